"""What verbs say: JSON on stdout, progress and errors on stderr; and the threads they work with."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

SCHEMA_VERSION = 1


def fail(message: str, code: int) -> NoReturn:
    print(f"parseshot: {message}", file=sys.stderr)
    sys.exit(code)


def print_json(**values: Any) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **values}, indent=1))


def use_threads(count: int) -> None:
    import torch

    from parseshot.engine.allocator import keep_freed_memory

    torch.set_num_threads(count)
    keep_freed_memory()


@contextlib.contextmanager
def progress(label: str) -> Iterator[Callable[..., None]]:
    """A bar on stderr with rate and time left; silent where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    started, before = time.monotonic(), 0
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(label, total=None, note="")

        def update(done: int, total: int, note: str = "") -> None:
            nonlocal started, before
            if done < before:  # another stage has begun
                started = time.monotonic()
            before = done
            rate = done / max(time.monotonic() - started, 1e-9)
            bar.update(task, completed=done, total=total, note=f"{note} {rate:.3g}/s".strip())

        yield update
