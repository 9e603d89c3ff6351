"""What one sees of a training run while it goes: a line of figures, the page with its curves, TensorBoard."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from parseshot.engine.recipe import Recipe
from parseshot.engine.run import BOARD, REPORT
from parseshot.engine.training import EpisodeStage
from parseshot.errors import ParseshotError, UsageError
from parseshot.training_report import write_training

Update = Callable[[int, int, str], None]  # (done, total, figures)
NOT_SHOWN = ("stage", "step", "seconds")


class Watch:
    """Called with each step's figures. The page is written at every validation and when the run ends, in any way."""

    def __init__(self, recipe: Recipe, out: Path, update: Update, *, tensorboard: bool = False) -> None:
        self.recipe, self.out, self.update = recipe, out, update
        self.started = False
        self.writer: Any = _summary_writer() if tensorboard else None
        self.boards: dict[str, Any] = {}  # one a stage: both count their steps from 1

    def __enter__(self) -> "Watch":
        return self

    def __call__(self, figures: dict[str, Any]) -> None:
        self.started = True
        step, stage = int(figures["step"]), str(figures.get("stage", ""))
        training = self.recipe.training
        total = training.pretraining.steps if stage and training.pretraining else training.episodes
        shown = {name: value for name, value in figures.items() if name not in NOT_SHOWN}
        self.update(step, total, " ".join([stage, *(f"{name} {value:.3f}" for name, value in shown.items())]).strip())
        if self.writer is not None:
            where = stage or EpisodeStage.name
            if where not in self.boards:
                self.boards[where] = self.writer(str(self.out / BOARD / where), purge_step=step)
            for name, value in shown.items():
                self.boards[where].add_scalar(name, value, step)
        if "val" in figures:
            self.write()

    def write(self) -> None:
        write_training(self.out, recipe=self.recipe.model_dump(mode="json"), path=self.out / REPORT)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for board in self.boards.values():
            board.close()
        if self.started:
            with contextlib.suppress(ParseshotError) if error else contextlib.nullcontext():
                self.write()  # where the disk is full, what stopped the run is what to say


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError(f"--tensorboard: {error}; pip install 'parseshot[tensorboard]'") from None
    return SummaryWriter
