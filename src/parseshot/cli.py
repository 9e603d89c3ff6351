"""The command line: verbs only. Data goes to stdout, logs and progress to stderr; heavy imports wait for their verb."""

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from parseshot import __version__
from parseshot.errors import DataError, ParseshotError, UsageError

SCHEMA_VERSION = 1

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Recognise fine-grained things from a few photos of each, and see which parts decided.",
)
data_app = typer.Typer(no_args_is_help=True, help="Prepare and look at data.")
app.add_typer(data_app, name="data")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Threads = Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")]
Data = Annotated[Path, typer.Option(help="A packed data set.")]
Features = Annotated[
    bool, typer.Option("--features", help="Use a frozen backbone's maps in DATA/features; they are made there once.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
Split = Annotated[str, typer.Option(help="base, val or novel.")]
ProtocolName = Annotated[
    str, typer.Option(help="paper: 5-way, 1 and 5 shots, 15 queries, 600 episodes. frn: 16 queries, 10,000 episodes.")
]
Way = Annotated[str | None, typer.Option(help="Classes of an episode, or all. (default: of the protocol)")]
Shots = Annotated[
    str | None,
    typer.Option(help="Support images of each class, e.g. 1,5; 1+2+5 is a number for each class. (default: 1,5)"),
]
Queries = Annotated[int | None, typer.Option(min=1, help="Query images of each class. (default: of the protocol)")]
Episodes = Annotated[int | None, typer.Option(min=2, help="Number of episodes. (default: of the protocol)")]
Memory = Annotated[
    float | None,
    typer.Option(min=0, help="GB of encodings above which they go to disk. (default: half of what is free)"),
]
Seed = Annotated[int, typer.Option(min=0, help="Which episodes are drawn.")]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
ASKED = os.environ.get("OMP_NUM_THREADS", "")
THREADS = int(ASKED) if ASKED.isdigit() and int(ASKED) > 0 else CORES


def main() -> NoReturn:
    """Run the command; an error a user can cause is one sentence and an exit code, never a traceback."""
    try:
        code = app(standalone_mode=False)
    except ParseshotError as error:
        _fail(f"{error} [{error.code}]", error.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        sys.exit(0)
    except OSError as error:
        _fail(f"{error} [{DataError.code}]", DataError.exit_code)
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # the option parser's own errors
            _fail(f"{error.format_message()} [{UsageError.code}]", UsageError.exit_code)
        traceback.print_exc()
        _fail("this is a bug in parseshot; please report it with the lines above [E_INTERNAL]", 5)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    print(f"parseshot: {message}", file=sys.stderr)
    sys.exit(code)


def _print_json(**values: Any) -> None:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **values}, indent=1))


def _use_threads(count: int) -> None:
    import torch

    from parseshot.engine.allocator import keep_freed_memory

    torch.set_num_threads(count)
    keep_freed_memory()


@contextlib.contextmanager
def _progress(label: str) -> Iterator[Callable[..., None]]:
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


def _version(wanted: bool) -> None:
    if wanted:
        print(f"parseshot {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Which species and pictures are drawn.")] = 1,
    threads: Threads = THREADS,
) -> None:
    """Draw five unseen species, enrol five pictures of each, recognise 75 others, write an HTML report."""
    from parseshot.demo import run_demo

    _use_threads(threads)
    with _progress("demo") as update:
        result = run_demo(out, seed=seed, progress=update)
    print(f"accuracy {100 * result.accuracy:.1f} % ({result.right} of {result.queries}, {result.classes} species)")
    print(f"time {result.seconds:.1f} s, of which recognition {1000 * result.seconds_a_picture:.0f} ms a picture")
    print(f"report {result.report}")


