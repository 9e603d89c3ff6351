"""The demonstration, which needs no data."""

from pathlib import Path
from typing import Annotated

import typer

from parseshot.cli.options import THREADS, Threads
from parseshot.cli.terminal import progress, use_threads

app = typer.Typer()


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Which species and pictures are drawn.")] = 1,
    threads: Threads = THREADS,
) -> None:
    """Draw five unseen species, enrol five pictures of each, recognise 75 others, write an HTML report."""
    from parseshot.demo import run_demo

    use_threads(threads)
    with progress("demo") as update:
        result = run_demo(out, seed=seed, progress=update)
    print(f"accuracy {100 * result.accuracy:.1f} % ({result.right} of {result.queries}, {result.classes} species)")
    print(f"time {result.seconds:.1f} s, of which recognition {1000 * result.seconds_a_picture:.0f} ms a picture")
    print(f"report {result.report}")
