"""Recipes: one TOML file is one trained model; shipped ones by name, others by path, any value overridden."""

import sys
from importlib import resources
from pathlib import Path
from typing import Any

from parseshot.config import Config, read_config
from parseshot.engine.model import ModelConfig
from parseshot.engine.training import TrainingConfig
from parseshot.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Recipe(Config):
    """What `parseshot train` needs beside the data."""

    title: str
    model: ModelConfig
    training: TrainingConfig


def shipped_recipes() -> dict[str, Path]:
    """The recipes of the package, by name."""
    folder = Path(str(resources.files("parseshot") / "recipes"))
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def load_recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """A shipped recipe or a TOML file, with `a.b=value` overrides applied (TOML values; bare words are text)."""
    shipped = shipped_recipes()
    file = shipped.get(name, Path(name))
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise UsageError(f"no recipe {name!r}: neither a file nor one of {', '.join(shipped)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not valid TOML: {error}") from None
    for override in overrides or []:
        _apply(values, override)
    return read_config(Recipe, values, source=f"recipe {name}")


def _apply(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise UsageError(f"--set {override!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for key in keys[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise UsageError(f"--set {override!r}: {key!r} is a value, not a section")
    values[keys[-1]] = value
