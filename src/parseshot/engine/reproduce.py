"""Tables whose rows share images, classes, features, episodes and budget. A row is done once; what is there is kept."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parseshot.data.episodes import draw_episodes
from parseshot.data.packed import Pack
from parseshot.data.staging import replace_file
from parseshot.engine.encoding import Encoded, encode_split
from parseshot.engine.evaluation import evaluate, score
from parseshot.engine.features import FeaturePack, Progress
from parseshot.engine.model import Model
from parseshot.engine.paired_table import markdown, summary
from parseshot.engine.protocol import Protocol
from parseshot.engine.rates import train_row
from parseshot.engine.recipe import Recipe, load_recipe, shipped_recipes
from parseshot.engine.rows import Done, finished, found_rate, read_row, row_key, write_row
from parseshot.engine.tables import Row, tables
from parseshot.engine.training import EpisodeStage, cached_for
from parseshot.errors import ParseshotError, Stopped, UsageError
from parseshot.parts.parsing import entropy

EPISODES = 10_000
BLOCK = 1_000  # episodes evaluated between two times that the row is saved
MEASURED = (2, 16)  # steps and episodes that an estimate is made of
Say = Callable[[str], None]


def reproduce(
    name: str,
    data: Path,
    out: Path,
    *,
    budget: str = "cpu",
    only: Sequence[str] = (),
    overrides: Sequence[str] = (),
    episodes: int = EPISODES,
    rates_of: Path | None = None,
    device: torch.device | None = None,
    look: bool = False,
    say: Say = lambda line: None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train and evaluate the rows of a table that are not in `out` yet, and write `out`/table.json and table.md.

    rates_of: a folder of this table, done on other data: its learning rates are taken over instead of looked for.
    look: do nothing, put together what there is, rows under way with the episodes they have.
    """
    if name not in tables():
        raise UsageError(f"no table {name!r}; there are {', '.join(tables())}")
    if budget != "cpu":
        raise UsageError(
            "--budget paper: the paper's recipes take 44 to 270 hours each on two cores; train them one by one "
            "(parseshot recipes), then parseshot compare"
        )
    table, pack, place = tables()[name], Pack(data), device or torch.device("cpu")
    unknown = set(only) - {row.name for row in table.rows}
    if unknown:
        raise UsageError(f"table {name} has no row {', '.join(sorted(unknown))}")
    rows = [row for row in table.rows if not only or row.name in only]
    if rates_of is not None:
        rows = [replace(row, rates=(found_rate(rates_of, row.name),)) for row in rows]
    recipes = {row.name: _recipe(row, pack.name, overrides) for row in rows}
    fewest = min(len(images) for images in pack.by_class("novel").values())
    protocol = Protocol(episodes=episodes, queries=max(1, min(15, fewest - 5)))
    asked = [protocol.model_copy(update={"split": split}) for split in table.splits]
    keys = {row.name: row_key(recipes[row.name], row.rates, pack, asked) for row in rows}
    left = [row for row in rows if not look and not finished(out, row.name, keys[row.name], episodes)]
    features = {row.name: _features(recipes[row.name], pack, data, place, progress) for row in left}
    failed: dict[str, str] = {}
    if left:
        hours = 0.0
        for number, row in enumerate(left):
            if progress:
                progress(number, len(left), f"{row.name}: measuring a few steps")
            hours += _estimate(row, recipes[row.name], features[row.name], asked, place, failed)
        say(f"{len(left)} of {len(rows)} rows to do, about {hours / 3600:.1f} hours")
    for row in left:
        if row.name in failed:
            continue
        started = time.perf_counter()
        try:
            done = _do(row, recipes[row.name], keys[row.name], features[row.name], asked, out, place, progress)
        except Stopped:
            raise
        except ParseshotError as error:
            failed[row.name] = str(error)
            say(f"{row.name}: {error}")
            continue
        shown = ", ".join(f"{100 * found.mean():.2f}" for found in done.accuracies.values())
        say(f"{row.name}: {shown} in {time.perf_counter() - started:.0f} s")
    found = [kept for row in rows if (kept := finished(out, row.name, keys[row.name], 2 if look else episodes))]
    found = [done.first(episodes) for done in found]
    if look and not found:
        raise UsageError(f"{out} holds no row of the table {name} with these settings yet")
    out.mkdir(parents=True, exist_ok=True)
    result = summary(table, pack, protocol, found, failed)
    replace_file(out / "table.json", (json.dumps(result, indent=1) + "\n").encode())
    replace_file(out / "table.md", markdown(result).encode())
    return result


def _recipe(row: Row, data: str, overrides: Sequence[str]) -> Recipe:
    name = f"{data}-{row.recipe}"
    if name not in shipped_recipes():
        raise UsageError(f"there is no recipe {name}: this table is for data prepared as cub or cars")
    return load_recipe(name, [*row.overrides, *overrides])


