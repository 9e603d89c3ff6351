"""docs/results.json and docs/results.md say the same; the check of `make results-check` notices what is off."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from parseshot.engine.model import Model, shipped_models
from parseshot.engine.statistics import Interval

ROOT = Path(__file__).resolve().parent.parent
TOLD = json.loads((ROOT / "docs" / "results.json").read_text(encoding="utf-8"))
TEXT = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results_check", ROOT / "benchmarks" / "results_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("row", TOLD["rows"], ids=lambda row: f"{row['model']}-{row['protocol']}-{row['shots']}")
def test_every_row_is_printed_and_has_its_model_and_data(row: dict, checker: ModuleType) -> None:
    assert checker.check(row, (row["accuracy"], row["interval_95"]), TEXT) == []
    assert row["data"] in TOLD["data"]
    assert row["model"] in shipped_models() or (ROOT / row["model"] / "config.json").is_file()


def test_every_shipped_model_loads_is_small_and_has_a_row() -> None:
    assert shipped_models()
    for name, folder in shipped_models().items():
        Model.from_pretrained(name)
        assert (folder / "model.safetensors").stat().st_size < 5e6
        assert name in {row["model"] for row in TOLD["rows"]}


@pytest.mark.parametrize("name", list(shipped_models()))
def test_every_card_says_what_one_must_know(name: str) -> None:
    card = (shipped_models()[name] / "README.md").read_text(encoding="utf-8")
    for heading in ("What it is", "Data and split", "Protocol and numbers", "Where it fails", "ImageNet", "Licence"):
        assert f"\n## {heading}\n" in card
    for row in TOLD["rows"]:
        if row["model"] == name:
            assert f"{row['accuracy']:.2f} ± {row['interval_95']:.2f}" in card


def test_what_is_off_is_named(checker: ModuleType) -> None:
    row = TOLD["rows"][0]
    right = row["accuracy"], row["interval_95"]
    assert checker.check(row, (right[0] + 0.01, right[1]), TEXT) == []
    assert "accuracy is" in checker.check(row, (right[0] + 0.03, right[1]), TEXT)[0]
    assert "interval_95 is" in checker.check(row, (right[0], right[1] - 0.03), TEXT)[0]
    assert "does not print" in checker.check({**row, "accuracy": right[0] + 0.01}, right, TEXT)[0]


@pytest.mark.parametrize("table", sorted((ROOT / "docs" / "tables").iterdir()), ids=lambda folder: folder.name)
def test_a_printed_table_is_that_of_its_rows(table: Path) -> None:
    """docs/tables holds the accuracy of every episode; what docs/results.md prints is their mean and interval."""
    rows = sorted((table / "rows").glob("*.json"))
    assert rows
    asked = json.loads((table / "table.json").read_text(encoding="utf-8"))["protocol"]["episodes"]
    start, end = (TEXT.index(f"<!-- {mark}{table.name} -->") for mark in ("", "/"))
    printed = TEXT[start:end].splitlines()
    for file in rows:
        told = json.loads(file.read_text(encoding="utf-8"))
        with np.load(file.with_suffix(".npz")) as kept:
            cells = [f"{100 * one.mean:.2f} ± {100 * one.half_width:.2f}" for one in map(Interval.of, kept.values())]
            (episodes,) = {len(kept[shots]) for shots in kept.files}
        name = told["name"] if episodes == asked else f"{told['name']} ({episodes:,} episodes)"
        weights = f"{told['told']['trained_weights']:,}"
        assert any(line.startswith(f"| {name} | {' | '.join(cells)} |") and weights in line for line in printed)
