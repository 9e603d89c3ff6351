"""Every image encoded once: into memory, or into a file on disk where that would take too much of it."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from parseshot.data.packed import Pack
from parseshot.data.staging import reserve
from parseshot.engine.features import FeaturePack
from parseshot.engine.model import TOGETHER, Model
from parseshot.errors import DataError
from parseshot.methods import Encoding

Progress = Callable[[int, int, str], None]  # (done, total, of what)


@dataclass(frozen=True)
class Encoded:
    """The images of a split, class by class."""

    encoding: Encoding
    rows: dict[int, np.ndarray]  # class → its rows of the encoding
    images: np.ndarray  # [n] row → image number of the pack
    bytes: int
    on_disk: bool


def encode_split(
    model: Model, pack: Pack, split: str, *, memory: int | None = None, progress: Progress | None = None
) -> Encoded:
    """Encode each image of a split once. More than `memory` bytes (half of what is free) go to a temporary file."""
    if pack.size != model.config.image_size:
        raise DataError(f"{pack.path} holds images of {pack.size} px, the model wants {model.config.image_size} px")
    members = pack.by_class(split)
    numbers = np.concatenate(list(members.values()))
    store: dict[str, Tensor] = {}
    size, on_disk = 0, False
    for start in range(0, len(numbers), TOGETHER):
        batch = numbers[start : start + TOGETHER]
        if isinstance(pack, FeaturePack):
            found = model.encode_features(pack.maps(batch))
        else:
            found = model.encode(torch.from_numpy(pack.pixels(batch)).permute(0, 3, 1, 2))
        if not store:
            size = len(numbers) * sum(tensor[0].nbytes for tensor in found.values())
            on_disk = size > (free_memory() // 2 if memory is None else memory)
            store = {name: _allocate(tensor, len(numbers), on_disk) for name, tensor in found.items()}
        for name, tensor in found.items():
            store[name][start : start + len(batch)] = tensor
        if progress:
            progress(start + len(batch), len(numbers), "encoding")
    ends = np.cumsum([len(images) for images in members.values()])
    rows = {name: np.arange(end - len(images), end) for (name, images), end in zip(members.items(), ends, strict=True)}
    return Encoded(Encoding(**store), rows, numbers, size, on_disk)


def _allocate(like: Tensor, count: int, on_disk: bool) -> Tensor:
    shape = (count, *like.shape[1:])
    if not on_disk:
        return torch.empty(shape, dtype=like.dtype)
    with tempfile.TemporaryFile(prefix="parseshot-") as file:  # has no name, so nothing is left when we are killed
        kind = like.cpu().numpy().dtype
        reserve(file.fileno(), int(np.prod(shape)) * kind.itemsize, str(Path(tempfile.gettempdir()) / "encodings"))
        return torch.from_numpy(np.memmap(file, dtype=kind, mode="r+", shape=shape))


def free_memory() -> int:
    """Bytes a process may still take: of the machine, or of its container where that is less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4 << 30
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].strip().isdigit():
        free = min(free, max(0, int(limit[0]) - int(used[0])))
    return free


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return []
