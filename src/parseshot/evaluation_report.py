"""The pages of `evaluate --report` and `compare --report`: how sure the figures are, and what lies behind them."""

import functools
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import jinja2
import numpy as np
from PIL import Image

from parseshot.data.packed import Pack
from parseshot.engine.evaluation import Evaluation, Outcome
from parseshot.engine.protocol import shots_text
from parseshot.engine.results import (
    MATRIX,
    CalibrationRecord,
    ComparedRow,
    ComparisonResult,
    Confusion,
    EvaluationResult,
    Group,
    ModelCard,
    Pair,
    Result,
)
from parseshot.report import Album, environment, write_page

THUMBNAILS, THUMBNAIL_SIZE = 4, 112  # pictures a class of a confused pair, and pixels of their longer side
NAMED = 60  # classes up to which the matrix has their names at its edges
WRITTEN = 20  # classes up to which it has the rates in its cells
NAME = 24  # characters of a class at the edges of the matrix
TOLD_OF = 5  # cells a class that say what they are when pointed at; all of them in a small matrix
SHADES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 1.0)  # rates at which the colour of a cell changes
SPOKEN, FEW = 0.8, 0.01  # the confidence put into words, and the share of queries below which a bin says little
STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25)  # of an accuracy axis
LISTED = 45  # paired differences up to which their table is open from the start


def write_evaluation(result: EvaluationResult, found: Evaluation, pack: Pack, path: Path) -> None:
    """Write the page of one model: one self-contained HTML file."""
    album = Album(lossless=0)
    page = render(
        "evaluation.html.j2",
        result=result,
        sections=[
            _section(one, outcome, found, pack, album)
            for one, outcome in zip(result.results, found.outcomes, strict=True)
        ],
        cards=_card_rows([result.model_card]),
        command=_evaluate_command(result, pack),
        most=MATRIX,
        pictures=album.pictures,
    )
    write_page(page, path)


def write_comparison(result: ComparisonResult, path: Path) -> None:
    """Write the page of several models on the same episodes: one self-contained HTML file."""
    names = path_tails([card.path for card in result.models])
    page = render(
        "comparison.html.j2",
        result=result,
        names=names,
        numbers={card.path: number for number, card in enumerate(result.models, 1)},
        sections=[
            _compared(result, shots) for shots in dict.fromkeys(shots_words(row.shots) for row in result.results)
        ],
        cards=_card_rows(result.models),
        heads=[f"{number} {names[card.path]}" for number, card in enumerate(result.models, 1)],
        command=_command("compare", [card.path for card in result.models], "PACK", result),
        pictures=[],
    )
    write_page(page, path)


def render(template: str, **values: Any) -> str:
    return _templates().get_template(template).render(**values)


@functools.cache
def _templates() -> jinja2.Environment:
    found = environment()
    found.filters |= {"share": share, "points": points, "shots": shots_words, "p_value": p_text, "cut": cut}
    return found


# --- words ---


def share(value: float, digits: int = 1) -> str:
    """A share in percent, held together by a no-break space.

    >>> share(0.5473)
    '54.7\\xa0%'
    """
    return f"{100 * value:.{digits}f}\xa0%"


def points(value: float) -> str:
    """A difference in percentage points, with its sign: +1.20, −0.35."""
    return f"{100 * value:+.2f}".replace("-", "−")


def p_text(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def shots_words(shots: int | Sequence[int]) -> str:
    """
    >>> shots_words(1), shots_words(5), shots_words([1, 2])
    ('1 shot', '5 shots', '1+2 shots')
    """
    text = shots_text(shots)
    return f"{text} shot" if text == "1" else f"{text} shots"


def cut(text: str, length: int) -> str:
    """At most `length` characters, the middle left out.

    >>> cut("a long name", 7)
    'a l…ame'
    """
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[: length - 1 - half]}…{text[-half:]}"


def path_tails(paths: Sequence[str]) -> dict[str, str]:
    """The shortest end of each path that no other path has.

    >>> path_tails(["runs/dop/best", "runs/proto/best", "old"])
    {'runs/dop/best': 'dop/best', 'runs/proto/best': 'proto/best', 'old': 'old'}
    """
    parts = {path: PurePath(path).parts for path in paths}
    tails = {}
    for path, mine in parts.items():
        others = [other for name, other in parts.items() if name != path]
        lengths = (n for n in range(1, len(mine)) if all(other[-n:] != mine[-n:] for other in others))
        tails[path] = str(PurePath(*mine[-next(lengths, len(mine)) :])) if mine else path
    return tails


# --- one number of shots of one model ---


