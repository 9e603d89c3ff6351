"""What one sees of a run: the line, the page at each validation and at the end, TensorBoard."""

from pathlib import Path
from typing import Any

import pytest

from parseshot.data.packed import Pack
from parseshot.engine.model import ModelConfig
from parseshot.engine.recipe import Recipe
from parseshot.engine.run import start_run
from parseshot.engine.training import PretrainingConfig, TrainingConfig
from parseshot.errors import DataError, Stopped, UsageError
from parseshot.watch import Watch

RECIPE = Recipe(
    title="Small",
    model=ModelConfig(backbone_options={"channels": 8}),
    training=TrainingConfig(
        episodes=4,
        way=4,
        shots=2,
        queries=2,
        validate_every=2,
        validation_episodes=5,
        pretraining=PretrainingConfig(steps=6, batch=8),
    ),
)


def run(birds: Pack, out: Path, watch: Any, resume: bool = False) -> None:
    start_run(RECIPE.model, birds, RECIPE.training, out, watch, resume=resume)


def test_the_line_names_the_stage_and_every_figure(birds: Pack, tmp_path: Path) -> None:
    lines: list[tuple[int, int, str]] = []
    out = tmp_path / "run"
    with Watch(RECIPE, out, lambda *line: lines.append(line)) as watch:
        run(birds, out, watch)
    assert [line[:2] for line in lines] == [*((step, 6) for step in range(1, 7)), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert lines[0][2].startswith("pretraining ce ")
    for word in ("ce", "diversity", "accuracy", "entropy", "sparsity", "geometry_share", "val"):
        assert f"{word} " in lines[7][2]
    assert "val" not in lines[6][2]
    assert "Validation accuracy" in (out / "report.html").read_text(encoding="utf-8")


def stopped_run(birds: Pack, out: Path, at: int, seen: list[dict[str, Any]], **options: Any) -> None:
    """A run that ends after so many steps of both stages, unsaved since the last validation."""
    with Watch(RECIPE, out, lambda *_: None, **options) as watch:

        def stop(figures: dict[str, Any]) -> None:
            watch(figures)
            seen.append(figures)
            if len(seen) == at:
                raise Stopped("enough")

        run(birds, out, stop)


def test_the_page_is_there_when_a_run_was_stopped(birds: Pack, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        stopped_run(birds, tmp_path / "run", 1, [])
    assert "1 of 6" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_nothing_is_written_where_no_run_began(tmp_path: Path) -> None:
    with pytest.raises(UsageError), Watch(RECIPE, tmp_path / "run", lambda *_: None):
        raise UsageError("refused")
    assert not (tmp_path / "run").exists()


def test_tensorboard_holds_the_figures_of_both_stages_and_a_resumed_run_goes_on(birds: Pack, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="parseshot[tensorboard] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, seen = tmp_path / "run", []  # type: Path, list[dict[str, Any]]
    with pytest.raises(Stopped):  # its step 3 is not saved, so it is done and told twice
        stopped_run(birds, out, 9, seen, tensorboard=True)
    with Watch(RECIPE, out, lambda *_: None, tensorboard=True) as watch:
        run(birds, out, watch, resume=True)
    first, second = (EventAccumulator(str(out / "tensorboard" / stage)) for stage in ("pretraining", "episodes"))
    for found in (first, second):
        found.Reload()
    assert [event.step for event in first.Scalars("ce")] == [1, 2, 3, 4, 5, 6]  # going on does not purge them
    assert [event.step for event in second.Scalars("ce")] == [1, 2, 3, 4]
    assert [event.step for event in second.Scalars("val")] == [2, 4]
    assert second.Scalars("ce")[0].value == pytest.approx(seen[6]["ce"], rel=1e-6)


def test_a_page_that_cannot_be_written_does_not_hide_what_stopped_the_run(
    birds: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise DataError("no room for the page")

    monkeypatch.setattr("parseshot.watch.write_training", full)
    with pytest.raises(Stopped, match="enough"):
        stopped_run(birds, tmp_path / "run", 1, [])


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install 'parseshot\[tensorboard\]'"):
        Watch(RECIPE, tmp_path, lambda *_: None, tensorboard=True)