@data_app.command("prepare")
def data_prepare(
    name: Annotated[str, typer.Argument(help="cub, cars, dogs, aircraft, folder, csv or synthetic (drawn birds).")],
    out: Annotated[Path, typer.Option(help="The directory to write; must not exist.")],
    source: Annotated[
        Path | None, typer.Option(help="A folder, a tar, tgz or zip archive, or a CSV file; synthetic needs none.")
    ] = None,
    size: Annotated[int, typer.Option(min=32, max=1024, help="Side of the images a model sees, in pixels.")] = 84,
    view: Annotated[
        str, typer.Option(help="paper: resize to --size. frn: resize to 92/84 of it, show the middle.")
    ] = "paper",
    split: Annotated[
        str | None, typer.Option(help="Which classes train and test: a shipped list (data splits) or a JSON file.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="folder, csv: the split; synthetic: the drawings.")] = 0,
    lenient: Annotated[bool, typer.Option(help="Use what is there of cut-off photos.")] = False,
    keep_duplicates: Annotated[bool, typer.Option(help="folder, csv: accept the same file in two classes.")] = False,
    base: Annotated[int, typer.Option(min=1, help="synthetic: species to train on.")] = 200,
    val: Annotated[int, typer.Option(min=1, help="synthetic: species to choose the model on.")] = 50,
    novel: Annotated[int, typer.Option(min=1, help="synthetic: species to evaluate on.")] = 50,
    per_class: Annotated[int, typer.Option(min=1, help="synthetic: pictures of each species.")] = 30,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = CORES,
    as_json: Json = False,
) -> None:
    """Turn raw pictures into a packed data set, once. Files that cannot be used are listed; exit code 1 says so."""
    from parseshot.data import prepare

    if name == "synthetic":
        if source is not None:
            raise UsageError("synthetic is drawn, it takes no --source")
        with _progress("drawing") as update:
            pack = prepare.prepare_synthetic(
                out,
                size=size,
                base=base,
                val=val,
                novel=novel,
                per_species=per_class,
                seed=seed,
                workers=workers,
                progress=update,
            )
    else:
        prepare.check_name(name)
        if source is None:
            raise UsageError(f"{name} needs --source, a folder or archive")
        if (out / "pack.json").exists():
            print(f"{out} is there already; kept if the same command made it from this archive", file=sys.stderr)
        with _progress("preparing") as update:
            pack = prepare.prepare(
                name,
                source,
                out,
                size=size,
                view=view,
                split=split,
                seed=seed,
                lenient=lenient,
                keep_duplicates=keep_duplicates,
                workers=workers,
                progress=update,
            )
    _print_pack(pack, as_json)
    if pack.problems:
        raise typer.Exit(1)


@data_app.command("info")
def data_info(
    data: Annotated[Path, typer.Argument(metavar="DIR")],
    sheet: Annotated[
        Path | None, typer.Option(help="Where the contact sheet goes; default DIR/contact-sheet.png.")
    ] = None,
    no_sheet: Annotated[bool, typer.Option("--no-sheet", help="Draw none.")] = False,
    table: Annotated[Path | None, typer.Option("--csv", help="Write a table of all images.")] = None,
    verify: Annotated[bool, typer.Option(help="Compare every array with its checksum.")] = False,
    as_json: Json = False,
) -> None:
    """Say what a packed data set holds, by split and class, and draw a contact sheet with boxes and parts."""
    from parseshot.data.packed import Pack

    pack = Pack(data)
    if verify:
        pack.verify()
    if table is not None:
        _write_table(pack, table)
    if not no_sheet:
        from parseshot.figures import contact_sheet, twin_sheet

        target = sheet or data / "contact-sheet.png"
        contact_sheet(pack).save(target)
        print(f"contact sheet {target}", file=sys.stderr)
        twins = twin_sheet(pack)
        if twins is not None:
            pairs = target.with_name(f"{target.stem}-duplicates{target.suffix}")
            twins.save(pairs)
            print(f"the same photo twice, or nearly: {pairs}", file=sys.stderr)
    _print_pack(pack, as_json, classes=True)


@data_app.command("splits")
def data_splits(as_json: Json = False) -> None:
    """List the shipped splits with their fingerprints."""
    from parseshot.data.split import load_split, shipped_splits

    rows = []
    for name in shipped_splits():
        found = load_split(name)
        roles = list(found.classes.values())
        rows.append({**found.record(), **{role: roles.count(role) for role in ("base", "val", "novel")}})
    if as_json:
        _print_json(splits=rows)
        return
    for row in rows:
        print(f"{row['name']:16} {row['fingerprint']}  {row['base']}/{row['val']}/{row['novel']} classes")


def _write_table(pack: Any, file: Path) -> None:
    import csv

    from parseshot.data.names import csv_cell

    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("number", "path", "label", "split"))
        for number, (name, label) in enumerate(zip(pack.files, pack.labels.tolist(), strict=True)):
            writer.writerow((number, csv_cell(name), csv_cell(pack.classes[label]), pack.splits[label]))


def _print_pack(pack: Any, as_json: bool, *, classes: bool = False) -> None:
    counts, by_class = pack.counts(), pack.class_counts()
    if as_json:
        _print_json(
            path=str(pack.path),
            **pack.record(),
            splits=counts,
            classes=[
                {"name": name, "split": role, "images": by_class[name]}
                for name, role in zip(pack.classes, pack.splits, strict=True)
            ],
            problems=pack.problems,
            warnings=pack.warnings,
            provenance=pack.provenance,
        )
        return
    print(f"{pack.path}: {pack.name}, {len(pack)} images of {pack.size} px, fingerprint {pack.fingerprint}")
    print(f"split {pack.split['name']}, fingerprint {pack.split['fingerprint']}")
    for split, count in counts.items():
        print(f"  {split:6} {count['classes']:5} classes {count['images']:7} images")
        names = [name for name, role in zip(pack.classes, pack.splits, strict=True) if role == split]
        for name in names if classes else ():
            print(f"    {by_class[name]:5}  {name}")
    for kind, rows in (("warning", pack.warnings), ("left out", [problem["message"] for problem in pack.problems])):
        for row in rows:
            print(f"{kind}: {row}", file=sys.stderr)


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

    _use_threads(threads)
    place, pack = choose_device(device), Pack(data)
    with _progress("training") as update:
        if resolved.training.cached_views is not None:
            pack = cached_for(resolved.model, resolved.training, pack, data / "features", place, update)
        if dry_run:
            from parseshot.engine.plan import plan

            _print_json(recipe=resolved.model_dump(mode="json"), plan=plan(resolved, pack, place))
            return
        with Watch(resolved, out, update, tensorboard=tensorboard) as watch:
            summary = start_run(resolved.model, pack, resolved.training, out, watch, resume=resume, device=place)
    if int(os.environ.get("RANK", "0")):  # under torchrun the first process speaks
        return
    print(f"{out}/best and {out}/last written after {summary['episodes_seen']} episodes, {summary['seconds']:.0f} s")
    print(f"val accuracy of last {100 * summary['val_accuracy']:.1f} % (5-way 5-shot)")
    print(f"curves {out}/report.html")


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
    _use_threads(threads)
    loaded, pack = Model.from_pretrained(model).to(choose_device(device)), Pack(data)
    started = time.monotonic()
    with _progress("evaluating") as update:
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
    _use_threads(threads)
    pack, place = Pack(data), choose_device(device)
    loaded = [Model.from_pretrained(path).to(place) for path in models]
    found = []
    with _progress("comparing") as update:
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
    table: Annotated[str, typer.Argument(help="methods, or of DOP: terms, scales, parts, location.")],
    data: Annotated[Path, typer.Option(help="A packed data set, cub or cars at 224 px.")],
    out: Annotated[Path, typer.Option(help="Where rows are kept; what is there already is not done again.")],
    budget: Annotated[
        str, typer.Option(help="cpu: heads on cached features, hours on two cores. paper: says why not.")
    ] = "cpu",
    only: Annotated[list[str] | None, typer.Option(help="Only this row; may be given again.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a value in all rows, e.g. training.episodes=100.")
    ] = None,
    episodes: Annotated[int, typer.Option(min=2, help="Paired episodes at each number of shots.")] = 10_000,
    look: Annotated[bool, typer.Option("--look", help="Run nothing, show what there is so far.")] = False,
    device: Device = "auto",
    threads: Threads = THREADS,
    as_json: Json = False,
) -> None:
    """Train and evaluate the rows of a table with the same images, features, episodes and budget; hours first."""
    from parseshot.engine.device import choose_device
    from parseshot.engine.reproduce import markdown
    from parseshot.engine.reproduce import reproduce as run

    _use_threads(threads)
    with _progress("reproducing") as update:
        result = run(
            table,
            data,
            out,
            budget=budget,
            only=only or (),
            overrides=overrides or (),
            episodes=episodes,
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

    _use_threads(threads)
    loaded = Model.from_pretrained(model)
    with _progress("encoding") as update:
        pack = cached(loaded, Pack(data), data / "features", progress=update) if features else Pack(data)
        fitted = fit(loaded, pack, update)
    save_provenance(model, loaded.provenance)
    if as_json:
        _print_json(calibration=fitted.model_dump(mode="json"))
    else:
        print(f"{model}: calibrated; below {fitted.threshold:.2f} a photo is none of the enrolled classes")


GalleryName = Annotated[str, typer.Argument(metavar="GALLERY", help="A file, or a postgresql:// URL.")]
ModelName = Annotated[
    str, typer.Option("--model", help="A model directory, or the name of one that ships (default, cub-conv4, …).")
]
Find = Annotated[
    bool | None,
    typer.Option("--find/--whole", help="Look for the object in photos, or take them whole. (default: by the model)"),
]


def _recognizer(gallery: str, model: str, find: bool | None, threads: int, *, create: bool = False) -> Any:
    _use_threads(threads)
    from parseshot.recognition.gallery import Gallery
    from parseshot.recognition.recognizer import Recognizer

    if not create:
        Gallery.open(gallery).close()  # a name that was mistyped makes no new gallery
    return Recognizer(model, gallery, find=find)


@app.command()
def enroll(
    gallery: GalleryName,
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders named after their class, or that hold such folders.")
    ] = None,
    of_class: Annotated[str | None, typer.Option("--class", help="All photos are of this class.")] = None,
    model: ModelName = "default",
    find: Find = None,
    again: Annotated[
        bool, typer.Option("--again", help="Encode the stored photos again, for another model or a new version of it.")
    ] = False,
    threads: Threads = THREADS,
    as_json: Json = False,
) -> None:
    """Add photos to a gallery, which is made where there is none; all in one change that `remove --undo` takes back."""
    from parseshot.recognition.batch import photos_to_enroll

    if again == bool(folders):
        raise UsageError("say which folders to enroll, or --again")
    if again:
        with _recognizer(gallery, model, find, threads) as recognizer, _progress("encoding") as update:
            version = recognizer.encode_again(update)
        print(f"{gallery} holds encodings of {model} now (version {version.number})")
        return
    items = list(photos_to_enroll(folders or (), of_class))
    with _recognizer(gallery, model, find, threads, create=True) as recognizer, _progress("enrolling") as update:
        done = recognizer.enroll(items, progress=update)
        classes = len(recognizer.snapshot().classes)
    if as_json:
        _print_json(
            version=None if done.version is None else done.version._asdict(),
            failures=[one.to_json() for one in done.failures],
            twins=[one._asdict() for one in done.twins],
            classes=classes,
        )
    else:
        for one in done.twins:
            print(f"warning: {one}", file=sys.stderr)
        for one in done.failures:
            print(f"{one.source}: {one.message} [{one.code}]", file=sys.stderr)
        if done.version is not None:
            detail = done.version.detail
            there = f", {len(detail['repeated'])} were there already" if detail["repeated"] else ""
            print(
                f"{detail['photos']} photos of {len(detail['classes'])} classes enrolled{there}; "
                f"{gallery} has {classes} classes now (version {done.version.number})"
            )
    if done.version is None:
        raise DataError("no photo could be enrolled")
    if done.failures:
        raise typer.Exit(1)


