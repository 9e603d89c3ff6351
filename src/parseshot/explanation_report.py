"""An explanation to look at: a picture of the parts and what they matched, a page with the ledgers, or their JSON."""

import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parseshot.data.staging import replace_file
from parseshot.errors import UsageError
from parseshot.explanation_figure import (
    ROWS_APART,
    SHOWN,
    Linked,
    Tile,
    View,
    bottom_of,
    draw_explained,
    file_name,
    link_classes,
    links_between,
    looked_at,
    query_view,
    role,
    row_of,
    says,
)
from parseshot.figures import svg_lines, svg_marks
from parseshot.recognition.answer import SCHEMA_VERSION, Answer, percent
from parseshot.recognition.explained import ClassLedger, Explained
from parseshot.recognition.ledger import CELLS, GEOMETRY, PHOTOS, WHOLE, LedgerRow
from parseshot.report import Album, environment, rounded, write_page

WIDTH, TILE, QUERY, RING = 600, 292, 340, 18  # of the linked photos, sides of an example and of the query, least ring
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # of the examples
LETTER = 24  # the height of one
OTHERS = {WHOLE: "the whole object", GEOMETRY: "geometry", PHOTOS: "number of photos"}  # rows that are no part's


def write_explained(explained: Explained, path: Path | str) -> None:
    """Write a picture, a page or JSON, by the suffix of the path: whole or not at all."""
    path = Path(path)
    WRITERS[suffix_of(path)](explained, path)


def suffix_of(path: Path | str) -> str:
    """.png, .html or .json; others are refused."""
    suffix = Path(path).suffix.lower()
    if suffix not in WRITERS:
        known = ", ".join(list(WRITERS)[:-1]) + f" or {list(WRITERS)[-1]}"
        raise UsageError(f"{path}: an explanation is written as {known}, which the name of the file must end with")
    return suffix


def _write_picture(explained: Explained, path: Path) -> None:
    written = io.BytesIO()
    draw_explained(explained).save(written, "PNG")
    _write(written.getvalue(), path)


def _write_html(explained: Explained, path: Path) -> None:
    write_page(render(explained), path)


def _write_json(explained: Explained, path: Path) -> None:
    document = {"schema_version": SCHEMA_VERSION} | explained.to_json()
    _write((json.dumps(document, indent=1) + "\n").encode(), path)


def _write(data: bytes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data)


WRITERS: dict[str, Callable[[Explained, Path], None]] = {
    ".png": _write_picture, ".html": _write_html, ".json": _write_json,
}  # fmt: skip


def render(explained: Explained) -> str:
    """The page as text."""
    answer, album = explained.answer, Album()
    query = query_view(explained)
    shown = link_classes(explained)
    digits = _digits([one.ledger.ledger.distance for one in shown])
    ledgers = [_ledger(one.ledger, len(explained.parts), digits) for one in shown]
    return (
        environment()
        .get_template("explanation.html.j2")
        .render(
            title=str(explained),
            says=says(explained),
            answer=answer,
            known=percent(answer.known),
            threshold=None if answer.threshold is None else percent(answer.threshold),
            looked_at=looked_at(answer),
            photo=_side(album, query),
            candidates=_candidates(answer),
            cards=[
                {
                    "role": role(number, answer),
                    "name": one.ledger.candidate.name,
                    "probability": percent(one.ledger.candidate.probability),
                    "scene": _scene(album, query, one),
                    "photos": _photos(one),
                    "ledger": ledger,
                }
                for number, (one, ledger) in enumerate(zip(shown, ledgers, strict=True))
            ],
            compared=_compared(explained, album, query, shown, ledgers, digits),
            pictures=album.pictures,
        )
    )


def _candidates(answer: Answer) -> list[dict[str, Any]]:
    rows = [(one.name, one.probability) for one in answer.candidates]
    if answer.threshold is not None:
        rows.append((None, 1 - answer.known))  # type: ignore[arg-type]
    return [{"name": name, "probability": percent(p), "bar": round(100 * p, 1)} for name, p in rows]


def _side(album: Album, view: View) -> dict[str, Any]:
    """A photo with its parts, for a template."""
    picture = album.add(np.asarray(view.image))
    frame = None
    if view.frame:
        left, top, right, bottom = view.frame
        frame = {"x": left - 0.5, "y": top - 0.5, "width": right - left, "height": bottom - top}
    marks = svg_marks(view.parts, view.image.width, view.image.height)
    return {"picture": picture, "parts": marks, "lines": svg_lines(view.parts), "frame": frame}


def _scene(album: Album, query: View, one: Linked) -> dict[str, Any]:
    """The query among the examples of a class: above it where they are more than two, and below."""
    half = len(one.shown) // 2 if len(one.shown) > 2 else 0
    above = row_of(one.shown[:half], LETTER, WIDTH, TILE, RING)
    (asked,) = row_of([query], bottom_of(above) + ROWS_APART if above else 0.0, WIDTH, QUERY, RING)
    below = row_of(one.shown[half:], bottom_of([asked]) + ROWS_APART, WIDTH, TILE, RING)
    tiles = [_shown(album, asked)]
    for at, (tile, example) in enumerate(zip(above + below, one.examples, strict=True)):
        y = tile.top - 7 if at < half else tile.top + tile.height + 17
        tiles.append(_shown(album, tile) | {"letter": _letter(example), "x": tile.left + tile.width / 2, "y": y})
    lines = [
        {"colour": colour, "path": f"M{x:.1f} {y:.1f}L{across:.1f} {down:.1f}"}
        for colour, ((x, y), (across, down)) in links_between(asked, above + below, one)
    ]
    return {"width": WIDTH, "height": math.ceil(bottom_of(below) + LETTER), "tiles": tiles, "lines": lines}


