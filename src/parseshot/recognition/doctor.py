"""The doctor: which enrolled photos are in the wrong class, there twice, blurred or too small, and what to expect.

Everything is told by leave-one-out, from the encodings that are stored; pictures are read once, to be looked at.

Letters: n photos, N classes, S scales, K parts.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from parseshot.data.duplicates import differing_bits, near_pairs
from parseshot.data.photo import open_photo, to_square
from parseshot.engine.encoding import Progress
from parseshot.engine.model import Model
from parseshot.methods.dop import DOP
from parseshot.recognition.blur import edge_steepness
from parseshot.recognition.diagnosis import (
    ACROSS,
    BLURRED,
    DUPLICATE,
    KINDS,
    MISLABELLED,
    MORE,
    NO_PARTS,
    TINY,
    ClassDiagnosis,
    Confused,
    Diagnosis,
    Finding,
    Share,
)
from parseshot.recognition.enrolment import HASHED
from parseshot.recognition.explain import places_of
from parseshot.recognition.leave_one_out import leave_one_out, part_distances
from parseshot.recognition.recognizer import ONE_CLASS, Recognizer
from parseshot.recognition.records import EnrolledPhoto
from parseshot.recognition.snapshot import Snapshot

SURE, SURE_RAW = 0.99, 0.9  # probability from which another class is named, by a calibrated model and by another
BLUR = 0.25  # steepness below which edges are blurred: a Gaussian of 1.6 pixels of what the model sees …
OUTLYING = 3.0  # … if it also is so many deviations below the median of the gallery
ANYWHERE = 0.5  # entropy of a location that is spread over as many cells as a whole row has
LOW = 0.5  # share of a class's photos; if fewer are recognised it needs more
CONFUSED = 12  # pairs listed


def examine(recognizer: Recognizer, progress: Progress | None = None) -> Diagnosis:
    """Examine the newest version of a recogniser's gallery. Nothing is encoded and nothing is changed."""
    case = _take_in(recognizer, progress)
    findings = [*_mislabelled(case), *_copies(case), *_badly_shown(case), *_without_parts(case), *_weak_classes(case)]
    order = {kind: number for number, kind in enumerate(KINDS)}
    findings.sort(key=lambda one: (order[one.kind], -one.sure, one.photo or 0))
    suspects = {finding.photo for finding in findings if finding.kind == MISLABELLED}
    plain = case.counted & torch.tensor([photo.id not in suspects for photo in case.photos])
    return Diagnosis(
        recognizer.opened.name,
        case.snapshot.version,
        recognizer.fingerprint,
        len(case.photos),
        tuple(_of_class(case, label) for label in range(len(case.names))),
        _share(case, case.counted),
        _share(case, plain),
        tuple(_confused(case)),
        tuple(findings),
        tuple(_notes(case, calibrated=recognizer.calibrated)),
    )


class _Seen(NamedTuple):
    """What the pictures show."""

    squares: np.ndarray  # uint8 [n, HASHED, HASHED, 3], of all of each
    steepness: np.ndarray  # [n], of what the model was shown
    pixels: np.ndarray  # [n], of that, in the photo


@dataclass(frozen=True)
class _Case:
    """A gallery with all that was measured of it."""

    model: Model
    snapshot: Snapshot
    photos: list[EnrolledPhoto]  # n
    names: list[str]  # N
    seen: _Seen
    pairs: np.ndarray  # [m, 2] rows of copies
    groups: Tensor  # [n]: photos of one number are copies
    scores: Tensor  # [n, N] left out
    probabilities: Tensor  # [n, N]
    counted: Tensor  # [n] whether it says something of the accuracy

    @functools.cached_property
    def taken(self) -> Tensor:
        """The class with the highest score, [n]."""
        return self.scores.argmax(1)

    def label(self, row: int) -> int:
        return int(self.snapshot.labels[row])

    def finding(self, kind: str, row: int, sentence: str, sure: float, **other: Any) -> Finding:
        photo = self.photos[row]
        return Finding(kind, self.names[self.label(row)], sentence, sure, photo.id, photo.source, **other)


def _take_in(recognizer: Recognizer, progress: Progress | None) -> _Case:
    snapshot, photos = _enrolled(recognizer)
    seen = _look_at(recognizer, photos, progress)
    pairs = near_pairs(seen.squares)
    groups = _groups(pairs, len(photos))
    left = _left(snapshot, groups)
    scores = leave_one_out(recognizer.loaded.method, snapshot, groups, progress)
    scores = recognizer.calibration.corrected(scores, left)
    return _Case(
        recognizer.loaded,
        snapshot,
        photos,
        [one.name for one in snapshot.classes],
        seen,
        pairs,
        groups,
        scores,
        recognizer.calibration.shares(scores, left),
        _counted(scores, snapshot.labels, groups),
    )


