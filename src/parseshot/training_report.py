"""The page of a training run: how far it came, and a chart of every figure in its metrics."""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parseshot.engine.state import METRICS
from parseshot.evaluation_report import flat, render
from parseshot.report import write_page

POINTS = 300  # of a curve, and rows of the table, however many steps
MARKS = 40  # falls of the learning rate up to which each is drawn
LEFT, RIGHT, TOP, BOTTOM = 48, 336, 24, 164  # of the plot, in units of the SVG; the template draws its frame
EPISODES = "episodes"  # the stage of rows that name none
LARGEST = 1e100  # what is beyond has no place on an axis

Row = dict[str, Any]


class Known(NamedTuple):
    """What a figure is called, what it says, and whether it is a share."""

    title: str
    words: str
    percent: bool = False


class Column(NamedTuple):
    """A figure over the steps that have it."""

    steps: list[float]
    values: list[float]
    loss: bool  # a term of the loss


class Point(NamedTuple):
    """Of a curve: the middle 80 % of the values around a step, and their mean."""

    step: float
    low: float
    mean: float
    high: float


KNOWN = {
    "val": Known("Validation accuracy", "Right answers on the val classes, which are never trained on.", True),
    "accuracy": Known("Training accuracy", "Right answers on a step's images, before it learns from them.", True),
    "ce": Known("Cross-entropy", "How far the probability of the right answer is from certain: 0 is certain."),
    "global_ce": Known("Cross-entropy, all base classes", "The same among all classes trained on, not an episode's."),
    "base_ce": Known(
        "Cross-entropy, all base classes", "Of a classifier of the classes trained on, which is not kept."
    ),
    "diversity": Known("Diversity", "The lower it is, the farther apart the parts of an image lie."),
    "entropy": Known(
        "Part entropy",
        "How spread out a part's location is: 0 one cell, 1 everywhere (dop-paper: ln of the number of cells).",
    ),
    "sparsity": Known("Sparsity of z", "Share of the part templates that an image makes no use of.", True),
    "geometry_share": Known("Share of geometry", "How much of a distance comes from where the parts lie.", True),
}


def write_training(run: Path, *, recipe: Mapping[str, Any], path: Path) -> None:
    """Write the page of a run, finished or not: one self-contained HTML file."""
    page = render(
        "training.html.j2",
        title=recipe.get("title") or "Training run",
        stages={name: _stage(name, rows, recipe) for name, rows in _read(Path(run) / METRICS).items()},
        episodes=EPISODES,
        settings=flat(recipe, ""),
        pictures=[],
    )
    write_page(page, path)


def _read(path: Path) -> dict[str, list[Row]]:
    """The rows of each stage by step; a line that is no row is left out, of a step written twice the last counts."""
    stages: dict[str, dict[float, Row]] = {}
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.split("\n"):
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and math.isfinite(step := _number(row.get("step"))):
                stages.setdefault(str(row.get("stage") or EPISODES), {})[step] = row
    return {name: [rows[step] for step in sorted(rows)] for name, rows in stages.items()}


def _number(value: Any) -> float:
    """A value that can be drawn; NaN for all others."""
    return float(value) if type(value) in (int, float) and abs(value) < LARGEST else math.nan


def _columns(rows: Sequence[Row]) -> dict[str, Column]:
    """The steps and the values of each figure, as accuracies, loss terms, others; all but texts and lists is one."""
    columns: dict[str, Column] = {}
    for row in rows:
        loss = "accuracy" in row  # loss terms are written before it
        for key, value in row.items():
            loss = loss and key != "accuracy"
            if type(value) in (int, float, type(None)) and key not in ("step", "seconds", "stage"):
                column = columns.setdefault(key, Column([], [], loss))
                column.steps.append(row["step"])
                column.values.append(_number(value))
    order = sorted(columns, key=lambda key: (key != "val", key != "accuracy", not columns[key].loss))
    return {key: columns[key] for key in order}


