"""Seconds an episode from encodings, for every method: 5-way, 1 and 5 shots, 15 queries a class, many episodes at once.

    python benchmarks/heads.py [--channels 64] [--grid 5] [--episodes 64] [--threads 2] [--methods dop,frn] [--json]

Random maps, as large as Conv-4's at 84 px unless told otherwise; the time does not depend on their values. Each method
encodes 300 images once, then scores --episodes episodes as an evaluation does; ProtoNet is timed before and after each
and its median is the yardstick. The smallest of three repeats counts.
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch

from parseshot.data.episodes import draw_episodes
from parseshot.engine.allocator import keep_freed_memory
from parseshot.engine.evaluation import score
from parseshot.methods import METHODS, Encoding, Method, build_method, takes_pairs

IMAGES, CLASSES, LIMIT = 300, 10, 30.0  # images, classes, milliseconds an episode


def built(name: str, channels: int, grid: int) -> tuple[Method, Encoding]:
    """A method with random weights and what it keeps of random images."""
    torch.manual_seed(0)
    fine = channels if takes_pairs(name) else 0
    method = build_method(name, channels, grid, fine=fine).eval()
    with torch.inference_mode():
        maps = torch.randn(IMAGES, channels + 4 * fine, grid, grid).relu()
        method.initialise(maps[:50])
        return method, Encoding.cat([method.encode(part) for part in maps.split(50)])


def milliseconds(method: Method, codes: Encoding, shots: int, episodes: int, repeats: int = 3) -> float:
    members = {number: np.arange(number, IMAGES, CLASSES) for number in range(CLASSES)}
    drawn = draw_episodes(members, range(episodes), way=5, shots=shots, queries=15, seed=0)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        score(method, codes, drawn)
        times.append(time.perf_counter() - started)
    return 1000 * min(times) / episodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--grid", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    keep_freed_memory()
    yardstick = built("protonet", asked.channels, asked.grid)
    milliseconds(*yardstick, 5, asked.episodes)
    rows, known = [], []
    for name in asked.methods.split(","):
        known.append(milliseconds(*yardstick, 5, asked.episodes))
        method, codes = built(name, asked.channels, asked.grid)
        score_one = [milliseconds(method, codes, shots, asked.episodes) for shots in (1, 5)]
        known.append(milliseconds(*yardstick, 5, asked.episodes))
        rows.append(
            {
                "method": name,
                "parameters": sum(weight.numel() for weight in method.parameters()),
                "ms_1_shot": round(score_one[0], 2),
                "ms_5_shot": round(score_one[1], 2),
                "numbers_an_image": sum(tensor[0].numel() for tensor in codes.values()),
            }
        )
        if not asked.json:
            slow = "  slow" if max(score_one) > LIMIT else ""
            print(f"{name:20} {score_one[0]:8.2f} {score_one[1]:8.2f} ms an episode{slow}", flush=True)
    if asked.json:
        print(json.dumps({"protonet_5_shot_ms": round(statistics.median(known), 3), "rows": rows}))
    else:
        print(f"ProtoNet between all of them: {statistics.median(known):.2f} ms (5 shots)")


if __name__ == "__main__":
    main()