def _shown(album: Album, tile: Tile) -> dict[str, Any]:
    """A tile for the template, with rings that can be seen however small the photo is."""
    side = _side(album, tile.view)
    ring = tile.ring / tile.zoom / 10
    marks = [mark | {"place": f"translate({mark['x']} {mark['y']}) scale({ring:.4f})"} for mark in side["parts"]]
    at = {"left": tile.left, "top": tile.top, "width": tile.width, "height": tile.height}
    return side | {"parts": marks, "letter": None, "at": {name: round(value, 1) for name, value in at.items()}}


def _letter(example: int) -> str:
    return LETTERS[example] if example < len(LETTERS) else str(example + 1)


def _photos(one: Linked) -> list[dict[str, Any]]:
    """All that a row of the ledger names, and the parts whose lines end there."""
    return [
        {
            "letter": _letter(number),
            "source": example.photo.source,
            "name": file_name(example.photo.source),
            "id": example.photo.id,
            "parts": [part + 1 for part, linked in enumerate(one.links) if linked == number],
        }
        for number, example in enumerate(one.ledger.examples)
    ]


def _digits(distances: Sequence[float]) -> int:
    least = min(distances)
    return min(8, max(4, 3 - math.floor(math.log10(least)))) if least > 0 else 4


def _ledger(one: ClassLedger, parts: int, digits: int) -> dict[str, Any]:
    """The rows, part by part, the others last; what is printed adds up to what is printed as their sum."""
    ordered = [row for part in range(parts) for row in one.ledger.rows if row.part == part]
    ordered += [row for row in one.ledger.rows if row.part is None]
    printed = rounded([row.adds for row in ordered], digits)
    groups = []
    for part in range(parts):
        mine = [(row, adds) for row, adds in zip(ordered, printed, strict=True) if row.part == part]
        groups.append({"rows": [_ledger_row(row, adds, digits) for row, adds in mine], "sum": sum(a for _, a in mine)})
    others = [
        {"name": OTHERS[row.kind], "kind": row.kind, "sum": adds, "text": _number(adds, digits)}
        for row, adds in zip(ordered, printed, strict=True)
        if row.part is None
    ]
    return {
        "parts": [group | {"text": _number(group["sum"], digits)} for group in groups],  # type: ignore[arg-type]
        "others": others,
        "total": _number(sum(printed), digits),
    }


def _number(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:.{digits}f}"  # no minus before a zero


def _ledger_row(row: LedgerRow, adds: float, digits: int) -> dict[str, Any]:
    return {
        "scale": "cells" if row.kind == CELLS else f"{row.scale} × {row.scale}",
        "weight": "–" if row.weight is None else f"{row.weight:.4f}",
        "distance": "–" if row.distance is None else f"{row.distance:.4f}",
        "matched": "–" if row.matched is None else _letter(row.matched),
        "adds": _number(adds, digits),
    }


def _compared(
    explained: Explained,
    album: Album,
    query: View,
    shown: Sequence[Linked],
    ledgers: Sequence[dict[str, Any]],
    digits: int,
) -> dict[str, Any] | None:
    """What each part adds for either class, and what speaks most for the first; None where there is one class."""
    if len(shown) < SHOWN:
        return None
    sums = [[row["sum"] for row in (*one["parts"], *one["others"])] for one in ledgers]
    names = [row["name"] for row in ledgers[0]["others"]]
    longest = max(map(max, sums)) or 1.0
    rows = [
        {
            "name": None if number < len(explained.parts) else names[number - len(explained.parts)],
            "adds": [_number(value, digits) for value in pair],
            "bars": [round(100 * max(0.0, value) / longest, 1) for value in pair],
            "gain": pair[1] - pair[0],
            "difference": f"{round(pair[1] - pair[0], digits) + 0.0:+.{digits}f}",
        }
        for number, pair in enumerate(zip(*sums, strict=True))
    ]
    gains = [second - first for first, second in zip(*sums, strict=True)]
    lacked = explained.decided_by
    if lacked is None and max(gains) > 0:
        lacked = max(range(len(gains)), key=gains.__getitem__)
    return {
        "names": [one.ledger.candidate.name for one in shown],
        "rows": rows,
        "totals": [one["total"] for one in ledgers],
        "difference": f"{round(sum(gains), digits) + 0.0:+.{digits}f}",
        "lacked": lacked,
        "gain": None if lacked is None else _number(gains[lacked], digits),
        "differ_at": explained.differ_at,
        "sides": [_side(album, query), *(_side(album, one.views[0]) for one in shown)],
        "crops": [_crops(album, query, shown, part) for part in range(len(explained.parts))],
    }


def _crops(album: Album, query: View, shown: Sequence[Linked], part: int) -> list[dict[str, Any]]:
    """A part in the query and in the example it is linked with, of either class."""
    views = [query, *(one.views[one.links[part] or 0] for one in shown)]
    sides = [_side(album, view) for view in views]
    return [{"picture": side["picture"], "window": side["parts"][part]["window"]} for side in sides]
