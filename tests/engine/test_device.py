"""Which device and which numbers are chosen, and what is refused."""

import pytest
import torch

from parseshot.engine.device import autocast, choose_device, is_out_of_memory
from parseshot.errors import UsageError


def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device() == choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device() == torch.device("mps")


def test_under_torchrun_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device() == torch.device("cuda", 1)
    assert choose_device("cuda:0") == torch.device("cuda", 0)
    assert taken == [1, 0]
    with pytest.raises(UsageError, match="there are 2 GPUs, counted from 0"):
        choose_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "", "CPU"])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="use auto, cpu, cuda, cuda:1 or mps"):
        choose_device(name)


def test_what_the_machine_has_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="has no cuda"):
        choose_device("cuda")


def test_a_cpu_does_not_gain_by_bfloat16() -> None:
    image = torch.ones(1, 1)
    for precision, kind in (("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        with autocast(torch.device("cpu"), precision):
            assert (image @ image).dtype == kind


def test_words_of_the_allocator_are_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
    assert not is_out_of_memory(ValueError("not enough memory"))
