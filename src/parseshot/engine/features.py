"""A frozen backbone's feature maps of a pack, worked out once: methods then train and are evaluated in minutes.

A directory named after the weights and the pack holds the maps of the plain images, for evaluation, and beside them
those of augmented views of the base images, for training, and of one that is moved, where that is asked for: float16,
memory-mapped, with an index that is written last.
"""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parseshot.backbones.base import digest, turned
from parseshot.data.augment import SCALE, SHIFT, TURN, Augmentation, augment, draw_warps, move_photos
from parseshot.data.packed import Pack
from parseshot.data.staging import only_one, replace_file, reserve, sync
from parseshot.engine.model import BATCH, Model
from parseshot.errors import DataError, UsageError
from parseshot.methods import Pairs

SCHEMA_VERSION = 1
PLAIN, MIRRORED = "plain", "mirrored"  # maps for evaluation: of the image, or its mean with its mirror image
MOVED, MOVED_SEED = -1, 1  # a view beside the numbered ones: the photo turned, scaled and shifted
ROWS = 64  # maps between two looks at the clock; augmentation draws by such groups, so a resumed run draws the same
SAVED_EVERY = 20.0  # seconds
Progress = Callable[[int, int, str], None]  # (done, total, of what)


class FeaturePack(Pack):
    """A pack whose images have been through the backbone already. Everything else is the pack's own."""

    def __init__(
        self,
        pack: Path | str,
        folder: Path,
        views: int = 0,
        *,
        others: str = "",
        plain: str = PLAIN,
        warped: str = "",
    ) -> None:
        """`views` in all; those that do not follow from the plain maps are in the file `others`.

        The file `warped`, if there is one, has the maps of the base images moved.
        """
        super().__init__(pack)
        self.plain, index = _open(folder, plain)  # [n, G, G, C]
        self.channels = int(index.get("channels") or self.plain.shape[-1])  # without those of a packed finer map
        self.others = _open(folder, others)[0] if others else None  # [V' · base images, G, G, C]
        self.warped = _open(folder, warped)[0] if warped else None  # [base images, G, G, C]
        base = base_images(self)
        self.views, self.base = views, len(base)
        self.turned = views - (0 if self.others is None else len(self.others) // len(base))  # 1: view 1 is plain turned
        self.place = np.full(len(self), -1)  # image → where it is among the base images
        self.place[base] = np.arange(len(base))

    def maps(self, numbers: np.ndarray, views: np.ndarray | None = None) -> Tensor:
        """Feature maps [B, C, G, G] of images, channels_last in memory; plain, or in a view each: 0 is plain."""
        numbers = np.asarray(numbers)
        if views is None or not views.any():
            found = self.plain[numbers]
        else:
            places = self.place[numbers]
            if (places[views > 0] < 0).any():
                raise UsageError("only base images have augmented views")
            found = np.empty((len(numbers), *self.plain.shape[1:]), dtype=np.float16)
            stored = views > self.turned
            found[~stored] = self.plain[numbers[~stored]]
            if self.others is not None:
                found[stored] = self.others[((views - 1 - self.turned) * self.base + places)[stored]]
        maps = torch.from_numpy(found).permute(0, 3, 1, 2).float()
        if views is not None and self.turned:
            mirrored = torch.from_numpy(views == 1)
            maps[mirrored] = turned(maps[mirrored], self.channels)
        return maps

    def pairs(self, numbers: np.ndarray, views: np.ndarray) -> Pairs:
        """Maps of base images and of the same images moved, both turned where the view is the plain one turned."""
        assert self.warped is not None, "ask `cached` for warps"
        turn = torch.from_numpy((views == 1) & (self.turned == 1))
        warped = torch.from_numpy(self.warped[self.place[numbers]]).permute(0, 3, 1, 2).float()
        warped[turn] = turned(warped[turn], self.channels)
        warps = draw_warps(numbers, MOVED_SEED)
        warps = torch.where(turn[:, None, None], warps * torch.tensor([[1.0, -1.0, -1.0], [-1.0, 1.0, 1.0]]), warps)
        return Pairs(self.maps(numbers, turn.numpy().astype(int)), warped, warps)

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
    warps: bool = False,
    progress: Progress | None = None,
) -> FeaturePack:
    """The pack with its feature maps, made in `folder` if they are not there; a broken-off try is gone on with.

    With `warps`, those of each base image moved too.
    """
    if any(weight.requires_grad for weight in model.backbone.parameters()):
        raise UsageError(f"backbone {model.config.backbone} is trained; only a frozen one's features can be kept")
    if pack.size != model.config.image_size:
        raise DataError(f"{pack.path} holds images of {pack.size} px, the model wants {model.config.image_size} px")
    weights = digest(model.backbone.state_dict())
    paired = ["paired"] if model.backbone.fine_channels else []
    target = Path(folder) / f"{model.config.backbone}-{_short(weights, pack.fingerprint, *paired)}"
    about = {
        "schema_version": SCHEMA_VERSION,
        "backbone": model.config.backbone,
        "backbone_options": model.config.backbone_options,
        "channels": model.backbone.out_channels,
        "weights": weights,
        "pack": pack.record(),
    }
    plain = MIRRORED if model.config.mirrored else PLAIN
    _ensure(model, pack, target, plain, [(0, np.arange(len(pack)))], Augmentation(), about, progress)
    warped = ""
    if warps:
        ranges = {"seed": MOVED_SEED, "turn": TURN, "scale": SCALE, "shift": SHIFT}
        warped = f"warped-{_short(plain, json.dumps(ranges))}"
        groups = [(MOVED, base_images(pack))]
        _ensure(model, pack, target, warped, groups, Augmentation(), about | {"warps": ranges}, progress)
    augmentation = augmentation or Augmentation()
    first = 2 if model.config.mirrored and augmentation.flip else 1  # a mean over both sides has its mirror image in it
    if views < first:
        return FeaturePack(pack.path, target, views, plain=plain, warped=warped)
    drawn = "" if views == 1 and augmentation.flip else augmentation.model_dump_json()  # the mirror image is not drawn
    name = f"views-{_short(str(views), drawn, *(['turned'] if first == 2 else []))}"
    groups = [(view, base_images(pack)) for view in range(first, views + 1)]
    about |= {"views": views, "augmentation": augmentation.model_dump(mode="json")}
    _ensure(model, pack, target, name, groups, augmentation, about, progress)
    return FeaturePack(pack.path, target, views, others=name, plain=plain, warped=warped)


