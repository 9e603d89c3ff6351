"""The recogniser: photos of each class in, answers out. A model, a gallery, and what is prepared of it for queries.

recognizer = Recognizer(gallery="birds.gallery")
recognizer.add_class("Song Sparrow", ["a.jpg", "b.jpg"])
recognizer.predict(["c.jpg"])
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from parseshot.config import read_config
from parseshot.data.names import class_name
from parseshot.data.photo import open_photo
from parseshot.engine.model import Model
from parseshot.errors import DataError, PhotoError, UsageError
from parseshot.methods.base import Encoding
from parseshot.recognition.answer import Answer, Candidate, Failure, Twin
from parseshot.recognition.calibration import Calibration
from parseshot.recognition.enrolment import Named, find_twins, new_photos
from parseshot.recognition.explained import Explained, explain_photo
from parseshot.recognition.gallery import Gallery
from parseshot.recognition.looking import Given, Look, PhotoSource, encode_looks, inside, look, read_photo
from parseshot.recognition.prepared import PreparedGallery
from parseshot.recognition.records import Box, NewPhoto, Version, portions
from parseshot.recognition.snapshot import Snapshot

Progress = Callable[[int, int], None]  # (done, total)

TOGETHER = 64  # photos that are read, encoded and scored at once
CANDIDATES = 5  # classes that an answer names
PRETRAINED = ("efficientnet", "timm:")  # backbones whose features are strong where an object is
ONE_CLASS = "one class is enrolled: a probability needs two"
UNCALIBRATED = "this model has no calibration: probabilities are raw, and nothing is ever none of these"


class Item(NamedTuple):
    """A photo to enroll or to recognise."""

    source: PhotoSource
    name: str = ""  # what to call it; its path where it has one
    box: Box | None = None  # left, top, right, bottom in its pixels, where the object is known to be


class Enrolled(NamedTuple):
    """What became of an enrolment."""

    version: Version | None  # None where no photo could be used
    failures: list[Failure]
    twins: list[Twin]  # photos that look like one that is there already


class Recognizer:
    """Recognises photos by those that are enrolled. It has scikit-learn's manners, and a gallery that lasts.

    model: a name that ships, or a directory. gallery: a file, a `postgresql://` URL, an open `Gallery`, or None for one
    that is gone with the recogniser. find: whether the object is looked for in photos that come without a box; None
    does so for pretrained backbones. Nothing is loaded before it is needed. Threads may share one.
    """

    def __init__(
        self,
        model: Model | Path | str = "default",
        gallery: Gallery | Path | str | None = None,
        *,
        find: bool | None = None,
    ) -> None:
        self.model, self.gallery, self.find = model, gallery, find
        self._lock = threading.RLock()
        self._model: Model | None = None
        self._fingerprint = ""
        self._gallery: Gallery | None = None
        self._folder: TemporaryDirectory[str] | None = None
        self._snapshot: Snapshot | None = None
        self._prepared: PreparedGallery | None = None

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
        snapshot, rows = self.filled(), []
        for some in portions(map(Item, _as_list(photos)), TOGETHER):
            encoding, _ = self.encode([self.read(item) for item in some])
            rows.append(self.calibration.shares(self.scores(encoding, snapshot), snapshot.photos_of).numpy())
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
        for some in portions(items, TOGETHER):
            usable = []
            for name, item in some:
                try:
                    usable.append(Named(class_name(name, item.name or "the photo"), *self.read(item)))
                except DataError as error:
                    if strict:
                        raise
                    failures.append(Failure.of(item.source, item.name, error))
            if usable:
                new += new_photos(self.loaded, usable, find=self.finds)
            if progress:
                progress(len(new) + len(failures), len(items))
        if not new and strict:
            raise DataError("there are no photos to enroll: a class needs one at least")
        if not new:
            return Enrolled(None, failures, [])
        twins = find_twins(new, self.snapshot(), self.opened.picture)
        return Enrolled(self.opened.add(new, self.fingerprint, key=key), failures, twins)

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
        """An answer or a failure for each photo, as they come, all from one version; photos are read ahead."""
        snapshot = self.filled()
        items = (photo if isinstance(photo, Item) else Item(photo) for photo in photos)
        groups = portions(items, TOGETHER)
        with ThreadPoolExecutor(1) as reader:
            waiting = reader.submit(self._read_some, groups)
            while read := waiting.result():
                waiting = reader.submit(self._read_some, groups)
                yield from self._answer(read, snapshot)

    def _read_some(self, groups: Iterator[list[Item]]) -> "list[tuple[Given, Box | None] | Failure]":
        found: list[tuple[Given, Box | None] | Failure] = []
        for item in next(groups, []):
            try:
                found.append(self.read(item))
            except DataError as error:
                found.append(Failure.of(item.source, item.name, error))
        return found

    def _answer(
        self, read: "list[tuple[Given, Box | None] | Failure]", snapshot: Snapshot
    ) -> Iterator[Answer | Failure]:
        usable = [one for one in read if not isinstance(one, Failure)]
        answers = iter(self.answer_encoded(usable, *self.encode(usable), snapshot) if usable else ())
        for one in read:
            yield one if isinstance(one, Failure) else next(answers)

    def answer_encoded(
        self, read: Sequence[tuple[Given, Box | None]], encoding: Encoding, looks: Sequence[Look], snapshot: Snapshot
    ) -> list[Answer]:
        """Answers for photos that have been encoded."""
        scores, fitted = self.scores(encoding, snapshot), self.calibration
        shares, knowns = fitted.shares(scores, snapshot.photos_of), fitted.knowns(scores, snapshot.photos_of)
        return [
            self._one_answer(given, seen, scores[row], shares[row], float(knowns[row]), snapshot)
            for row, ((given, _), seen) in enumerate(zip(read, looks, strict=True))
        ]

    def _one_answer(
        self, given: Given, seen: Look, scores: Tensor, shares: Tensor, known: float, snapshot: Snapshot
    ) -> Answer:
        known = known if self.calibrated else 1.0
        candidates = []
        for label in scores.topk(min(CANDIDATES, len(scores))).indices.tolist():
            one = snapshot.classes[label]
            candidates.append(Candidate(one.id, one.name, float(scores[label]), known * float(shares[label])))
        warnings = [ONE_CLASS] * (len(snapshot.classes) == 1) + [UNCALIBRATED] * (not self.calibrated)
        return Answer(
            given.source,
            tuple(candidates),
            known,
            self.calibration.threshold if self.calibrated else None,
            seen.box,
            seen.how,
            (given.image.width, given.image.height),
            self._ready(snapshot).of_digest.get(given.sha256),
            (*given.notes, *warnings),
            snapshot.version,
            self.fingerprint,
        )

    # what is loaded and prepared

    @property
    def loaded(self) -> Model:
        """The model, loaded when first needed."""
        with self._lock:
            if self._model is None:
                self._model = self.model if isinstance(self.model, Model) else Model.from_pretrained(self.model)
                self._model.eval()
                self._fingerprint = self._model.fingerprint()
            return self._model

    @property
    def fingerprint(self) -> str:
        """Of the model."""
        with self._lock:
            self._model = self.loaded
            return self._fingerprint

    @property
    def finds(self) -> bool:
        """Whether the object is looked for in photos without a box."""
        return self.loaded.config.backbone.startswith(PRETRAINED) if self.find is None else self.find

    @property
    def calibrated(self) -> bool:
        return "calibration" in self.loaded.provenance

    @property
    def calibration(self) -> Calibration:
        told = self.loaded.provenance.get("calibration")
        return Calibration() if told is None else read_config(Calibration, told, source="the model's calibration")

    @property
    def opened(self) -> Gallery:
        """The gallery, opened when first needed and made where there is none."""
        with self._lock:
            where = self.gallery
            if self._gallery is None and isinstance(where, Gallery):
                self._gallery = where
            elif self._gallery is None:
                if where is None:
                    self._folder = TemporaryDirectory(prefix="parseshot-")
                    where = Path(self._folder.name) / "gallery"
                assert not isinstance(where, Gallery)
                self._gallery = Gallery.open(where, create=True, fingerprint=self.fingerprint)
            return self._gallery

    def snapshot(self) -> Snapshot:
        """The newest version of the gallery, read whole once and then by what changed."""
        with self._lock:
            if self._snapshot is None:
                self._snapshot = self.opened.snapshot()
            elif self.opened.version != self._snapshot.version:
                self._snapshot = self._snapshot.after(self.opened.changes(self._snapshot.version))
            return self._snapshot

    def close(self) -> None:
        """Close the gallery; a temporary one is gone. It is opened again when it is needed."""
        with self._lock:
            if self._gallery is not None and not isinstance(self.gallery, Gallery):
                self._gallery.close()
            if self._folder is not None:
                self._folder.cleanup()
            self._gallery = self._folder = self._snapshot = self._prepared = None

    def __enter__(self) -> "Recognizer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def scores(self, encoding: Encoding, snapshot: Snapshot) -> Tensor:
        """[Q, N], comparable between classes of few and of many photos."""
        return self.calibration.corrected(self._ready(snapshot).scores(encoding), snapshot.photos_of)

    def prepare(self) -> None:
        """Make the newest version ready, so that the next answer does not wait for it."""
        self._ready(self.filled())

    def _ready(self, snapshot: Snapshot) -> PreparedGallery:
        """The classes of a snapshot, prepared; those of the newest one are kept."""
        with self._lock:
            if self._prepared is None:
                self._prepared = PreparedGallery(self.loaded.method)
            found = self._prepared.of(snapshot)
            if found.version > self._prepared.version:
                self._prepared = found
            return found

    def filled(self) -> Snapshot:
        """The newest version, which must hold photos."""
        snapshot = self.snapshot()
        if not snapshot.classes:
            raise DataError(f"{self.opened.name} is empty: enroll photos of some classes first")
        return snapshot

    def read(self, item: Item) -> tuple[Given, Box | None]:
        """A photo, and what of its box lies in it."""
        given = read_photo(item.source, item.name)
        return given, None if item.box is None else inside(item.box, given.image, given.source)

    def encode(self, read: Sequence[tuple[Given, Box | None]]) -> tuple[Encoding, list[Look]]:
        """Photos that were read, and what of them was looked at."""
        looks = look(self.loaded, [given.image for given, _ in read], [box for _, box in read], find=self.finds)
        return encode_looks(self.loaded, looks), looks


def _as_list(photos: Any) -> list[Any]:
    """One photo, or several: a stack of arrays [n, H, W, 3] is several."""
    if isinstance(photos, np.ndarray):
        return list(photos) if photos.ndim == 4 else [photos]
    if isinstance(photos, (str, Path, bytes, Item)) or hasattr(photos, "read") or not isinstance(photos, Iterable):
        return [photos]
    return list(photos)