@app.command()
def remove(
    gallery: GalleryName,
    names: Annotated[list[str] | None, typer.Argument(help="Classes to take out.")] = None,
    photo: Annotated[list[int] | None, typer.Option(help="Photos to take out, by their number.")] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Take the last change back, whatever it was.")] = False,
    as_json: Json = False,
) -> None:
    """Take classes or photos out of a gallery, or take the last change back."""
    from parseshot.recognition.gallery import Gallery

    if undo == bool(names or photo):
        raise UsageError("say which classes or photos to remove, or --undo")
    with Gallery.open(gallery) as opened:
        if undo:
            done = [opened.undo()]
        else:
            done = [opened.remove_class(name) for name in names or ()]
            done += [opened.remove_photo(number) for number in photo or ()]
    if as_json:
        _print_json(versions=[one._asdict() for one in done])
        return
    for one in done:
        told = f"took back version {one.detail['undoes']}" if undo else f"{one.detail['photos']} photos removed"
        print(f"{told}; {gallery} is at version {one.number}")


@app.command()
def predict(
    gallery: GalleryName,
    images: Annotated[list[Path], typer.Argument(help="Photos, or folders of photos.")],
    model: ModelName = "default",
    find: Find = None,
    as_json: Json = False,
    csv: Annotated[Path | None, typer.Option(help="Write a table to this file.")] = None,
    jsonl: Annotated[Path | None, typer.Option(help="Write a JSON object a photo to this file.")] = None,
    threads: Threads = THREADS,
) -> None:
    """Say what photos show, by a gallery. A photo that cannot be used is an error in its row, and exit code 1."""
    from parseshot.recognition.answer import Failure
    from parseshot.recognition.batch import photos_to_recognise, write_answers

    items, found = list(photos_to_recognise(images)), []
    with _recognizer(gallery, model, find, threads) as recognizer, _progress("recognising") as update:
        for answer in recognizer.answers(items):
            found.append(answer)
            update(len(found), len(items))
            if not (as_json or csv or jsonl):
                failed = isinstance(answer, Failure)
                said = f"{answer.message} [{answer.code}]" if failed else str(answer)
                print(f"{answer.source}\t{said}", file=sys.stderr if failed else sys.stdout, flush=True)
    for path, as_csv in ((csv, True), (jsonl, False)):
        if path is not None:
            write_answers(found, path, as_csv=as_csv)
    if as_json:
        _print_json(answers=[one.to_json() for one in found])
    if any(isinstance(one, Failure) for one in found):
        raise typer.Exit(1)


