"""A run that is killed, stopped, starved of disk or fed NaN: what was saved is whole, and going on changes nothing."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parseshot.backbones.dropblock import DropBlock
from parseshot.data.packed import Pack
from parseshot.engine import state, training
from parseshot.engine.model import Model, ModelConfig
from parseshot.engine.run import Stop, start_run
from parseshot.engine.training import PretrainingConfig, PretrainingStage, TrainingConfig
from parseshot.errors import DataError, ModelError, Stopped

KILLS = int(os.environ.get("PARSESHOT_KILLS", "3"))
SMALL = ModelConfig(backbone_options={"channels": 8})
CONFIG = TrainingConfig(
    episodes=12, way=4, shots=2, queries=2, lr=2e-3, decay_every=5, validate_every=4, validation_episodes=5
)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return Model.from_pretrained(path).state_dict()


def same(first: Path, second: Path) -> bool:
    one, two = weights(first), weights(second)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def metrics(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.fixture(scope="module")
def whole(birds: Pack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    start_run(SMALL, birds, CONFIG, out)
    return out


def test_stopping_at_any_step_changes_nothing(birds: Pack, whole: Path, tmp_path: Path) -> None:
    for at in (1, 4, 7):
        stop_at(SMALL, birds, CONFIG, tmp_path / "run", at)
    start_run(SMALL, birds, CONFIG, tmp_path / "run", resume=True)
    assert same(tmp_path / "run" / "last", whole / "last")
    assert same(tmp_path / "run" / "best", whole / "best")
    assert metrics(tmp_path / "run") == metrics(whole)


def test_stopping_changes_nothing_where_weights_are_averaged(birds: Pack, whole: Path, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"average": 0.9})
    start_run(SMALL, birds, config, tmp_path / "whole")
    for at in (3, 4, 9):
        stop_at(SMALL, birds, config, tmp_path / "run", at)
    start_run(SMALL, birds, config, tmp_path / "run", resume=True)
    assert same(tmp_path / "run" / "last", tmp_path / "whole" / "last")
    assert same(tmp_path / "run" / "best", tmp_path / "whole" / "best")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert not same(tmp_path / "whole" / "last", whole / "last")
    losses = [row["ce"] for row in metrics(tmp_path / "whole")]
    assert losses == [row["ce"] for row in metrics(whole)]  # the steps themselves know nothing of it


def test_a_run_from_before_a_setting_existed_goes_on_without_it() -> None:
    before, now = {"training": {"lr": 0.1}}, {"training": {"lr": 0.1, "average": 0.0}}
    assert state._changed(before, now) == []
    assert state._changed(before, {"training": {"lr": 0.1, "average": 0.9}}) == ["training.average was None, now 0.9"]
    assert state._changed({"training": {"lr": 0.1}}, {"training": {"lr": 0.0}}) == ["training.lr was 0.1, now 0.0"]


def test_stopping_in_pretraining_changes_nothing(birds: Pack, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"pretraining": PretrainingConfig(steps=6, batch=8, lr=2e-3, decay_every=3)})
    start_run(SMALL, birds, config, tmp_path / "whole")
    for at in (2, 6):  # in the middle, and at its end, before the first episode
        stop_in_pretraining(birds, config, tmp_path / "run", at)
        assert len(metrics(tmp_path / "run")) == at
    stop_at(SMALL, birds, config, tmp_path / "run", 5)
    start_run(SMALL, birds, config, tmp_path / "run", resume=True)
    assert same(tmp_path / "run" / "last", tmp_path / "whole" / "last")
    assert same(tmp_path / "run" / "best", tmp_path / "whole" / "best")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert len(metrics(tmp_path / "run")) == 18


def stop_in_pretraining(birds: Pack, config: TrainingConfig, out: Path, step: int) -> None:
    batch = PretrainingStage.batch

    def interrupt(self: PretrainingStage, at: int) -> np.ndarray:
        if at == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(self, at)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PretrainingStage, "batch", interrupt)
        with pytest.raises(Stopped, match=f"after step {step} of 6 of pretraining; go on with --resume"):
            start_run(SMALL, birds, config, out, resume=out.exists())


def test_what_a_step_draws_depends_on_the_step_alone(birds: Pack) -> None:
    """DropBlock draws from the global generator, wherever that happens to be."""
    found = []
    for state_before in (1, 2):
        torch.manual_seed(0)
        model = Model(SMALL)
        model.backbone.block4.append(DropBlock(drop_rate=0.5, block_size=1, ramp_batches=1))
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
        torch.manual_seed(state_before)
        for step in (3, 4):
            episode = training.draw(birds.by_class("base"), CONFIG, step)
            found.append(training.train_step(model, optimiser, birds, episode, CONFIG, step)["ce"])
    assert found[:2] == found[2:]


def stop_at(kind: ModelConfig, birds: Pack, config: TrainingConfig, out: Path, step: int) -> None:
    """Ctrl-C during a step: the step is finished, the state saved."""

    before, draw = [step], training.draw

    def interrupt(*arguments: Any) -> Any:
        if before and arguments[2] == step - 1:
            before.clear()
            os.kill(os.getpid(), signal.SIGINT if step % 2 else signal.SIGTERM)
        return draw(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "draw", interrupt)
        with pytest.raises(Stopped, match=rf"after step {step} of {config.episodes}; go on with --resume"):
            start_run(kind, birds, config, out, resume=out.exists())


def test_killed_at_random_moments_and_resumed(birds: Pack, tmp_path: Path) -> None:
    """kill -9, which no handler sees, in a process of its own; the state is saved after every step."""
    program = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from parseshot.data.packed import Pack\n"
        "from parseshot.engine import run, training\n"
        "from parseshot.engine.model import ModelConfig\n"
        "run.SAVE_SECONDS = float(sys.argv[4])\n"
        "run.start_run(ModelConfig.model_validate_json(sys.argv[1]), Pack(sys.argv[2]),\n"
        "    training.TrainingConfig.model_validate_json(sys.argv[3]), sys.argv[5], resume=True)\n"
    )
    config = CONFIG.model_copy(update={"episodes": 60, "validate_every": 20})

    def process(out: Path, seconds: float) -> subprocess.Popen[bytes]:
        arguments = (SMALL.model_dump_json(), birds.path, config.model_dump_json(), seconds, out)
        return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)])

    assert process(tmp_path / "whole", 1e9).wait() == 0
    run, killed, chance = tmp_path / "run", 0, random.Random(0)
    for _ in range(4 * KILLS):
        if killed == KILLS or (run / "last").exists():
            break
        before = len(metrics(run)) if (run / "metrics.jsonl").exists() else 0
        started = process(run, 0.0)
        while started.poll() is None and (not (run / "metrics.jsonl").exists() or len(metrics_now(run)) <= before):
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.25 / max(1, KILLS / 4)))
        killed += started.poll() is None
        started.kill()
        started.wait()
    assert killed >= min(KILLS, 2)
    assert process(run, 0.0).wait() == 0
    assert same(run / "last", tmp_path / "whole" / "last")
    assert same(run / "best", tmp_path / "whole" / "best")
    assert metrics(run) == metrics(tmp_path / "whole")
    assert sorted(one.name for one in run.iterdir()) == [".lock", "best", "last", "metrics.jsonl", "state.safetensors"]
    print(f"killed {killed} times, weights the same")


def metrics_now(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text(errors="replace").splitlines()


def test_a_finished_run_is_left_as_it_is(birds: Pack, whole: Path) -> None:
    before = (whole / "last" / "model.safetensors").stat().st_mtime_ns
    told = start_run(SMALL, birds, CONFIG, whole, resume=True)
    assert told["episodes_seen"] == 12
    assert (whole / "last" / "model.safetensors").stat().st_mtime_ns == before


def test_a_run_may_be_made_longer_but_not_otherwise_changed(birds: Pack, tmp_path: Path) -> None:
    start_run(SMALL, birds, CONFIG.model_copy(update={"episodes": 4}), tmp_path / "run")
    with pytest.raises(DataError, match=r"training\.lr was 0\.002, now 0\.1"):
        start_run(SMALL, birds, CONFIG.model_copy(update={"lr": 0.1}), tmp_path / "run", resume=True)
    with pytest.raises(DataError, match=r"model\.backbone_options\.channels was 8, now 16"):
        start_run(ModelConfig(backbone_options={"channels": 16}), birds, CONFIG, tmp_path / "run", resume=True)
    with pytest.raises(DataError, match="--resume goes on with the run there"):
        start_run(SMALL, birds, CONFIG, tmp_path / "run")
    longer = CONFIG.model_copy(update={"episodes": 8})
    start_run(SMALL, birds, longer, tmp_path / "run", resume=True)
    start_run(SMALL, birds, longer, tmp_path / "whole")
    assert same(tmp_path / "run" / "last", tmp_path / "whole" / "last")


def test_a_full_disk_leaves_the_old_state(birds: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIG.model_copy(update={"episodes": 8})
    stop_at(SMALL, birds, config, tmp_path / "run", 3)
    before = (tmp_path / "run" / state.STATE).read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(
            DataError, match=r"not saved \(No space left on device\); it needs .* MB are free.*--resume"
        ):
            start_run(SMALL, birds, config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / state.STATE).read_bytes() == before
    assert not [one for one in (tmp_path / "run").iterdir() if one.name.startswith(".state")]
    start_run(SMALL, birds, config, tmp_path / "run", resume=True)
    start_run(SMALL, birds, config, tmp_path / "whole")
    assert same(tmp_path / "run" / "last", tmp_path / "whole" / "last")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "cannot be read"),
        (lambda data: b"", "cannot be read"),
        (lambda data: data[:-40] + bytes(40), "does not match its checksum"),
    ],
)
def test_a_damaged_state_is_refused(birds: Pack, tmp_path: Path, damage, message: str) -> None:
    stop_at(SMALL, birds, CONFIG, tmp_path / "run", 2)
    path = tmp_path / "run" / state.STATE
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=message):
        start_run(SMALL, birds, CONFIG, tmp_path / "run", resume=True)


def test_what_a_killed_run_left_behind_is_cleared_away(birds: Pack, whole: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of writing: half a state, half a checkpoint, the old best moved aside, a cut-off line."""
    run = tmp_path / "run"
    stop_at(SMALL, birds, CONFIG, run, 5)
    (run / ".state.safetensors.abc").write_bytes(b"half")
    (run / ".best.new1").mkdir()
    (run / ".best.old.x").mkdir()
    (run / "best").rename(run / ".best.old.x" / "model")
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"ce": 1.0, "step": 6}\n{"ce": 0.9, "st')
    start_run(SMALL, birds, CONFIG, run, resume=True)
    assert same(run / "last", whole / "last")
    assert metrics(run) == metrics(whole)
    assert not [one.name for one in run.iterdir() if one.name.startswith(".") and one.name != ".lock"]


def test_two_runs_in_one_directory(birds: Pack, tmp_path: Path) -> None:
    with (
        state.only_run(tmp_path / "run"),
        pytest.raises(DataError, match=rf"another run .*pid {os.getpid()}, since 20"),
    ):
        start_run(SMALL, birds, CONFIG, tmp_path / "run", resume=True)
    start_run(SMALL, birds, CONFIG.model_copy(update={"episodes": 1}), tmp_path / "run", resume=True)  # not stale


def test_the_second_signal_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_planted_nan_names_the_term_and_the_image_and_is_never_saved(
    birds: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = training.train_step
    names: list[str] = []

    def plant(model, optimiser, pack, episode, *rest):
        if rest[1] == 5:
            forward = model.backbone.forward
            names.append(pack.files[np.concatenate((episode.support, episode.query))[3]])
            spoil = torch.ones(16, 1, 1, 1)
            spoil[3] = torch.nan
            monkeypatch.setattr(model.backbone, "forward", lambda images: forward(images) * spoil)
        return step(model, optimiser, pack, episode, *rest)

    monkeypatch.setattr(training, "train_step", plant)
    with pytest.raises(ModelError) as caught:
        start_run(SMALL, birds, CONFIG, tmp_path / "run")
    assert "step 6: the loss term ce and diversity is not finite" in str(caught.value)
    assert f"with the images {names[0]};" in str(caught.value)
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run" / "best").values())
    with state.safe_open(tmp_path / "run" / state.STATE, "pt") as file:
        assert all(file.get_tensor(name).isfinite().all() for name in file.keys())  # noqa: SIM118


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(birds: Pack, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"step \d+: the (loss term|gradient of) "):
        start_run(SMALL, birds, CONFIG.model_copy(update={"lr": 1e30, "episodes": 30}), tmp_path / "run")
