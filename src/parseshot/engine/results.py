"""What an evaluation or a comparison says, as one document: the `--json` output, and what the report is drawn from.

The JSON schema beside it (schemas/evaluation.json, schemas/comparison.json) is made from these classes and committed.
No times and dates: the same command gives the same bytes.
"""

import platform
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from parseshot import __version__
from parseshot.config import Config
from parseshot.data.names import printable
from parseshot.data.packed import Pack
from parseshot.engine.evaluation import Evaluation, OpenSet, Outcome, paired_difference
from parseshot.engine.model import Model
from parseshot.engine.protocol import Protocol
from parseshot.engine.statistics import BINS, Z95, Interval, Reliability, by_classes, holm, indistinct_groups
from parseshot.errors import ModelError

SCHEMA_VERSION: Literal[2] = 2
CONFUSED = 12  # pairs listed
MATRIX = 200  # classes up to which the whole matrix is written
SIGNIFICANT = 0.05


class Versions(Config):
    parseshot: str
    torch: str
    numpy: str
    python: str
    threads: int


class SplitRecord(Config):
    name: str
    fingerprint: str


class DataRecord(Config):
    name: str
    fingerprint: str
    size: int
    split: SplitRecord


class ModelCard(Config):
    """What is to know about a model beside its figures."""

    path: str
    method: str
    backbone: str
    image_size: int
    grid: int
    parameters: int
    weights: str  # fingerprint
    options: dict[str, Any]  # of backbone and method
    trained_on: DataRecord | None
    base_classes: int | None
    episodes_seen: int | None
    val_accuracy: float | None
    training: dict[str, Any]


class ClassRecord(Config):
    name: str
    accuracy: float | None  # None where no episode asked for it
    queries: int


class ConfusedPair(Config):
    """Queries of a class given to another, out of those in episodes that held both."""

    truth: str
    taken_for: str
    times: int
    of: int
    rate: float


class Confusion(Config):
    classes: list[str]
    taken: list[list[int]]  # [truth][answer]
    of: list[list[int]]


class Bin(Config):
    low: float
    high: float
    queries: int
    confidence: float | None
    accuracy: float | None


class CalibrationRecord(Config):
    ece: float
    nll: float
    bins: list[Bin]


class Calibration(Config):
    raw: CalibrationRecord
    temperature: float | None  # fitted on the val classes
    tempered: CalibrationRecord | None


class OpenSetScore(Config):
    auroc: float
    auroc_interval_95: float
    fpr_at_95_tpr: float
    fpr_interval_95: float


class OpenSetRecord(Config):
    unseen_classes: int
    by_logit: OpenSetScore  # the highest logit says whether a query is known
    by_probability: OpenSetScore  # the highest probability does


class Result(Config):
    """One number of shots."""

    shots: int | list[int]
    accuracy: float
    interval_95: float  # half width over episodes, 1.96·σ/√n with ddof 1
    interval_95_by_classes: tuple[float, float]  # bootstrap over the classes
    copies_left_out: int
    near_copies: int
    per_class: list[ClassRecord]
    most_confused: list[ConfusedPair]
    confusion: Confusion | None
    calibration: Calibration
    open_set: OpenSetRecord | None


class Cache(Config):
    images: int
    bytes: int
    on_disk: bool


class EvaluationResult(Config):
    """`parseshot evaluate --json`."""

    schema_version: Literal[2] = SCHEMA_VERSION
    kind: Literal["evaluation"] = "evaluation"
    model: str
    method: str
    model_card: ModelCard
    data: DataRecord
    protocol: Protocol
    results: list[Result]
    cache: Cache
    notes: list[str]
    versions: Versions


class ComparedRow(Config):
    model: str
    method: str
    shots: int | list[int]
    accuracy: float
    interval_95: float
    interval_95_by_classes: tuple[float, float]
    lead_of_first: float
    lead_interval_95: float
    excludes_zero: bool


class Pair(Config):
    """first − second, on the same episodes."""

    shots: int | list[int]
    first: str
    second: str
    difference: float
    interval_95: float
    interval_95_by_classes: tuple[float, float]
    p_value: float
    p_holm: float  # corrected for the number of pairs at these shots
    differ: bool  # p_holm < 0.05


class Group(Config):
    """Models that were not told apart."""

    shots: int | list[int]
    models: list[str]


