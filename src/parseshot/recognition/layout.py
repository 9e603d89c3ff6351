"""An encoding as bytes: all tensors of a photo one after the other, raw and little-endian.

Names, types and shapes are the same for all photos of a model and are kept once, so the bytes of many photos are joined
and copied into place without parsing each.
"""

import functools
import json
import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parseshot.errors import DataError, ModelError
from parseshot.methods.base import Encoding

SPARE = 64  # photos that there is room for beside a quarter of those that are there


class Part(NamedTuple):
    """One tensor of a photo's encoding."""

    name: str
    dtype: str  # "float32", …
    shape: tuple[int, ...]  # of one photo

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"no tensor has the type {self.dtype!r}")
        return found

    @property
    def size(self) -> int:
        """Bytes a photo."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Where in a photo's bytes each of its tensors lies: in the order of their names, without gaps."""

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, encoding: Encoding) -> "Layout":
        ordered = sorted(encoding.items())
        return cls(tuple(Part(name, str(t.dtype).removeprefix("torch."), tuple(t.shape[1:])) for name, t in ordered))

    @classmethod
    def from_json(cls, text: str, where: str) -> "Layout":
        """What `to_json` wrote; `where` names the gallery if it is not that."""
        try:
            layout = cls(tuple(Part(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(text)))
            if layout.size <= 0:
                raise ValueError("nothing is stored")
        except (ValueError, TypeError) as error:
            raise DataError(f"{where} is damaged: how its encodings are laid out cannot be read ({error})") from None
        return layout

    def to_json(self) -> str:
        return json.dumps(self.parts)

    @functools.cached_property
    def size(self) -> int:
        """Bytes a photo."""
        return sum(part.size for part in self.parts)

    def pack(self, encoding: Encoding, what: str) -> bytes:
        """The bytes of one photo's encoding; `what` names the photo if it does not fit."""
        given = Layout.of(encoding)
        if given != self:
            raise ModelError(f"{what}: its encoding holds {given}, those of this gallery hold {self}")
        if encoding.images != 1:
            raise ModelError(f"{what}: an encoding of {encoding.images} images where one is stored")
        return b"".join(_bytes(encoding[part.name]).tobytes() for part in self.parts)

    def unpack(self, count: int, pieces: Iterable[Sequence[bytes]]) -> "GrowingEncoding":
        """The encoding of `count` photos, whose bytes come in pieces of many photos."""
        room = _Room(self, count)
        places = [room.places[part.name] for part in self.parts]  # each [photos, bytes of the part]
        start = 0
        for piece in pieces:
            joined = np.frombuffer(b"".join(piece), np.uint8).reshape(len(piece), self.size)
            offset = 0
            for place in places:
                place[start : start + len(piece)] = joined[:, offset : offset + place.shape[1]]
                offset += place.shape[1]
            start += len(piece)
        return GrowingEncoding(room, count)

    def __str__(self) -> str:
        return ", ".join(f"{name} {dtype}{list(shape)}" for name, dtype, shape in self.parts)


class GrowingEncoding(Encoding):
    """An encoding with room behind it: to add photos, those that are there need not be copied."""

    def __init__(self, room: "_Room", count: int) -> None:
        super().__init__(**{name: tensor[:count] for name, tensor in room.tensors.items()})
        self._room = room

    def with_added(self, added: Encoding) -> "GrowingEncoding":
        """These photos and then the added ones; into the room behind, unless others were put there before."""
        count, more = self.images, added.images
        room = self._room if self._room.claim(count, count + more) else _Room(self._room.layout, count + more)
        for name, place in room.places.items():
            if room is not self._room:
                place[:count] = _bytes(self[name])
            place[count : count + more] = _bytes(added[name])
        return GrowingEncoding(room, count + more)

    def in_order(self, rows: Tensor) -> "GrowingEncoding":
        """A copy of some photos, in the order of rows [n]."""
        room = _Room(self._room.layout, len(rows))
        for name, place in room.places.items():
            np.take(_bytes(self[name]), rows.numpy(), axis=0, out=place[: len(rows)], mode="clip")
        return GrowingEncoding(room, len(rows))


class _Room:
    """Memory for the encodings of more photos than are there; what is not used yet costs nothing."""

    def __init__(self, layout: Layout, used: int) -> None:
        self.layout = layout
        self.tensors = {
            part.name: torch.empty(used + used // 4 + SPARE, *part.shape, dtype=part.torch_dtype)
            for part in layout.parts
        }
        self.places = {name: _bytes(tensor) for name, tensor in self.tensors.items()}  # each [photos, bytes]
        self._used, self._lock = used, threading.Lock()

    def claim(self, start: int, end: int) -> bool:
        """Take the rows start … end − 1 for oneself, if they are there and nobody did."""
        with self._lock:
            if start != self._used or end > min(len(tensor) for tensor in self.tensors.values()):
                return False
            self._used = end
            return True


def _bytes(tensor: Tensor) -> np.ndarray:
    """A tensor of n images as bytes [n, …] that share its memory where it lies in one piece on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(len(tensor), math.prod(tensor.shape[1:]))
    return flat.view(torch.uint8).numpy()
