"""The recogniser: photos of each class in, answers out.

recognizer = Recognizer(gallery="birds.gallery")
recognizer.add_class("Song Sparrow", ["a.jpg", "b.jpg"])
recognizer.predict(["c.jpg"])
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from parseshot.data.names import class_name
from parseshot.data.photo import open_photo
from parseshot.errors import DataError, PhotoError, UsageError
from parseshot.methods.base import Encoding
from parseshot.recognition.answer import Answer, Candidate, Failure, Twin
from parseshot.recognition.enrolment import ToStore, find_twins, new_photos, to_store
from parseshot.recognition.explained import Explained, explain_photo
from parseshot.recognition.gallery import Gallery
from parseshot.recognition.held import Held
from parseshot.recognition.looking import Item, PhotoSource, Seen, encode_looks, look
from parseshot.recognition.records import NewPhoto, Version, portions
from parseshot.recognition.side_by_side import side_by_side
from parseshot.recognition.snapshot import Snapshot

Progress = Callable[[int, int], None]  # (done, total)

TOGETHER = 32  # photos that are read, encoded and scored at once …
MANY = 1_000  # … twice as many against so many classes, where scoring takes most of the time
CANDIDATES = 5  # classes that an answer names
ONE_CLASS = "one class is enrolled: a probability needs two"
UNCALIBRATED = "this model has no calibration: probabilities are raw, and nothing is ever none of these"


class Enrolled(NamedTuple):
    """What became of an enrolment."""

    version: Version | None  # None where no photo could be used
    failures: list[Failure]
    twins: list[Twin]  # photos that look like one that is there already


class Recognizer(Held):
    """Recognises photos by those that are enrolled. It has scikit-learn's manners, and a gallery that lasts.

    model: a name that ships, or a directory. gallery: a file, a `postgresql://` URL, an open `Gallery`, or None for one
    that is gone with the recogniser. find: whether the object is looked for in photos that come without a box; None
    does so for models that learned from objects cut out by their boxes. Nothing is loaded before it is needed. Threads
    may share one.
    """

    def __enter__(self) -> "Recognizer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # scikit-learn's manners

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {"model": self.model, "gallery": self.gallery, "find": self.find}

    def set_params(self, **values: Any) -> "Recognizer":
        unknown = sorted(set(values) - set(self.get_params()))
        if unknown:
            raise UsageError(f"a Recognizer has no parameter {unknown[0]!r}; it has model, gallery and find")
        self.close()
        self._model = None
        for name, value in values.items():
            setattr(self, name, value)
        return self

    def fit(self, photos: Sequence[PhotoSource], names: Sequence[str]) -> "Recognizer":
        """Start afresh with these photos and the names of their classes. A lasting gallery must be empty for that."""
        if self.gallery is None:
            self.close()
        elif self.snapshot().classes:
            raise UsageError(f"{self.opened.name} holds photos already; partial_fit adds to them")
        return self.partial_fit(photos, names)

    def partial_fit(self, photos: Sequence[PhotoSource], names: Sequence[str]) -> "Recognizer":
        """Add photos to their classes, new or not: all of them or none."""
        if len(photos) != len(names):
            raise UsageError(f"{len(photos)} photos, but {len(names)} names of classes")
        self.enroll([(str(name), Item(photo)) for photo, name in zip(photos, names, strict=True)], strict=True)
        return self

    def predict(self, photos: Sequence[PhotoSource] | PhotoSource) -> np.ndarray:
        """The name of the likeliest class of each photo; `recognise` says how likely, and whether it is any of them."""
        return np.array([answer.candidates[0].name for answer in self.recognise(photos)], dtype=object)

    def predict_proba(self, photos: Sequence[PhotoSource] | PhotoSource) -> np.ndarray:
        """Probabilities [n, N] in the order of `classes_`, if each photo is of one of these classes."""
        snapshot = self.filled()

        def shares(items: Sequence[Item]) -> np.ndarray:
            encoding = self.encode([self.see(item) for item in items])
            return self.calibration.shares(self.scores(encoding, snapshot), snapshot.photos_of).numpy()

        rows = list(side_by_side(shares, portions(map(Item, _as_list(photos)), TOGETHER)))
        return np.concatenate(rows) if rows else np.empty((0, len(snapshot.classes)))

    def score(self, photos: Sequence[PhotoSource], names: Sequence[str]) -> float:
        """Share of photos whose class is named rightly."""
        return float(np.mean(self.predict(photos) == np.asarray(names, dtype=object)))

    @property
    def classes_(self) -> np.ndarray:
        """Names of the classes, in the order in which they were first enrolled."""
        return np.array([one.name for one in self.snapshot().classes], dtype=object)

    # enrolling and removing

    def add_class(self, name: str, photos: Sequence[PhotoSource] | PhotoSource, *, key: str | None = None) -> Version:
        """Enroll a new class. One encoding a photo; nothing is done to the other classes."""
        if class_name(name, "the new class") in set(self.classes_):
            raise DataError(f"{self.opened.name} has a class {name!r} already; add_photos adds to it")
        return self.add_photos(name, photos, key=key)

    def add_photos(self, name: str, photos: Sequence[PhotoSource] | PhotoSource, *, key: str | None = None) -> Version:
        """Enroll photos of a class, new or not: all of them or none."""
        done = self.enroll([(name, Item(photo)) for photo in _as_list(photos)], strict=True, key=key)
        assert done.version is not None
        return done.version

    def remove(self, name: str, *, key: str | None = None) -> Version:
        """Take a class out; `gallery.undo` brings it back."""
        return self.opened.remove_class(name, key=key)

    def enroll(
        self,
        items: Sequence[tuple[str, Item]],
        *,
        strict: bool = False,
        key: str | None = None,
        progress: Progress | None = None,
    ) -> Enrolled:
        """Enroll photos of named classes in one change. Those that cannot be used are told and the others go in.

        strict: one that cannot be used is an error, and nothing is enrolled. key: see `Gallery.add`.
        """
        new: list[NewPhoto] = []
        failures: list[Failure] = []
        for good, bad in side_by_side(lambda some: self._made(some, strict=strict), portions(items, TOGETHER)):
            new += good
            failures += bad
            if progress:
                progress(len(new) + len(failures), len(items))
        if not new and strict:
            raise DataError("there are no photos to enroll: a class needs one at least")
        if not new:
            return Enrolled(None, failures, [])
        twins = find_twins(new, self.snapshot(), self.opened.picture)
        return Enrolled(self.opened.add(new, self.fingerprint, key=key), failures, twins)

    def _made(self, some: Sequence[tuple[str, Item]], *, strict: bool) -> tuple[list[NewPhoto], list[Failure]]:
        """What is to be stored of photos, and those that cannot be used."""
        usable: list[ToStore] = []
        failures: list[Failure] = []
        for name, item in some:
            try:
                usable.append(to_store(class_name(name, item.name or "the photo"), *self.read(item)))
            except DataError as error:
                if strict:
                    raise
                failures.append(Failure.of(item.source, item.name, error))
        return list(new_photos(self.loaded, usable, find=self.finds)) if usable else [], failures

    def encode_again(self, progress: Progress | None = None) -> Version:
        """Let the gallery belong to this model: its stored photos are encoded again, in the boxes they have."""
        if self.gallery is None or isinstance(self.gallery, Gallery):
            raise UsageError("encode_again is for a recogniser that was given a gallery by its name")
        self.close()
        with Gallery.open(self.gallery) as gallery:
            return gallery.replace_encodings(self.fingerprint, self._encoded_again(gallery, progress))

    def _encoded_again(self, gallery: Gallery, progress: Progress | None) -> Iterator[tuple[int, Encoding]]:
        total, done = len(gallery.photos()), 0
        for some in portions(gallery.pictures(), TOGETHER):
            images = [open_photo(one.data, one.source).image for one in some]
            encoding = encode_looks(self.loaded, look(self.loaded, images, [one.box for one in some], find=False))
            yield from ((one.photo, encoding.take(slice(row, row + 1))) for row, one in enumerate(some))
            done += len(some)
            if progress:
                progress(done, max(total, done))

    # recognising

    def recognise(self, photos: Sequence[PhotoSource | Item] | PhotoSource | Item) -> list[Answer]:
        """An answer for each photo, all from one version of the gallery; a photo that cannot be used is an error."""
        found = []
        for answer in self.answers(_as_list(photos)):
            if isinstance(answer, Failure):
                raise PhotoError(answer.code, answer.message)
            found.append(answer)
        return found

    def explain(self, photo: PhotoSource | Item) -> Explained:
        """Recognise one photo and say why: a ledger for each of the likeliest classes, whose rows add up."""
        return explain_photo(self, photo if isinstance(photo, Item) else Item(photo))

    def answers(self, photos: Iterable[PhotoSource | Item]) -> Iterator[Answer | Failure]:
        """An answer or a failure for each photo, in their order, all from one version; groups go side by side."""
        snapshot = self.filled()
        items = (photo if isinstance(photo, Item) else Item(photo) for photo in photos)
        together = TOGETHER if len(snapshot.classes) < MANY else 2 * TOGETHER
        for answers in side_by_side(lambda group: self._answer(group, snapshot), portions(items, together)):
            yield from answers

    def _answer(self, items: Sequence[Item], snapshot: Snapshot) -> "list[Answer | Failure]":
        seen: list[Seen | Failure] = []
        for item in items:
            try:
                seen.append(self.see(item))
            except DataError as error:
                seen.append(Failure.of(item.source, item.name, error))
        usable = [one for one in seen if not isinstance(one, Failure)]
        answers = iter(self.answer_encoded(usable, self.encode(usable), snapshot) if usable else ())
        return [one if isinstance(one, Failure) else next(answers) for one in seen]

    def answer_encoded(self, seen: Sequence[Seen], encoding: Encoding, snapshot: Snapshot) -> list[Answer]:
        """Answers for photos that have been encoded."""
        scores, fitted = self.scores(encoding, snapshot), self.calibration
        shares, knowns = fitted.shares(scores, snapshot.photos_of), fitted.knowns(scores, snapshot.photos_of)
        return [
            self._one_answer(one, scores[row], shares[row], float(knowns[row]), snapshot)
            for row, one in enumerate(seen)
        ]

    def _one_answer(self, seen: Seen, scores: Tensor, shares: Tensor, known: float, snapshot: Snapshot) -> Answer:
        known = known if self.calibrated else 1.0
        candidates = []
        for label in scores.topk(min(CANDIDATES, len(scores))).indices.tolist():
            one = snapshot.classes[label]
            candidates.append(Candidate(one.id, one.name, float(scores[label]), known * float(shares[label])))
        warnings = [ONE_CLASS] * (len(snapshot.classes) == 1) + [UNCALIBRATED] * (not self.calibrated)
        return Answer(
            seen.source,
            tuple(candidates),
            known,
            self.calibration.threshold if self.calibrated else None,
            seen.look.box,
            seen.look.how,
            seen.size,
            self._ready(snapshot).of_digest.get(seen.sha256),
            (*seen.notes, *warnings),
            snapshot.version,
            self.fingerprint,
        )


def _as_list(photos: Any) -> list[Any]:
    """One photo, or several: a stack of arrays [n, H, W, 3] is several."""
    if isinstance(photos, np.ndarray):
        return list(photos) if photos.ndim == 4 else [photos]
    if isinstance(photos, (str, Path, bytes, Item)) or hasattr(photos, "read") or not isinstance(photos, Iterable):
        return [photos]
    return list(photos)