class ComparisonResult(Config):
    """`parseshot compare --json`."""

    schema_version: Literal[2] = SCHEMA_VERSION
    kind: Literal["comparison"] = "comparison"
    models: list[ModelCard]
    data: DataRecord
    protocol: Protocol
    results: list[ComparedRow]
    pairs: list[Pair]
    indistinct: list[Group]
    notes: list[str]
    versions: Versions


def evaluation_result(path: Path | str, model: Model, pack: Pack, found: Evaluation) -> EvaluationResult:
    return EvaluationResult(
        model=printable(str(path)),
        method=model.config.method,
        model_card=model_card(path, model),
        data=_data(pack),
        protocol=found.protocol,
        results=[_result(pack, found, outcome) for outcome in found.outcomes],
        cache=Cache(images=len(found.images), bytes=found.cache_bytes, on_disk=found.on_disk),
        notes=found.notes,
        versions=versions(),
    )


def comparison_result(
    paths: Sequence[Path | str], models: Sequence[Model], pack: Pack, found: Sequence[Evaluation]
) -> ComparisonResult:
    """Every model beside every other, on the same episodes."""
    names = [printable(str(path)) for path in paths]
    rows, pairs, groups = [], [], []
    for column, shots in enumerate(found[0].protocol.shots):
        told = _json_shots(shots)
        outcomes = [one.outcomes[column] for one in found]
        for name, model, evaluation, outcome in zip(names, models, found, outcomes, strict=True):
            lead = paired_difference(outcomes[0], outcome)
            rows.append(
                ComparedRow(
                    model=name,
                    method=model.config.method,
                    shots=told,
                    accuracy=outcome.interval.mean,
                    interval_95=outcome.interval.half_width,
                    interval_95_by_classes=evaluation.interval_by_classes(outcome),
                    lead_of_first=lead.mean,
                    lead_interval_95=lead.half_width,
                    excludes_zero=lead.excludes_zero(),
                )
            )
        which = list(combinations(range(len(names)), 2))
        differences = [paired_difference(outcomes[a], outcomes[b]) for a, b in which]
        corrected = holm([one.p_value for one in differences])
        differ = np.zeros((len(names), len(names)), dtype=bool)
        for (a, b), difference, p in zip(which, differences, corrected, strict=True):
            differ[a, b] = differ[b, a] = p < SIGNIFICANT
            pairs.append(
                Pair(
                    shots=told,
                    first=names[a],
                    second=names[b],
                    difference=difference.mean,
                    interval_95=difference.half_width,
                    interval_95_by_classes=_difference_by_classes(found[a], outcomes[a], found[b], outcomes[b]),
                    p_value=difference.p_value,
                    p_holm=p,
                    differ=p < SIGNIFICANT,
                )
            )
        order = sorted(range(len(names)), key=lambda at: -outcomes[at].interval.mean)
        groups += [Group(shots=told, models=[names[at] for at in run]) for run in indistinct_groups(order, differ)]
    return ComparisonResult(
        models=[model_card(path, model) for path, model in zip(paths, models, strict=True)],
        data=_data(pack),
        protocol=found[0].protocol,
        results=rows,
        pairs=pairs,
        indistinct=groups,
        notes=list(dict.fromkeys(note for one in found for note in one.notes)),
        versions=versions(),
    )


def _difference_by_classes(a: Evaluation, first: Outcome, b: Evaluation, second: Outcome) -> tuple[float, float]:
    (right, counts), (other, _) = a.per_class(first), b.per_class(second)
    return by_classes(right - other, counts)


def model_card(path: Path | str, model: Model) -> ModelCard:
    """The card; what a checkpoint says about its training is a file anyone may have edited."""
    try:
        return _model_card(path, model)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{path}: what its config.json says about the training is damaged: {error}") from None


def _model_card(path: Path | str, model: Model) -> ModelCard:
    known = model.provenance
    data = known.get("data", {})
    return ModelCard(
        path=printable(str(path)),
        method=model.config.method,
        backbone=model.config.backbone,
        image_size=model.config.image_size,
        grid=model.grid,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights=model.fingerprint(),
        options={"backbone": model.config.backbone_options, "method": model.config.method_options},
        trained_on=DataRecord(**{key: data[key] for key in DataRecord.model_fields}) if "split" in data else None,
        base_classes=len(known["base_classes"]) if "base_classes" in known else None,
        episodes_seen=known.get("episodes_seen"),
        val_accuracy=known.get("val_accuracy"),
        training=known.get("training", {}),
    )