@app.command()
def explain(
    gallery: GalleryName,
    image: Annotated[Path, typer.Argument(help="A photo.")],
    out: Annotated[Path, typer.Option(help="Where the explanation goes: .html, .png or .json.")],
    model: ModelName = "default",
    find: Find = None,
    threads: Threads = THREADS,
) -> None:
    """Say what a photo shows and why: which parts were found, which photos they matched, and what each part added."""
    from parseshot.explanation_report import suffix_of, write_explained

    suffix_of(out)  # refused before the work
    with _recognizer(gallery, model, find, threads) as recognizer:
        found = recognizer.explain(image)
    write_explained(found, out)
    print(found)


@app.command()
def doctor(
    gallery: GalleryName, model: ModelName = "default", threads: Threads = THREADS, as_json: Json = False
) -> None:
    """Look for photos that are mislabelled, doubled, blurred or tiny, and say how well a gallery will recognise."""
    from parseshot.recognition.doctor import examine

    with _recognizer(gallery, model, None, threads) as recognizer, _progress("examining") as update:
        found = examine(recognizer, update)
    if as_json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        print("\n".join(found.lines()))


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="A model directory, or the name of one that ships.")],
    onnx: Annotated[Path | None, typer.Option(help="Write backbone and parse as an ONNX file.")] = None,
    pt2: Annotated[Path | None, typer.Option(help="Write them as a torch.export program.")] = None,
    gallery: Annotated[
        str | None, typer.Option(help="Also write this gallery's classes, for parseshot.matcher.")
    ] = None,
    npz: Annotated[Path | None, typer.Option(help="Where its classes go, for parseshot.matcher.")] = None,
    threads: Threads = THREADS,
) -> None:
    """Write a model, or a gallery's classes, for use without PyTorch; compared with what they came from first."""
    if not (onnx or pt2 or npz) or (gallery is None) != (npz is None):
        raise UsageError("say where to: --onnx FILE, --pt2 FILE, or --gallery GALLERY --npz FILE")
    _use_threads(threads)
    from parseshot.engine.model import Model
    from parseshot.export import export_gallery, export_onnx, export_torch

    loaded = Model.from_pretrained(model)
    for path, write in ((onnx, export_onnx), (pt2, export_torch)):
        if path is not None:
            print(f"{path}: at most {write(loaded, path):.1e} from the model")
    if gallery is not None and npz is not None:
        with _recognizer(gallery, model, None, threads) as recognizer:
            print(f"{npz}: at most {export_gallery(recognizer, npz):.1e} from the model")


