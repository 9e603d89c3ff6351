"""A training run in a directory: it can be stopped, killed and gone on with, and ends in the same bits."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from parseshot.data.packed import Pack
from parseshot.engine.averaging import averaged, follow
from parseshot.engine.device import is_out_of_memory
from parseshot.engine.distributed import ALONE, Team, synchronise
from parseshot.engine.evaluation import validation_accuracy
from parseshot.engine.features import FeaturePack
from parseshot.engine.model import Model, ModelConfig
from parseshot.engine.state import (
    LOCK,
    METRICS,
    STATE,
    Reached,
    Saved,
    is_left_over,
    keep_metrics,
    only_run,
    read_state,
    save_state,
)
from parseshot.engine.training import EpisodeStage, PretrainingStage, Stage, TrainingConfig, provenance
from parseshot.errors import DataError, ModelError, Stopped, UsageError

Report = Callable[[dict[str, Any]], None]
SAVE_SECONDS = 60.0  # between two saves of the state
REPORT, BOARD = "report.html", "tensorboard"  # what others may write into a run's directory


def start_run(
    model: ModelConfig,
    pack: Pack,
    config: TrainingConfig,
    out: Path | str,
    report: Report | None = None,
    *,
    resume: bool = False,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Build a model from the recipe's seed and train it into a directory that holds no other run, or goes on there."""
    out = Path(out)
    with Team.joined() as team:
        strangers = [one for one in out.iterdir() if not is_ours(one.name)] if out.is_dir() else []
        if team.first and out.exists() and (strangers if resume else any(out.iterdir())):
            hint = "--resume goes on with the run there" if (out / STATE).exists() else "choose another --out"
            raise DataError(f"{out} exists and is not empty; {hint}")
        team.any(False)  # the others wait here, so that none writes before the first has looked
        torch.manual_seed(config.seed)
        return train(Model(model).to(device), pack, config, out, report, resume=resume, team=team)


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
    views = pack.views if isinstance(pack, FeaturePack) else None
    if views != config.cached_views:
        raise UsageError(f"training.cached_views is {config.cached_views}, the pack has {views}: see `cached_for`")
    recipe = {
        "model": model.config.model_dump(mode="json"),
        "training": config.model_dump(mode="json"),
        "data": pack.fingerprint,
    }
    with only_run(out) if team.first else contextlib.nullcontext(), Stop() as stop:
        synchronise(model, team)
        saved = read_state(out, recipe) if resume else None
        reached = saved.reached if saved else Reached(stage="")
        if team.first:
            keep_metrics(out, reached)
        if reached.stage == EpisodeStage.name and reached.step >= config.episodes and (out / "last").is_dir():
            return dict(Model.from_pretrained(out / "last").provenance)
        with (out / METRICS if team.first else Path(os.devnull)).open("a", encoding="utf-8") as metrics:
            run = _Run(model, pack, config, out, team, recipe, stop, metrics, report, reached)
            if config.pretraining and reached.stage != EpisodeStage.name:
                run.through(PretrainingStage(model, pack, config, team), saved)
            run.through(EpisodeStage(model, pack, config, team), saved)
        return model.provenance


@dataclass
class _Run:
    """A run under way."""

    model: Model
    pack: Pack
    config: TrainingConfig
    out: Path
    team: Team
    recipe: dict[str, Any]
    stop: "Stop"
    metrics: TextIO
    report: Report | None
    reached: Reached

    def __post_init__(self) -> None:
        self.begun = time.perf_counter() - self.reached.seconds
        self.begun_cpu = time.process_time() - self.reached.cpu_seconds

    def through(self, stage: Stage, saved: Saved | None) -> None:
        """All steps of a stage that are left."""
        schedule = stage.schedule
        optimiser = torch.optim.Adam(stage.module.parameters(), lr=schedule.lr, weight_decay=schedule.weight_decay)
        if saved and stage.name == saved.reached.stage:
            saved.restore(stage.module, optimiser)
        else:
            self.reached = Reached(stage=stage.name)
            stage.begin()
        reached, written = self.reached, time.perf_counter()
        while reached.step < stage.steps:
            figures = _one_step(stage, optimiser, reached.step)
            if self.config.average and stage.name == EpisodeStage.name:
                follow(optimiser, self.config.average, reached.step)
            asked = self.team.any(self.stop.asked)
            reached.step, reached.seconds = reached.step + 1, time.perf_counter() - self.begun
            reached.cpu_seconds = time.process_time() - self.begun_cpu
            figures |= {"step": reached.step, "seconds": round(reached.seconds, 3)}
            last = reached.step == stage.steps
            if stage.name == EpisodeStage.name and (last or reached.step % self.config.validate_every == 0):
                with averaged(optimiser):
                    figures["val"] = self.validate(last=last)
            if self.team.first:
                self.metrics.write(json.dumps(figures) + "\n")
                self.metrics.flush()
                if last or "val" in figures or asked or time.perf_counter() - written > SAVE_SECONDS:
                    save_state(self.out, stage.module, optimiser, reached, self.recipe)
                    written = time.perf_counter()
                if self.report:
                    self.report(figures)
            if asked and not (last and stage.name == EpisodeStage.name):
                where = "" if stage.name == EpisodeStage.name else f" of {stage.name}"
                raise Stopped(f"stopped after step {reached.step} of {stage.steps}{where}; go on with --resume")

    def validate(self, *, last: bool) -> float:
        """Accuracy on the val classes; keeps the weights if they are the best so far, or the last."""
        model, reached, first = self.model, self.reached, self.team.first
        mine = validation_accuracy(model, self.pack, self.config.validation_episodes).mean if first else 0.0
        val = self.team.from_first(mine)
        model.provenance = provenance(self.pack, self.config, reached.step, val, reached.seconds, reached.cpu_seconds)
        if reached.best is None or val > reached.best:
            reached.best = val
            if first:
                model.save_pretrained(self.out / "best")
        if last and first:
            model.save_pretrained(self.out / "last")
        return val


def _one_step(stage: Stage, optimiser: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    for group in optimiser.param_groups:
        group["lr"] = stage.schedule.rate(step)
    try:
        figures = stage.step(optimiser, step)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"step {step + 1}: out of memory with {stage.images} images a step; what was saved before is whole. Use "
            "fewer (training.way, queries or shots), or share them out over several machines with torchrun"
        ) from None
    return figures if stage.name == EpisodeStage.name else {"stage": stage.name} | figures


def is_ours(name: str) -> bool:
    """Whether a run's directory may hold this."""
    return name in (STATE, METRICS, LOCK, REPORT, BOARD, "best", "last") or is_left_over(name)


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
