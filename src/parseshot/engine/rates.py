"""A row's model, trained at the learning rate that suits it, not at one that was found for another method."""

from pathlib import Path

import torch

from parseshot.data.packed import Pack
from parseshot.engine.evaluation import evaluate
from parseshot.engine.model import Model
from parseshot.engine.protocol import Protocol
from parseshot.engine.recipe import Recipe
from parseshot.engine.rows import recipe_digest, slug
from parseshot.engine.run import Report, start_run
from parseshot.engine.tables import LADDER, Row
from parseshot.errors import ModelError

CHOOSING = 500  # episodes of the val classes at each number of shots, to choose a learning rate


def train_row(
    row: Row, recipe: Recipe, pack: Pack, protocol: Protocol, out: Path, device: torch.device, report: Report
) -> tuple[Model, dict[str, float]]:
    """The row's model, and what chose its learning rate; a rate at which training breaks down is left out.

    Of several rates, the best is never the smallest or largest that was tried, unless there are none beyond.
    """
    found: dict[float, Model] = {}
    by_rate: dict[float, float] = {}
    broken: ModelError | None = None
    untried = list(row.rates or (recipe.training.lr,))
    while untried:
        rate = untried.pop(0)
        run = out / f"{slug(row.name)}-{recipe_digest(recipe, pack)[:8]}-{rate:g}"  # other settings, another run
        resume = (run / "metrics.jsonl").exists()
        training = recipe.training.model_copy(update={"lr": rate})
        try:
            told = start_run(recipe.model, pack, training, run, report, resume=resume, device=device)
            found[rate] = Model.from_pretrained(run / "best").to(device)
            found[rate].provenance["cpu_seconds"] = told["cpu_seconds"]  # of the whole training, not up to the best
            if len(row.rates) > 1:
                by_rate[rate] = _val_accuracy(found[rate], pack, protocol)
        except ModelError as error:
            broken, by_rate[rate] = error, 0.0
        if len(row.rates) > 1 and not untried:
            untried = beyond(by_rate)
    if not found:
        assert broken is not None
        raise broken
    best = _best(by_rate) if by_rate else next(iter(found))
    return found[best], {f"{rate:g}": by_rate[rate] for rate in found if rate in by_rate}


def beyond(by_rate: dict[float, float]) -> list[float]:
    """The next learning rate of the ladder where the best so far is the smallest or the largest of those tried."""
    best = _best(by_rate)
    lower = [rate for rate in LADDER if rate < best][:1] if best == min(by_rate) else []
    higher = [rate for rate in LADDER if rate > best][-1:] if best == max(by_rate) else []
    return lower + higher


def _best(by_rate: dict[float, float]) -> float:
    return max(by_rate, key=lambda rate: (by_rate[rate], -rate))  # of equals the smaller, which breaks down less


def _val_accuracy(model: Model, pack: Pack, protocol: Protocol) -> float:
    """Mean over the numbers of shots on the val classes, on the same episodes for every learning rate."""
    asked = protocol.model_copy(update={"split": "val", "episodes": min(CHOOSING, protocol.episodes)})
    means = [outcome.interval.mean for outcome in evaluate(model, pack, asked).outcomes]
    return round(sum(means) / len(means), 4)