def _stage(name: str, rows: Sequence[Row], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A part of the run that has steps, charts and a learning rate of its own."""
    training = recipe.get("training") or {}
    settings = training if name == EPISODES else training.get(name)
    settings = settings if isinstance(settings, Mapping) else {}
    total = _number(settings.get("episodes" if name == EPISODES else "steps"))
    first, last = rows[0], rows[-1]
    seconds = _number(last.get("seconds")) - _number(first.get("seconds"))
    falls = _falls(settings, last["step"])
    return {
        "step": f"{last['step']:,}" + (f" of {total:,.0f}" if total > 0 else ""),
        "time": _clock(last.get("seconds")),
        "pace": figure(seconds / (last["step"] - first["step"])) if len(rows) > 1 and seconds >= 0 else None,
        "window": _window(len(rows)),
        "charts": [_chart(key, column, rows, falls) for key, column in _columns(rows).items()],
        "falls": len(falls),
        "settings": settings,
        **_validations(rows),
    }


def _falls(settings: Mapping[str, Any], last: float) -> list[tuple[float, float]]:
    """(last step before it, learning rate after it) of each fall of the learning rate up to a step."""
    rate, every, factor = (_number(settings.get(key)) for key in ("lr", "decay_every", "decay_factor"))
    count = int((last - 1) // every) if rate > 0 and every >= 1 and factor < 1 else 0
    return [(every * fall, rate * factor**fall) for fall in range(1, count + 1)] if count <= MARKS else []


def _validations(rows: Sequence[Row]) -> dict[str, Any]:
    """A table with the best one marked; of very many, the best and others that are evenly spread."""
    found = [row for row in rows if math.isfinite(_number(row.get("val")))]
    best = max(found, key=lambda row: row["val"], default=None)
    spread = {*np.linspace(0, len(found) - 1, min(len(found), POINTS)).astype(int).tolist()}
    table = [
        row | {"time": _clock(row.get("seconds")), "best": row is best}
        for at, row in enumerate(found)
        if at in spread or row is best
    ]
    return {"validations": table, "validated": len(found)}


def _chart(key: str, column: Column, rows: Sequence[Row], falls: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The chart of one figure: a line in a band, or dots for what is measured now and then."""
    known = KNOWN.get(key, Known(key, ""))
    values = np.array(column.values) * (100 if known.percent else 1)
    dots = len(values) <= POINTS and (key == "val" or 2 * len(values) < len(rows))
    window = 1 if dots else _window(len(values))
    chart = {"key": key, "known": known, "loss": column.loss, "dots": dots, "window": window, "end": None}
    chart |= {"count": len(values), "lost": int((~np.isfinite(values)).sum())}
    pieces = _pieces(column.steps, values, window)
    drawn = [point for piece in pieces for point in piece]
    if not drawn:
        return chart
    start, end = min(0, rows[0]["step"]), max(1, rows[-1]["step"])
    levels = ticks(min(point.low for point in drawn), max(point.high for point in drawn))

    def x(step: float) -> str:
        return f"{LEFT + (RIGHT - LEFT) * (step - start) / (end - start):.1f}"

    def y(value: float) -> str:
        return f"{BOTTOM - (BOTTOM - TOP) * (value - levels[0]) / (levels[-1] - levels[0]):.1f}"

    def path(points: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{x(step)} {y(value)}" for step, value in points)

    def text(value: float) -> str:
        return f"{value:.1f}\xa0%" if known.percent else figure(value)

    lines = [path([(at.step, at.mean) for at in piece]) + "h0" * (len(piece) == 1) for piece in pieces]
    bands = [path([(at.step, at.high) for at in piece] + [(at.step, at.low) for at in piece[::-1]]) for piece in pieces]
    return chart | {
        "line": "".join(lines),
        "band": "".join(f"{band}z" for band in bands) if window > 1 else "",
        "points": [{"x": x(at.step), "y": y(at.mean), "step": at.step, "text": text(at.mean)} for at in drawn],
        "steps": [{"x": x(at), "text": f"{at:,.0f}"} for at in ticks(start, end) if at <= end and at % 1 == 0],
        "levels": [{"y": y(at), "text": label} for at, label in zip(levels, tick_texts(levels), strict=True)],
        "falls": [{"x": x(step), "rate": figure(rate), "step": step + 1} for step, rate in falls],
        "end": text(drawn[-1].mean),
        "lowest": text(min(point.mean for point in drawn)),
        "highest": text(max(point.mean for point in drawn)),
    }


def _window(count: int) -> int:
    """How many values make a point of a curve: about a fiftieth of them, and odd."""
    return 2 * (count // 100) + 1


def _pieces(steps: Sequence[float], values: np.ndarray, window: int) -> list[list[Point]]:
    """A curve of at most POINTS points, broken where all values that a point stands for are missing."""
    pieces: list[list[Point]] = [[]]
    edges = np.linspace(0, len(values), min(POINTS, len(values)) + 1).astype(int).tolist()
    for start, end in pairwise(edges):
        middle = (start + end - 1) // 2
        near = values[max(0, min(start, middle - window // 2)) : max(end, middle + window // 2 + 1)]
        if np.isfinite(values[start:end]).any():
            near = np.sort(near[np.isfinite(near)])
            near = near[len(near) // 10 : len(near) - len(near) // 10]
            pieces[-1].append(Point(steps[middle], float(near[0]), float(near.mean()), float(near[-1])))
        else:
            pieces.append([])
    return [piece for piece in pieces if piece]


def ticks(low: float, high: float) -> list[float]:
    """Round values around a range, or up to a constant.

    >>> ticks(0.83, 2.65), ticks(100, 100)
    ([0.5, 1.0, 1.5, 2.0, 2.5, 3.0], [90.0, 92.0, 94.0, 96.0, 98.0, 100.0])
    """
    size = max(abs(low), abs(high))
    if size < 1 / LARGEST:
        low, high = 0.0, 1.0
    elif high - low <= 1e-9 * size:
        low, high = sorted((0.9 * high, high))
    power = math.floor(math.log10((high - low) / 5))
    step = next(one * 10.0**power for one in (1, 2, 5, 10) if one * 10.0**power >= 0.1999 * (high - low))
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return [round(step * tick, 12 - power) for tick in range(first, last + 1)]


def tick_texts(values: Sequence[float]) -> list[str]:
    """The labels of an axis, all with the decimals that its step needs.

    >>> tick_texts([-0.5, 0.0, 0.5]), tick_texts([0.0, 20000.0])
    (['−0.5', '0.0', '0.5'], ['0', '20,000'])
    """
    step, largest = values[1] - values[0], max(map(abs, values))
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    style = f",.{digits}f" if digits <= 5 and largest < 1e5 else f".{math.ceil(math.log10(largest / step)) + 1}g"
    return [format(value, style).replace("-", "−") for value in values]


def figure(value: float) -> str:
    """A number to read, to three digits.

    >>> figure(0.83915), figure(-1.97), figure(30000)
    ('0.839', '−1.97', '30,000')
    """
    return (f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}").replace("-", "−")


def _clock(seconds: Any) -> str:
    """Hours and minutes, 2:05; a dash where the time is not known."""
    minutes = _number(seconds) // 60
    return f"{minutes // 60:,.0f}:{minutes % 60:02.0f}" if minutes >= 0 else "–"
