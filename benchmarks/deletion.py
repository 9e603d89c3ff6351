"""Is the part that an explanation calls decisive really what decided? Mask it, and mask other places of the same size.

    python benchmarks/deletion.py --data data/cub-224 [--tasks 40] [--queries 5] [--side 64] [--model default]

Tasks of 5 novel classes with 5 photos each. For each query that is answered, the part that speaks most for the answer
against the runner-up is covered, at its surest scale, by a square of the picture's mean colour, and then squares at
other places, at least as far away as the square is wide, are covered instead. Measured is how far the part's row of the
ledger moves (what the part adds to the distance to the answer), and how far its lead over the runner-up falls.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from parseshot.data.episodes import draw_episode
from parseshot.data.packed import Pack
from parseshot.engine.allocator import keep_freed_memory
from parseshot.engine.model import Model, to_tensor
from parseshot.engine.statistics import Interval
from parseshot.methods.base import Encoding
from parseshot.recognition.ledger import EXPRESSION, Ledger, make_ledger

ELSEWHERE = 4  # other places of each query


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="default")
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--queries", type=int, default=5, help="of a task")
    parser.add_argument("--side", type=int, default=64, help="pixels of the square")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    keep_freed_memory()
    model, pack = Model.from_pretrained(asked.model), Pack(asked.data)
    members, random = pack.by_class("novel"), np.random.default_rng(0)
    rows = []
    for task in range(asked.tasks):
        episode = draw_episode(members, way=5, shots=5, queries=1 + asked.queries // 5, seed=0, index=task)
        support = model.encode(to_tensor(pack.pixels(episode.support)))
        labels = torch.from_numpy(episode.support_labels)
        for image in random.permutation(episode.query)[: asked.queries]:
            found = one_query(model, pack.pixels(np.array([image]))[0], support, labels, asked.side, random)
            rows += [found] if found else []
    print(json.dumps(summary(np.array(rows), asked), indent=1))


def one_query(
    model: Model, pixels: np.ndarray, support: Encoding, labels: torch.Tensor, side: int, random: np.random.Generator
) -> tuple[float, ...] | None:
    """How far the decisive part's row moves, and its lead falls: masked there, and elsewhere on average."""
    query = model.encode(to_tensor(pixels[None]))
    with torch.inference_mode():
        first, second = model.method.logits(query, support, labels)[0].topk(2).indices.tolist()
    near, far = (support.take((labels == one).nonzero()[:, 0]) for one in (first, second))
    before = [make_ledger(model, query, one) for one in (near, far)]
    parts = 1 + max(row.part for row in before[0].rows if row.part is not None)
    gains = [before[1].of_part(part) - before[0].of_part(part) for part in range(parts)]
    part = int(np.argmax(gains))
    if gains[part] <= 0:
        return None  # the geometry decided
    there = place_of(before[0], part)
    places = [there, *elsewhere(there, side, len(pixels), random)]
    masked = model.encode(to_tensor(np.stack([cover(pixels, place, side) for place in places])))
    moved, fallen = [], []
    for row in range(len(places)):
        after = [make_ledger(model, masked.take(slice(row, row + 1)), one) for one in (near, far)]
        moved.append(abs(after[0].of_part(part) - before[0].of_part(part)))
        fallen.append(gains[part] - (after[1].of_part(part) - after[0].of_part(part)))
    return moved[0], float(np.mean(moved[1:])), fallen[0], float(np.mean(fallen[1:]))


def place_of(ledger: Ledger, part: int) -> tuple[float, float]:
    """At its surest scale."""
    rows = [row for row in ledger.rows if row.part == part and row.kind == EXPRESSION]
    place = min(rows, key=lambda row: row.entropy or 0.0).place
    assert place is not None
    return place


def elsewhere(
    there: tuple[float, float], side: int, size: int, random: np.random.Generator
) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    while len(found) < ELSEWHERE:
        x, y = random.uniform(side / 2, size - side / 2, size=2).tolist()
        if max(abs(x - there[0]), abs(y - there[1])) >= side:
            found.append((x, y))
    return found


def cover(pixels: np.ndarray, place: tuple[float, float], side: int) -> np.ndarray:
    """The square is moved inwards where it would leave the picture, so that all squares are as large."""
    left, top = (int(np.clip(round(at - side / 2), 0, len(pixels) - side)) for at in place)
    covered = pixels.copy()
    covered[top : top + side, left : left + side] = pixels.mean((0, 1))
    return covered


def summary(rows: np.ndarray, asked: argparse.Namespace) -> dict[str, object]:
    moved, other, fallen, other_fallen = rows.T

    def told(values: np.ndarray) -> list[float]:
        interval = Interval.of(values)
        return [round(interval.mean, 5), round(interval.half_width, 5)]

    return {
        "model": asked.model,
        "queries": len(rows),
        "row_moves_masked_there": told(moved),
        "row_moves_masked_elsewhere": told(other),
        "difference": told(moved - other),
        "moves_more_there": round(float((moved > other).mean()), 3),
        "lead_falls_masked_there": told(fallen),
        "lead_falls_masked_elsewhere": told(other_fallen),
        "falls_more_there": round(float((fallen > other_fallen).mean()), 3),
    }


if __name__ == "__main__":
    main()