def _section(one: Result, outcome: Outcome, found: Evaluation, pack: Pack, album: Album) -> dict[str, Any]:
    asked = sorted((row for row in one.per_class if row.accuracy is not None), key=lambda row: -(row.accuracy or 0))
    places = {pack.classes[number]: place for place, number in enumerate(found.classes)}

    def shown(truth: str, answer: str) -> list[dict[str, Any]]:
        """The pictures of a class that were most often given to another, or to itself."""
        rows = np.flatnonzero(found.labels == places[truth])
        times = outcome.taken[rows, places[answer]]
        first = [at for at in np.argsort(-times, kind="stable")[:THUMBNAILS] if times[at]]
        images = [int(found.images[rows[at]]) for at in first]
        return [
            {"picture": album.add(_thumbnail(pack, image)), "times": int(times[at]), "file": pack.files[image]}
            for at, image in zip(first, images, strict=True)
        ]

    records = {"Raw": one.calibration.raw, "Tempered": one.calibration.tempered}
    return {
        "result": one,
        "classes": [*asked, *(row for row in one.per_class if row.accuracy is None)],
        "pairs": [
            {"pair": pair, "taken": shown(pair.truth, pair.taken_for), "right": shown(pair.taken_for, pair.taken_for)}
            for pair in one.most_confused
        ],
        "matrix": _matrix(one.confusion) if one.confusion else None,
        "diagrams": [_diagram(title, record) for title, record in records.items() if record],
    }


def _thumbnail(pack: Pack, image: int) -> np.ndarray:
    picture = Image.fromarray(pack.pixels([image])[0])
    picture.thumbnail((THUMBNAIL_SIZE, THUMBNAIL_SIZE))
    return np.asarray(picture)


