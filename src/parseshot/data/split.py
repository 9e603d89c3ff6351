"""Which classes train, choose and test: the lists in use, a list of your own, or a seed.

Papers on the same data set use different lists, and their numbers do not compare. So a split has a name and a
fingerprint, and both go into the pack, the checkpoint and every result.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from parseshot.data.names import class_name
from parseshot.errors import DataError

SPLITS = ("base", "val", "novel")
ALIASES = {"train": "base", "valid": "val", "validation": "val", "test": "novel"} | {name: name for name in SPLITS}
SHARES = (0.5, 0.25, 0.25)  # of the classes, by seed


@dataclass(frozen=True)
class Split:
    """The role of every class."""

    name: str
    classes: dict[str, str]  # class → base, val or novel

    @property
    def fingerprint(self) -> str:
        """Of the roles alone: two files that say the same have the same."""
        return hashlib.sha256(json.dumps(self.classes, sort_keys=True).encode()).hexdigest()[:16]

    def roles(self, classes: Sequence[str]) -> list[str]:
        """The role of each of these classes, in order; a class the list does not know is an error that names it."""
        unknown = [name for name in classes if name not in self.classes]
        if unknown:
            shown = ", ".join(unknown[:5]) + (" …" if len(unknown) > 5 else "")
            raise DataError(f"split {self.name!r} does not say what to do with {len(unknown)} classes: {shown}")
        return [self.classes[name] for name in classes]

    def record(self) -> dict[str, str]:
        return {"name": self.name, "fingerprint": self.fingerprint}


def shipped_splits() -> list[str]:
    """Names of the lists in the package."""
    folder = resources.files("parseshot") / "data" / "splits"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_split(name_or_file: str) -> Split:
    """A shipped list by name, or a JSON file."""
    if name_or_file in shipped_splits():
        text = (resources.files("parseshot") / "data" / "splits" / f"{name_or_file}.json").read_text(encoding="utf-8")
        return Split(name_or_file, _roles(json.loads(text), name_or_file))
    path = Path(name_or_file)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not a JSON file: {error}") from None
    except (OSError, ValueError):  # a name no file can have
        shown = name_or_file if len(name_or_file) < 100 else name_or_file[:100] + "…"
        raise DataError(f"split {shown!r} is neither a file nor one of {', '.join(shipped_splits())}") from None
    return Split(path.stem, _roles(content, str(path)))


def split_by_seed(classes: Sequence[str], seed: int) -> Split:
    """Half of the classes to train, a quarter each to choose and to test; fewer than four classes are all novel.

    The order of `classes` does not matter.
    """
    names = sorted(classes)
    if len(names) < 4:
        return Split(f"seed-{seed}", dict.fromkeys(names, "novel"))
    shuffled = np.random.default_rng(seed).permutation(len(names))
    val, novel = (max(1, round(share * len(names))) for share in SHARES[1:])
    roles = ["novel"] * novel + ["val"] * val + ["base"] * (len(names) - novel - val)
    return Split(f"seed-{seed}", {names[i]: role for i, role in zip(shuffled, roles, strict=True)})


def split_by_column(roles: Mapping[str, str]) -> Split:
    """Roles read from a CSV column."""
    return Split("csv", dict(roles))


def _roles(content: Any, where: str) -> dict[str, str]:
    """{"classes": {class: role}}, {class: role} or {role: [class, …]}; train, valid and test are understood."""
    if isinstance(content, dict) and isinstance(content.get("classes"), dict):
        content = content["classes"]
    if not isinstance(content, dict) or not content:
        raise DataError(f'{where}: a split is {{"base": [classes], "val": […], "novel": […]}} or {{class: role}}')
    pairs = []
    for key, value in content.items():
        if isinstance(value, list):
            pairs += [(name, key) for name in value]
        else:
            pairs.append((key, value))
    roles: dict[str, str] = {}
    for raw, role in pairs:
        if not isinstance(raw, str) or not isinstance(role, str) or role not in ALIASES:
            raise DataError(f"{where}: {raw!r} → {role!r}: a role is one of {', '.join(ALIASES)}")
        name = class_name(raw, where)
        if roles.setdefault(name, ALIASES[role]) != ALIASES[role]:
            raise DataError(f"{where}: class {name!r} is both {roles[name]} and {ALIASES[role]}")
    return roles
