"""One picture from its source into the pack: decoded, cropped, resized, written. Light: worker processes import it."""

import hashlib
import os
from typing import NamedTuple

import numpy as np

from parseshot.data.photo import open_photo, to_square
from parseshot.data.source import Place, close_archives, read
from parseshot.errors import PhotoError

Box = tuple[float, float, float, float]
BANNER_WIDTH = 400  # narrower Aircraft photos are downsized copies, whose banner is not 20 rows: taken to have none
HEADER = 128  # bytes of an .npy header, padded


class Rules(NamedTuple):
    """How the pictures of a data set are shown."""

    images: str  # the file to write into
    stored: int
    lenient: bool
    upright: bool
    crop: bool
    centre: bool  # show the middle square of a whole photo, as FRN does
    banner: int


class Task(NamedTuple):
    """What a worker needs to know of one picture."""

    rules: Rules
    row: int
    name: str
    place: Place
    box: Box | None


class Rendered(NamedTuple):
    """What a worker says of a picture it has written."""

    digest: bytes
    region: Box  # of the photo, that is shown: left, top, width, height
    box: Box | None  # inside the photo
    notes: tuple[str, ...]


def render(task: Task) -> Rendered | tuple[str, str]:
    """Decode, crop, resize and write one picture; or (code, message)."""
    rules, _, name, place, box = task
    try:
        data = read(place)
        image, notes = open_photo(data, name, lenient=rules.lenient, upright=rules.upright)
        foot = image.height - (rules.banner if image.width >= BANNER_WIDTH else 0)
        if box is not None:
            inside = (max(box[0], 0.0), max(box[1], 0.0), min(box[2], float(image.width)), min(box[3], float(foot)))
            if inside[2] - inside[0] < 1 or inside[3] - inside[1] < 1:
                raise PhotoError("E_BOX", f"{name}: the box {box} lies outside the {image.width}×{foot} picture")
            if inside != box:
                notes = (*notes, "box reaches past the edge; clamped")
            box = inside
        shown = box if rules.crop else _middle(image.width, foot) if rules.centre else None
        pixels, *region = to_square(image, rules.stored, shown)
        _write_row(task, pixels)
        left, top, width, height = region
        return Rendered(hashlib.sha256(data).digest(), (left, top, width, height), box, notes)
    except PhotoError as error:
        return error.code, str(error)
    except OSError as error:  # of the output
        return "E_OUTPUT", f"{rules.images}: {error.strerror or error}"


def _middle(width: int, height: int) -> tuple[float, float, float, float]:
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _write_row(task: Task, pixels: np.ndarray) -> None:
    handle = _handle(task.rules.images)
    view, offset = np.ascontiguousarray(pixels).data.cast("B"), HEADER + task.row * pixels.nbytes
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written


_handles: dict[str, int] = {}  # one open file a worker process


def _handle(path: str) -> int:
    if path not in _handles:
        _handles[path] = os.open(path, os.O_WRONLY)
    return _handles[path]


def close_files() -> None:
    """Let go of the output and of archives, in a process that goes on."""
    close_archives()
    while _handles:
        os.close(_handles.popitem()[1])
