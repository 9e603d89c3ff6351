"""The report: one HTML file that shows every recognised picture, the example it matched, and what each part added."""

import base64
import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from PIL import Image

from parseshot.data.staging import replace_file
from parseshot.errors import DataError
from parseshot.figures import check_picture, svg_lines, svg_marks
from parseshot.recognition.answer import percent
from parseshot.recognition.explain import Explanation, FoundPart

TEMPLATES, TEMPLATE = Path(__file__).parent / "web", "base.html.j2"  # the frame of every page
THUMBNAILS = 5  # enrolled pictures shown a class
LOSSLESS = 128  # pixels: larger pictures are embedded as lossy WebP


@dataclass(frozen=True)
class ReportQuery:
    """One recognised picture."""

    image: np.ndarray  # uint8 [H, W, 3]
    truth: str | None  # its true class, where known
    explanation: Explanation


@dataclass(frozen=True)
class Report:
    """Everything on the page."""

    title: str
    summary: dict[str, str]  # label → value, shown at the top: accuracy, time, model, data, versions
    classes: list[str]  # names, by class number
    support: list[np.ndarray]  # enrolled pictures, row by row
    support_labels: list[int]
    queries: list[ReportQuery]


def write_report(report: Report, path: Path) -> None:
    """Write one self-contained HTML file."""
    write_page(render(report), path)


def write_page(page: str, path: Path) -> None:
    """Write a page whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, page.encode("utf-8", errors="replace"))  # names of folders may hold lone surrogates


def environment() -> jinja2.Environment:
    """Templates that escape every name: they get numbers, colours and names, never markup."""
    loader, strict = jinja2.FileSystemLoader(TEMPLATES), jinja2.StrictUndefined
    return jinja2.Environment(loader=loader, autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True)


def render(report: Report) -> str:
    """The page as text."""
    if len(report.support) != len(report.support_labels):
        raise DataError(f"{len(report.support)} enrolled pictures, but {len(report.support_labels)} labels")
    album = Album()
    cards = [_card(report, album, number, query) for number, query in enumerate(report.queries, 1)]
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            cards=cards,
            verdicts=Counter(card["verdict"] for card in cards),
            enrolled=_enrolled(report, album),
            confusion=_confusion(cards),
            names=sorted({name for card in cards for name in (card["answer"], card["truth"]) if name is not None}),
            pictures=album.pictures,
        )
    )


class Album:
    """Gives each distinct picture a number, so that it is embedded once however often it is shown."""

    def __init__(self, lossless: int = LOSSLESS) -> None:
        self.lossless = lossless
        self.pictures: list[dict[str, Any]] = []
        self._numbers: dict[tuple[tuple[int, ...], bytes], int] = {}

    def add(self, image: np.ndarray) -> dict[str, Any]:
        check_picture(image)
        number = self._numbers.setdefault((image.shape, image.tobytes()), len(self.pictures))
        if number == len(self.pictures):
            height, width = image.shape[:2]
            picture = {"number": number, "width": width, "height": height, "box": f"-.5 -.5 {width} {height}"}
            self.pictures.append(picture | {"uri": _data_uri(image, self.lossless)})
        return self.pictures[number]


def _data_uri(image: np.ndarray, lossless: int) -> str:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "WEBP", lossless=max(image.shape) <= lossless, quality=90, method=4)
    return "data:image/webp;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


def _enrolled(report: Report, album: Album) -> list[dict[str, Any]]:
    rows: list[list[int]] = [[] for _ in report.classes]
    for row, label in enumerate(report.support_labels):
        rows[label].append(row)
    return [
        {"name": name, "count": len(mine), "pictures": [album.add(report.support[row]) for row in mine[:THUMBNAILS]]}
        for name, mine in zip(report.classes, rows, strict=True)
    ]


def _card(report: Report, album: Album, number: int, query: ReportQuery) -> dict[str, Any]:
    why = query.explanation
    names = [report.classes[label] for label, _, _ in why.ranking]
    answer = names[0]
    return {
        "number": number,
        "verdict": "unknown" if query.truth is None else "right" if query.truth == answer else "wrong",
        "truth": query.truth,
        "true_rank": names.index(query.truth) + 1 if query.truth in names else None,
        "answer": answer,
        "probability": percent(why.ranking[0][2]),
        "runner_up": names[1] if len(names) > 1 else None,
        "runner_up_probability": percent(why.ranking[1][2]) if len(names) > 1 else None,
        "query": _side(album.add(query.image), why.parts),
        "example": _side(album.add(report.support[why.matched]), why.matched_parts),
        "degenerate": why.degenerate_geometry,
        **_balance(why),
    }


def _side(picture: dict[str, Any], parts: Sequence[FoundPart]) -> dict[str, Any]:
    marks = svg_marks(parts, picture["width"], picture["height"])
    return {"picture": picture, "parts": marks, "lines": svg_lines(parts)}


def _balance(why: Explanation) -> dict[str, Any]:
    """The sum of Eq. 7 as rows, the geometry last, and the row that speaks most for the answer."""
    nearest, second = (*why.part_distances, why.geometry), (*why.runner_up_part_distances, why.runner_up_geometry)
    total, longest = sum(nearest), max(*nearest, *second) or 1.0
    digits = min(6, max(3, 2 - math.floor(math.log10(total)))) if total > 0 else 3
    shares = rounded([100 * value / total for value in nearest], 0) if total > 0 else [0.0] * len(nearest)
    printed, printed_second = rounded(nearest, digits), rounded(second, digits)
    gains = [far - near for near, far in zip(nearest, second, strict=True)]
    decided = max(range(len(gains) - 1), key=gains.__getitem__)
    if gains[decided] <= 0:
        decided = len(gains) - 1  # no part is nearer to the answer than to the runner-up, so the geometry is
    rows = [
        {
            "adds": f"{printed[row]:.{digits}f}",
            "share": f"{shares[row]:.0f}",
            "bar": round(100 * nearest[row] / longest, 1),
            "against": f"{printed_second[row]:.{digits}f}",
            "against_bar": round(100 * second[row] / longest, 1),
        }
        for row in range(len(nearest))
    ]
    return {
        "rows": rows[:-1],
        "geometry": rows[-1],
        "total": f"{sum(printed):.{digits}f}",
        "runner_up_total": f"{sum(printed_second):.{digits}f}",
        "decided": decided if len(why.ranking) > 1 and gains[decided] > 0 else None,
        "gain": f"{gains[decided]:.{digits}f}",
    }


def rounded(values: Sequence[float], digits: int) -> list[float]:
    """The values rounded so that they add up to their rounded sum: each is the step of the rounded running sum.

    >>> rounded([0.4, 0.4, 0.4], 0)
    [0.0, 1.0, 0.0]
    """
    return [float(step) for step in np.diff(np.round(np.cumsum(values), digits), prepend=0.0)]


def _confusion(cards: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a true class: how many were right, and what the others were taken for, with their card numbers."""
    rows = []
    for truth in sorted({card["truth"] for card in cards if card["truth"] is not None}):
        mine = [card for card in cards if card["truth"] == truth]
        taken: dict[str, list[int]] = {}
        for card in mine:
            if card["verdict"] == "wrong":
                taken.setdefault(card["answer"], []).append(card["number"])
        mistakes = sorted(taken.items(), key=lambda item: (-len(item[1]), item[0]))
        right = sum(card["verdict"] == "right" for card in mine)
        rows.append({"name": truth, "count": len(mine), "right": right, "taken": mistakes})
    return rows
