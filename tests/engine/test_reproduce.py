"""Tables: rows done once on the same episodes, gone on with, compared in pairs; one bad row is one line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parseshot.data.packed import Pack
from parseshot.engine import rates
from parseshot.engine import reproduce as module
from parseshot.engine.evaluation import evaluate
from parseshot.engine.model import Model
from parseshot.engine.paired_table import markdown, summary
from parseshot.engine.protocol import Protocol
from parseshot.engine.rates import beyond
from parseshot.engine.reproduce import reproduce
from parseshot.engine.rows import Done, slug
from parseshot.engine.tables import RATES, Row, Table, tables
from parseshot.errors import ModelError, Stopped, UsageError
from parseshot.methods import build_method

LESS = [
    "training.episodes=2",
    "training.validation_episodes=3",
    "training.way=4",
    "training.shots=1",
    "training.queries=2",
    "model.backbone_options.channels=8",
    "model.image_size=84",
]
ROWS = (
    Row("first", "dop"),
    Row("second", "protonet"),
    Row("bad one", "dop", ("model.method_options.scales=[99]",)),
)


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch, birds: Pack) -> Path:
    monkeypatch.setattr(module, "tables", lambda: {"three": Table("Three rows", ROWS)})
    monkeypatch.setattr(module, "_recipe", lambda row, data, overrides: load(f"birds-{row.recipe}", row, overrides))
    return birds.path


def load(name: str, row: Row, overrides: list[str]) -> object:
    return module.load_recipe(name, [*row.overrides, *overrides])


def test_rows_are_done_once_and_compared_in_pairs(three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    shown: list[tuple[int, int, str]] = []
    result = reproduce(
        "three", three, tmp_path, overrides=LESS, episodes=30, say=said.append, progress=lambda *one: shown.append(one)
    )
    assert (1, 3, "second: measuring a few steps") in shown
    assert (2, 2, "first: training") in shown
    assert (30, 30, "second: episodes") in shown
    assert said[0].startswith("3 of 3 rows to do, about 0.0 hours")
    assert [row["name"] for row in result["rows"]] == ["first", "second"]
    (run,) = tmp_path.glob("second-*")
    everything = sum(weight.numel() for weight in Model.from_pretrained(run / "best").parameters())
    assert result["rows"][1]["trained_weights"] == everything  # the backbone is trained as well
    assert list(result["failed"]) == ["bad one"]
    assert "larger than the grid" in result["failed"]["bad one"]
    kept = {name: np.load(tmp_path / "rows" / f"{name}.npz") for name in ("first", "second")}
    for shots in ("1", "5"):
        one, two = (kept[name][shots] for name in ("first", "second"))
        row = result["rows"][1]["shots"][shots]
        assert row["difference"] == pytest.approx(100 * (two - one).mean(), abs=0.006)
        assert result["rows"][0]["shots"][shots]["difference"] is None
        assert row["accuracy"] == pytest.approx(100 * two.mean(), abs=0.006)
    assert json.loads((tmp_path / "table.json").read_text()) == result
    assert (tmp_path / "table.md").read_text() == markdown(result)
    assert "bad one failed" in markdown(result)
    assert f"| second | {result['rows'][1]['shots']['1']['accuracy']:.2f} ±" in markdown(result)

    done = module._do
    monkeypatch.setattr(module, "_do", None)  # doing a row again would fail
    again = reproduce("three", three, tmp_path, overrides=LESS, episodes=30, only=["first", "second"])
    assert again["rows"] == result["rows"]
    fewer = reproduce("three", three, tmp_path, overrides=LESS, episodes=20, only=["first"])  # the first of them
    assert fewer["rows"][0]["shots"]["1"]["accuracy"] == round(100 * kept["first"]["1"][:20].mean(), 2)
    monkeypatch.setattr(module, "_do", done)
    other = [*LESS, "training.seed=1"]
    reproduce("three", three, tmp_path, overrides=other, episodes=20, only=["first"])  # another recipe: again
    assert len(np.load(tmp_path / "rows" / "first.npz")["1"]) == 20


def test_a_slow_evaluation_goes_on_where_it_was_stopped(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK", 10)
    whole = reproduce("three", three, tmp_path / "whole", overrides=LESS, episodes=25, only=["second"])
    asked: list[int] = []
    evaluate = module.evaluate

    def stopped_once(*some: Any, first: int = 0, **others: Any) -> Any:
        asked.append(first)
        if len(asked) == 3:
            raise Stopped("stopped")
        return evaluate(*some, first=first, **others)

    monkeypatch.setattr(module, "evaluate", stopped_once)
    with pytest.raises(Stopped):
        reproduce("three", three, tmp_path / "parts", overrides=LESS, episodes=25, only=["second"])
    seen = reproduce("three", three, tmp_path / "parts", overrides=LESS, episodes=25, look=True)
    assert [row["episodes"] for row in seen["rows"]] == [20]
    assert "| second (20 episodes) |" in markdown(seen)
    again = reproduce("three", three, tmp_path / "parts", overrides=LESS, episodes=25, only=["second"])
    assert asked == [0, 10, 20, 20]
    assert again["rows"][0]["shots"] == whole["rows"][0]["shots"]


def test_val_classes_beside_the_novel_ones_and_how_sure_locations_are(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Table("Two splits", ROWS[:2], ("novel", "val"))
    monkeypatch.setattr(module, "tables", lambda: {"three": both})
    result = reproduce("three", three, tmp_path, overrides=LESS, episodes=6)
    first, second = result["rows"]
    assert list(first["shots"]) == ["1", "5", "val 1", "val 5"]
    (run,) = tmp_path.glob("first-*")
    model = Model.from_pretrained(run / "best")
    found = evaluate(model, Pack(three), Protocol(split="val", episodes=6, queries=result["protocol"]["queries"]))
    assert first["shots"]["val 5"]["accuracy"] == round(100 * found.outcomes[1].interval.mean, 2)
    novel = np.concatenate(list(Pack(three).by_class("novel").values()))
    assert first["entropy"] == pytest.approx(float(model.encode(Pack(three).load(novel))["entropy"].mean()), abs=1e-4)
    assert second["entropy"] is None
    head, _, *lines = markdown(result).splitlines()
    assert "| val 5-shot |" in head
    assert f"| {first['entropy']:.2f} |" in lines[0]
    assert head.count("|") == lines[0].count("|") == lines[1].count("|")


def test_the_best_learning_rate_on_val_is_kept(three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (Row("first", "dop", rates=(1e-3, 1e30, 1e-5)),)  # the second breaks down
    monkeypatch.setattr(module, "tables", lambda: {"three": Table("Rates", rows)})
    (row,) = reproduce("three", three, tmp_path, overrides=LESS, episodes=5)["rows"]
    by_rate = row["val_accuracy_by_lr"]
    assert list(by_rate)[:2] == ["0.001", "1e-05"]
    assert "1e+30" not in by_rate
    with monkeypatch.context() as patch:
        patch.setattr(rates, "_val_accuracy", None)  # a row that is extended has its rate
        (longer,) = reproduce("three", three, tmp_path, overrides=LESS, episodes=8)["rows"]
    assert (longer["lr"], longer["val_accuracy_by_lr"]) == (row["lr"], by_rate)
    assert by_rate[f"{row['lr']:g}"] == max(by_rate.values())
    worst = (Row("first", "dop", rates=(1e30,)),)
    monkeypatch.setattr(module, "tables", lambda: {"three": Table("Rates", worst)})
    failed = reproduce("three", three, tmp_path, overrides=LESS, episodes=5)["failed"]
    assert "not finite" in failed["first"]


def test_rates_can_be_taken_over_from_a_table_of_other_data(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "tables", lambda: {"three": Table("Rates", (Row("first", "dop", rates=(7e-4,)),))})
    reproduce("three", three, tmp_path / "before", overrides=LESS, episodes=2)
    monkeypatch.setattr(module, "tables", lambda: {"three": Table("Rates", (Row("first", "dop", rates=RATES),))})
    (row,) = reproduce("three", three, tmp_path / "after", overrides=LESS, episodes=2, rates_of=tmp_path / "before")[
        "rows"
    ]
    assert (row["lr"], row["val_accuracy_by_lr"]) == (7e-4, {})
    with pytest.raises(UsageError, match="has no row 'first' to take a learning rate from"):
        reproduce("three", three, tmp_path / "after", rates_of=tmp_path)
    (tmp_path / "before" / "rows" / "first.json").write_text('{"told": {}}')
    with pytest.raises(ModelError, match=r"first\.json is damaged"):
        reproduce("three", three, tmp_path / "after", rates_of=tmp_path / "before")


@pytest.mark.parametrize(
    ("peak", "tried"),
    [
        (3e-3, [3e-3, 1e-3, 1e-2]),
        (1e-4, [3e-3, 1e-3, 3e-4, 1e-4, 3e-5]),
        (3e-2, [3e-3, 1e-3, 1e-2, 3e-2, 1e-1]),
        (1e-9, [3e-3, 1e-3, 3e-4, 1e-4, 3e-5]),  # until the ladder ends
    ],
)
def test_the_search_for_a_rate_does_not_end_at_its_edge(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peak: float, tried: list[float]
) -> None:
    monkeypatch.setattr(module, "tables", lambda: {"three": Table("Rates", (Row("first", "dop", rates=RATES),))})
    monkeypatch.setattr(
        rates, "_val_accuracy", lambda model, *_: 1 / (1 + abs(np.log(model.provenance["training"]["lr"] / peak)))
    )
    (row,) = reproduce("three", three, tmp_path, overrides=LESS, episodes=2)["rows"]
    assert list(row["val_accuracy_by_lr"]) == [f"{rate:g}" for rate in tried]
    assert row["lr"] == min(tried, key=lambda rate: abs(np.log(rate / peak)))


def test_where_every_rate_breaks_down_smaller_ones_are_tried() -> None:
    assert beyond({1e-2: 0.0, 3e-3: 0.0, 1e-3: 0.0}) == [3e-4]
    assert beyond({1e-1: 0.0, 3e-2: 0.3, 1e-2: 0.2}) == []
    assert beyond({1e-1: 0.4, 3e-2: 0.3}) == []


def test_what_cannot_be_done_is_said(three: Path, birds: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no table 'four'; there are three"):
        reproduce("four", three, tmp_path)
    with pytest.raises(UsageError, match="44 to 270 hours"):
        reproduce("three", three, tmp_path, budget="paper")
    with pytest.raises(UsageError, match="has no row fourth"):
        reproduce("three", three, tmp_path, only=["fourth"])
    with pytest.raises(UsageError, match="holds no row of the table three"):
        reproduce("three", three, tmp_path / "empty", look=True)
    assert not (tmp_path / "empty").exists()
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "first.json").write_text("{")
    with pytest.raises(ModelError, match=r"first\.json is damaged .* remove it"):
        reproduce("three", three, tmp_path, only=["first"], overrides=LESS)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="there is no recipe synthetic-efficientnet-dop"):
        reproduce("methods", birds.path, tmp_path)


def test_every_method_has_a_row() -> None:
    from parseshot.methods import METHODS

    rows = [row.name for row in tables()["methods"].rows]
    assert [row for row in rows if ", " not in row] == list(METHODS)
    pooled = {row for row in rows if row.endswith(", pooled")}
    assert {"baseline++, pooled", "metaoptnet-ridge, pooled", "dsn, pooled"} <= pooled
    assert not {"protonet, pooled", "simpleshot, pooled"} & pooled  # one has a name of its own, one is pooled anyway


@pytest.mark.parametrize("table", tables())
def test_rows_are_recipes_that_can_be_built(table: str) -> None:
    rows = tables()[table].rows
    assert len({slug(row.name) for row in rows}) == len(rows)  # each has a file of its own
    for row in rows:
        recipe = module._recipe(row, "cub", [])
        build_method(recipe.model.method, 8, 7, recipe.model.method_options, fine=8)


@pytest.mark.parametrize("ranked", [True, False])
def test_a_ranked_table_keeps_its_first_row_first(ranked: bool, birds: Pack) -> None:
    means = {"first": 0.5, "low": 0.4, "high": 0.9, "middle": 0.6}
    told = {"trained_weights": 1, "lr": 1e-3, "training_cpu_seconds": 1.0, "evaluation_cpu_seconds": 1.0}
    rows = [Done(name, {"1": np.full(4, mean), "5": np.full(4, mean)}, told) for name, mean in means.items()]
    table = Table("Four rows", tuple(Row(name, "dop") for name in means), ranked=ranked)
    found = summary(table, birds, Protocol(episodes=4), rows, {})
    wanted = ["first", "high", "middle", "low"] if ranked else list(means)
    assert [row["name"] for row in found["rows"]] == wanted
    assert {row["name"]: row["shots"]["1"]["difference"] for row in found["rows"]} == {
        "first": None,
        "low": -10.0,
        "high": 40.0,
        "middle": 10.0,
    }
