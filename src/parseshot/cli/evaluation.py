"""Verbs that measure trained models: evaluate, compare, reproduce, calibrate."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from parseshot.cli.options import (
    THREADS,
    Data,
    Device,
    Episodes,
    Features,
    Json,
    Memory,
    ProtocolName,
    Queries,
    Seed,
    Shots,
    Split,
    Threads,
    Way,
)
from parseshot.cli.terminal import print_json, progress, use_threads
from parseshot.errors import UsageError

app = typer.Typer()


@app.command()
def evaluate(
    model: Annotated[
        Path,
        typer.Argument(help="A model directory, or the name of a model that ships (default, cub-conv4, birds-conv4)."),
    ],
    data: Data,
    protocol: ProtocolName = "paper",
    split: Split = "novel",
    way: Way = None,
    shots: Shots = None,
    queries: Queries = None,
    episodes: Episodes = None,
    seed: Seed = 0,
    calibrate: Annotated[bool, typer.Option(help="Fit a temperature on the val classes.")] = False,
    open_set: Annotated[bool, typer.Option(help="Add queries of five further classes to every episode.")] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write an HTML report here; implies --calibrate and --open-set.")
    ] = None,
    memory: Memory = None,
    features: Features = False,
    device: Device = "auto",
    threads: Threads = THREADS,
    as_json: Json = False,
) -> None:
    """Few-shot accuracy on unseen classes: mean over episodes with its 95 % intervals, by class, calibration."""
    from parseshot.data.packed import Pack
    from parseshot.engine.device import choose_device
    from parseshot.engine.evaluation import evaluate as run
    from parseshot.engine.features import cached
    from parseshot.engine.model import Model
    from parseshot.engine.protocol import named_protocol
    from parseshot.engine.results import evaluation_result
    from parseshot.engine.summary import evaluation_lines, evaluation_remarks

    asked = named_protocol(protocol, split=split, way=way, shots=shots, queries=queries, episodes=episodes, seed=seed)
    use_threads(threads)
    loaded, pack = Model.from_pretrained(model).to(choose_device(device)), Pack(data)
    started = time.monotonic()
    with progress("evaluating") as update:
        found = run(
            loaded,
            cached(loaded, pack, data / "features", progress=update) if features else pack,
            asked(pack),
            calibrate=calibrate or report is not None,
            open_set=open_set or report is not None,
            memory=_bytes(memory),
            progress=update,
        )
    result = evaluation_result(model, loaded, pack, found)
    print(result.model_dump_json(indent=1) if as_json else "\n".join(evaluation_lines(result)), flush=True)
    remarks = [*evaluation_remarks(result), f"{time.monotonic() - started:.1f} s"]
    print("\n".join(remarks), file=sys.stderr)
    if report is not None:  # last: a page that cannot be written must not cost the figures
        from parseshot.evaluation_report import write_evaluation

        write_evaluation(result, found, pack, report)
        print(f"report {report}", file=sys.stderr)


@app.command()
def compare(
    models: Annotated[list[Path], typer.Argument(help="Model directories or names, two or more.")],
    data: Data,
    protocol: ProtocolName = "paper",
    split: Split = "novel",
    way: Way = None,
    shots: Shots = None,
    queries: Queries = None,
    episodes: Episodes = None,
    seed: Seed = 0,
    report: Annotated[
        Path | None, typer.Option(help="Write an HTML report with a critical-difference plot here.")
    ] = None,
    memory: Memory = None,
    features: Features = False,
    device: Device = "auto",
    threads: Threads = THREADS,
    as_json: Json = False,
) -> None:
    """Compare models on the same episodes: means, and paired differences with their 95 % interval and p-value."""
    if len(models) < 2:
        raise UsageError("compare needs at least two models")
    if len(set(models)) < len(models):
        raise UsageError("compare was given the same model twice")
    from parseshot.data.packed import Pack
    from parseshot.engine.device import choose_device
    from parseshot.engine.evaluation import evaluate as run
    from parseshot.engine.features import cached
    from parseshot.engine.model import Model
    from parseshot.engine.protocol import named_protocol
    from parseshot.engine.results import comparison_result
    from parseshot.engine.summary import comparison_lines

    asked = named_protocol(protocol, split=split, way=way, shots=shots, queries=queries, episodes=episodes, seed=seed)
    use_threads(threads)
    pack, place = Pack(data), choose_device(device)
    loaded = [Model.from_pretrained(path).to(place) for path in models]
    found = []
    with progress("comparing") as update:
        for model in loaded:
            source = cached(model, pack, data / "features", progress=update) if features else pack
            found.append(run(model, source, asked(pack), memory=_bytes(memory), progress=update))
    result = comparison_result(models, loaded, pack, found)
    print(result.model_dump_json(indent=1) if as_json else "\n".join(comparison_lines(result)), flush=True)
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr)
    if report is not None:
        from parseshot.evaluation_report import write_comparison

        write_comparison(result, report)
        print(f"report {report}", file=sys.stderr)


@app.command()
def reproduce(
    table: Annotated[
        str,
        typer.Argument(help="methods, leaders, conv4; of DOP: presets, terms, scales, parts, location, grid, tries."),
    ],
    data: Annotated[Path, typer.Option(help="A packed data set, cub or cars, at 224 px; for conv4 at 84.")],
    out: Annotated[Path, typer.Option(help="Where rows are kept; what is there already is not done again.")],
    budget: Annotated[
        str, typer.Option(help="cpu: hours on two cores, most on cached features. paper: says why not.")
    ] = "cpu",
    only: Annotated[list[str] | None, typer.Option(help="Only this row; may be given again.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a value in all rows, e.g. training.episodes=100.")
    ] = None,
    episodes: Annotated[int, typer.Option(min=2, help="Paired episodes at each number of shots.")] = 10_000,
    rates_of: Annotated[
        Path | None,
        typer.Option(help="Take learning rates from this table, done on other data: a third of the time."),
    ] = None,
    look: Annotated[bool, typer.Option("--look", help="Run nothing, show what there is so far.")] = False,
    device: Device = "auto",
    threads: Threads = THREADS,
    as_json: Json = False,
) -> None:
    """Train and evaluate the rows of a table with the same images, features, episodes and budget; hours first."""
    from parseshot.engine.device import choose_device
    from parseshot.engine.paired_table import markdown
    from parseshot.engine.reproduce import reproduce as run

    use_threads(threads)
    with progress("reproducing") as update:
        result = run(
            table,
            data,
            out,
            budget=budget,
            only=only or (),
            overrides=overrides or (),
            episodes=episodes,
            rates_of=rates_of,
            look=look,
            device=choose_device(device),
            say=lambda line: print(line, file=sys.stderr, flush=True),
            progress=update,
        )
    print(json.dumps(result, indent=1) if as_json else markdown(result), flush=True)
    if result["failed"]:
        raise typer.Exit(1)


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 1e9)


@app.command()
def calibrate(
    model: Annotated[Path, typer.Argument(help="A model directory; what is fitted is written into it.")],
    data: Data,
    features: Features = False,
    threads: Threads = THREADS,
    as_json: Json = False,
) -> None:
    """Fit probabilities, and the one of "none of these", on a data set's val classes, which a model must not know."""
    from parseshot.data.packed import Pack
    from parseshot.engine.checkpoint import save_provenance
    from parseshot.engine.features import cached
    from parseshot.engine.model import Model
    from parseshot.recognition.calibration import calibrate as fit

    if not model.is_dir():  # a model that ships is shared by all; found out now, not after the fitting
        raise UsageError(f"{model} is not a model directory: what is fitted is written into it (copy one that ships)")
    use_threads(threads)
    loaded = Model.from_pretrained(model)
    with progress("encoding") as update:
        pack = cached(loaded, Pack(data), data / "features", progress=update) if features else Pack(data)
        fitted = fit(loaded, pack, update)
    save_provenance(model, loaded.provenance)
    if as_json:
        print_json(calibration=fitted.model_dump(mode="json"))
    else:
        print(f"{model}: calibrated; below {fitted.threshold:.2f} a photo is none of the enrolled classes")