def _features(recipe: Recipe, pack: Pack, data: Path, device: torch.device, progress: Progress | None) -> Pack:
    if recipe.training.cached_views is None:
        return pack
    return cached_for(recipe.model, recipe.training, pack, data / "features", device, progress)


def _estimate(
    row: Row, recipe: Recipe, pack: Pack, asked: Sequence[Protocol], device: torch.device, failed: dict[str, str]
) -> float:
    """Seconds of training and evaluation, from a few steps and episodes of a model that is thrown away."""
    try:
        torch.manual_seed(0)
        model = Model(recipe.model).to(device)
        stage = EpisodeStage(model, pack, recipe.training)
        stage.begin()
        optimiser = torch.optim.Adam(stage.module.parameters(), lr=recipe.training.lr)
        steps, drawn = MEASURED
        started = time.perf_counter()
        for step in range(steps):
            stage.step(optimiser, step)
        training = (time.perf_counter() - started) / steps * recipe.training.episodes
        training *= max(1, len(row.rates))
        return training + len(asked) * _scoring(model, pack, asked[0], drawn)
    except ParseshotError as error:
        failed[row.name] = str(error)
        return 0.0


def _scoring(model: Model, pack: Pack, protocol: Protocol, drawn: int) -> float:
    members = {number: images[:25] for number, images in list(pack.by_class(protocol.split).items())[: protocol.way]}
    numbers = np.concatenate(list(members.values()))
    codes = (
        model.encode_features(pack.maps(numbers)) if isinstance(pack, FeaturePack) else model.encode(pack.load(numbers))
    )
    rows = {number: np.flatnonzero(np.isin(numbers, images)) for number, images in members.items()}
    held = Encoded(codes, rows, numbers, 0, False)
    total = 0.0
    for shots in protocol.shots:
        few = draw_episodes(
            held.rows,
            range(drawn),
            way=protocol.way,
            shots=protocol.of_each_class(shots),
            queries=protocol.queries,
            seed=0,
        )
        started = time.perf_counter()
        score(model.method, codes, few, model.device)
        total += (time.perf_counter() - started) / drawn * protocol.episodes
    return total


def _do(
    row: Row,
    recipe: Recipe,
    key: str,
    pack: Pack,
    asked: Sequence[Protocol],
    out: Path,
    device: torch.device,
    progress: Progress | None,
) -> Done:
    def report(figures: dict[str, Any]) -> None:
        if progress:
            progress(int(figures["step"]), recipe.training.episodes, f"{row.name}: training")

    def of_block(done: int, total: int, what: str) -> None:
        if progress:
            progress(done, total, f"{row.name}: {what} of a block")

    done = read_row(out, row.name, key)
    if done:  # with episodes of one model, go on with that one
        row = replace(row, rates=(done.told["lr"],))
    protocol = asked[0]
    model, by_rate = train_row(row, recipe, pack, protocol, out, device, report)
    encoded = {each.split: encode_split(model, pack, each.split) for each in asked}  # once for all blocks
    done = done or Done(
        row.name,
        {_column(each.split, shots): np.empty(0) for each in asked for shots in each.shots},
        {
            "lr": model.provenance["training"]["lr"],
            "val_accuracy": model.provenance["val_accuracy"],
            "val_accuracy_by_lr": by_rate,
            "training_cpu_seconds": model.provenance["cpu_seconds"],
            "evaluation_cpu_seconds": 0.0,
            "threads": torch.get_num_threads(),
            "entropy": _entropy(encoded[protocol.split]),
            "trained_weights": _trained_weights(model, recipe),
            "recipe": recipe.model_dump(mode="json"),
        },
    )
    while done.episodes < protocol.episodes:  # in blocks, each kept: what is slow goes on where it was stopped
        first, started = done.episodes, time.process_time()
        for each in asked:
            block = each.model_copy(update={"episodes": min(BLOCK, protocol.episodes - first)})
            held = encoded[each.split]
            for outcome in evaluate(model, pack, block, first=first, encoded=held, progress=of_block).outcomes:
                name = _column(each.split, outcome.shots)
                done.accuracies[name] = np.concatenate((done.accuracies[name], outcome.episodes))
        seconds = done.told["evaluation_cpu_seconds"] + time.process_time() - started
        done.told["evaluation_cpu_seconds"] = round(seconds, 1)
        write_row(out, done, key)
        if progress:
            progress(done.episodes, protocol.episodes, f"{row.name}: episodes")
    return done


def _trained_weights(model: Model, recipe: Recipe) -> int:
    """Those of the backbone count where it is trained, not where its features are cached."""
    parts = [model.projection, model.method, *([] if recipe.training.cached_views is not None else [model.backbone])]
    return sum(weight.numel() for part in parts for weight in part.parameters())


def _column(split: str, shots: object) -> str:
    return str(shots) if split == "novel" else f"{split} {shots}"


def _entropy(encoded: Encoded) -> float | None:
    """Mean normalised entropy of ν over the images of a split, where a method has parts."""
    return round(float(entropy(encoded.encoding["nu"]).mean()), 4) if "nu" in encoded.encoding else None
