"""Training in episodes: draw, encode, compare, step."""

import contextlib
import json
import os
import platform
import signal
import threading
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
from parseshot.engine.distributed import Team, synchronise
from parseshot.engine.evaluation import validation_accuracy
from parseshot.engine.model import Model, ModelConfig
from parseshot.engine.state import (
    LOCK,
    METRICS,
    STATE,
    Reached,
    is_left_over,
    keep_metrics,
    load_state,
    only_run,
    save_state,
)
from parseshot.errors import DataError, ModelError, Stopped
from parseshot.methods import Encoding

Report = Callable[[dict[str, float]], None]
ALONE = Team()
SAVE_SECONDS = 60.0  # between two saves of the state
ADVICE = (
    "nothing was saved from this step; lower the learning rate or look at these images, then --resume or start again"
)


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

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.lr * self.decay_factor ** (step // self.decay_every)


def start_run(
    model: ModelConfig,
    pack: Pack,
    config: TrainingConfig,
    out: Path | str,
    report: Report | None = None,
    *,
    resume: bool = False,
) -> dict[str, Any]:
    """Build a model from the recipe's seed and train it into a directory that holds no other run, or goes on there."""
    out, team = Path(out), Team.from_environment()
    strangers = [one for one in out.iterdir() if not is_ours(one.name)] if out.is_dir() else []
    if team.first and out.exists() and (strangers if resume else any(out.iterdir())):
        hint = "--resume goes on with the run there" if (out / STATE).exists() else "choose another --out"
        raise DataError(f"{out} exists and is not empty; {hint}")
    team.any(False)  # the others wait here, so that none writes before the first has looked
    torch.manual_seed(config.seed)
    return train(Model(model), pack, config, out, report, resume=resume, team=team)


def train(
    model: Model,
    pack: Pack,
    config: TrainingConfig,
    out: Path | str,
    report: Report | None = None,
    *,
    resume: bool = False,
    team: Team = ALONE,
) -> dict[str, Any]:
    """Train on the base classes; keep the weights best on the val classes in `out`/best, the last in `out`/last.

    Returns what is also written into the checkpoint as its provenance. Each step's figures go to `out`/metrics.jsonl.
    The state is saved at every validation, about once a minute, and when SIGTERM or Ctrl-C asks to stop.
    """
    out = Path(out)
    if pack.size != model.config.image_size:
        raise DataError(f"{pack.path} holds images of {pack.size} px, the model wants {model.config.image_size} px")
    recipe = {
        "model": model.config.model_dump(mode="json"),
        "training": config.model_dump(mode="json"),
        "data": pack.fingerprint,
    }
    members = pack.by_class("base")
    with only_run(out) if team.first else contextlib.nullcontext(), Stop() as stop:
        synchronise(model, team)
        optimiser = torch.optim.Adam(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        reached = load_state(out, model, optimiser, recipe) if resume else None
        if reached is None:
            reached = Reached()
            torch.manual_seed(config.seed)
            initialise(model, pack, draw(members, config, 0, pack.classes))
        if team.first:
            keep_metrics(out, reached.step)
        if reached.step >= config.episodes and (out / "last").is_dir():
            return dict(Model.from_pretrained(out / "last").provenance)
        begun, saved = time.perf_counter() - reached.seconds, time.perf_counter()
        with (out / METRICS if team.first else Path(os.devnull)).open("a", encoding="utf-8") as metrics:
            while reached.step < config.episodes:
                step = reached.step
                for group in optimiser.param_groups:
                    group["lr"] = config.rate(step)
                episode = draw(members, config, step, pack.classes)
                figures = train_step(model, optimiser, pack, episode, config, step, team)
                asked = team.any(stop.asked)
                reached.step, reached.seconds = step + 1, time.perf_counter() - begun
                figures |= {"step": reached.step, "seconds": round(reached.seconds, 3)}
                last = reached.step == config.episodes
                if last or reached.step % config.validate_every == 0:
                    mine = validation_accuracy(model, pack, config.validation_episodes).mean if team.first else 0.0
                    figures["val"] = team.from_first(mine)
                    model.provenance = provenance(pack, config, reached.step, figures["val"], reached.seconds)
                    if reached.best is None or figures["val"] > reached.best:
                        reached.best = figures["val"]
                        if team.first:
                            model.save_pretrained(out / "best")
                    if last and team.first:
                        model.save_pretrained(out / "last")
                metrics.write(json.dumps(figures) + "\n")
                metrics.flush()
                due = "val" in figures or asked or time.perf_counter() - saved > SAVE_SECONDS
                if due and team.first:
                    save_state(out, model, optimiser, reached, recipe)
                    saved = time.perf_counter()
                if report and team.first:
                    report(figures)
                if asked and not last:
                    raise Stopped(f"stopped after step {reached.step} of {config.episodes}; go on with --resume")
        return model.provenance


def is_ours(name: str) -> bool:
    """Whether a run's directory may hold this."""
    return name in (STATE, METRICS, LOCK, "best", "last") or is_left_over(name)


class Stop:
    """Remembers that SIGTERM or Ctrl-C came, so that the step is finished and saved; the second one ends at once."""

    def __init__(self) -> None:
        self.asked = False
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self.before = {one: signal.signal(one, self._ask) for one in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for one, handler in self.before.items():
            signal.signal(one, handler)

    def _ask(self, number: int, _: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


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
    team: Team = ALONE,
) -> dict[str, float]:
    """One episode: support and query images in one forward pass, Algorithm 2, one step of the optimiser."""
    model.train()
    torch.manual_seed((config.seed * 1_000_003 + step + (team.rank << 40)) % (1 << 63))  # what DropBlock draws
    numbers = np.concatenate((episode.support, episode.query))
    pixels = pack.pixels(numbers, margin=config.augmentation.margin)
    images = augment(pixels, config.augmentation, size=pack.size, seed=config.seed, step=step)
    encoding = team.gather(model(images[team.share(len(images))]))
    support, query = encoding.take(slice(len(episode.support))), encoding.take(slice(len(episode.support), None))
    labels, targets = torch.from_numpy(episode.support_labels), torch.from_numpy(episode.query_labels)
    terms = model.method.loss(query, support, labels, targets)
    total = torch.stack(list(terms.values())).sum()
    _refuse_nan(terms, encoding, step, [pack.files[number] for number in numbers])
    optimiser.zero_grad(set_to_none=True)
    (total / team.size).backward()
    team.sum_gradients(model)
    _refuse_nan_gradients(model, step)
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


def _refuse_nan(terms: dict[str, Tensor], encoding: Encoding, step: int, names: Sequence[str]) -> None:
    bad = [name for name, term in terms.items() if not torch.isfinite(term)]
    if not bad:
        return
    finite = torch.stack([tensor.detach().flatten(1).isfinite().all(1) for tensor in encoding.values()]).all(0)
    hit = [name for name, fine in zip(names, finite.tolist(), strict=True) if not fine] or list(names)
    raise ModelError(
        f"step {step + 1}: the loss term {' and '.join(bad)} is not finite, with the images {', '.join(hit[:5])}"
        f"{' …' if len(hit) > 5 else ''}; {ADVICE}"
    )


def _refuse_nan_gradients(model: Model, step: int) -> None:
    bad = [
        name
        for name, weight in model.named_parameters()
        if weight.grad is not None and not bool(weight.grad.isfinite().all())
    ]
    if bad:
        raise ModelError(f"step {step + 1}: the gradient of {', '.join(bad[:3])} is not finite; {ADVICE}")
