"""docs/methods.md: its table is what `parseshot methods` says, and its tutorial runs as printed."""

import re
import shlex
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parseshot.cli import app
from parseshot.methods import METHODS, MethodEntry, parameters

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "methods.md").read_text(encoding="utf-8")


def test_the_table_lists_every_method() -> None:
    inside = TEXT.split("<!-- methods -->")[1].split("<!-- /methods -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in inside.strip().splitlines()[2:]]
    assert [row[0].strip("`") for row in rows] == list(METHODS)
    for row, (name, one) in zip(rows, METHODS.items(), strict=True):
        assert row[1:] == [str(one.year), one.summary, f"{parameters(name):,}", one.fitted]


def test_the_tutorial_runs_as_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    method, line = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(method.splitlines()) + len(line.splitlines()) <= 60
    module = types.ModuleType("robust")
    exec(compile(method, "docs/methods.md", "exec"), module.__dict__)
    monkeypatch.setitem(METHODS, "robust", METHODS["protonet"])  # removed again after the test
    exec(line, {"METHODS": METHODS, "MethodEntry": MethodEntry, **module.__dict__})
    monkeypatch.chdir(tmp_path)
    less = {
        "data": ["--base", "12", "--val", "5", "--novel", "6", "--per-class", "20"],
        "train": ["--set", "training.episodes=2", "--set", "training.validation_episodes=2", "--threads", "1"],
        "compare": ["--episodes", "20", "--queries", "5", "--threads", "1"],
    }
    commands = [line.split("parseshot ")[1] for line in TEXT.splitlines() if line.startswith("    parseshot ")]
    assert len(commands) == 4
    for command in commands:
        words = shlex.split(command)
        result = CliRunner().invoke(app, [*words, *less[words[0]]])
        assert result.exit_code == 0, result.output
    assert "robust" in result.output
