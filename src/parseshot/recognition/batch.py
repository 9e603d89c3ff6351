"""Many photos at once: those that lie in folders, and answers as the rows of a CSV or JSONL file."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from parseshot.data.names import csv_cell, printable
from parseshot.data.photo import PHOTO_SUFFIXES
from parseshot.data.source import Source, open_source
from parseshot.data.staging import replace_file
from parseshot.errors import DataError
from parseshot.recognition.answer import SCHEMA_VERSION, Answer, Failure
from parseshot.recognition.looking import Item

COLUMNS = (
    "photo", "answer", "probability", "second", "second_probability", "known", "rejected", "crop", "left", "top",
    "right", "bottom", "duplicate_of", "gallery_version", "warnings", "error", "message",
)  # fmt: skip


def photos_to_recognise(paths: Iterable[Path]) -> Iterator[Item]:
    """`photo_files`, each as something to recognise."""
    return (Item(path) for path in photo_files(paths))


def photo_files(paths: Iterable[Path]) -> Iterator[Path]:
    """The files that are named, and the photos below the folders that are, in the order of their names."""
    for path in paths:
        if path.is_dir():
            listed = _photos_below(path)
            if not listed:
                raise DataError(f"{printable(str(path))} holds no photos")
            yield from (path / name for name in listed)
        else:
            yield path


def photos_to_enroll(folders: Iterable[Path], of_class: str | None = None) -> Iterator[tuple[str, Item]]:
    """Photos with their classes: a folder's photos are of the class it is named after, those below a folder in it too.

    birds/robin/1.jpg and birds/robin/spring/2.jpg are robins if `birds` or `birds/robin` is given; a file needs
    `of_class`, which stands for all names.
    """
    for folder in folders:
        if not folder.is_dir():
            if of_class is None:
                kind = "is a file: say its --class" if folder.exists() else "does not exist"
                raise DataError(f"{printable(str(folder))} {kind}")
            yield of_class, Item(folder)
            continue
        listed = _photos_below(folder)
        if not listed:
            raise DataError(f"{printable(str(folder))} holds no photos, so there is no class to make of it")
        own = folder.resolve().name
        for name in listed:
            first, inner, _ = name.partition("/")
            yield of_class or (first if inner else own), Item(folder / name)


def _photos_below(folder: Path) -> list[str]:
    source: Source = open_source(folder, folder)
    return [name for name in source.files if Path(name).suffix.lower() in PHOTO_SUFFIXES]


def to_csv(answers: Sequence[Answer | Failure]) -> str:
    """A line for each photo. No cell is taken for a formula by a spreadsheet."""
    written = io.StringIO()
    rows = csv.DictWriter(written, COLUMNS, restval="", lineterminator="\n")
    rows.writeheader()
    for one in answers:
        rows.writerow({name: csv_cell(str(value)) for name, value in _row(one).items()})
    return written.getvalue()


def _row(one: Answer | Failure) -> dict[str, Any]:
    if isinstance(one, Failure):
        return {"photo": one.source, "error": one.code, "message": one.message}
    found = {
        "photo": one.source,
        "answer": one.name or "",
        "probability": f"{one.candidates[0].probability:.4f}",
        "known": f"{one.known:.4f}",
        "rejected": str(one.rejected).lower(),
        "crop": one.crop_is,
        **{name: f"{edge:.1f}" for name, edge in zip(("left", "top", "right", "bottom"), one.crop, strict=True)},
        "duplicate_of": "" if one.duplicate_of is None else one.duplicate_of,
        "gallery_version": one.version,
        "warnings": "; ".join(one.warnings),
    }
    if len(one.candidates) > 1:
        second = one.candidates[1]
        found |= {"second": second.name, "second_probability": f"{second.probability:.4f}"}
    return found


def to_jsonl(answers: Sequence[Answer | Failure]) -> str:
    """A JSON object for each photo."""
    return "".join(json.dumps({"schema_version": SCHEMA_VERSION, **one.to_json()}) + "\n" for one in answers)


def write_answers(answers: Sequence[Answer | Failure], path: Path, *, as_csv: bool) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (to_csv(answers) if as_csv else to_jsonl(answers)).encode())
