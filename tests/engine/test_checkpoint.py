"""Checkpoints: what is saved comes back, what is damaged is refused by name, nothing is unpickled."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parseshot.engine.checkpoint import CONFIG, WEIGHTS
from parseshot.engine.model import Model, ModelConfig
from parseshot.errors import ModelError, UsageError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = Model(ModelConfig())
    model.provenance = {"base_classes": ["a"], "note": "x" * 1000}
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_round_trip(saved: Path) -> None:
    images = torch.rand(2, 3, 84, 84, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    original, loaded = Model(ModelConfig()), Model.from_pretrained(saved)
    before, after = original.encode(images), loaded.encode(images)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert loaded.provenance["base_classes"] == ["a"]
    assert not loaded.training
    assert sorted(file.name for file in saved.iterdir()) == ["README.md", CONFIG, WEIGHTS]
    assert (saved / "README.md").read_text().startswith("---\nlibrary_name: parseshot")


def test_saving_again_replaces_it_and_leaves_nothing_behind(saved: Path) -> None:
    Model.from_pretrained(saved).save_pretrained(saved)
    assert [entry.name for entry in saved.parent.iterdir()] == ["model"]


def test_a_directory_with_other_files_is_not_overwritten(saved: Path) -> None:
    (saved / "thesis.txt").write_text("mine")
    with pytest.raises(ModelError, match=r"thesis\.txt"):
        Model(ModelConfig()).save_pretrained(saved)
    assert (saved / "thesis.txt").read_text() == "mine"
    assert [entry.name for entry in saved.parent.iterdir()] == ["model"]


def test_weights_that_are_not_finite_are_never_saved(saved: Path) -> None:
    model = Model.from_pretrained(saved)
    with torch.no_grad():
        model.method.templates.maps[0][0, 0] = torch.nan
    with pytest.raises(ModelError, match=r"templates\.maps\.0"):
        model.save_pretrained(saved)
    Model.from_pretrained(saved)


def test_half_the_size_for_a_rounding(saved: Path, tmp_path: Path) -> None:
    model = Model.from_pretrained(saved)
    model.save_pretrained(tmp_path / "half", half=True)
    whole, half = ((folder / WEIGHTS).stat().st_size for folder in (saved, tmp_path / "half"))
    assert 0.5 < half / whole < 0.6
    again = Model.from_pretrained(tmp_path / "half").state_dict()
    for name, weight in model.state_dict().items():
        assert again[name].dtype == weight.dtype
        assert torch.equal(again[name], weight.half().float() if weight.ndim > 1 else weight)
    with torch.no_grad():
        model.method.templates.maps[0][0, 0] = 1e5  # beyond float16
    with pytest.raises(ModelError, match=r"templates\.maps\.0"):
        model.save_pretrained(tmp_path / "half", half=True)


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a directory nor one of .*birds-conv4"):
        Model.from_pretrained(tmp_path / "nothing")


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_and_not_run(saved: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (saved / WEIGHTS).write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(ModelError, match="not a readable safetensors"):
        Model.from_pretrained(saved)
    assert not canary.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: (2**63 - 1).to_bytes(8, "little") + data[8:],
    ],
)
def test_damaged_weights_are_refused(saved: Path, damage) -> None:
    (saved / WEIGHTS).write_bytes(damage((saved / WEIGHTS).read_bytes()))
    with pytest.raises(ModelError, match=WEIGHTS):
        Model.from_pretrained(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("method.slopes"), "missing method.slopes"),
        (lambda w: w.update(extra=torch.zeros(1)), "unexpected extra"),
        (lambda w: w.update({"method.slopes": torch.zeros(3)}), r"method.slopes is .*\[3\]"),
        (lambda w: w.update({"method.slopes": torch.full((2,), torch.nan)}), "method.slopes is not finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(saved: Path, change, message: str) -> None:
    weights = load_file(saved / WEIGHTS)
    change(weights)
    save_file(weights, saved / WEIGHTS)
    with pytest.raises(ModelError, match=message):
        Model.from_pretrained(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(schema_version=99), "schema_version 99"),
        (lambda c: c["model"].update(image_size=-1), "image_size"),
        (lambda c: c["model"].update(colour="red"), "unknown key 'colour'"),
        (lambda c: c["model"].update(method_options={"parts": 10**9}), "parts"),
        (lambda c: c["model"].update(method_options={"scales": [2]}), "odd"),
        (lambda c: c["model"].update(method_options={"scales": [9]}), "larger than the grid"),
    ],
)
def test_a_wrong_config_is_refused_by_field(saved: Path, change, message: str) -> None:
    config = json.loads((saved / CONFIG).read_text())
    change(config)
    (saved / CONFIG).write_text(json.dumps(config))
    with pytest.raises((ModelError, UsageError), match=message):
        Model.from_pretrained(saved)


def test_config_that_is_not_json(saved: Path) -> None:
    (saved / CONFIG).write_text("{")
    with pytest.raises(ModelError, match="damaged"):
        Model.from_pretrained(saved)
