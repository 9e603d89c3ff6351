"""A prepared data set: one directory of memory-mapped arrays and an index, written whole or not at all."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parseshot.errors import DataError

SCHEMA_VERSION = 1
INDEX = "pack.json"
SPLITS = ("base", "val", "novel")


class Pack:
    """Read access to a prepared directory.

    images: uint8 [n, H, W, 3], memory-mapped. labels: [n], index into `classes`. splits: base, val or novel a class.
    parts: float32 [n, P, 3] as (x, y, visible) in pixels of the image, the centre of the top left pixel at (0, 0).
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        index = _read_index(self.path)
        self.name: str = index["name"]
        self.size: int = index["size"]
        self.classes: list[str] = index["classes"]
        self.splits: list[str] = index["splits"]
        self.part_names: list[str] = index["part_names"]
        self.provenance: dict[str, Any] = index["provenance"]
        self.fingerprint: str = index["fingerprint"]
        arrays = {name: _read_array(self.path, name, entry) for name, entry in index["arrays"].items()}
        self.images, self.labels = arrays["images"], np.asarray(arrays["labels"])
        self.parts, self.boxes = arrays.get("parts"), arrays.get("boxes")

    def __len__(self) -> int:
        return len(self.labels)

    def by_class(self, split: str) -> dict[int, np.ndarray]:
        """Image numbers of each class of a split: {class: [n_c]}."""
        if split not in SPLITS:
            raise DataError(f"unknown split {split!r}; {self.path} has {', '.join(SPLITS)}")
        classes = [number for number, name in enumerate(self.splits) if name == split]
        if not classes:
            raise DataError(f"{self.path} has no classes in split {split!r}")
        order = np.argsort(self.labels, kind="stable")
        bounds = np.searchsorted(self.labels[order], np.arange(len(self.classes) + 1))
        return {number: order[bounds[number] : bounds[number + 1]] for number in classes}

    def counts(self) -> dict[str, dict[str, int]]:
        """Number of classes and images of each split."""
        split_of_image = np.array(self.splits)[self.labels]
        return {
            split: {"classes": self.splits.count(split), "images": int((split_of_image == split).sum())}
            for split in SPLITS
        }

    def load(self, numbers: np.ndarray | Sequence[int]) -> Tensor:
        """Images as float [B, 3, H, W] in [0, 1], channels_last in memory."""
        pixels = torch.from_numpy(self.images[np.asarray(numbers)])  # [B, H, W, 3]
        return pixels.permute(0, 3, 1, 2).float().div_(255.0)


def write_pack(
    path: Path | str,
    *,
    name: str,
    arrays: Mapping[str, np.ndarray],
    classes: Sequence[str],
    splits: Sequence[str],
    part_names: Sequence[str] = (),
    provenance: Mapping[str, Any],
) -> Pack:
    """Write a prepared directory: into a temporary neighbour first, renamed when complete."""
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"{path} exists and is not empty; remove it or choose another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        entries = {}
        for array_name, array in arrays.items():
            file = temporary / f"{array_name}.npy"
            with file.open("wb") as stream:
                np.save(stream, np.ascontiguousarray(array), allow_pickle=False)
                stream.flush()
                os.fsync(stream.fileno())
            entries[array_name] = {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": _sha256(file)}
        index = {
            "schema_version": SCHEMA_VERSION,
            "name": name,
            "size": int(arrays["images"].shape[1]),
            "classes": list(classes),
            "splits": list(splits),
            "part_names": list(part_names),
            "provenance": dict(provenance),
            "arrays": entries,
        }
        index["fingerprint"] = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()[:16]
        (temporary / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        temporary.chmod(0o755)
        if path.exists():
            path.rmdir()
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Pack(path)


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{path} is not a prepared data set (no {INDEX}); make one with: parseshot data prepare"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path / INDEX} is damaged ({error}); prepare the data again") from None
    version = index.get("schema_version") if isinstance(index, dict) else None
    if version != SCHEMA_VERSION:
        raise DataError(f"{path / INDEX} has schema_version {version!r}, this parseshot reads {SCHEMA_VERSION}")
    return index


def _read_array(path: Path, name: str, entry: dict[str, Any]) -> np.ndarray:
    file = path / f"{name}.npy"
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{file} cannot be read ({error}); prepare the data again") from None
    if list(array.shape) != entry["shape"] or str(array.dtype) != entry["dtype"]:
        raise DataError(f"{file} is {array.dtype}{list(array.shape)}, the index says {entry['dtype']}{entry['shape']}")
    return array


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
