"""A model for use elsewhere, as ONNX or as a program of torch.export, and a gallery for `matcher.py` beside it.

What is exported is `Model.forward` in evaluation mode: images float32 [B, 3, H, W] in [0, 1], any B → the tensors of
the encoding by name. Nothing is written before it was run and gave what the model gives.
"""

import contextlib
import copy
import io
import json
import logging
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parseshot import __version__
from parseshot.data.staging import replace_file
from parseshot.data.synthetic import draw, make_species
from parseshot.engine.model import Model, to_tensor
from parseshot.errors import DataError, ModelError, UsageError
from parseshot.matcher import FORMAT, Matcher
from parseshot.matcher import SCHEMA_VERSION as GALLERY_VERSION
from parseshot.methods.base import Encoding
from parseshot.methods.dop import DOP
from parseshot.parts.distance import Dictionary, Shown
from parseshot.recognition.recognizer import Recognizer
from parseshot.recognition.snapshot import Snapshot

SCHEMA_VERSION = 1  # of what is told about a model in its file
OPSET = 18
TOLERANCE = 1e-4  # how far apart the model and what was exported may be, in units of the largest value if above 1
BATCHES = (1, 3)  # that it is tried with
TRIED = 8  # enrolled photos that a gallery is tried with
INSTALL = "pip install 'parseshot[onnx]'"

Run = Callable[[Tensor], Mapping[str, Tensor]]


class _Forward(nn.Module):
    """A model with a plain dict as its answer, which a graph can have."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return dict(self.model(images))


def export_onnx(model: Model, path: Path | str) -> float:
    """Write the model as ONNX, with what one must know to use it as metadata; returns how far from torch it is."""
    path = _place(path)
    onnx, runtime = _installed("onnx"), _installed("onnxruntime")
    _installed("onnxscript")
    frozen = _Forward(_frozen(model))
    program, names = _traced(frozen), list(_run(frozen, _examples(model, 1)[0]))
    with _quiet(), _exportable(model, "as ONNX"):
        found = torch.onnx.export(
            program, dynamo=True, opset_version=OPSET, input_names=["images"], output_names=names, verbose=False
        )
    assert found is not None
    proto = found.model_proto
    _name_batch(proto.graph)
    onnx.helper.set_model_props(proto, _about(model, names))
    proto.producer_name, proto.producer_version = "parseshot", __version__
    onnx.checker.check_model(proto, full_check=True)
    data = proto.SerializeToString()
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> dict[str, Tensor]:
        outputs = session.run(names, {"images": images.numpy()})
        return dict(zip(names, map(torch.from_numpy, outputs), strict=True))

    gap = _compared(model, frozen, run, path)
    _write(path, data)
    return gap


def export_torch(model: Model, path: Path | str) -> float:
    """Write the model for `torch.export.load(path).module()`, parseshot not needed; returns how far from it it is.

    What one must know to use it is in the file too: `extra_files={"parseshot.json": ""}` of `torch.export.load`.
    """
    path = _place(path)
    frozen = _Forward(_frozen(model))
    program = _traced(frozen)
    names = list(_run(frozen, _examples(model, 1)[0]))
    written = io.BytesIO()
    with _quiet():
        torch.export.save(program, written, extra_files={"parseshot.json": json.dumps(_about(model, names))})
        data = written.getvalue()
        read = torch.export.load(io.BytesIO(data)).module()
    gap = _compared(model, frozen, read, path)
    _write(path, data)
    return gap


def export_gallery(recognizer: Recognizer, path: Path | str) -> float:
    """Write the classes of a gallery for `matcher.Matcher`, one .npz; returns how far from torch its scores are."""
    path = _place(path)
    method, snapshot = recognizer.loaded.method, recognizer.filled()
    if not isinstance(method, DOP):
        raise UsageError(
            f"method {recognizer.loaded.config.method} has no matcher without torch; those of DOP have one"
        )
    if snapshot.fingerprint != recognizer.fingerprint:
        raise ModelError(
            f"{recognizer.opened.name} holds encodings of the model {snapshot.fingerprint}, not of this one"
        )
    with torch.inference_mode():
        shown = _shown(method, snapshot)
        arrays = _of_classes(shown) | _of_method(method) | _of_recognizer(recognizer, snapshot)
        written = io.BytesIO()
        np.savez(written, **arrays)  # type: ignore[arg-type]
        gap = _scores_compared(recognizer, shown, snapshot, Matcher(arrays), path)
    _write(path, written.getvalue())
    return gap


# The graph


def _traced(frozen: _Forward) -> torch.export.ExportedProgram:
    """The graph of a model for any number of images."""
    batch = torch.export.Dim("batch", min=1)
    images = _examples(frozen.model, BATCHES[-1])[0]
    with _quiet(), _exportable(frozen.model, "as a graph"), torch.no_grad():
        return torch.export.export(frozen, (images,), dynamic_shapes={"images": {0: batch}})


def _frozen(model: Model) -> Model:
    """A copy on the CPU in evaluation mode."""
    return copy.deepcopy(model).cpu().eval().requires_grad_(False)


def _about(model: Model, outputs: list[str]) -> dict[str, str]:
    """What one must know to use an exported model, as text."""
    return {
        "schema_version": str(SCHEMA_VERSION),
        "parseshot_version": __version__,
        "fingerprint": model.fingerprint(),
        "config": model.config.model_dump_json(),
        "image_size": str(model.config.image_size),
        "input": "images",
        "input_range": "0 1",
        "input_layout": "batch, channels (red, green, blue), rows, columns",
        "outputs": json.dumps(outputs),
    }


def _name_batch(graph: Any) -> None:
    """Call the number of images "batch", not by torch's symbol for it."""
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if symbol in size.dim_param:
                size.dim_param = size.dim_param.replace(symbol, "batch")


