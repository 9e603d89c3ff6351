"""Leave-one-out over the enrolled photos: each is scored as a query that was never enrolled, exactly.

Copies of a photo leave with it, or it would recognise itself.

Letters: n photos, N classes, K parts, p pairs of a photo and a class.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parseshot.engine.encoding import Progress
from parseshot.methods.base import Encoding, Method
from parseshot.methods.dop import DOP
from parseshot.recognition.prepared import PreparedGallery
from parseshot.recognition.snapshot import Snapshot

QUERIES = 32  # photos that are scored at once
SUPPORT = 1024  # photos of classes that are prepared without one of theirs at once


class _Pair(NamedTuple):
    """A photo and what is left of a class without it; rows of the snapshot."""

    query: int
    rows: Tensor


@torch.inference_mode()
def leave_one_out(method: Method, snapshot: Snapshot, groups: Tensor, progress: Progress | None = None) -> Tensor:
    """Scores [n, N]. groups [n]: photos of one number are copies. −inf: nothing is left of this class.

    What a separable method makes of a class is made once, and again without a photo for that photo alone; others score
    each photo against all the rest.
    """
    method.eval()
    found = (_scores_apart if method.separable else _scores_together)(method, snapshot, groups, progress)
    return found.double()


def _scores_apart(method: Method, snapshot: Snapshot, groups: Tensor, progress: Progress | None) -> Tensor:
    encoding, count = _encoding(snapshot), len(snapshot.photos)
    prepared, some = PreparedGallery(method).of(snapshot), torch.arange(count).split(QUERIES)
    scores = torch.cat([prepared.scores(encoding.take(rows)) for rows in some])  # [n, N]
    changed = [(row, label) for row in range(count) for label in _classes_of_copies(snapshot, groups, row)]
    pairs = [_Pair(row, _left(snapshot, groups, row, label)) for row, label in changed]
    rows, labels = torch.tensor(changed).T  # [p], [p]
    scores[rows, labels] = -torch.inf
    there = torch.tensor([len(pair.rows) > 0 for pair in pairs])
    asked, compared = [pair for pair in pairs if len(pair.rows)], []
    for values in _one_to_one(method, encoding, asked, method.score):
        compared.append(values)
        if progress is not None:
            progress(sum(map(len, compared)), len(asked), "left out")
    if asked:
        scores[rows[there], labels[there]] = torch.cat(compared)
    return scores


def _scores_together(method: Method, snapshot: Snapshot, groups: Tensor, progress: Progress | None) -> Tensor:
    encoding, count = _encoding(snapshot), len(snapshot.photos)
    scores = torch.full((count, len(snapshot.classes)), -torch.inf)
    for row in range(count):
        rest = (groups != groups[row]).nonzero()[:, 0]
        present, labels = snapshot.labels[rest].unique(return_inverse=True)
        if len(present):
            scores[row, present] = method.logits(encoding.take(slice(row, row + 1)), encoding.take(rest), labels)[0]
        if progress is not None:
            progress(row + 1, count, "left out")
    return scores


@torch.inference_mode()
def part_distances(method: DOP, snapshot: Snapshot, groups: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
    """Eq. 7 by part, [p, K], for pairs (row, label) of photos and classes that keep photos without them."""
    left = [_Pair(row, _left(snapshot, groups, row, label)) for row, label in pairs]
    method.eval()
    found = _one_to_one(method, _encoding(snapshot), left, lambda query, shown: method.terms(query, shown).by_part)
    return torch.cat([*found])


def _encoding(snapshot: Snapshot) -> Encoding:
    assert snapshot.encoding is not None
    return snapshot.encoding


def _classes_of_copies(snapshot: Snapshot, groups: Tensor, row: int) -> list[int]:
    return snapshot.labels[groups == groups[row]].unique().tolist()


def _left(snapshot: Snapshot, groups: Tensor, row: int, label: int) -> Tensor:
    """Rows of a class without a photo and its copies."""
    return ((snapshot.labels == label) & (groups != groups[row])).nonzero()[:, 0]


def _one_to_one(
    method: Method, encoding: Encoding, pairs: list[_Pair], compare: Callable[[Encoding, Any], Tensor]
) -> Iterator[Tensor]:
    """`compare` of each photo with its own remaining class: the diagonals of small squares, [pairs of one, ...]."""
    for some in _squares(pairs):
        rows = torch.cat([pair.rows for pair in some])
        labels = torch.arange(len(some)).repeat_interleave(torch.tensor([len(pair.rows) for pair in some]))
        query = encoding.take(torch.tensor([pair.query for pair in some]))
        found, each = compare(query, method.prepare(encoding.take(rows), labels)), torch.arange(len(some))
        yield found[each, each]


def _squares(pairs: list[_Pair]) -> Iterator[list[_Pair]]:
    some: list[_Pair] = []
    for pair in pairs:
        if some and (len(some) == QUERIES or sum(len(one.rows) for one in (*some, pair)) > SUPPORT):
            yield some
            some = []
        some.append(pair)
    if some:
        yield some
