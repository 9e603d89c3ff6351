"""A frozen backbone's feature maps of a pack, worked out once: methods then train and are evaluated in minutes.

Stored are the plain view of every image and, for training, a few augmented views of the base images, as float16 in one
memory-mapped file. Its directory is named after a fingerprint of the weights, the pack and the views.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parseshot.backbones.base import digest
from parseshot.data.augment import Augmentation, augment
from parseshot.data.packed import Pack
from parseshot.data.staging import only_one, replace_file, reserve, sync
from parseshot.engine.model import BATCH, Model
from parseshot.errors import DataError, UsageError

SCHEMA_VERSION = 1
INDEX, MAPS, PARTIAL = "features.json", "maps.npy", "maps.partial"
ROWS = 64  # maps between two looks at the clock; augmentation draws by such groups, so a resumed run draws the same
SAVED_EVERY = 20.0  # seconds
Progress = Callable[[int, int, str], None]  # (done, total, of what)


class FeaturePack(Pack):
    """A pack whose images have been through the backbone already. Everything else is the pack's own."""

    def __init__(self, pack: Path | str, folder: Path) -> None:
        super().__init__(pack)
        index = _read_index(folder)
        self.folder, self.views = folder, int(index["views"])
        self.first_view = np.full(len(self), -1)  # image → its row among the base images
        base = base_images(self)
        self.first_view[base] = np.arange(len(base))
        self.maps_file = _open_maps(folder / MAPS, index["shape"])
        self.base = len(base)

    def rows(self, numbers: np.ndarray, views: np.ndarray) -> np.ndarray:
        """Where the maps of these images in these views lie."""
        places = self.first_view[numbers]
        if (views > 0).any() and (places[views > 0] < 0).any():
            raise UsageError("only base images have augmented views")
        return np.where(views > 0, len(self) + (views - 1) * self.base + places, numbers)

    def maps(self, numbers: np.ndarray, views: np.ndarray | int = 0) -> Tensor:
        """Feature maps [B, C, G, G] of images, channels_last in memory; view 0 is the plain image."""
        rows = self.rows(np.asarray(numbers), np.broadcast_to(views, len(numbers)))
        return torch.from_numpy(self.maps_file[rows]).permute(0, 3, 1, 2).float()

    def draw_views(self, count: int, *, seed: int, step: int) -> np.ndarray:
        """A view for each of a training step's images."""
        return np.random.default_rng((seed, step)).integers(self.views + 1, size=count)


def base_images(pack: Pack) -> np.ndarray:
    return np.sort(np.concatenate(list(pack.by_class("base").values())))


def cached(
    model: Model,
    pack: Pack,
    folder: Path | str,
    *,
    views: int = 0,
    augmentation: Augmentation | None = None,
    progress: Progress | None = None,
) -> FeaturePack:
    """The pack with its feature maps, made in `folder` if they are not there; a broken-off try is gone on with."""
    if any(weight.requires_grad for weight in model.backbone.parameters()):
        raise UsageError(f"backbone {model.config.backbone} is trained; only a frozen one's features can be kept")
    if pack.size != model.config.image_size:
        raise DataError(f"{pack.path} holds images of {pack.size} px, the model wants {model.config.image_size} px")
    augmentation = augmentation or Augmentation()
    key = {
        "schema_version": SCHEMA_VERSION,
        "backbone": model.config.backbone,
        "weights": digest(model.backbone.state_dict()),
        "pack": pack.fingerprint,
        "views": views,
        "augmentation": augmentation.model_dump(mode="json") if views > 1 else None,
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    target = Path(folder) / name
    if not (target / INDEX).exists():
        target.mkdir(parents=True, exist_ok=True)
        with only_one(target / ".lock", f"{target}: another process is making these features"):
            if not (target / INDEX).exists():
                _make(model, pack, target, key, augmentation, progress)
    return FeaturePack(pack.path, target)


@torch.inference_mode()
def _make(
    model: Model, pack: Pack, target: Path, key: dict[str, Any], augmentation: Augmentation, progress: Progress | None
) -> None:
    model.eval()
    jobs = [(0, np.arange(len(pack)))] + [(view, base_images(pack)) for view in range(1, key["views"] + 1)]
    groups = [
        (view, start, images[start : start + ROWS]) for view, images in jobs for start in range(0, len(images), ROWS)
    ]
    total = sum(len(images) for _, images in jobs)
    size, channels = model.grid, model.backbone.out_channels
    shape = (total, size, size, channels)
    file = target / PARTIAL
    done = _done_before(target, file, shape)
    if done == 0:
        with file.open("wb") as stream:
            reserve(stream.fileno(), int(np.prod(shape)) * 2, str(file))
    store = np.memmap(file, dtype=np.float16, mode="r+", shape=shape)
    row, saved = 0, time.monotonic()
    for view, start, images in groups:
        if row >= done:
            pixels = _view(pack, images, view, start, augmentation)
            maps = [
                model.backbone(part.to(model.device).contiguous(memory_format=torch.channels_last))
                for part in pixels.split(BATCH)
            ]
            found = torch.cat(maps).permute(0, 2, 3, 1).half().cpu().numpy()
            if not np.isfinite(found).all():
                raise DataError(f"{pack.path}: features beyond the range of float16, e.g. of {pack.files[images[0]]}")
            store[row : row + len(images)] = found
            if time.monotonic() - saved > SAVED_EVERY:
                store.flush()
                replace_file(target / "progress.json", json.dumps({"shape": shape, "done": row + len(images)}).encode())
                saved = time.monotonic()
        row += len(images)
        if progress:
            progress(row, total, "features")
    store.flush()
    del store
    sync(file)
    os.replace(file, target / MAPS)
    index = {**key, "shape": shape, "pack_name": pack.name, "backbone_options": model.config.backbone_options}
    replace_file(target / INDEX, (json.dumps(index, indent=1) + "\n").encode())
    (target / "progress.json").unlink(missing_ok=True)


def _view(pack: Pack, images: np.ndarray, view: int, start: int, augmentation: Augmentation) -> Tensor:
    """Pixels of a view, uint8 [B, 3, H, W]: 0 plain, 1 its mirror image, the others drawn like training's."""
    if view > 1:
        pixels = pack.pixels(images, margin=augmentation.margin)
        return augment(pixels, augmentation, size=pack.size, seed=view, step=start)
    plain = torch.from_numpy(pack.pixels(images)).permute(0, 3, 1, 2)
    return plain.flip(-1) if view else plain


def _done_before(target: Path, file: Path, shape: tuple[int, ...]) -> int:
    """Rows that an earlier try has written for certain."""
    try:
        told = json.loads((target / "progress.json").read_text(encoding="utf-8"))
        if tuple(told["shape"]) == shape and file.stat().st_size == int(np.prod(shape)) * 2:
            return int(told["done"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return 0


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["schema_version"] == SCHEMA_VERSION:
            return dict(index)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise DataError(f"{folder} does not hold features of this parseshot; remove it, they are made again")


def _open_maps(file: Path, shape: list[int]) -> np.ndarray:
    try:
        if file.stat().st_size != int(np.prod(shape)) * 2:
            raise OSError("it has another size than its index says")
        return np.memmap(file, dtype=np.float16, mode="r", shape=tuple(shape))
    except OSError as error:
        raise DataError(f"{file} cannot be used ({error}); remove {file.parent}, it is made again") from None
