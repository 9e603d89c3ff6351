"""The flow is one-way: a module imports only from its own room and from rooms to its left; and nothing is pickled."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "parseshot"

ROOMS: tuple[tuple[str, ...], ...] = (
    ("errors", "matcher"),  # importable by all; import nothing of ours
    ("config",),
    ("data",),
    ("backbones",),
    ("parts",),
    ("methods",),
    ("engine",),
    ("recognition",),
    (
        "figures",
        "figure_style",
        "report",
        "evaluation_report",
        "explanation_figure",
        "explanation_report",
        "training_report",
        "part_quality",
        "export",
        "watch",
    ),  # one room: these may import each other
    ("inside",),
    ("demo",),
    ("serve",),
    ("cli",),
)
RANK = {name: rank for rank, names in enumerate(ROOMS) for name in names}

PICKLING = (
    "pickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "torch.load",
    "torch.save",
    "torch.serialization",
    "torch.hub",
    "torch.jit.load",
    "torch.jit.save",
)
# bytes that are compared with a known checksum first, and read by the reader that admits tensors only
PINNED = {"backbones/efficientnet_lite.py": "torch.load(io.BytesIO(data), map_location='cpu', weights_only=True)"}


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, at any depth: lazy and type-only imports count too.

    `from a import b` gives "a.b"; a relative import keeps its leading dots; `import_module("a.b")` gives "a.b".
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, "." * node.level + (f"{node.module}." if node.module else "") + alias.name
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = dotted(node.func, {})
            if called and called.split(".")[-1] in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def dotted(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """The dotted name that an expression spells: torch.load for `t.load` after `import torch as t`."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (base := dotted(node.value, aliases)):
        return f"{base}.{node.attr}"
    return None


def steps_backwards(file: Path, package: Path) -> list[str]:
    """One sentence for each import of `file` that the flow does not allow."""
    room = file.relative_to(package).with_suffix("").parts[0]
    if room == "__init__":
        return []  # the public names come from anywhere
    if room not in RANK and room != "__main__":
        return [f"{file}: {room!r} has no place in the flow; give it one in ROOMS"]
    found = []
    for line, name in imports(ast.parse(file.read_text(encoding="utf-8"))):
        if name.startswith("."):
            found.append(f"{file}:{line}: relative import of {name!r}")
        elif name == package.name:
            found.append(f"{file}:{line}: imports the whole package; import from the room itself")
        elif name.startswith(f"{package.name}.") and name != f"{package.name}.__version__":
            target = name.split(".")[1]
            if target not in RANK:
                found.append(f"{file}:{line}: {target!r} is not a room; import it from where it is defined")
            elif not allowed(room, target):
                found.append(f"{file}:{line}: {room} imports {target}, which is not to its left")
    return found


def allowed(room: str, target: str) -> bool:
    if room == "__main__":
        return target == "cli"
    if RANK[room] == 0:
        return False
    return RANK[target] <= RANK[room]


