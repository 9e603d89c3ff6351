"""Training in episodes: draw, encode, compare, step."""

import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from parseshot import __version__
from parseshot.config import Config
from parseshot.data.augment import Augmentation, augment
from parseshot.data.episodes import Episode, draw_episode
from parseshot.data.packed import Pack
from parseshot.engine.evaluation import validation_accuracy
from parseshot.engine.model import Model, ModelConfig
from parseshot.errors import DataError, ModelError

Report = Callable[[dict[str, float]], None]


class TrainingConfig(Config):
    """How a model is trained. Defaults are the paper's episode and optimiser."""

    episodes: int = Field(10_000, ge=1)
    way: int = Field(10, ge=2)
    shots: int = Field(5, ge=1)
    queries: int = Field(10, ge=1)  # of each class
    lr: float = Field(5e-4, gt=0)  # Adam
    weight_decay: float = Field(0.0, ge=0)
    decay_every: int = Field(3_000, ge=1)  # episodes between the steps of the learning rate …
    decay_factor: float = Field(0.1, gt=0, le=1)  # … and what it is multiplied by
    augmentation: Augmentation = Augmentation()
    validate_every: int = Field(1_000, ge=1)
    validation_episodes: int = Field(200, ge=2)
    seed: int = Field(0, ge=0)


def start_run(
    model: ModelConfig, pack: Pack, config: TrainingConfig, out: Path | str, report: Report | None = None
) -> dict[str, Any]:
    """Build a model from the recipe's seed and train it into a directory that holds no other run."""
    if Path(out).exists() and any(Path(out).iterdir()):
        raise DataError(f"{out} exists and is not empty; choose another --out")
    torch.manual_seed(config.seed)
    return train(Model(model), pack, config, out, report)


def train(
    model: Model, pack: Pack, config: TrainingConfig, out: Path | str, report: Report | None = None
) -> dict[str, Any]:
    """Train on the base classes; keep the weights best on the val classes in `out`/best, the last in `out`/last.

    Returns what is also written into the checkpoint as its provenance. Each step's figures go to `out`/metrics.jsonl.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    if pack.size != model.config.image_size:
        raise DataError(f"{pack.path} holds images of {pack.size} px, the model wants {model.config.image_size} px")
    members = pack.by_class("base")
    torch.manual_seed(config.seed)
    initialise(model, pack, draw(members, config, 0, pack.classes))
    optimiser = torch.optim.Adam(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, config.decay_every, config.decay_factor)
    best, started = -math.inf, time.perf_counter()
    with (out / "metrics.jsonl").open("w", encoding="utf-8") as metrics:
        for step in range(config.episodes):
            figures = train_step(model, optimiser, pack, draw(members, config, step, pack.classes), config, step)
            schedule.step()
            seconds = time.perf_counter() - started
            figures |= {"step": step + 1, "seconds": round(seconds, 3)}
            last = step + 1 == config.episodes
            if last or (step + 1) % config.validate_every == 0:
                figures["val"] = validation_accuracy(model, pack, config.validation_episodes).mean
                model.provenance = provenance(pack, config, step + 1, figures["val"], seconds)
                if figures["val"] > best:
                    best = figures["val"]
                    model.save_pretrained(out / "best")
                if last:
                    model.save_pretrained(out / "last")
            metrics.write(json.dumps(figures) + "\n")
            metrics.flush()
            if report:
                report(figures)
    return model.provenance


def draw(
    members: dict[int, np.ndarray], config: TrainingConfig, step: int, names: Sequence[str] | None = None
) -> Episode:
    """The episode of a training step."""
    return draw_episode(
        members, way=config.way, shots=config.shots, queries=config.queries, seed=config.seed, index=step, names=names
    )


@torch.no_grad()
def initialise(model: Model, pack: Pack, episode: Episode) -> None:
    """Let the method set what depends on the scale of the features, from one episode's support images."""
    model.train()
    state = {name: value.clone() for name, value in model.backbone.state_dict().items()}
    features = model.backbone(pack.load(episode.support))
    model.backbone.load_state_dict(state)  # the look must not move the running statistics
    model.method.initialise(features)


def train_step(
    model: Model,
    optimiser: torch.optim.Optimizer,
    pack: Pack,
    episode: Episode,
    config: TrainingConfig,
    step: int,
) -> dict[str, float]:
    """One episode: support and query images in one forward pass, Algorithm 2, one step of the optimiser."""
    model.train()
    numbers = np.concatenate((episode.support, episode.query))
    pixels = pack.pixels(numbers, margin=config.augmentation.margin)
    images = augment(pixels, config.augmentation, size=pack.size, seed=config.seed, step=step)
    encoding = model(images)
    support, query = encoding.take(slice(len(episode.support))), encoding.take(slice(len(episode.support), None))
    labels, targets = torch.from_numpy(episode.support_labels), torch.from_numpy(episode.query_labels)
    terms = model.method.loss(query, support, labels, targets)
    total = torch.stack(list(terms.values())).sum()
    _refuse_nan(terms, step, numbers)
    optimiser.zero_grad(set_to_none=True)
    total.backward()
    optimiser.step()
    figures = {name: float(term.detach()) for name, term in terms.items()}
    return figures | model.method.monitor(query, support, labels, targets)


def provenance(pack: Pack, config: TrainingConfig, step: int, val: float, seconds: float) -> dict[str, Any]:
    """How the weights came about: data, classes, settings, versions."""
    return {
        "data": pack.record() | pack.provenance,
        "base_classes": [name for name, split in zip(pack.classes, pack.splits, strict=True) if split == "base"],
        "training": config.model_dump(mode="json"),
        "episodes_seen": step,
        "val_accuracy": round(val, 6),
        "seconds": round(seconds, 1),
        "threads": torch.get_num_threads(),
        "versions": {"parseshot": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def _refuse_nan(terms: dict[str, Tensor], step: int, numbers: np.ndarray) -> None:
    bad = [name for name, term in terms.items() if not torch.isfinite(term)]
    if bad:
        raise ModelError(
            f"step {step + 1}: the loss term {' and '.join(bad)} is not finite (images {numbers[:8].tolist()} …); "
            "nothing was saved from this step; lower the learning rate or check these images"
        )
