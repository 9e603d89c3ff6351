"""Run a function over many items in worker processes; an item that hangs or kills its worker costs that item only."""

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
BATCH = 32  # items sent at a time: few messages, and little to do again when a worker is lost
START = 60.0  # seconds a worker may take to import what it needs


class Lost(Exception):
    """The worker died or was killed over an item; str() says how."""


class Crew(Generic[Item, Result]):
    """Worker processes that start at once, so that they import while their items are still being listed.

    `function` must be importable and must not raise. With one worker everything runs in this process, without
    protection from decoders that hang or crash.
    """

    def __init__(self, function: Callable[[Item], Result], *, workers: int, timeout: float) -> None:
        self.function, self.timeout = function, timeout
        self.workers = [_Worker(function) for _ in range(workers if workers > 1 else 0)]

    def __enter__(self) -> "Crew[Item, Result]":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.stop()

    def run(self, items: Sequence[Item]) -> Iterator[tuple[int, Result | Lost]]:
        """Yield (index, result) as they are done, in no order."""
        if not self.workers:
            yield from ((index, self.function(item)) for index, item in enumerate(items))
            return
        queue = [list(range(start, min(start + BATCH, len(items)))) for start in range(0, len(items), BATCH)][::-1]
        for worker in self.workers:
            worker.give(queue.pop() if queue else [], items)
        while busy := [worker for worker in self.workers if worker.todo]:
            ready = wait([worker.pipe for worker in busy], timeout=min(1.0, self.timeout / 4))
            for worker in busy:
                lost: str | None = None
                if worker.pipe in ready or worker.pipe.poll():
                    try:
                        results = worker.pipe.recv()
                    except (EOFError, OSError):
                        worker.process.join()
                        lost = f"the decoder crashed (exit code {worker.process.exitcode})"
                    else:
                        yield from zip(worker.todo, results, strict=True)
                        worker.todo = []
                elif worker.stuck_for() > (self.timeout if worker.done.value >= 0 else START):
                    lost = f"not decoded within {self.timeout:g} s"
                if lost is not None:
                    worker.stop()
                    if worker.done.value < 0:
                        raise RuntimeError(f"a worker process did not start: {lost}")
                    at = min(worker.done.value, len(worker.todo) - 1)  # where it was; those before are done again
                    yield worker.todo[at], Lost(lost)
                    queue += [rest for rest in (worker.todo[:at], worker.todo[at + 1 :]) if rest]
                    worker.restart()
                if not worker.todo and queue:
                    worker.give(queue.pop(), items)


class _Worker:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function
        self.restart()

    def restart(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        self.pipe, end = context.Pipe()
        self.done = context.Value("i", -1, lock=False)  # items of the batch that are done; −1 until it is ready
        arguments = (end, self.done, self.function)
        self.process: BaseProcess = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        end.close()
        self.todo: list[int] = []
        self.seen, self.since = -1, time.monotonic()

    def give(self, indices: list[int], items: Sequence[Any]) -> None:
        self.todo, self.seen, self.since = list(indices), -2, time.monotonic()
        if indices:
            with contextlib.suppress(OSError):  # it died in between: its pipe says so when read
                self.pipe.send([items[index] for index in indices])

    def stuck_for(self) -> float:
        """Seconds since it last finished an item."""
        if self.done.value != self.seen:
            self.seen, self.since = self.done.value, time.monotonic()
        return time.monotonic() - self.since

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, done: Any, function: Callable[[Any], Any]) -> None:
    done.value = 0
    try:
        while True:
            batch = pipe.recv()
            done.value = 0
            results = []
            for item in batch:
                results.append(function(item))
                done.value += 1
            pipe.send(results)
    except (EOFError, OSError, KeyboardInterrupt):  # the parent is done, or gone
        return
