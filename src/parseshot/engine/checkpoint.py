"""Checkpoints: a directory with config.json, model.safetensors and a card, replaced whole; no pickle anywhere."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from parseshot.data.staging import not_saved, replace_file, sync
from parseshot.errors import ModelError

SCHEMA_VERSION = 1
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"


def save(
    path: Path | str,
    weights: Mapping[str, Tensor],
    model: Mapping[str, Any],
    provenance: Mapping[str, Any],
    elsewhere: str | None = None,
    *,
    half: bool = False,
) -> None:
    """Write a checkpoint into a temporary neighbour, then put it in place of the old one.

    elsewhere: which published weights belong to it and are not in it. half: matrices and filters as float16.
    """
    if half:
        weights = {name: tensor.half() if _large(tensor) else tensor for name, tensor in weights.items()}
    bad = [name for name, tensor in weights.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if bad:
        raise ModelError(f"{path}: not saved, these weights are not finite: {', '.join(bad[:5])}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    config = {
        "schema_version": SCHEMA_VERSION,
        "library_name": "parseshot",
        "model": model,
        "weights_elsewhere": elsewhere,
        "provenance": provenance,
    }
    data = to_bytes({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()})
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        (temporary / WEIGHTS).write_bytes(data)
        (temporary / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        (temporary / CARD).write_text(card(model, provenance), encoding="utf-8")
        for file in temporary.iterdir():
            file.chmod(0o644)
            sync(file)
        temporary.chmod(0o755)
        _replace(temporary, path)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise not_saved(path, len(data), error) from None
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def save_provenance(path: Path | str, provenance: Mapping[str, Any]) -> None:
    """Replace what a checkpoint says of how it came about; its weights, and a card that somebody wrote, stay."""
    path = Path(path)
    config = _read_config(path) | {"provenance": provenance}
    replace_file(path / CONFIG, (json.dumps(config, indent=1) + "\n").encode())


def load(path: Path | str) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any], str | None]:
    """Weights (float16 as float32), model configuration, provenance and the weights found elsewhere of a checkpoint."""
    path = Path(path)
    config = _read_config(path)
    try:
        weights = load_file(path / WEIGHTS)
    except FileNotFoundError:
        raise ModelError(f"{path} has no {WEIGHTS}") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path / WEIGHTS} is not a readable safetensors file: {error}") from None
    weights = {name: tensor.float() if tensor.dtype == torch.float16 else tensor for name, tensor in weights.items()}
    return weights, config["model"], config.get("provenance") or {}, config.get("weights_elsewhere")


def _large(tensor: Tensor) -> bool:
    """Not a scale, a bias or a statistic, of which there are few and whose digits count."""
    return tensor.dtype == torch.float32 and tensor.ndim > 1


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError(f"{path} is not a model directory (no {CONFIG})") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path / CONFIG} is damaged: {error}") from None
    version = config.get("schema_version") if isinstance(config, dict) else None
    if version != SCHEMA_VERSION or not isinstance(config.get("model"), dict):
        raise ModelError(f"{path / CONFIG} has schema_version {version!r}, this parseshot reads {SCHEMA_VERSION}")
    return dict(config)


def check_weights(path: Path | str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse missing, unexpected, misshapen or non-finite tensors, by name."""
    problems = [f"missing {name}" for name in expected if name not in found]
    problems += [f"unexpected {name}" for name in found if name not in expected]
    for name in found.keys() & expected.keys():
        ours, theirs = expected[name], found[name]
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            problems.append(f"{name} is {theirs.dtype}{list(theirs.shape)}, not {ours.dtype}{list(ours.shape)}")
        elif theirs.is_floating_point() and not torch.isfinite(theirs).all():
            problems.append(f"{name} is not finite")
    if problems:
        raise ModelError(f"{Path(path) / WEIGHTS} does not fit its {CONFIG}: {'; '.join(sorted(problems)[:5])}")


def card(model: Mapping[str, Any], provenance: Mapping[str, Any]) -> str:
    """The model card: what it is, what it was trained on, what was measured."""
    lines = [
        "---",
        "library_name: parseshot",
        "pipeline_tag: image-classification",
        "tags: [few-shot, fine-grained]",
        "---",
    ]
    lines += [f"# {model['method']} on {model['backbone']}, {model['image_size']} px", ""]
    lines += [f"- {key}: {_short(value)}" for key, value in provenance.items()]
    return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 300 else f"{text[:300]} … (whole in {CONFIG})"


def _replace(new: Path, path: Path) -> None:
    """Rename a directory over an older one; the old one is removed only after the new one is in place."""
    if not path.exists():
        new.rename(path)
        return
    unknown = [entry.name for entry in path.iterdir() if entry.name not in (CONFIG, WEIGHTS, CARD)]
    if unknown:
        raise ModelError(f"{path} holds other files ({', '.join(sorted(unknown)[:3])}); choose another directory")
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    path.rename(old / "model")
    new.rename(path)
    shutil.rmtree(old)
