"""From a photo, however it is given, to the square a model sees: read, the object in it found, cropped."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from parseshot.data.names import printable
from parseshot.data.photo import Photo, Square, open_photo, read_bytes, take_image, to_square
from parseshot.engine.model import Model
from parseshot.errors import PhotoError
from parseshot.methods.base import Encoding
from parseshot.recognition.finding import find_objects
from parseshot.recognition.records import Box

PhotoSource: TypeAlias = Path | str | bytes | IO[bytes] | Image.Image | np.ndarray


class Item(NamedTuple):
    """A photo to enroll or to recognise."""

    source: PhotoSource
    name: str = ""  # what to call it; its path where it has one
    box: Box | None = None  # left, top, right, bottom in its pixels, where the object is known to be


class Given(NamedTuple):
    """A photo that was read."""

    source: str  # what to call it
    image: Image.Image  # upright, RGB
    sha256: str  # of the file, or of the pixels where there is none
    notes: tuple[str, ...]


class Look(NamedTuple):
    """What a model is shown of a photo."""

    square: Square
    box: Box  # of the photo, in its pixels (edges)
    how: str  # "given", "found" or "whole"


class Seen(NamedTuple):
    """What is kept of a photo that was looked at: a square, not the picture, which may be a hundred times as large."""

    source: str
    sha256: str
    notes: tuple[str, ...]
    size: tuple[int, int]  # width and height
    look: Look


def read_photo(source: PhotoSource, name: str = "", *, lenient: bool = False) -> Given:
    """A file by its path, bytes or open file, a PIL image, or an array [H, W, 3] (uint8, or floats from 0 to 1)."""
    if isinstance(source, np.ndarray):
        return _of_pixels(take_image(_from_array(source, name or "the array"), name or "the array"), name or "array")
    if isinstance(source, Image.Image):
        return _of_pixels(take_image(source, name or "the picture"), name or "picture")
    if not isinstance(source, (str, Path, bytes)) and not hasattr(source, "read"):
        raise PhotoError("E_FORMAT", f"{name or 'the photo'} is a {type(source).__name__}, which is not a picture")
    name = name or (str(source) if isinstance(source, (str, Path)) else getattr(source, "name", "") or "the picture")
    data = read_bytes(source, name)
    photo = open_photo(data, str(name), lenient=lenient)
    return Given(printable(str(name)), photo.image, hashlib.sha256(data).hexdigest(), photo.notes)


def _of_pixels(photo: Photo, name: str) -> Given:
    seen = hashlib.sha256(f"{photo.image.size}".encode() + photo.image.tobytes()).hexdigest()
    return Given(name, photo.image, seen, photo.notes)


def _from_array(pixels: np.ndarray, name: str) -> Image.Image:
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (3, 4)):
        raise PhotoError("E_FORMAT", f"{name} has the shape {list(pixels.shape)}; a picture is [H, W, 3]")
    if np.issubdtype(pixels.dtype, np.floating):
        if not np.isfinite(pixels).all():
            raise PhotoError("E_FORMAT", f"{name} holds NaN or infinity; give pixels from 0 to 1")
        if pixels.min() < 0 or pixels.max() > 1:
            raise PhotoError("E_FORMAT", f"{name} holds floats from {pixels.min():g} to {pixels.max():g}, not 0 to 1")
        pixels = np.rint(pixels * 255).astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise PhotoError("E_FORMAT", f"{name} holds {pixels.dtype}; a picture is uint8, or floats from 0 to 1")
    return Image.fromarray(np.ascontiguousarray(pixels))


def look(
    model: Model, images: Sequence[Image.Image], boxes: Sequence[Box | None] | None = None, *, find: bool
) -> list[Look]:
    """What the model is to see of each photo: a box that is given, else the object if it is to be found, else all.

    A box that is given has been through `inside`.
    """
    boxes = boxes or [None] * len(images)
    wanted = [number for number, box in enumerate(boxes) if box is None] if find else []
    found = dict(zip(wanted, find_objects([images[number] for number in wanted]), strict=True))
    looks = []
    for number, (image, given) in enumerate(zip(images, boxes, strict=True)):
        box = found.get(number) if given is None else given
        how = "whole" if box is None else "given" if given is not None else "found"
        square = to_square(image, model.config.image_size, box)
        looks.append(Look(square, box or (0.0, 0.0, float(image.width), float(image.height)), how))
    return looks


def encode_looks(model: Model, looks: Sequence[Look]) -> Encoding:
    """Of what is shown of each photo."""
    return model.encode(_as_bytes([seen.square.pixels for seen in looks]))


def _as_bytes(squares: Sequence[np.ndarray]) -> Tensor:
    """uint8 [n, 3, H, W], channels_last in memory: a backbone normalises bytes by itself, in one pass."""
    return torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2)


def inside(box: Box, image: Image.Image, name: str) -> Box:
    """What of a box lies in a photo."""
    if len(box) != 4:
        raise PhotoError("E_BOX", f"{name}: a box is left, top, right, bottom, not {list(box)}")
    left, top, right, bottom = (float(edge) for edge in box)
    cut = max(0.0, left), max(0.0, top), min(float(image.width), right), min(float(image.height), bottom)
    if not (np.isfinite((left, top, right, bottom)).all() and cut[2] - cut[0] >= 1 and cut[3] - cut[1] >= 1):
        raise PhotoError(
            "E_BOX",
            f"{name}: the box {list(box)} (left, top, right, bottom) is not in a photo of {image.width}×{image.height}",
        )
    return cut
