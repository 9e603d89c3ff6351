"""Freed memory kept in the process (parseshot.engine.allocator) against glibc's default, for a Conv-4 training step.

    python benchmarks/allocator.py --data data/cub [--threads 2] [--steps 8] [--repeats 3]

Each side is a process of its own, in turn, because the switch cannot be taken back; every one trains DOP on Conv-4 for
--steps steps of 100 images and encodes 480 images in batches of 8. Medians, and the median of the paired ratios.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from parseshot.data.packed import Pack
from parseshot.engine.allocator import keep_freed_memory, peak_memory
from parseshot.engine.model import Model, ModelConfig
from parseshot.engine.training import TrainingConfig, draw, train_step


def measure(data: Path, steps: int) -> dict[str, float]:
    torch.manual_seed(0)
    model, pack = Model(ModelConfig(backbone_options={"pools": 3})), Pack(data)
    config, members = TrainingConfig(queries=5), pack.by_class("base")
    optimiser = torch.optim.Adam(model.parameters(), lr=config.lr)
    times = []
    for step in range(steps + 2):
        started = time.perf_counter()
        train_step(model, optimiser, pack, draw(members, config, step), config, step)
        times.append(time.perf_counter() - started)
    images = torch.from_numpy(pack.pixels(np.arange(480))).permute(0, 3, 1, 2)
    model.encode(images[:64])
    started = time.perf_counter()
    model.encode(images)
    encoding = time.perf_counter() - started
    memory = peak_memory() or 0.0
    return {"step": statistics.median(times[2:]), "encoding": encoding, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=("kept", "default"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        torch.set_num_threads(arguments.threads)
        if arguments.side == "kept" and not keep_freed_memory():
            raise SystemExit("this C library cannot keep freed memory")
        print(json.dumps(measure(arguments.data, arguments.steps)))
        return
    runs: dict[str, list[dict[str, float]]] = {"default": [], "kept": []}
    for _ in range(arguments.repeats):
        for side, found in runs.items():
            told = subprocess.run(
                [sys.executable, *sys.argv, "--side", side], check=True, capture_output=True, text=True
            )
            found.append(json.loads(told.stdout))
    for what, unit in (("step", "s a training step"), ("encoding", "s for 480 images"), ("memory", "GB at most")):
        sides = {side: [one[what] for one in found] for side, found in runs.items()}
        ratio = statistics.median(a / b for a, b in zip(sides["default"], sides["kept"], strict=True))
        default, kept = (statistics.median(side) for side in sides.values())
        print(f"{unit:18} default {default:.2f}   kept {kept:.2f}   {ratio:.2f}×")


if __name__ == "__main__":
    main()
