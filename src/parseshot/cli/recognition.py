"""The verbs of a person with photos: enroll, remove, predict, explain, doctor; and export, for use elsewhere."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from parseshot.cli.options import THREADS, Find, GalleryName, Json, ModelName, Threads
from parseshot.cli.terminal import print_json, progress, use_threads
from parseshot.errors import DataError, UsageError

app = typer.Typer()


def _recognizer(gallery: str, model: str, find: bool | None, threads: int, *, create: bool = False) -> Any:
    use_threads(threads)
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
        with _recognizer(gallery, model, find, threads) as recognizer, progress("encoding") as update:
            version = recognizer.encode_again(update)
        print(f"{gallery} holds encodings of {model} now (version {version.number})")
        return
    items = list(photos_to_enroll(folders or (), of_class))
    with _recognizer(gallery, model, find, threads, create=True) as recognizer, progress("enrolling") as update:
        done = recognizer.enroll(items, progress=update)
        classes = len(recognizer.snapshot().classes)
    if as_json:
        print_json(
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
    purge: Annotated[
        bool, typer.Option("--purge", help="Delete for good what was removed, now or before; nothing can undo it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Take classes or photos out of a gallery, take the last change back, or delete for good what was taken out."""
    from parseshot.recognition.gallery import Gallery

    if undo == bool(names or photo or purge):
        raise UsageError("say which classes or photos to remove, or --undo, or --purge")
    with Gallery.open(gallery) as opened:
        if undo:
            done = [opened.undo()]
        else:
            done = [opened.remove_class(name) for name in names or ()]
            done += [opened.remove_photo(number) for number in photo or ()]
        purged = opened.purge() if purge else None
    if as_json:
        print_json(versions=[one._asdict() for one in (*done, purged) if one is not None])
        return
    for one in done:
        told = f"took back version {one.detail['undoes']}" if undo else f"{one.detail['photos']} photos removed"
        print(f"{told}; {gallery} is at version {one.number}")
    if purged is not None:
        print(f"{purged.detail['photos']} photos deleted for good; {gallery} is at version {purged.number}")
    elif purge:
        print(f"{gallery} holds nothing that was removed")


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
    with _recognizer(gallery, model, find, threads) as recognizer, progress("recognising") as update:
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
        print_json(answers=[one.to_json() for one in found])
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

    with _recognizer(gallery, model, None, threads) as recognizer, progress("examining") as update:
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
    use_threads(threads)
    from parseshot.engine.model import Model
    from parseshot.export import export_gallery, export_onnx, export_torch

    loaded = Model.from_pretrained(model)
    for path, write in ((onnx, export_onnx), (pt2, export_torch)):
        if path is not None:
            print(f"{path}: at most {write(loaded, path):.1e} from the model")
    if gallery is not None and npz is not None:
        with _recognizer(gallery, model, None, threads) as recognizer:
            print(f"{npz}: at most {export_gallery(recognizer, npz):.1e} from the model")
