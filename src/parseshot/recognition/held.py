"""What a recogniser holds: a model and a gallery, each loaded when first needed, and its newest version, prepared."""

import threading
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from parseshot.config import read_config
from parseshot.engine.model import Model
from parseshot.errors import DataError
from parseshot.methods.base import Encoding
from parseshot.recognition.calibration import Calibration
from parseshot.recognition.gallery import Gallery
from parseshot.recognition.looking import Given, Item, Seen, encode_looks, inside, look, read_photo
from parseshot.recognition.prepared import PreparedGallery
from parseshot.recognition.records import Box
from parseshot.recognition.snapshot import Snapshot

CUT_OUT = ("cub", "aircraft")  # data sets of objects that were cut out by their boxes


class Held:
    """The model, the gallery and what is prepared of it; threads may share one."""

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
        """Whether the object is looked for in photos without a box: by default, if the model learned from such."""
        learned_from = self.loaded.provenance.get("data", {}).get("name")
        return learned_from in CUT_OUT if self.find is None else self.find

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

    def see(self, item: Item) -> Seen:
        """What the model is to see of a photo."""
        return self.seen(*self.read(item))

    def seen(self, given: Given, box: Box | None) -> Seen:
        """The same of one that was read."""
        (shown,) = look(self.loaded, [given.image], [box], find=self.finds)
        return Seen(given.source, given.sha256, given.notes, given.image.size, shown)

    def encode(self, seen: Sequence[Seen]) -> Encoding:
        return encode_looks(self.loaded, [one.look for one in seen])
