"""Tables whose rows share images, classes, features, episodes and budget. A row is done once; what is there is kept."""

import hashlib
import io
import json
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from parseshot.engine.protocol import Protocol
from parseshot.engine.recipe import Recipe, load_recipe, shipped_recipes
from parseshot.engine.run import Report, start_run
from parseshot.engine.statistics import Interval
from parseshot.engine.tables import LADDER, Row, Table, tables
from parseshot.engine.training import EpisodeStage, cached_for
from parseshot.errors import ModelError, ParseshotError, Stopped, UsageError
from parseshot.parts.parsing import entropy

SCHEMA_VERSION = 1
EPISODES = 10_000
CHOOSING = 500  # episodes of the val classes at each number of shots, to choose a learning rate
BLOCK = 1_000  # episodes evaluated between two times that the row is saved
MEASURED = (2, 16)  # steps and episodes that an estimate is made of
Say = Callable[[str], None]


@dataclass
class Done:
    """A row, finished or under way."""

    name: str
    accuracies: dict[str, np.ndarray]  # shots → [E]; those of another split than novel are "val 1", "val 5"
    told: dict[str, Any]

    @property
    def episodes(self) -> int:
        return min(len(found) for found in self.accuracies.values())

    def first(self, episodes: int) -> "Done":
        """The row over no more than these episodes."""
        return Done(self.name, {shots: found[:episodes] for shots, found in self.accuracies.items()}, self.told)


