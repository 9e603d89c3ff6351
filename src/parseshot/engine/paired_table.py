"""Rows side by side: means, intervals, paired differences to the first, as JSON and as a table for reading."""

from collections.abc import Sequence
from typing import Any

from parseshot.data.packed import Pack
from parseshot.engine.protocol import Protocol
from parseshot.engine.rows import SCHEMA_VERSION, Done
from parseshot.engine.statistics import Interval
from parseshot.engine.tables import Table


def summary(
    table: Table, pack: Pack, protocol: Protocol, rows: Sequence[Done], failed: dict[str, str]
) -> dict[str, Any]:
    """Means, intervals and paired differences to the first row, over the episodes that both have."""
    lines = []
    for done in rows:
        shots = {}
        for number, each in done.accuracies.items():
            first = rows[0].accuracies[number]
            both = min(len(each), len(first))
            mean, apart = Interval.of(each), Interval.of(each[:both] - first[:both])
            shots[number] = {
                "accuracy": round(100 * mean.mean, 2),
                "interval_95": round(100 * mean.half_width, 2),
                "difference": None if done is rows[0] else round(100 * apart.mean, 2),
                "difference_interval_95": None if done is rows[0] else round(100 * apart.half_width, 2),
            }
        lines.append({"name": done.name, "episodes": done.episodes, "shots": shots, **done.told})
    if table.ranked:
        lines[1:] = sorted(lines[1:], key=lambda line: -sum(each["accuracy"] for each in line["shots"].values()))
    return {
        "schema_version": SCHEMA_VERSION,
        "title": table.title,
        "data": pack.record(),
        "protocol": protocol.model_dump(mode="json"),
        "rows": lines,
        "failed": failed,
    }


def markdown(result: dict[str, Any]) -> str:
    """The table for reading."""
    shots = list(result["rows"][0]["shots"]) if result["rows"] else []
    head = ["row", *(f"{number}-shot" for number in shots), *(f"to the first, {number}-shot" for number in shots)]
    more = ["trained weights", "rate", "training, CPU", "evaluation, CPU"]
    entropies = any(row.get("entropy") is not None for row in result["rows"])
    head += (["entropy of ν"] if entropies else []) + more
    lines = [head, ["---"] * len(head)]
    for row in result["rows"]:
        values = [row["shots"][number] for number in shots]
        part = "" if row["episodes"] == result["protocol"]["episodes"] else f" ({row['episodes']:,} episodes)"
        lines.append(
            [
                row["name"] + part,
                *(f"{value['accuracy']:.2f} ± {value['interval_95']:.2f}" for value in values),
                *(
                    ""
                    if value["difference"] is None
                    else f"{value['difference']:+.2f} ± {value['difference_interval_95']:.2f}"
                    for value in values
                ),
                *([_number(row.get("entropy"))] if entropies else []),
                f"{row['trained_weights']:,}",
                f"{row['lr']:g}",
                *(_number(row[f"{what}_cpu_seconds"], " s", digits=0) for what in ("training", "evaluation")),
            ]
        )
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return text + "".join(f"\n\n{name} failed: {why}" for name, why in result["failed"].items()) + "\n"


def _number(value: float | None, unit: str = "", *, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"
