"""Groups worked on side by side: in order, lazily, one PyTorch thread each; errors come through."""

import threading
from collections.abc import Iterator

import pytest
import torch

from parseshot.recognition.side_by_side import side_by_side


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_several_groups_have_a_thread_each_and_come_in_order() -> None:
    met = threading.Barrier(2, timeout=20)  # fails unless two are under way at once

    def work(group: int) -> tuple[int, int]:
        met.wait()
        return group, torch.get_num_threads()

    assert list(side_by_side(work, range(6))) == [(group, 1) for group in range(6)]
    assert torch.get_num_threads() == 2
    inherited: list[int] = []
    other = threading.Thread(target=lambda: inherited.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert inherited == [2]


@pytest.mark.usefixtures("two_threads")
def test_one_group_gets_all_threads_and_none_nothing() -> None:
    here = threading.get_ident()
    seen = list(side_by_side(lambda _: (threading.get_ident(), torch.get_num_threads()), [0]))
    assert seen == [(here, 2)]
    assert list(side_by_side(lambda group: group, [])) == []


@pytest.mark.usefixtures("two_threads")
def test_groups_are_asked_for_as_they_are_needed() -> None:
    taken: list[int] = []

    def groups() -> Iterator[int]:
        for number in range(50):
            taken.append(number)
            yield number

    found = side_by_side(lambda group: group, groups())
    assert [next(found) for _ in range(4)] == [0, 1, 2, 3]
    assert len(taken) <= 4 + 3
    found.close()  # type: ignore[attr-defined]
    assert len(taken) <= 4 + 3


@pytest.mark.usefixtures("two_threads")
def test_an_error_comes_where_its_group_would() -> None:
    def work(group: int) -> int:
        if group == 2:
            raise ValueError("the third")
        return group

    found = side_by_side(work, range(9))
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(ValueError, match="the third"):
        next(found)
    assert torch.get_num_threads() == 2