def reproduce(
    name: str,
    data: Path,
    out: Path,
    *,
    budget: str = "cpu",
    only: Sequence[str] = (),
    overrides: Sequence[str] = (),
    episodes: int = EPISODES,
    device: torch.device | None = None,
    look: bool = False,
    say: Say = lambda line: None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train and evaluate the rows of a table that are not in `out` yet, and write `out`/table.json and table.md.

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
    recipes = {row.name: _recipe(row, pack.name, overrides) for row in rows}
    fewest = min(len(images) for images in pack.by_class("novel").values())
    protocol = Protocol(episodes=episodes, queries=max(1, min(15, fewest - 5)))
    asked = [protocol.model_copy(update={"split": split}) for split in table.splits]
    keys = {row.name: _key(recipes[row.name], row.rates, pack, asked) for row in rows}
    left = [row for row in rows if not look and not _finished(out, row.name, keys[row.name], episodes)]
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
    found = [kept for row in rows if (kept := _finished(out, row.name, keys[row.name], 2 if look else episodes))]
    found = [done.first(episodes) for done in found]
    if look and not found:
        raise UsageError(f"{out} holds no row of the table {name} with these settings yet")
    out.mkdir(parents=True, exist_ok=True)
    result = summary(table, pack, protocol, found, failed)
    replace_file(out / "table.json", (json.dumps(result, indent=1) + "\n").encode())
    replace_file(out / "table.md", markdown(result).encode())
    return result


def summary(
    table: Table, pack: Pack, protocol: Protocol, rows: Sequence[Done], failed: dict[str, str]
) -> dict[str, Any]:
    """Means, intervals and paired differences to the first row, over the episodes that both have."""
    lines = []
    for done in rows:
        shots = {}
        for number, each in done.accuracies.items():
            first = rows[0].accuracies[number]
            both = min(len(each), len(first))
            mean, apart = Interval.of(each), Interval.of(each[:both] - first[:both])
            shots[number] = {
                "accuracy": round(100 * mean.mean, 2),
                "interval_95": round(100 * mean.half_width, 2),
                "difference": None if done is rows[0] else round(100 * apart.mean, 2),
                "difference_interval_95": None if done is rows[0] else round(100 * apart.half_width, 2),
            }
        lines.append({"name": done.name, "episodes": done.episodes, "shots": shots, **done.told})
    return {
        "schema_version": SCHEMA_VERSION,
        "title": table.title,
        "data": pack.record(),
        "protocol": protocol.model_dump(mode="json"),
        "rows": lines,
        "failed": failed,
    }


def markdown(result: dict[str, Any]) -> str:
    """The table for reading."""
    shots = list(result["rows"][0]["shots"]) if result["rows"] else []
    head = ["row", *(f"{number}-shot" for number in shots), *(f"to the first, {number}-shot" for number in shots)]
    more = ["trained weights", "rate", "training, CPU", "evaluation, CPU"]
    entropies = any(row.get("entropy") is not None for row in result["rows"])
    head += (["entropy of ν"] if entropies else []) + more
    lines = [head, ["---"] * len(head)]
    for row in result["rows"]:
        values = [row["shots"][number] for number in shots]
        part = "" if row["episodes"] == result["protocol"]["episodes"] else f" ({row['episodes']:,} episodes)"
        lines.append(
            [
                row["name"] + part,
                *(f"{value['accuracy']:.2f} ± {value['interval_95']:.2f}" for value in values),
                *(
                    ""
                    if value["difference"] is None
                    else f"{value['difference']:+.2f} ± {value['difference_interval_95']:.2f}"
                    for value in values
                ),
                *([_number(row.get("entropy"))] if entropies else []),
                f"{row['trained_weights']:,}",
                f"{row['lr']:g}",
                *(_number(row[f"{what}_cpu_seconds"], " s", digits=0) for what in ("training", "evaluation")),
            ]
        )
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return text + "".join(f"\n\n{name} failed: {why}" for name, why in result["failed"].items()) + "\n"


def _number(value: float | None, unit: str = "", *, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"


def _recipe(row: Row, data: str, overrides: Sequence[str]) -> Recipe:
    name = f"{data}-{row.recipe}"
    if name not in shipped_recipes():
        raise UsageError(f"there is no recipe {name}: this table is for data prepared as cub or cars")
    return load_recipe(name, [*row.overrides, *overrides])


def _key(recipe: Recipe, rates: tuple[float, ...], pack: Pack, asked: Sequence[Protocol]) -> str:
    protocols = [protocol.model_dump_json(exclude={"episodes"}) for protocol in asked]
    return _digest(recipe, pack, str(list(rates)), *protocols)


def _digest(recipe: Recipe, pack: Pack, *more: str) -> str:
    text = "".join((recipe.model_dump_json(exclude_defaults=True), pack.fingerprint, *more))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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

    done = _read(out, row.name, key)
    if done:  # with episodes of one model, go on with that one
        row = replace(row, rates=(done.told["lr"],))
    protocol = asked[0]
    model, by_rate = _trained(row, recipe, pack, protocol, out, device, report)
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
            "trained_weights": sum(
                weight.numel() for part in (model.projection, model.method) for weight in part.parameters()
            ),
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
        _write(out, done, key)
        if progress:
            progress(done.episodes, protocol.episodes, f"{row.name}: episodes")
    return done


def _column(split: str, shots: object) -> str:
    return str(shots) if split == "novel" else f"{split} {shots}"


def _entropy(encoded: Encoded) -> float | None:
    """Mean normalised entropy of ν over the images of a split, where a method has parts."""
    return round(float(entropy(encoded.encoding["nu"]).mean()), 4) if "nu" in encoded.encoding else None


def _trained(
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
        run = out / f"{_slug(row.name)}-{_digest(recipe, pack)[:8]}-{rate:g}"  # other settings, another run
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


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "+-." else "-" for letter in name)


def _write(out: Path, done: Done, key: str) -> None:
    folder = out / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    file = io.BytesIO()
    np.savez_compressed(file, **done.accuracies)  # type: ignore[arg-type]
    replace_file(folder / f"{_slug(done.name)}.npz", file.getvalue())
    told = {"schema_version": SCHEMA_VERSION, "key": key, "name": done.name, "told": done.told}
    replace_file(folder / f"{_slug(done.name)}.json", (json.dumps(told, indent=1) + "\n").encode())


def _finished(out: Path, name: str, key: str, episodes: int) -> Done | None:
    """A row with at least that many episodes."""
    done = _read(out, name, key)
    return done if done and done.episodes >= episodes else None


def _read(out: Path, name: str, key: str) -> Done | None:
    """What there is of a row with just these settings."""
    file = out / "rows" / f"{_slug(name)}.json"
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        if told["key"] != key:
            return None
        with np.load(file.with_suffix(".npz")) as kept:
            return Done(name, {shots: kept[shots] for shots in kept.files}, told["told"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{file} is damaged ({error}); remove it, the row is done again") from None
