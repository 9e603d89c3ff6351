"""The verb that trains."""

import os
from pathlib import Path
from typing import Annotated

import typer

from parseshot.cli.options import THREADS, Device, Threads
from parseshot.cli.terminal import print_json, progress, use_threads

app = typer.Typer()


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe (parseshot recipes) or a TOML file.")],
    data: Annotated[Path, typer.Option(help="A packed data set.")],
    out: Annotated[Path, typer.Option(help="The run's directory: best/, last/, metrics.jsonl.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a value, e.g. training.lr=1e-3.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, exactly as if never stopped.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe and what it will cost, from a few real steps.")
    ] = False,
    device: Device = "auto",
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write RUN/tensorboard; needs parseshot[tensorboard].")
    ] = False,
    threads: Threads = THREADS,
) -> None:
    """Train a model in episodes. Ctrl-C or SIGTERM saves its state first; --resume goes on."""
    from parseshot.engine.recipe import load_recipe

    resolved = load_recipe(recipe, overrides)
    from parseshot.data.packed import Pack
    from parseshot.engine.device import choose_device
    from parseshot.engine.run import start_run
    from parseshot.engine.training import cached_for
    from parseshot.watch import Watch

    use_threads(threads)
    place, pack = choose_device(device), Pack(data)
    with progress("training") as update:
        if resolved.training.cached_views is not None:
            pack = cached_for(resolved.model, resolved.training, pack, data / "features", place, update)
        if dry_run:
            from parseshot.engine.plan import plan

            print_json(recipe=resolved.model_dump(mode="json"), plan=plan(resolved, pack, place))
            return
        with Watch(resolved, out, update, tensorboard=tensorboard) as watch:
            summary = start_run(resolved.model, pack, resolved.training, out, watch, resume=resume, device=place)
    if int(os.environ.get("RANK", "0")):  # under torchrun the first process speaks
        return
    print(f"{out}/best and {out}/last written after {summary['episodes_seen']} episodes, {summary['seconds']:.0f} s")
    print(f"val accuracy of last {100 * summary['val_accuracy']:.1f} % (5-way 5-shot)")
    print(f"curves {out}/report.html")
