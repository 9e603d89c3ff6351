"""A whole training step against the bare backbone's forward and backward pass, and where the rest of the time goes.

    python benchmarks/training.py --data data/cub [--backbone conv4] [--methods dop,protonet] [--steps 8] [--threads 2]

Both sides see the same number of images in channels_last, in turn, in one process that keeps freed memory (as `train`
does). The bare side has its float images ready and takes the sum of its features as its loss. Medians, and the median
of the paired ratios; the projection is for the paper's schedule. Peak memory is that of the process so far.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from parseshot.data.packed import Pack
from parseshot.engine import training
from parseshot.engine.allocator import keep_freed_memory, peak_memory
from parseshot.engine.model import Model, ModelConfig
from parseshot.engine.training import EpisodeStage, TrainingConfig

PARTS = ("draw", "load and augment", "backbone forward", "encode", "loss", "backward", "optimiser", "checks", "figures")


class Clock:
    """Adds up the seconds spent in functions that it was wrapped around."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.spent[name] += time.perf_counter() - started

        return timed


def bare(backbone: torch.nn.Module, images: torch.Tensor) -> float:
    started = time.perf_counter()
    backbone.zero_grad(set_to_none=True)
    backbone(images).sum().backward()
    return time.perf_counter() - started


def watched(stage: EpisodeStage, clock: Clock) -> None:
    """Wrap the parts of a step; nothing else about it changes."""
    model = stage.model
    training.draw = clock.around("draw", training.draw)
    training.augmented = clock.around("load and augment", training.augmented)
    training._refuse_nan = clock.around("checks", training._refuse_nan)
    training._refuse_nan_gradients = clock.around("checks", training._refuse_nan_gradients)
    model.backbone.forward = clock.around("backbone forward", model.backbone.forward)
    model.method.encode = clock.around("encode", model.method.encode)
    model.method.loss = clock.around("loss", model.method.loss)
    model.method.monitor = clock.around("figures", model.method.monitor)
    torch.Tensor.backward = clock.around("backward", torch.Tensor.backward)


def measure(model: Model, pack: Pack, config: TrainingConfig, steps: int) -> dict[str, Any]:
    stage = EpisodeStage(model, pack, config)
    stage.begin()
    optimiser = torch.optim.Adam(model.parameters(), lr=config.lr)
    images = torch.rand(stage.images, 3, pack.size, pack.size).contiguous(memory_format=torch.channels_last)
    wholes, bares = [], []
    stage.step(optimiser, 0)
    bare(model.backbone, images)
    for step in range(1, steps + 1):
        started = time.perf_counter()
        stage.step(optimiser, step)
        wholes.append(time.perf_counter() - started)
        bares.append(bare(model.backbone, images))
    kept = {name: getattr(training, name) for name in ("draw", "augmented", "_refuse_nan", "_refuse_nan_gradients")}
    backward, clock = torch.Tensor.backward, Clock()
    watched(stage, clock)
    optimiser.step = clock.around("optimiser", optimiser.step)
    for step in range(steps + 1, 2 * steps + 1):
        stage.step(optimiser, step)
    torch.Tensor.backward = backward
    for name, function in kept.items():
        setattr(training, name, function)
    each = statistics.median(wholes)
    return {
        "images": stage.images,
        "grid": model.grid,
        "step_seconds": round(each, 3),
        "bare_seconds": round(statistics.median(bares), 3),
        "ratio": round(statistics.median(one / other for one, other in zip(wholes, bares, strict=True)), 3),
        "where": {name: round(clock.spent[name] / steps, 4) for name in PARTS},
        "peak_gb": peak_memory(),
        "paper_hours": {"cub": round(10_000 * each / 3600, 1), "others": round(30_000 * each / 3600, 1)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--backbone", default="conv4")
    parser.add_argument("--pools", type=int, default=3, help="of conv4")
    parser.add_argument("--methods", default="dop,protonet")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    keep_freed_memory()
    pack, config = Pack(asked.data), TrainingConfig()  # the paper's episode: 150 images
    options = {"pools": asked.pools} if asked.backbone == "conv4" else {}
    for method in asked.methods.split(","):
        torch.manual_seed(0)
        model = Model(
            ModelConfig(backbone=asked.backbone, backbone_options=options, method=method, image_size=pack.size)
        )
        print(json.dumps({"backbone": asked.backbone, "method": method, **measure(model, pack, config, asked.steps)}))


if __name__ == "__main__":
    main()