def _enrolled(recognizer: Recognizer) -> tuple[Snapshot, list[EnrolledPhoto]]:
    """All photos of one version; again if somebody changed the gallery in between."""
    while True:
        snapshot, photos = recognizer.filled(), recognizer.opened.photos()
        if [photo.id for photo in photos] == snapshot.photos.tolist():
            return snapshot, photos


def _look_at(recognizer: Recognizer, photos: Sequence[EnrolledPhoto], progress: Progress | None) -> _Seen:
    side = recognizer.loaded.config.image_size
    squares = np.empty((len(photos), HASHED, HASHED, 3), dtype=np.uint8)
    steepness, pixels = np.empty(len(photos)), np.empty(len(photos))
    for row, photo in enumerate(photos):
        image = open_photo(recognizer.opened.picture(photo.id), photo.source).image
        left, top, right, bottom = photo.box or (0, 0, *image.size)
        squares[row] = to_square(image, HASHED).pixels
        steepness[row] = edge_steepness(to_square(image, side, photo.box).pixels)
        pixels[row] = (right - left) * (bottom - top)
        if progress is not None:
            progress(row + 1, len(photos), "looked at")
    return _Seen(squares, steepness, pixels)


def _groups(pairs: np.ndarray, count: int) -> Tensor:
    """A number for each photo, [n], that its copies share: the row of the first of them."""
    groups = torch.arange(count)
    for first, second in pairs.tolist():
        low, high = sorted((int(groups[first]), int(groups[second])))
        groups[groups == high] = low
    return groups


def _left(snapshot: Snapshot, groups: Tensor) -> Tensor:
    """How many photos of each class there are without a photo and its copies, [n, N]."""
    gone = torch.zeros(len(groups), len(snapshot.classes), dtype=torch.int64)
    gone.index_put_((groups, snapshot.labels), torch.ones_like(groups), accumulate=True)
    return snapshot.photos_of - gone[groups]


def _counted(scores: Tensor, labels: Tensor, groups: Tensor) -> Tensor:
    """Which photos tell the accuracy, [n]: of copies the first, and none whose copy is in another class."""
    if scores.shape[1] < 2:
        return torch.zeros(len(scores), dtype=torch.bool)
    first = groups == torch.arange(len(groups))
    torn = torch.zeros_like(first)
    torn[groups[labels != labels[groups]]] = True  # by the first of each group
    return first & ~torn[groups] & _has_rest(scores, labels)


def _has_rest(scores: Tensor, labels: Tensor) -> Tensor:
    """Whether something is left of its class, [n]."""
    return scores.gather(1, labels[:, None])[:, 0].isfinite()


def _share(case: _Case, which: Tensor) -> Share:
    right = case.taken == case.snapshot.labels
    return Share(int((right & which).sum()), int(which.sum()))


def _of_class(case: _Case, label: int) -> ClassDiagnosis:
    mine, one = case.snapshot.labels == label, case.snapshot.classes[label]
    return ClassDiagnosis(one.id, one.name, int(mine.sum()), _share(case, mine & case.counted))


def _confused(case: _Case) -> Iterator[Confused]:
    """The pairs that are confused most often."""
    count = len(case.names)
    truth, taken = case.snapshot.labels[case.counted], case.taken[case.counted]
    table = torch.bincount(truth * count + taken, minlength=count**2).view(count, count)  # [N, N]
    table.fill_diagonal_(0)
    times, places = table.flatten().sort(descending=True, stable=True)
    for many, place in zip(times[:CONFUSED].tolist(), places[:CONFUSED].tolist(), strict=True):
        if many:
            label, other = divmod(place, count)
            yield Confused(case.names[label], case.names[other], many, int((truth == label).sum()))


def _mislabelled(case: _Case) -> Iterator[Finding]:
    """Nearer to another class than to the rest of its own, and surely; where there are parts, at most of them too."""
    labels = case.snapshot.labels
    others = case.scores.scatter(1, labels[:, None], -torch.inf)  # [n, N]
    best, taken = others.max(1)
    own, other = (case.probabilities.gather(1, which[:, None])[:, 0] for which in (labels, taken))
    sure = other / (own + other)  # NaN where there is no other class
    enough = SURE if "calibration" in case.model.provenance else SURE_RAW
    rows = (_has_rest(case.scores, labels) & best.isfinite() & (sure >= enough)).nonzero()[:, 0].tolist()
    parts = _parts_nearer(case, rows, taken)
    for row, (nearer, of) in zip(rows, parts, strict=True):
        if of and 2 * nearer <= of:
            continue
        name, at = case.names[int(taken[row])], f", at {nearer} of {of} parts" * bool(of)
        sentence = f"looks more like {name} than like the other photos of its class{at}"
        yield case.finding(MISLABELLED, row, sentence, float(sure[row]), other_class=name)