def pickling(file: Path) -> list[str]:
    """One sentence for each import or use in `file` of something that reads or writes pickles."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = []
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom):
            aliases.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    uses = list(imports(tree))
    pinned = next((code for name, code in PINNED.items() if file.as_posix().endswith(f"parseshot/{name}")), None)
    allowed = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node) == pinned}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in allowed and (name := dotted(node, aliases)):
            uses.append((node.lineno, name))
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append(f"{file}:{node.lineno}: allow_pickle")
    for line, name in uses:
        if any(name == banned or name.startswith(f"{banned}.") for banned in PICKLING):
            found.append(f"{file}:{line}: {name}")
    return found


def source_files(package: Path = PACKAGE) -> list[Path]:
    return sorted(package.rglob("*.py"))


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("file", source_files(), ids=name_of)
def test_no_step_backwards(file: Path) -> None:
    assert steps_backwards(file, PACKAGE) == []


@pytest.mark.parametrize("file", source_files(), ids=name_of)
def test_no_pickle(file: Path) -> None:
    assert pickling(file) == []


@pytest.mark.parametrize("file", source_files(), ids=name_of)
def test_no_import_from_the_tests(file: Path) -> None:
    ours = {"tests", "reference", "conftest"}  # reference.py is the float64 second implementation of the equations
    names = [name for _, name in imports(ast.parse(file.read_text(encoding="utf-8")))]
    assert [name for name in names if name.split(".")[0] in ours] == []


def test_the_walk_finds_the_package() -> None:
    assert {"__init__.py", "backbones/__init__.py", "backbones/resnet12.py"} <= {name_of(f) for f in source_files()}


# The checkers themselves, on planted files


def plant(root: Path, name: str, code: str) -> tuple[Path, Path]:
    """Writes `code` as the module `name` of a small package; returns the file and the package."""
    package = root / "parseshot"
    file = package / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code, encoding="utf-8")
    return file, package


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("data/packed.py", "from parseshot.methods.dop import DOP"),
        ("data/packed.py", "from parseshot import methods"),
        ("data/packed.py", "import parseshot.methods.dop as dop"),
        ("data/packed.py", "def lazy():\n    from parseshot.engine.training import train"),
        ("data/packed.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import parseshot.cli"),
        ("data/packed.py", "import importlib\nimportlib.import_module('parseshot.engine')"),
        ("data/deep/er.py", "from parseshot.engine import training"),
        ("backbones/conv4.py", "from parseshot.parts import parsing"),
        ("engine/training.py", "from parseshot.recognition.gallery import Gallery"),
        ("recognition/doctor.py", "from parseshot.report import write"),
        ("figures.py", "from parseshot.serve.app import app"),
        ("serve/app.py", "from parseshot.cli import main"),
        ("errors.py", "from parseshot.config import Config"),
        ("errors.py", "from parseshot.data import packed"),
        ("methods/dop.py", "from ..engine import training"),
        ("methods/dop.py", "import parseshot"),
        ("methods/dop.py", "from parseshot import Recognizer"),
        ("__main__.py", "from parseshot.engine import training"),
        ("helpers.py", "import math"),  # a module without a room
    ],
)
def test_a_planted_step_backwards_is_caught(tmp_path: Path, name: str, code: str) -> None:
    assert len(steps_backwards(*plant(tmp_path, name, code))) == 1


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("__init__.py", "from parseshot.cli import main\nfrom parseshot.data import packed"),
        ("__main__.py", "from parseshot.cli import main\nmain()"),
        ("data/packed.py", "from parseshot.data.catalog import CATALOG\nfrom parseshot.config import Config"),
        ("parts/parsing.py", "from parseshot.backbones import Backbone\nfrom parseshot.errors import ModelError"),
        ("report.py", "from parseshot.figures import draw\nfrom parseshot.recognition.explain import explain"),
        ("cli.py", "from parseshot import __version__\ndef serve():\n    from parseshot.serve.app import app"),
        ("config.py", "import parseshot_data_elsewhere\nimport torch"),
    ],
)
def test_a_step_forwards_is_allowed(tmp_path: Path, name: str, code: str) -> None:
    assert steps_backwards(*plant(tmp_path, name, code)) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('weights.pt', weights_only=True)",
        "import torch as t\nt.save({}, 'weights.pt')",
        "from torch import load as read",
        "from torch import serialization\nserialization.load('weights.pt')",
        "import numpy as np\nnp.load('a.npy', allow_pickle=True)",
    ],
)
def test_planted_pickling_is_caught(tmp_path: Path, code: str) -> None:
    assert pickling(plant(tmp_path, "engine/checkpoint.py", code)[0])


def test_only_the_very_call_is_pinned(tmp_path: Path) -> None:
    name, call = next(iter(PINNED.items()))
    fine, bad = (f"import io\nimport torch\n{code}" for code in (call, call.replace("True", "False")))
    assert pickling(plant(tmp_path / "fine", name, fine)[0]) == []
    assert pickling(plant(tmp_path / "bad", name, bad)[0])
    assert pickling(plant(tmp_path / "elsewhere", "engine/checkpoint.py", fine)[0])


def test_what_is_not_pickling_is_allowed(tmp_path: Path) -> None:
    code = "import json, torch\nimport numpy as np\njson.load(f)\nnp.load('a.npy', allow_pickle=False)\ntorch.sum(x)"
    assert pickling(plant(tmp_path, "engine/checkpoint.py", code)[0]) == []
