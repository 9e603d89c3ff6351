"""From photos that were read to photos that a gallery takes: reduced, without metadata, encoded, hashed."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from parseshot.data.duplicates import BITS, differing_bits, perceptual_hashes, same_photo
from parseshot.data.photo import open_photo, to_square
from parseshot.engine.model import Model
from parseshot.recognition.answer import Twin
from parseshot.recognition.gallery import stored_picture
from parseshot.recognition.looking import Given, encode_looks, look
from parseshot.recognition.records import Box, NewPhoto
from parseshot.recognition.snapshot import Snapshot

STORED_SIDE = 1024  # pixels of the longer side of a photo as it is kept
HASHED = 72  # pixels of the side of the picture that a perceptual hash is taken of


class ToStore(NamedTuple):
    """A photo that was read, as it will be stored, with the class it is to be in."""

    class_name: str
    source: str
    sha256: str
    notes: tuple[str, ...]
    picture: bytes
    image: Image.Image  # of these bytes
    box: Box | None  # in its pixels


def to_store(class_name: str, given: Given, box: Box | None) -> ToStore:
    picture = stored_picture(_reduced(given.image))
    image = open_photo(picture, given.source).image
    scaled = _scaled(box, given.image, image)
    return ToStore(class_name, given.source, given.sha256, given.notes, picture, image, scaled)


def new_photos(model: Model, stored: Sequence[ToStore], *, find: bool) -> list[NewPhoto]:
    """What is encoded is what will be stored, so that encoding it again gives the same bits."""
    images = [one.image for one in stored]
    looks = look(model, images, [one.box for one in stored], find=find)
    encoding = encode_looks(model, looks)
    hashes = perceptual_hashes(np.stack([to_square(image, HASHED).pixels for image in images])).tolist()
    return [
        NewPhoto(
            one.class_name,
            one.source,
            one.sha256,
            (hashes[row][0], hashes[row][1]),
            one.image.width,
            one.image.height,
            one.picture,
            encoding.take(slice(row, row + 1)),
            None if seen.how == "whole" else seen.box,
            (*one.notes, f"box {seen.how}") if seen.how != "whole" else one.notes,
        )
        for row, (one, seen) in enumerate(zip(stored, looks, strict=True))
    ]


def _reduced(image: Image.Image) -> Image.Image:
    """No larger than it is kept."""
    factor = STORED_SIDE / max(image.size)
    if factor >= 1:
        return image
    size = max(1, round(image.width * factor)), max(1, round(image.height * factor))
    return image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)


def _scaled(box: Box | None, before: Image.Image, after: Image.Image) -> Box | None:
    if box is None:
        return None
    across, down = after.width / before.width, after.height / before.height
    return box[0] * across, box[1] * down, box[2] * across, box[3] * down


def find_twins(new: Sequence[NewPhoto], snapshot: Snapshot, picture: Callable[[int], bytes]) -> list[Twin]:
    """New photos that look like an enrolled one, or like one before them: resized, compressed again or mirrored.

    Hashes name the candidates; the pictures, those of the gallery by `picture`, decide.
    """
    there = len(snapshot.photos)
    hashes = np.concatenate((snapshot.hashes, np.array([one.hashes for one in new], dtype=np.uint64).reshape(-1, 2)))
    found = []
    for at, photo in enumerate(new):
        before = hashes[: there + at, 0]
        apart = np.minimum(*(differing_bits(before ^ np.uint64(own)) for own in photo.hashes))
        for row in np.flatnonzero(apart <= BITS).tolist():
            other = new[row - there] if row >= there else None
            data = picture(int(snapshot.photos[row])) if other is None else other.picture
            if not same_photo(_square(photo.picture), _square(data)):
                continue
            if other is None:
                name = snapshot.classes[int(snapshot.labels[row])].name
                found.append(Twin(photo.source, photo.class_name, int(snapshot.photos[row]), name))
            else:
                found.append(Twin(photo.source, photo.class_name, None, other.class_name, other.source))
            break
    return found


def _square(data: bytes) -> np.ndarray:
    return to_square(open_photo(data).image, HASHED).pixels