@app.command()
def parse(
    model: Annotated[
        Path,
        typer.Argument(help="A model directory, or the name of a model that ships (default, cub-conv4, birds-conv4)."),
    ],
    images: Annotated[list[Path], typer.Argument(help="Pictures.")],
    out: Annotated[Path, typer.Option(help="Where the drawings and parts.json go.")],
    threads: Threads = THREADS,
) -> None:
    """Draw the parts a model finds on pictures, and write them as JSON."""
    from parseshot.demo import parse_files
    from parseshot.engine.model import Model

    _use_threads(threads)
    with _progress("parsing") as update:
        found = parse_files(Model.from_pretrained(model), images, out, progress=update)
    for row in found:
        print(f"{row['image']}: " + (row["error"] if "error" in row else row["drawing"]))
    if any("error" in row for row in found):
        raise typer.Exit(1)


@app.command("part-quality")
def part_quality(
    model: Annotated[
        Path,
        typer.Argument(help="A model directory, or the name of a model that ships (default, cub-conv4, birds-conv4)."),
    ],
    data: Annotated[Path, typer.Option(help="A packed data set with annotated positions.")],
    threads: Threads = THREADS,
    as_json: Json = False,
) -> None:
    """Predict annotated positions from the parts' locations by a linear map, beside four floors."""
    from parseshot.data.packed import Pack
    from parseshot.engine.model import Model
    from parseshot.part_quality import part_quality as run

    _use_threads(threads)
    scores = run(Model.from_pretrained(model), Pack(data))
    best = min(score.error for score in scores if score.name.startswith("floor"))
    if as_json:
        _print_json(scores=[{**vars(score), "of_best_floor": score.error / best} for score in scores])
        return
    print("mean error in % of the box, linear map fitted on base classes, measured on novel classes")
    for score in scores:
        print(
            f"{score.name:24} {score.locations} locations {score.error:6.2f}  {score.error / best:5.2f} of best floor"
        )


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods: year, parameters beyond the backbone (640 channels, 5×5 cells), what is fitted at test time."""
    from parseshot.methods import METHODS, parameters

    rows = [
        {
            "name": name,
            "year": one.year,
            "parameters": parameters(name),
            "fitted": one.fitted,
            "summary": one.summary,
            "maps": 2 if one.kind.paired else 1,
            "finer_grid": one.kind.finer_grid,
        }
        for name, one in METHODS.items()
    ]
    if as_json:
        _print_json(methods=rows)
        return
    for row in rows:
        print(f"{row['name']:18} {row['year']}  {row['parameters']:>10,}  {row['summary']}")
        if row["fitted"] != "nothing":
            print(f"{'':36}at test time: {row['fitted']}")


@app.command()
def recipes(as_json: Json = False) -> None:
    """List the shipped recipes."""
    from parseshot.engine.recipe import load_recipe, shipped_recipes

    titles = {name: load_recipe(name).title for name in shipped_recipes()}
    if as_json:
        _print_json(recipes=[{"name": name, "title": title} for name, title in titles.items()])
        return
    for name, title in titles.items():
        print(f"{name:28} {title}")


@app.command()
def checks(as_json: Json = False) -> None:
    """Say what this installation has, and whether it works."""
    from parseshot.demo import run_checks

    found = run_checks()
    if as_json:
        _print_json(checks=found)
    else:
        for name, value in found.items():
            print(f"{name:22} {value}")
    if found["self test"] != "ok":
        raise typer.Exit(5)


if __name__ == "__main__":
    main()
