"""Evaluate the kept models again and fail if a number of docs/results.json, or its print in docs/results.md, is off.

    python benchmarks/results_check.py [--source DIR] [--work build] [--only MODEL]

DIR holds the archives (default: $PARSESHOT_DATA); packs are prepared once in --work. A number is off when it differs by
more than 0.02 points from what comes out: other processors round otherwise, and a query near a tie may change sides.
"""

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from parseshot.data.packed import Pack
from parseshot.data.prepare import prepare, prepare_synthetic
from parseshot.engine.allocator import keep_freed_memory
from parseshot.engine.evaluation import evaluate
from parseshot.engine.model import Model
from parseshot.engine.protocol import named_protocol

DOCS = Path(__file__).resolve().parent.parent / "docs"
TOLERANCE = 0.02  # percentage points


def pack_of(name: str, how: list[str], source: Path, work: Path) -> Pack:
    """The pack that rows speak of, prepared from `how`: the data set's name and options as on the command line."""
    out = work / f"results-{name}"
    if (out / "pack.json").exists():
        return Pack(out)
    if how[0] == "synthetic":
        return prepare_synthetic(out, size=84, base=200, val=50, novel=50, per_species=30, seed=0, workers=2)
    options = dict(zip(how[1::2], how[2::2], strict=True))
    return prepare(how[0], source / options["--source"], out, size=int(options.get("--size", "84")), workers=2)


def check(row: dict[str, Any], found: tuple[float, float], text: str) -> list[str]:
    """What is wrong with a row."""
    name = f"{row['model']} on {row['data']}, {row['protocol']}, {row['shots']} shots"
    printed = f"{row['accuracy']:.2f} ± {row['interval_95']:.2f}"
    wrong = [] if printed in text else [f"{name}: docs/results.md does not print {printed}"]
    for what, expected, value in zip(
        ("accuracy", "interval_95"), (row["accuracy"], row["interval_95"]), found, strict=True
    ):
        if abs(expected - value) > TOLERANCE:
            wrong.append(f"{name}: {what} is {value:.2f}, docs/results.json says {expected:.2f}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path(os.environ.get("PARSESHOT_DATA", ".")))
    parser.add_argument("--work", type=Path, default=Path("build"))
    parser.add_argument("--only", help="of one model")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    keep_freed_memory()
    told, text = json.loads((DOCS / "results.json").read_text("utf-8")), (DOCS / "results.md").read_text("utf-8")
    wrong: list[str] = []
    key = ("model", "data", "protocol", "split", "seed")
    for (model, data, protocol, split, seed), rows in itertools.groupby(
        told["rows"], key=lambda row: tuple(row[name] for name in key)
    ):
        if asked.only not in (None, model):
            continue
        kept = DOCS.parent / model
        loaded = Model.from_pretrained(kept if kept.is_dir() else model)
        pack = pack_of(data, told["data"][data], asked.source, asked.work)
        rows = list(rows)
        shots = ",".join(str(row["shots"]) for row in rows)
        ask = named_protocol(protocol, split=split, way=None, shots=shots, queries=None, episodes=None, seed=seed)
        outcomes = evaluate(loaded, pack, ask(pack)).outcomes
        for row, outcome in zip(rows, outcomes, strict=True):
            interval = outcome.interval
            found = 100 * interval.mean, 100 * interval.half_width
            problems = check(row, found, text)
            wrong += problems
            verdict = "off" if problems else "as printed"
            print(f"{model} {data}/{split} {protocol} {row['shots']}-shot: {found[0]:.2f} ± {found[1]:.2f}, {verdict}")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