def versions() -> Versions:
    return Versions(
        parseshot=__version__,
        torch=torch.__version__,
        numpy=np.__version__,
        python=platform.python_version(),
        threads=torch.get_num_threads(),
    )


def _data(pack: Pack) -> DataRecord:
    return DataRecord.model_validate(pack.record())


def _json_shots(shots: int | tuple[int, ...]) -> int | list[int]:
    return shots if isinstance(shots, int) else list(shots)


def _result(pack: Pack, found: Evaluation, outcome: Outcome) -> Result:
    names = [printable(pack.classes[number]) for number in found.classes]
    right, counts = found.per_class(outcome)
    taken = found.confusion(outcome)
    whole = (
        Confusion(classes=names, taken=taken.tolist(), of=outcome.chances.tolist()) if len(names) <= MATRIX else None
    )
    return Result(
        shots=_json_shots(outcome.shots),
        accuracy=outcome.interval.mean,
        interval_95=outcome.interval.half_width,
        interval_95_by_classes=found.interval_by_classes(outcome),
        copies_left_out=outcome.copies,
        near_copies=outcome.near_copies,
        per_class=[
            ClassRecord(name=name, accuracy=float(good / count) if count else None, queries=int(count))
            for name, good, count in zip(names, right, counts, strict=True)
        ],
        most_confused=_most_confused(names, taken, outcome.chances),
        confusion=whole,
        calibration=Calibration(
            raw=_calibration(outcome.raw),
            temperature=outcome.temperature,
            tempered=_calibration(outcome.tempered) if outcome.tempered else None,
        ),
        open_set=_open_set(found, outcome),
    )


def _most_confused(names: Sequence[str], taken: np.ndarray, chances: np.ndarray) -> list[ConfusedPair]:
    """Pairs whose rate is surely high: ordered by the lower end of Wilson's interval, not led by one odd episode."""
    of = np.maximum(chances, 1)
    rates, square = taken / of, Z95**2 / of
    surely = (rates + square / 2 - np.sqrt(square * (rates * (1 - rates) + square / 4))) / (1 + square)
    np.fill_diagonal(surely, 0.0)
    order = np.argsort(-surely, axis=None, kind="stable")[:CONFUSED]
    pairs = [(int(at // len(names)), int(at % len(names))) for at in order]
    return [
        ConfusedPair(
            truth=names[a], taken_for=names[b], times=int(taken[a, b]), of=int(chances[a, b]), rate=float(rates[a, b])
        )
        for a, b in pairs
        if taken[a, b]
    ]


def _calibration(found: Reliability) -> CalibrationRecord:
    bins = []
    for at in range(BINS):
        count = found.counts[at]
        bins.append(
            Bin(
                low=at / BINS,
                high=(at + 1) / BINS,
                queries=int(count),
                confidence=float(found.confidence[at] / count) if count else None,
                accuracy=float(found.right[at] / count) if count else None,
            )
        )
    return CalibrationRecord(ece=found.ece, nll=found.nll, bins=bins)


def _open_set(found: Evaluation, outcome: Outcome) -> OpenSetRecord | None:
    if not outcome.open_set:
        return None
    return OpenSetRecord(
        unseen_classes=found.unseen,
        by_logit=_open_score(outcome.open_set["logit"]),
        by_probability=_open_score(outcome.open_set["probability"]),
    )


def _open_score(one: OpenSet) -> OpenSetScore:
    area, false = Interval.of(one.auroc), Interval.of(one.false_positives)
    return OpenSetScore(
        auroc=area.mean,
        auroc_interval_95=area.half_width,
        fpr_at_95_tpr=false.mean,
        fpr_interval_95=false.half_width,
    )


DOCUMENTS: dict[str, type[Config]] = {"evaluation": EvaluationResult, "comparison": ComparisonResult}


def json_schema(name: str) -> dict[str, Any]:
    """The JSON schema of a document; the one in schemas/ is this, written down."""
    found = DOCUMENTS[name].model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"parseshot/{name}.json", **found}