def _parts_nearer(case: _Case, rows: list[int], taken: Tensor) -> list[tuple[int, int]]:
    """At how many parts each photo is nearer to the class it is taken for, and of how many: 0 of 0 without parts."""
    method = case.model.method
    if not isinstance(method, DOP) or not rows:
        return [(0, 0)] * len(rows)
    pairs = [(row, int(labels[row])) for labels in (case.snapshot.labels, taken) for row in rows]
    own, other = part_distances(method, case.snapshot, case.groups, pairs).chunk(2)  # each [rows, K]
    return [(nearer, own.shape[1]) for nearer in (other < own).sum(1).tolist()]


def _copies(case: _Case) -> Iterator[Finding]:
    """Each photo with the first that it is a copy of, in its own class and in another."""
    told: set[tuple[int, str]] = set()
    for first, second in case.pairs.tolist():
        here, there = case.label(second), case.label(first)
        kind = DUPLICATE if here == there else ACROSS
        if (second, kind) in told:
            continue
        told.add((second, kind))
        other = case.photos[first]
        sentence = f"shows the same picture as {other.source} (photo {other.id})"
        if kind == ACROSS:
            sentence += f", which is in {case.names[there]}"
            scores = case.scores[second, [here, there]]  # without both
            if scores.isfinite().all():
                sentence += f"; it looks more like {case.names[(here, there)[int(scores.argmax())]]}"
        agreeing = 1 - _differing(case.snapshot.hashes, first, second) / 64
        yield case.finding(kind, second, sentence, agreeing, other_class=case.names[there], other_photo=other.id)


def _differing(hashes: np.ndarray, first: int, second: int) -> int:
    """Bits of two perceptual hashes, one of them mirrored if that is nearer."""
    return int(differing_bits(hashes[first, :1] ^ hashes[second]).min())


def _badly_shown(case: _Case) -> Iterator[Finding]:
    """Too few pixels, or else blurred: less sharp than sharp photos are, and than this gallery's are."""
    steepness, pixels = case.seen.steepness, case.seen.pixels
    enough = (case.model.config.image_size / 2) ** 2
    tiny = pixels < enough
    for row in np.flatnonzero(tiny).tolist():
        sentence = f"what is shown of it has {pixels[row]:.0f} pixels; {enough:.0f} are needed"
        yield case.finding(TINY, row, sentence, float(1 - pixels[row] / enough))
    if tiny.all():
        return
    usual = float(np.median(steepness[~tiny]))
    deviation = 1.4826 * float(np.median(np.abs(steepness[~tiny] - usual)))
    for row in np.flatnonzero(~tiny & (steepness < min(BLUR, usual - OUTLYING * deviation))).tolist():
        less = 1 - float(steepness[row]) / usual
        yield case.finding(BLURRED, row, f"is blurred: its edges are {less:.0%} less steep than usual here", less)


def _without_parts(case: _Case) -> Iterator[Finding]:
    """Most parts might be anywhere, at every scale; a model that does not look for them is not blamed."""
    method, encoding = case.model.method, case.snapshot.encoding
    if not isinstance(method, DOP) or method.config.location == "uniform" or encoding is None:
        return
    entropy = places_of(case.model, encoding)[1]  # [n, S, K]
    lost = (entropy > ANYWHERE).all(1).sum(1)  # [n]
    parts = entropy.shape[2]
    for row in (2 * lost > parts).nonzero()[:, 0].tolist():
        sentence = f"{int(lost[row])} of {parts} parts are not found in it"
        yield case.finding(NO_PARTS, row, sentence, float(entropy[row].mean()))


def _weak_classes(case: _Case) -> Iterator[Finding]:
    for label in range(len(case.names)):
        one = _of_class(case, label)
        right, asked = one.recognised
        if len(case.groups[case.snapshot.labels == label].unique()) == 1:
            sentence = "it has one photo" if one.photos == 1 else "its photos are copies of one"
            yield Finding(MORE, one.name, f"{sentence}, so that nothing can be left out", 1.0)
        elif asked and right < LOW * asked:
            sentence = f"{right} of {asked} photos are recognised when left out"
            yield Finding(MORE, one.name, sentence, 1 - right / asked)


def _notes(case: _Case, *, calibrated: bool) -> Iterator[str]:
    if case.counted.any():
        yield "leave-one-out has one photo of the class fewer than the gallery: new photos should do a little better"
    if len(case.names) == 1:
        yield ONE_CLASS
    elif not bool(case.counted.all()):
        yield f"{int((~case.counted).sum())} photos do not count: alone in their class, or copies"
    if not calibrated:
        yield "this model has no calibration: how sure a wrong label is, is raw"
