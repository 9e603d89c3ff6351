"""Rows of a table on disk: the accuracy of every episode, so that any two rows can be paired, and what they cost."""

import hashlib
import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parseshot.data.packed import Pack
from parseshot.data.staging import replace_file
from parseshot.engine.protocol import Protocol
from parseshot.engine.recipe import Recipe
from parseshot.errors import ModelError, UsageError

SCHEMA_VERSION = 1


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


def row_key(recipe: Recipe, rates: tuple[float, ...], pack: Pack, asked: Sequence[Protocol]) -> str:
    protocols = [protocol.model_dump_json(exclude={"episodes"}) for protocol in asked]
    return recipe_digest(recipe, pack, str(list(rates)), *protocols)


def recipe_digest(recipe: Recipe, pack: Pack, *more: str) -> str:
    text = "".join((recipe.model_dump_json(exclude_defaults=True), pack.fingerprint, *more))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def slug(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "+-." else "-" for letter in name)


def write_row(out: Path, done: Done, key: str) -> None:
    folder = out / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    file = io.BytesIO()
    np.savez_compressed(file, **done.accuracies)  # type: ignore[arg-type]
    replace_file(folder / f"{slug(done.name)}.npz", file.getvalue())
    told = {"schema_version": SCHEMA_VERSION, "key": key, "name": done.name, "told": done.told}
    replace_file(_file(out, done.name), (json.dumps(told, indent=1) + "\n").encode())


def finished(out: Path, name: str, key: str, episodes: int) -> Done | None:
    """A row with at least that many episodes."""
    done = read_row(out, name, key)
    return done if done and done.episodes >= episodes else None


def read_row(out: Path, name: str, key: str) -> Done | None:
    """What there is of a row with just these settings."""
    file = _file(out, name)
    try:
        told = _told(file)
        if told["key"] != key:
            return None
        with np.load(file.with_suffix(".npz")) as kept:
            return Done(name, {shots: kept[shots] for shots in kept.files}, told["told"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{file} is damaged ({error}); remove it, the row is done again") from None


def found_rate(out: Path, name: str) -> float:
    """The learning rate of a row that was done with whatever settings, on whatever data."""
    file = _file(out, name)
    try:
        return float(_told(file)["told"]["lr"])
    except FileNotFoundError:
        raise UsageError(f"{out} has no row {name!r} to take a learning rate from") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is damaged ({error}): no learning rate can be taken from it") from None


def _file(out: Path, name: str) -> Path:
    return out / "rows" / f"{slug(name)}.json"


def _told(file: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return told
