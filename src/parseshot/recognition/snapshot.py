"""What a reader holds of a gallery: all photos of one version, and what brings them to a later one."""

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parseshot.errors import UsageError
from parseshot.recognition.layout import GrowingEncoding


@dataclass(frozen=True, order=True)
class EnrolledClass:
    """A class that has photos. `number` says which came first; a class keeps it, and its id, when it comes back."""

    number: int
    id: str  # [a-z0-9]{12}
    name: str


@dataclass(frozen=True)
class Snapshot:
    """The photos of a gallery at one version, in the order in which they were enrolled; n photos of N classes."""

    version: int
    fingerprint: str | None  # of the model that made the encoding; None before the first enrolment
    classes: tuple[EnrolledClass, ...]  # N, in the order in which they were first enrolled
    photos: Tensor  # [n] ids, ascending
    labels: Tensor  # [n] in 0 … N−1
    digests: tuple[str, ...]  # n: sha256 of each file, to know a query that is one of them
    hashes: np.ndarray  # uint64 [n, 2] perceptual hashes of each picture and of its mirror image
    encoding: GrowingEncoding | None  # of n images; None before the first enrolment

    @functools.cached_property
    def photos_of(self) -> Tensor:
        """How many photos each class has, [N]."""
        return torch.bincount(self.labels, minlength=len(self.classes))

    def after(self, changes: "Changes") -> "Snapshot":
        """The snapshot of the later version, as if it had been read whole."""
        if changes.since != self.version:
            raise UsageError(f"changes since version {changes.since} do not follow version {self.version}")
        added = changes.added
        if changes.removed is None:
            return added
        keep = ~torch.isin(self.photos, changes.removed)  # [n]
        if not bool(keep.any()):
            return added
        photos = torch.cat((self.photos[keep], added.photos))
        order = photos.argsort()  # what comes back by undoing takes its old place
        numbers = torch.cat((self._class_numbers()[keep], added._class_numbers()))[order]
        classes, labels = label({one.number: one for one in (*self.classes, *added.classes)}, numbers)
        digests = (*itertools.compress(self.digests, keep.tolist()), *added.digests)
        return Snapshot(
            added.version,
            added.fingerprint,
            classes,
            photos[order],
            labels,
            tuple(map(digests.__getitem__, order.tolist())),
            np.concatenate((self.hashes[keep.numpy()], added.hashes))[order.numpy()],
            self._joined(keep, added.encoding, order),
        )

    def _class_numbers(self) -> Tensor:
        return torch.tensor([one.number for one in self.classes], dtype=torch.int64)[self.labels]  # [n]

    def _joined(self, keep: Tensor, added: GrowingEncoding | None, order: Tensor) -> GrowingEncoding:
        """Without a copy of what is there, where photos were only added."""
        assert self.encoding is not None
        assert added is not None
        kept = self.encoding if bool(keep.all()) else self.encoding.in_order(keep.nonzero()[:, 0])
        joined = kept.with_added(added)
        return joined if bool((order.diff() > 0).all()) else joined.in_order(order)


@dataclass(frozen=True)
class Changes:
    """What lies between two versions: photos that left, and the snapshot of those alone that came.

    Where the photos were encoded again for another model in between, all left and all came; so where some were purged.
    """

    since: int
    removed: Tensor | None  # [r] ids of photos; None is all, where nobody knows any more which there were
    added: Snapshot  # its version is the later one


def label(known: dict[int, EnrolledClass], numbers: Tensor) -> tuple[tuple[EnrolledClass, ...], Tensor]:
    """The classes that occur in numbers [n], in their order, and the place of each photo's class among them [n]."""
    present, labels = torch.unique(numbers, return_inverse=True)
    return tuple(known[number] for number in present.tolist()), labels
