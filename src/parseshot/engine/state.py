"""The state of a run: all that is needed to go on as if nothing had happened, in one file that is replaced whole.

Episodes, augmentation and every other random draw of a step are functions of (seed, step), and the learning rate is one
of the step, so the state is: weights and buffers, the optimiser's moments, the step, and the best val accuracy so far.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from parseshot.backbones.base import digest
from parseshot.data.staging import only_one, replace_file
from parseshot.errors import DataError, ModelError

STATE, LOCK, METRICS = "state.safetensors", ".lock", "metrics.jsonl"
SCHEMA_VERSION = 1


@dataclass
class Reached:
    """How far a run has come."""

    stage: str = "episodes"
    step: int = 0  # steps of the stage done
    best: float | None = None  # val accuracy of the weights in best/
    seconds: float = 0.0  # on the clock
    cpu_seconds: float = 0.0  # of all threads, which neither pauses nor other work on the machine lengthen


def save_state(
    out: Path, model: nn.Module, optimiser: torch.optim.Optimizer, reached: Reached, recipe: Mapping[str, Any]
) -> None:
    """Write the state beside the old one, then put it in its place; weights that are not finite are never written."""
    tensors = {f"model.{name}": tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    for number, moments in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{number}.{name}": value.detach().cpu().contiguous() for name, value in moments.items()}
    bad = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if bad:
        raise ModelError(f"{out / STATE}: not saved, these tensors are not finite: {', '.join(bad[:5])}")
    header = {
        "schema_version": SCHEMA_VERSION,
        "reached": asdict(reached),
        "recipe": recipe,
        "sha256": digest(tensors),
    }
    replace_file(out / STATE, to_bytes(tensors, metadata={"parseshot": json.dumps(header)}))


@dataclass(frozen=True)
class Saved:
    """What `save_state` wrote."""

    reached: Reached
    tensors: Mapping[str, Tensor]

    def restore(self, module: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        """Put a stage back to where it was."""
        weights, state = {}, {}  # type: dict[str, Tensor], dict[int, dict[str, Tensor]]
        for name, value in self.tensors.items():
            kind, rest = name.split(".", 1)
            if kind == "model":
                weights[rest] = value
            else:
                number, key = rest.split(".", 1)
                state.setdefault(int(number), {})[key] = value
        module.load_state_dict(weights)
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})


def read_state(out: Path, recipe: Mapping[str, Any]) -> Saved | None:
    """Where a run was saved last, checked; None where nothing was saved yet."""
    path = out / STATE
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get("parseshot", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); start again in another directory") from None
    if header.get("schema_version") != SCHEMA_VERSION:
        found = header.get("schema_version")
        raise ModelError(f"{path} has schema_version {found!r}, this parseshot reads {SCHEMA_VERSION}")
    if header["sha256"] != digest(tensors):
        raise ModelError(f"{path} does not match its checksum; start again in another directory")
    changed = _changed(header["recipe"], json.loads(json.dumps(recipe)))
    if changed:
        raise DataError(f"{out} was started otherwise: {'; '.join(changed)}. Use the same recipe, or another --out")
    return Saved(Reached(**header["reached"]), tensors)


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> list[str]:
    """The values that differ, by name; a run may be made longer, and what it did not know may be off."""
    found = []
    for key in sorted({*before, *now}):
        name, old, new = f"{path}{key}", before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _changed(old, new, f"{name}.")
        elif old != new and name != "training.episodes" and (key in before or new):
            found.append(f"{name} was {old!r}, now {new!r}")
    return found


def keep_metrics(out: Path, reached: Reached) -> None:
    """Drop lines of steps that will be done again, and a last line that was cut off."""
    path = out / METRICS
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            stage = row.get("stage", "episodes")
            if row["step"] <= reached.step if stage == reached.stage else reached.stage == "episodes":
                kept.append(line + "\n")
    replace_file(path, "".join(kept).encode())


def is_left_over(name: str) -> bool:
    """Whether a run that was killed while it wrote has left this in its directory."""
    return name.startswith((f".{STATE}.", f".{METRICS}.", ".best.", ".last."))


@contextlib.contextmanager
def only_run(out: Path) -> Iterator[None]:
    """Be the only run in a directory; the lock dies with its process, however that ends."""
    out.mkdir(parents=True, exist_ok=True)
    with only_one(out / LOCK, f"{out}: another run is at work here"):
        for left in out.iterdir():
            if is_left_over(left.name):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield
