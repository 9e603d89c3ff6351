"""A gallery made ready for queries: what a method works out of the classes is kept, in blocks of classes.

When photos come or go, only the blocks of their classes are worked out again. A method whose scores of a class depend
on the other classes has one block.
"""

from typing import Any

import torch
from torch import Tensor

from parseshot.methods.base import Encoding, Method
from parseshot.recognition.snapshot import Snapshot

BLOCK = 64  # classes


class PreparedGallery:
    """The prepared classes of one version; `of` goes on to another."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.version = -1
        self.of_digest: dict[str, int] = {}  # a file's sha256 → the photo that it was enrolled as
        self._blocks: dict[int, tuple[bytes, Any]] = {}  # block → the photos in it, what was prepared of them

    @torch.inference_mode()
    def of(self, snapshot: Snapshot) -> "PreparedGallery":
        """These classes made ready. What did not change is shared with the one before, which stays as it is."""
        if snapshot.version == self.version:
            return self
        assert snapshot.encoding is not None
        numbers = torch.tensor([one.number for one in snapshot.classes])  # [N], ascending
        block_of = numbers // BLOCK if self.method.separable else torch.zeros_like(numbers)
        rows = snapshot.labels.argsort(stable=True)  # photos by class
        blocks = block_of[snapshot.labels[rows]]  # [n], ascending
        found = PreparedGallery(self.method)
        found.version = snapshot.version
        found.of_digest = dict(zip(snapshot.digests, snapshot.photos.tolist(), strict=True))
        kinds, counts = blocks.unique_consecutive(return_counts=True)
        for block, count in zip(kinds.tolist(), counts.tolist(), strict=True):
            mine, rows = rows[:count], rows[count:]
            labels = snapshot.labels[mine]
            local = labels.unique_consecutive(return_inverse=True)[1]
            key = torch.stack((snapshot.photos[mine], numbers[labels])).numpy().tobytes()
            known = self._blocks.get(block)
            if known is None or known[0] != key:
                known = key, self.method.prepare(snapshot.encoding.take(mine), local)
            found._blocks[block] = known
        return found

    @torch.inference_mode()
    def scores(self, query: Encoding) -> Tensor:
        """[Q, N], classes in the order of the snapshot."""
        self.method.eval()
        return torch.cat([self.method.score(query, prepared) for _, prepared in self._blocks.values()], 1)