def _short(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def _ensure(
    model: Model,
    pack: Pack,
    target: Path,
    name: str,
    jobs: list[tuple[int, np.ndarray]],
    augmentation: Augmentation,
    about: dict[str, Any],
    progress: Progress | None,
) -> None:
    """Make the maps of these images in these views, unless they are there or another process is just making them."""
    if (target / f"{name}.json").exists():
        return
    target.mkdir(parents=True, exist_ok=True)
    with only_one(target / ".lock", f"{target}: another process is at work here", wait=True):
        if not (target / f"{name}.json").exists():
            channels = model.backbone.out_channels + 4 * model.backbone.fine_channels
            shape = (sum(len(images) for _, images in jobs), model.grid, model.grid, channels)
            file = target / f"{name}.partial"
            _fill(model, pack, file, shape, jobs, augmentation, progress)
            file.replace(target / f"{name}.maps")
            text = json.dumps({**about, "shape": shape}, indent=1) + "\n"
            replace_file(target / f"{name}.json", text.encode())
            file.with_suffix(".done").unlink(missing_ok=True)


@torch.inference_mode()
def _fill(
    model: Model,
    pack: Pack,
    file: Path,
    shape: tuple[int, ...],
    jobs: list[tuple[int, np.ndarray]],
    augmentation: Augmentation,
    progress: Progress | None,
) -> None:
    model.eval()
    done = _done_before(file, shape)
    if done == 0:
        with file.open("wb") as stream:
            reserve(stream.fileno(), int(np.prod(shape)) * 2, str(file))
    store = np.memmap(file, dtype=np.float16, mode="r+", shape=shape)
    row, saved = 0, time.monotonic()
    for view, at, images in [
        (view, at, whole[at : at + ROWS]) for view, whole in jobs for at in range(0, len(whole), ROWS)
    ]:
        if row >= done:
            pixels = _view(pack, images, view, at, augmentation)
            look = model.backbone if view > 0 else model.features  # training sees each view as it is
            maps = [
                look(part.to(model.device).contiguous(memory_format=torch.channels_last))
                for part in pixels.split(BATCH)
            ]
            found = torch.cat(maps).permute(0, 2, 3, 1).half().cpu().numpy()
            if not np.isfinite(found).all():
                raise DataError(f"{pack.path}: features beyond the range of float16, e.g. of {pack.files[images[0]]}")
            store[row : row + len(images)] = found
            if time.monotonic() - saved > SAVED_EVERY:
                store.flush()
                told = {"shape": shape, "done": row + len(images)}
                replace_file(file.with_suffix(".done"), json.dumps(told).encode())
                saved = time.monotonic()
        row += len(images)
        if progress:
            progress(row, shape[0], "features")
    store.flush()
    del store
    sync(file)


def _view(pack: Pack, images: np.ndarray, view: int, at: int, augmentation: Augmentation) -> Tensor:
    """Pixels of a view, uint8 [B, 3, H, W]: 0 plain, 1 its mirror image if flips are meant, the others as drawn.

    MOVED is the plain one turned, scaled and shifted.
    """
    if view == MOVED:
        return move_photos(pack.pixels(images), draw_warps(images, MOVED_SEED))
    if view > 1 or (view == 1 and not augmentation.flip):
        pixels = pack.pixels(images, margin=augmentation.margin)
        return augment(pixels, augmentation, size=pack.size, seed=view, step=at)
    plain = torch.from_numpy(pack.pixels(images)).permute(0, 3, 1, 2)
    return plain.flip(-1) if view else plain


def _done_before(file: Path, shape: tuple[int, ...]) -> int:
    """Rows that an earlier try has written for certain."""
    try:
        told = json.loads(file.with_suffix(".done").read_text(encoding="utf-8"))
        if tuple(told["shape"]) == shape and file.stat().st_size == int(np.prod(shape)) * 2:
            return int(told["done"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return 0


def _open(folder: Path, name: str) -> tuple[np.ndarray, dict[str, Any]]:
    file = folder / f"{name}.maps"
    try:
        index = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        if index["schema_version"] != SCHEMA_VERSION or file.stat().st_size != int(np.prod(index["shape"])) * 2:
            raise ValueError("it is not what its index says")
        return np.memmap(file, dtype=np.float16, mode="r", shape=tuple(index["shape"])), index
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be used ({error}); remove {folder}, it is made again") from None