@contextlib.contextmanager
def _exportable(model: Model, how: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of many kinds, by what in a method's code has no graph
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = textwrap.shorten(str(cause) or type(cause).__name__, 200, placeholder=" …")
        raise UsageError(f"method {model.config.method} cannot be exported {how}: {reason}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings to those who write exporters."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _installed(name: str) -> ModuleType:
    try:
        return __import__(name)
    except ImportError as error:
        raise UsageError(f"{name} is not installed ({error}): {INSTALL}") from None


def _place(path: Path | str) -> Path:
    """Where a file can be written: said before the work, not after it."""
    path = Path(path)
    if path.is_dir():
        raise DataError(f"{path} is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise DataError(f"{path} cannot be written: there is no folder {path.parent}")
    return path


def _write(path: Path, data: bytes) -> None:
    try:
        replace_file(path, data)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None


# Whether it is the same


def _examples(model: Model, count: int) -> list[Tensor]:
    """Noise and drawn birds, [count, 3, H, W] each."""
    size = model.config.image_size
    species = make_species(count)
    birds = np.stack([draw(one, seed, max(size, 32)).image[:size, :size] for seed, one in enumerate(species)])
    noise = np.random.default_rng(count).random((count, 3, size, size), dtype=np.float32)
    return [torch.from_numpy(noise), to_tensor(birds)]


@torch.inference_mode()
def _run(frozen: nn.Module, images: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = frozen(images)
    return found


def _compared(model: Model, frozen: _Forward, run: Run, path: Path) -> float:
    """How far what was exported is from the model; too far is an error."""
    largest = 0.0
    for images in (one for count in BATCHES for one in _examples(model, count)):
        wanted = _unordered(_run(frozen, images))
        with torch.inference_mode():
            found = _unordered(run(images))
        for name, tensor in wanted.items():
            gap = _gap(found[name], tensor)
            if not gap <= TOLERANCE:
                raise ModelError(
                    f"{path}: not written, what was exported differs from the model: {name} of {len(images)} images "
                    f"by {gap:.1e}, more than {TOLERANCE:g}"
                )
            largest = max(largest, gap)
    return largest


def _unordered(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cells as their weighted mean and mean square: equally likely ones may come in any order."""
    found = dict(outputs)
    if "cells" in found:
        cells, weights = found.pop("cells"), found["cell_weights"].unsqueeze(-1)
        found |= {"cells": (weights * cells).sum(2), "squared cells": (weights * cells.square()).sum(2)}
    return found


def _gap(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1.0))


# The gallery


def _shown(method: DOP, snapshot: Snapshot) -> list[Shown]:
    """What the method keeps of each class, each by itself so that none is filled up to the largest."""
    assert snapshot.encoding is not None
    rows = [(snapshot.labels == label).nonzero()[:, 0] for label in range(len(snapshot.classes))]
    return [method.prepare(snapshot.encoding.take(mine), torch.zeros_like(mine)) for mine in rows]


def _of_classes(shown: list[Shown]) -> dict[str, np.ndarray]:
    found = {name: _joined(shown, name) for name in ("entropy", "psi", "psi_square")}
    for name in ("z", "cells", "whole"):
        each = [getattr(one, name) for one in shown]
        if isinstance(each[0], Dictionary):
            found[f"{name}_vectors"] = torch.cat([one.vectors[:, 0] for one in each], 1).numpy()  # [K, ΣM, C]
            found[f"{name}_counts"] = np.array([one.vectors.shape[2] for one in each])
        elif each[0] is not None:
            found[name] = _joined(shown, name)
    return found


def _joined(shown: list[Shown], name: str) -> np.ndarray:
    found: np.ndarray = torch.cat([getattr(one, name) for one in shown]).numpy()
    return found


def _of_method(method: DOP) -> dict[str, np.ndarray]:
    config = method.config
    found: dict[str, Any] = {"normalised": config.normalised, "scale": -float(method.as_score(torch.ones(())))}
    if method.slopes is not None:
        found["slopes"] = method.slopes.cpu().numpy()
    if method.log_gamma is not None:
        found["gamma"] = float(method.log_gamma.exp())
    elif config.geometry and not config.normalised:
        found["gamma"] = config.gamma
    if config.cells:
        found["cells_weight"] = float(method.log_cell_weight.exp())
    if config.whole:
        found["whole_weight"] = float(method.log_whole_weight.exp())
    return {name: np.asarray(value, bool if name == "normalised" else np.float32) for name, value in found.items()}


def _of_recognizer(recognizer: Recognizer, snapshot: Snapshot) -> dict[str, np.ndarray]:
    calibration = recognizer.calibration
    found: dict[str, Any] = {
        "format": FORMAT,
        "schema_version": GALLERY_VERSION,
        "fingerprint": recognizer.fingerprint,
        "names": [one.name for one in snapshot.classes],
        "photos": snapshot.photos_of.numpy(),
        "advantage": calibration.advantage,
        "temperature": np.array(calibration.temperature),
    }
    if recognizer.calibrated:
        found |= {"known": np.array(calibration.known), "threshold": calibration.threshold}
    return {name: np.asarray(value) for name, value in found.items()}


def _scores_compared(
    recognizer: Recognizer, shown: list[Shown], snapshot: Snapshot, matcher: Matcher, path: Path
) -> float:
    """How far the matcher is from the recogniser on enrolled photos; too far is an error."""
    assert snapshot.encoding is not None
    method = recognizer.loaded.method
    some = Encoding(**{name: tensor[:TRIED] for name, tensor in snapshot.encoding.items()})
    wanted = torch.cat([method.score(some, one) for one in shown], 1)
    wanted = recognizer.calibration.corrected(wanted, snapshot.photos_of)
    gap = _gap(torch.from_numpy(matcher.scores({name: tensor.numpy() for name, tensor in some.items()})), wanted)
    if not gap <= TOLERANCE:
        raise ModelError(
            f"{path}: not written, its scores differ from the model's by {gap:.1e}, more than {TOLERANCE:g}"
        )
    return gap