def _matrix(confusion: Confusion) -> dict[str, Any]:
    """The geometry of the heat map, in pixels: one path a shade, and a box for each cell that says what it is."""
    taken, of, names = np.array(confusion.taken), np.array(confusion.of), confusion.classes
    count = len(names)
    rates = taken / np.maximum(of, 1)
    np.fill_diagonal(rates, 0.0)
    shades = np.searchsorted(SHADES, rates)  # 0 where nothing was taken
    side = max(4, min(40, 720 // count))
    font = min(12, side - 2)
    named = count <= NAMED
    edge = round(0.64 * font * min(NAME, max(map(len, names)))) + 12 if named else 30

    def path(cells: np.ndarray) -> str:
        corners = (f"M{edge + side * column} {edge + side * row}" for row, column in np.argwhere(cells))
        return "".join(f"{corner}h{side}v{side}h-{side}z" for corner in corners)

    every = 1 if named else 10  # the labels that are written
    loudest = np.argsort(-rates, axis=None, kind="stable")[: max(TOLD_OF * count, WRITTEN**2)]
    told = [divmod(int(at), count) for at in loudest if rates.flat[at] > 0]
    return {
        "size": edge + side * count + 1,
        "side": side,
        "edge": edge,
        "font": font if named else 10,
        "named": named,
        "labels": [
            {"name": name, "text": cut(name, NAME) if named else str(place + 1), "at": edge + side * place + side / 2}
            for place, name in enumerate(names)
            if named or (place + 1) % every == 0
        ],
        "names": names,
        "shades": [
            {"path": path(shades == shade), "low": SHADES[shade - 1], "high": SHADES[shade]}
            for shade in range(1, len(SHADES))
        ],
        "unmet": path((of == 0) & ~np.eye(count, dtype=bool)),
        "diagonal": path(np.eye(count, dtype=bool)),
        "cells": [
            {
                "x": edge + side * column,
                "y": edge + side * row,
                "title": f"{names[row]} taken for {names[column]}: {share(rates[row, column])} "
                f"({taken[row, column]} of {of[row, column]})",
                "rate": f"{100 * rates[row, column]:.0f}" if count <= WRITTEN else "",
                "deep": shades[row, column] >= len(SHADES) - 2,
            }
            for row, column in sorted(told)
        ],
    }


def _diagram(title: str, record: CalibrationRecord) -> dict[str, Any]:
    """A reliability diagram: accuracy and share of queries of each bin of confidence."""
    total = sum(one.queries for one in record.bins) or 1
    bins: list[dict[str, Any]] = [
        {
            "low": one.low,
            "high": one.high,
            "confidence": one.confidence,
            "accuracy": one.accuracy,
            "queries": one.queries,
            "share": one.queries / total,
            "few": one.queries < FEW * total,
        }
        for one in record.bins
        if one.confidence is not None
    ]
    heard = [one for one in bins if not one["few"]]
    said = min(heard, key=lambda one: abs(one["confidence"] - SPOKEN), default=None)
    most = max((one["share"] for one in bins), default=1.0)
    return {"title": title, "record": record, "bins": bins, "said": said, "most": most}


# --- comparison ---


def _compared(result: ComparisonResult, shots: str) -> dict[str, Any]:
    rows = [row for row in result.results if shots_words(row.shots) == shots]
    pairs = [pair for pair in result.pairs if shots_words(pair.shots) == shots]
    groups = [group for group in result.indistinct if shots_words(group.shots) == shots]
    return {
        "shots": shots,
        "rows": rows,
        "groups": groups,
        "plot": _plot(rows, groups),
        "pairs": [{"pair": pair, "verdict": _verdict(pair)} for pair in pairs],
        "open": len(pairs) <= LISTED,
    }


def _verdict(pair: Pair) -> str:
    low, high = pair.interval_95_by_classes
    if not pair.differ:
        return "not told apart"
    return "told apart on these classes" if low <= 0 <= high else "told apart"


def _plot(rows: Sequence[ComparedRow], groups: Sequence[Group]) -> dict[str, Any]:
    """The critical-difference plot: x in percent of the width, so that it fits any; a line for each model."""
    order = sorted(rows, key=lambda row: -row.accuracy)
    lines = [[line for line, row in enumerate(order) if row.model in group.models] for group in groups]
    lanes = _lanes([(min(mine), max(mine)) for mine in lines])
    left, right = 5.0, max(60.0, 95.0 - 3 * max(lanes, default=0))
    ticks = _ticks([(row.accuracy - row.interval_95, row.accuracy + row.interval_95) for row in rows])

    def across(value: float) -> float:
        return round(left + (right - left) * (value - ticks[0]) / (ticks[-1] - ticks[0]), 2)

    return {
        "ticks": [{"x": across(tick), "text": f"{100 * tick:.4g}\xa0%"} for tick in ticks],
        "lines": [
            {
                "row": row,
                "x": across(row.accuracy),
                "low": across(row.accuracy - row.interval_95),
                "high": across(row.accuracy + row.interval_95),
            }
            for row in order
        ],
        "bars": [{"x": right + 3 * lane, "lines": mine} for mine, lane in zip(lines, lanes, strict=True)],
    }


def _lanes(spans: Sequence[tuple[int, int]]) -> list[int]:
    """The first lane, from 1, in which each bar does not touch an earlier one."""
    lanes: list[int] = []
    for at, (first, last) in enumerate(spans):
        taken = {lanes[other] for other in range(at) if first <= spans[other][1] and spans[other][0] <= last}
        lanes.append(next(lane for lane in range(1, len(spans) + 1) if lane not in taken))
    return lanes


def _ticks(intervals: Sequence[tuple[float, float]]) -> list[float]:
    """Round accuracies around all intervals.

    >>> _ticks([(0.547, 0.561), (0.59, 0.602)])
    [0.54, 0.56, 0.58, 0.6, 0.62]
    """
    low, high = max(0.0, min(low for low, _ in intervals)), min(1.0, max(high for _, high in intervals))
    step = next(step for step in STEPS if high - low <= 4 * step)
    first, last = math.floor(round(low / step, 6)), math.ceil(round(high / step, 6))
    if first == last:
        first, last = max(first - 1, 0), max(last, 1)
    return [round(step * tick, 6) for tick in range(first, last + 1)]


# --- models and commands ---


def _card_rows(cards: Sequence[ModelCard]) -> list[dict[str, Any]]:
    """A row for each field that any of the models has, a value for each model."""
    fields = [_card_fields(card) for card in cards]
    labels = dict.fromkeys(label for one in fields for label in one)
    rows = [{"label": label, "values": [one.get(label, "–") for one in fields]} for label in labels]
    return [row | {"differs": len(set(row["values"])) > 1} for row in rows]


def _card_fields(card: ModelCard) -> dict[str, str]:
    data = card.trained_on
    return {
        "Path": card.path,
        "Method": card.method,
        "Backbone": card.backbone,
        "Image size": f"{card.image_size} × {card.image_size} pixels",
        "Grid": f"{card.grid} × {card.grid}",
        "Parameters": f"{card.parameters:,}",
        "Weights": card.weights,
        "Trained on": f"{data.name} {data.fingerprint}, split {data.split.name} {data.split.fingerprint}"
        if data
        else "–",
        "Base classes": _value(card.base_classes),
        "Episodes seen": _value(card.episodes_seen),
        "Accuracy on the val classes": "–" if card.val_accuracy is None else share(card.val_accuracy, 2),
        **flat(card.options, "Option "),
        **flat(card.training, "Training: "),
    }


def flat(values: Mapping[str, Any], label: str) -> dict[str, str]:
    """
    >>> flat({"lr": 0.1, "augmentation": {"flip": True}}, "Training: ")
    {'Training: lr': '0.1', 'Training: augmentation.flip': 'yes'}
    """
    found: dict[str, str] = {}
    for key, value in values.items():
        found |= flat(value, f"{label}{key}.") if isinstance(value, Mapping) else {f"{label}{key}": _value(value)}
    return found


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def _evaluate_command(result: EvaluationResult, pack: Pack) -> str:
    calibrated = any(one.calibration.temperature is not None for one in result.results)
    opened = any(one.open_set is not None for one in result.results)
    extras = ["--calibrate"] * calibrated + ["--open-set"] * opened
    return _command("evaluate", [result.model], str(pack.path), result, extras)


def _command(
    name: str,
    models: Sequence[str],
    data: str,
    result: EvaluationResult | ComparisonResult,
    extras: Sequence[str] = (),
) -> str:
    protocol = result.protocol
    options = {
        "data": data,
        "split": protocol.split,
        "way": protocol.way,
        "shots": ",".join(map(shots_text, protocol.shots)),
        "queries": protocol.queries,
        "episodes": protocol.episodes,
        "seed": protocol.seed,
        "threads": result.versions.threads,
    }
    words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    return shlex.join(["parseshot", name, *models, *words, *extras])
