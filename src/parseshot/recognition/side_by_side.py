"""Work on groups of photos side by side, a CPU thread each: the same digits whatever the number of threads."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")


def side_by_side(work: Callable[[A], B], groups: Iterable[A]) -> Iterator[B]:
    """`work` of each group, in their order; groups are asked for as they are needed, one more than there are threads.

    One group alone gets all of PyTorch's threads. Of several, each is worked on by one thread, as many at a time as
    PyTorch would use, so that their digits do not depend on how many these are.
    """
    asked, threads = iter(groups), torch.get_num_threads()
    first = list(_some(asked, 2))
    if len(first) < 2:
        yield from map(work, first)
        return
    with _pool(threads) as pool:
        waiting: deque[Future[B]] = deque(pool.submit(work, group) for group in first)
        waiting.extend(pool.submit(work, group) for group in _some(asked, threads - 1))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(work, group) for group in _some(asked, 1))


def _some(groups: Iterator[A], most: int) -> Iterator[A]:
    for _, group in zip(range(most), groups, strict=False):
        yield group


def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads in which PyTorch's operators use no others. The number is each thread's own; new ones get the last."""
    ready = Barrier(threads)

    def begin() -> None:
        torch.get_num_threads()  # else the first operator would take the number that was set last
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(threads)
    for done in [pool.submit(begin) for _ in range(threads)]:  # the barrier keeps each thread to one of them
        done.result()
    torch.set_num_threads(threads)
    return pool
