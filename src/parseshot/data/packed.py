"""A prepared data set: one directory of memory-mapped arrays and an index, written whole or not at all."""

import csv
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parseshot.data.names import csv_cell, printable
from parseshot.data.split import SPLITS
from parseshot.data.staging import staging
from parseshot.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA_VERSION = 2
INDEX, FILES = "pack.json", "files.json"


class Pack:
    """Read access to a prepared directory.

    images: uint8 [n, H, H, 3], memory-mapped; H is `stored`, the model sees the `size` pixels in its middle.
    labels: [n], index into `classes`. splits: base, val or novel a class. boxes: [n, 4] as left, top, right, bottom.
    parts: [n, P, 3] as (x, y, visible). Both in pixels of the middle; the centre of its top left pixel is (0, 0).
    twins: [m, 3], pairs of images of the same photo or nearly so (first < second), and 1 where the file is the same.
    official_train: [n], 1 where the data set's own division of images says "train".
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        index = _read_index(self.path)
        self.name: str = index["name"]
        self.size: int = index["size"]
        self.classes: list[str] = index["classes"]
        self.splits: list[str] = index["splits"]
        self.split: dict[str, str] = index["split"]  # name and fingerprint
        self.part_names: list[str] = index["part_names"]
        self.provenance: dict[str, Any] = index["provenance"]
        self.problems: list[dict[str, str]] = index["problems"]
        self.warnings: list[str] = index["warnings"]
        self.fingerprint: str = index["fingerprint"]
        self.checksums: dict[str, str] = {name: entry["sha256"] for name, entry in index["arrays"].items()}
        arrays = {name: _read_array(self.path, name, entry) for name, entry in index["arrays"].items()}
        self.images, self.labels = arrays["images"], np.asarray(arrays["labels"])
        self.stored: int = self.images.shape[1]
        self.parts, self.boxes = arrays.get("parts"), arrays.get("boxes")
        self.official_train = arrays.get("official_train")
        self.twins = np.asarray(arrays.get("twins", np.zeros((0, 3), dtype=np.int64)))

    def __len__(self) -> int:
        return len(self.labels)

    @functools.cached_property
    def files(self) -> list[str]:
        """The name each image had in its source."""
        try:
            names = json.loads((self.path / FILES).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path / FILES} cannot be read ({error}); prepare the data again") from None
        return list(names)

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

    def class_counts(self) -> dict[str, int]:
        """Number of images of each class."""
        counts = np.bincount(self.labels, minlength=len(self.classes))
        return {name: int(count) for name, count in zip(self.classes, counts, strict=True)}

    def pixels(self, numbers: np.ndarray | Sequence[int], *, margin: bool = False) -> np.ndarray:
        """Images as uint8 [B, H, H, 3]: the middle, or all that is stored."""
        edge = 0 if margin else (self.stored - self.size) // 2
        side = self.stored if margin else self.size
        return np.ascontiguousarray(self.images[np.asarray(numbers), edge : edge + side, edge : edge + side])

    def load(self, numbers: np.ndarray | Sequence[int], *, margin: bool = False) -> "Tensor":
        """`pixels` as float [B, 3, H, H] in [0, 1], channels_last in memory."""
        import torch  # here, because worker processes that prepare a pack need none

        return torch.from_numpy(self.pixels(numbers, margin=margin)).permute(0, 3, 1, 2).float().div_(255.0)

    def verify(self) -> None:
        """Compare every array with its checksum."""
        for name, expected in self.checksums.items():
            if sha256(self.path / f"{name}.npy") != expected:
                raise DataError(f"{self.path / f'{name}.npy'} does not match its checksum; prepare the data again")

    def record(self) -> dict[str, Any]:
        """What a checkpoint or a result says about its data."""
        return {"name": self.name, "fingerprint": self.fingerprint, "size": self.size, "split": self.split}

    def write_table(self, file: Path) -> None:
        """All images as CSV: number, path, label, split."""
        with file.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            writer.writerow(("number", "path", "label", "split"))
            for number, (name, label) in enumerate(zip(self.files, self.labels.tolist(), strict=True)):
                writer.writerow((number, csv_cell(name), csv_cell(self.classes[label]), self.splits[label]))


def write_pack(
    path: Path | str,
    *,
    name: str,
    arrays: Mapping[str, np.ndarray],
    classes: Sequence[str],
    splits: Sequence[str],
    split: Mapping[str, str],
    part_names: Sequence[str] = (),
    files: Sequence[str] | None = None,
    provenance: Mapping[str, Any],
) -> Pack:
    """Write a prepared directory from arrays in memory."""
    path = Path(path)
    refuse_existing(path)
    with staging(path) as folder:
        for array_name, array in arrays.items():
            save_array(folder, array_name, array)
        write_index(
            folder,
            name=name,
            size=int(arrays["images"].shape[1]),
            classes=classes,
            splits=splits,
            split=split,
            part_names=part_names,
            files=[f"{number:06d}" for number in range(len(arrays["labels"]))] if files is None else files,
            provenance=provenance,
        )
    return Pack(path)


def save_array(folder: Path, name: str, array: np.ndarray) -> None:
    with (folder / f"{name}.npy").open("wb") as stream:
        np.save(stream, np.ascontiguousarray(array), allow_pickle=False)


def write_index(
    folder: Path,
    *,
    name: str,
    size: int,
    classes: Sequence[str],
    splits: Sequence[str],
    split: Mapping[str, str],
    part_names: Sequence[str],
    files: Sequence[str],
    provenance: Mapping[str, Any],
    problems: Sequence[Mapping[str, str]] = (),
    warnings: Sequence[str] = (),
    checksums: Mapping[str, str] | None = None,
) -> None:
    """Describe the arrays that lie in a folder. The fingerprint covers all of it, pixels included.

    checksums: of arrays for which they are known already.
    """
    entries: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("*.npy")):
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        entries[file.stem] = {"shape": list(array.shape), "dtype": str(array.dtype)}
        entries[file.stem]["sha256"] = (checksums or {}).get(file.stem) or sha256(file)
    (folder / FILES).write_text(json.dumps([printable(one) for one in files], indent=0) + "\n", encoding="utf-8")
    index: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "size": size,
        "classes": list(classes),
        "splits": list(splits),
        "split": dict(split),
        "part_names": list(part_names),
        "provenance": dict(provenance),
        "problems": [dict(problem) for problem in problems],
        "warnings": list(warnings),
        "arrays": entries,
    }
    index["fingerprint"] = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()[:16]
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def refuse_existing(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"{path} exists and is not empty; remove it or choose another --out")


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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
        raise DataError(
            f"{path / INDEX} has schema_version {version!r}, this parseshot reads {SCHEMA_VERSION}; prepare it again"
        )
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
