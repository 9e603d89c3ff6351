"""Enrolled photos and their encodings, kept in versions: every change is one transaction and can be taken back.

Nothing is overwritten. Enrolling, removing and undoing each make a new version; what was removed stays until it is
purged. A reader sees one version whole, and brings what it holds up to a later one by reading only what came and went.
"""

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType

import torch
from PIL import Image
from sqlalchemy import ColumnElement, Connection, and_, delete, exists, insert, select

from parseshot.data.names import class_name, printable
from parseshot.errors import DataError, ModelError, UsageError
from parseshot.methods.base import Encoding
from parseshot.recognition.layout import Layout
from parseshot.recognition.purging import count_removed, delete_removed, read_purged
from parseshot.recognition.records import (
    EnrolledPhoto,
    NewPhoto,
    StoredPicture,
    Version,
    add_encodings,
    add_photos,
    add_version,
    bring_back,
    check_bytes,
    end_members,
    last_change,
    newest,
    read_box,
    read_photos,
    read_snapshot,
    read_version,
    sort_out,
)
from parseshot.recognition.snapshot import Changes, Snapshot
from parseshot.recognition.storage import Storage, open_storage
from parseshot.recognition.tables import (
    at,
    check_tables,
    classes,
    encodings,
    is_blank,
    make_tables,
    members,
    meta,
    photos,
    pictures,
    read_meta,
    table_names,
    versions,
)

CREATE, ENROLL, REMOVE, UNDO, ENCODE_AGAIN, PURGE = "create", "enroll", "remove", "undo", "encode again", "purge"
MAX_KEY = 200  # characters
PICTURES = 32  # that are read at once
JPEG_SIDE = 65_500  # pixels that a JPEG may be long


class Gallery:
    """A store of photos that threads, processes and, with PostgreSQL, servers share. `Gallery.open` opens one."""

    def __init__(self, storage: Storage, fingerprint: str | None = None) -> None:
        self.name = storage.name  # the file, or the URL without its secrets
        self._storage, self._fingerprint = storage, fingerprint

    @classmethod
    def open(cls, where: Path | str, *, create: bool = False, fingerprint: str | None = None) -> "Gallery":
        """A file, given by its path or as sqlite:///FILE, or a database, as postgresql://user:password@host/name.

        create: make an empty gallery where there is none. fingerprint: of the model it is used with; encodings of
        another one are refused then, now and at every later reading, should somebody replace them meanwhile.
        """
        storage = open_storage(where, _make if create else None)
        gallery = cls(storage, fingerprint)
        try:
            if create and storage.file is None:
                gallery._make_in_database()
            with storage.reading() as connection:
                check_tables(connection, storage.name)
                gallery._told(connection)
            storage.keep_log()
        except BaseException:
            storage.close()
            raise
        return gallery

    def close(self) -> None:
        self._storage.close()

    def __enter__(self) -> "Gallery":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Gallery({self.name!r})"

    @property
    def version(self) -> int:
        """The number of the newest version; 0 is the empty gallery."""
        with self._storage.reading() as connection:
            return newest(connection)

    @property
    def fingerprint(self) -> str | None:
        """Of the model that made the encodings; None before the first enrolment."""
        with self._storage.reading() as connection:
            return read_meta(connection).get("fingerprint")

    def history(self) -> list[Version]:
        """All versions, the oldest first."""
        with self._storage.reading() as connection:
            return [read_version(row) for row in connection.execute(select(versions).order_by(versions.c.number))]

    def photos(self, of_class: str | None = None) -> list[EnrolledPhoto]:
        """The photos that are in the gallery now, of one class or of all, in the order in which they were enrolled."""
        name = None if of_class is None else class_name(of_class, self.name)
        with self._storage.reading() as connection:
            return read_photos(connection, name)

    def picture(self, photo: int) -> bytes:
        """The stored picture of a photo that is, or was, in the gallery."""
        with self._storage.reading() as connection:
            row = connection.execute(select(pictures).where(pictures.c.photo == photo)).one_or_none()
            purged = read_purged(connection)
        if row is None:
            gone = (
                f" any more: it was purged, at version {purged.version} at the latest"
                if 0 < photo <= purged.photo
                else ""
            )
            raise DataError(f"{self.name} has no photo {photo}{gone}")
        check_bytes(row, "picture", self.name)
        return bytes(row.data)

    def pictures(self) -> Iterator[StoredPicture]:
        """Every photo that is, or was, in the gallery: what `replace_encodings` wants encoded."""
        asked = select(pictures, photos.c.box, photos.c.source).join(photos).order_by(pictures.c.photo).limit(PICTURES)
        last = 0
        while True:
            with self._storage.reading() as connection:
                rows = connection.execute(asked.where(pictures.c.photo > last)).all()
            if not rows:
                return
            for row in rows:
                check_bytes(row, "picture", self.name)
                yield StoredPicture(row.photo, bytes(row.data), read_box(row.box), row.source)
            last = rows[-1].photo

    def snapshot(self, version: int | None = None) -> Snapshot:
        """All photos of the newest version, or of an earlier one, with their encodings."""
        with self._storage.reading() as connection:
            asked = newest(connection) if version is None else self._known(connection, version)
            if asked < (purged := read_purged(connection).version):
                raise DataError(f"{self.name} cannot show version {asked}: all before version {purged} was purged")
            return read_snapshot(connection, asked, at(asked), self._told(connection), self.name)

    def changes(self, since: int) -> Changes:
        """What came and went after a version; `Snapshot.after` applies it."""
        with self._storage.reading() as connection:
            now = newest(connection)
            gone, came = at(self._known(connection, since)), at(now)
            if since < read_purged(connection).version:
                return Changes(since, None, read_snapshot(connection, now, came, self._told(connection), self.name))
            again = select(versions.c.number).where(versions.c.action == ENCODE_AGAIN, versions.c.number > since)
            if connection.execute(again.limit(1)).first() is None:
                gone = and_(members.c.until > since, _is_member_at(since), ~_is_member_at(now))
                came = and_(members.c.since > since, at(now), ~_is_member_at(since))
            removed = sorted(set(connection.execute(select(members.c.photo).where(gone)).scalars()))
            added = read_snapshot(connection, now, came, self._told(connection), self.name)
        return Changes(since, torch.tensor(removed, dtype=torch.int64), added)

    def add(self, new: Sequence[NewPhoto], fingerprint: str, *, key: str | None = None) -> Version:
        """Enroll photos that a model has encoded: all of them or none.

        A file that is in its class already is not stored twice, which the version's detail tells; one that is in
        another class is refused. key: a request that comes again under the same key changes nothing and gets the same
        answer; so with the other changes.
        """
        if not new:
            raise DataError(f"{self.name}: there are no photos to enroll")
        names = [class_name(photo.class_name, printable(photo.source)) for photo in new]
        layout = Layout.of(new[0].encoding)
        needed = sum(len(photo.picture) + layout.size for photo in new)
        with self._storage.writing(needed) as connection:
            if (done := _done_before(connection, key)) is not None:
                return done
            self._settle_model(connection, fingerprint, layout)
            fresh, repeated = sort_out(connection, new, names)
            counts = Counter(name for _, name in fresh)
            detail = {"photos": len(fresh), "classes": counts, "repeated": repeated}
            version = add_version(connection, ENROLL, detail, key)
            add_photos(connection, fresh, layout, fingerprint, version.number)
            return version

    def remove_class(self, name: str, *, key: str | None = None) -> Version:
        """Take all photos of a class out of the gallery, and so the class; undoing brings them back."""
        name = class_name(name, self.name)
        with self._storage.writing() as connection:
            if (done := _done_before(connection, key)) is not None:
                return done
            found = read_photos(connection, name)
            if not found:
                raise DataError(f"{self.name} has no class {name!r}")
            version = add_version(connection, REMOVE, {"photos": len(found), "classes": {name: len(found)}}, key)
            number = select(classes.c.number).where(classes.c.name == name).scalar_subquery()
            end_members(connection, members.c.class_number == number, version.number)
            return version

    def remove_photo(self, photo: int, *, key: str | None = None) -> Version:
        """Take one photo out of the gallery, and its class with the last one; undoing brings them back."""
        with self._storage.writing() as connection:
            if (done := _done_before(connection, key)) is not None:
                return done
            asked = select(classes.c.name).join(members).where(members.c.photo == photo, members.c.until.is_(None))
            name = connection.execute(asked).scalar_one_or_none()
            if name is None:
                raise DataError(f"{self.name} has no photo {photo}")
            version = add_version(connection, REMOVE, {"photos": 1, "classes": {name: 1}, "photo": photo}, key)
            end_members(connection, members.c.photo == photo, version.number)
            return version

    def undo(self, *, key: str | None = None) -> Version:
        """A new version with the photos from before the last change that is not undone yet; again, and it goes on back.

        An undoing is itself never undone. Encodings that were replaced stay replaced. What was purged is not there.
        """
        with self._storage.writing() as connection:
            if (done := _done_before(connection, key)) is not None:
                return done
            purged = read_purged(connection).version
            change = last_change(connection, purged)
            if change is None:
                since = f" since version {purged}, with which all that had been removed was purged" if purged else ""
                raise DataError(f"{self.name}: there is nothing to undo{since}")
            detail = {"undoes": change.number, "action": change.action}
            version = add_version(connection, UNDO, detail, key, undoes=change.number)
            bring_back(connection, change.number - 1, version.number)
            return version

    def purge(self) -> Version | None:
        """Delete for good what is stored of photos that are in no class now; what is in one stays as it is.

        No version before this one can be read or undone any more. None: there was nothing to delete. Either way the
        database gives back the room that nothing needs, and with it what deleted rows have left there; a purge that
        was cut short after its version was made is completed by another one.
        """
        version = None
        with self._storage.writing(erase=True) as connection:
            if count := count_removed(connection):
                version = add_version(connection, PURGE, {"photos": count})
                delete_removed(connection, version.number)
        self._storage.shrink(table_names())
        return version

    def replace_encodings(self, fingerprint: str, encoded: Iterable[tuple[int, Encoding]]) -> Version:
        """Let the gallery belong to another model, which has encoded every photo of `pictures`; all or nothing.

        Readers see the old encodings until the last one is written; other changes wait.
        """
        with self._storage.writing() as connection:
            old = read_meta(connection).get("fingerprint")
            missing = set(connection.execute(select(photos.c.id)).scalars())
            rows = _each_once(encoded, missing, self.name)
            first = next(rows, None)
            if first is None:
                raise DataError(f"{self.name}: no photo was encoded again")
            layout = Layout.of(first[1])
            connection.execute(delete(encodings))
            add_encodings(connection, chain([first], rows), layout, fingerprint)
            if missing:
                raise DataError(f"{self.name}: not changed, photo {min(missing)} was not encoded again")
            _set_model(connection, fingerprint, layout)
            return add_version(connection, ENCODE_AGAIN, {"from": old, "to": fingerprint})

    def _make_in_database(self) -> None:
        """Looks first, so that opening does not wait for a long write."""
        with self._storage.reading() as connection:
            blank = is_blank(connection)
        if blank:
            with self._storage.writing() as connection:
                _make(connection)

    def _known(self, connection: Connection, version: int) -> int:
        last = newest(connection)
        if not 0 <= version <= last:
            raise DataError(f"{self.name} has no version {version}, the newest is {last}")
        return version

    def _told(self, connection: Connection) -> dict[str, str]:
        """What the gallery says of itself, if its model is the one it is used with."""
        told = read_meta(connection)
        if self._fingerprint is not None:
            self._check_model(told.get("fingerprint"), self._fingerprint)
        return told

    def _check_model(self, stored: str | None, used: str) -> None:
        if stored is not None and stored != used:
            raise ModelError(
                f"{self.name} holds encodings of the model {stored}, not of {used}; name the model it was made with "
                "(--model …), or have its photos encoded again: parseshot enroll GALLERY --again --model …"
            )

    def _settle_model(self, connection: Connection, fingerprint: str, layout: Layout) -> None:
        """The first enrolment says which model the gallery belongs to; the others must be of the same."""
        told = read_meta(connection)
        self._check_model(told.get("fingerprint"), fingerprint)
        if "fingerprint" not in told:
            _set_model(connection, fingerprint, layout)
        elif (kept := Layout.from_json(told.get("layout", ""), self.name)) != layout:
            raise ModelError(f"{self.name}: the new encodings hold {layout}, the stored ones {kept}")


def stored_picture(image: Image.Image) -> bytes:
    """What the gallery keeps of a photo: hardly compressed, and nothing but pixels.

    Encode what this decodes to, not the original: then encoding again gives the same bits.
    """
    bare = image.convert("RGB")
    bare.info = {}
    written = io.BytesIO()
    if max(bare.size) > JPEG_SIDE:
        bare.save(written, "PNG")
    else:
        bare.save(written, "JPEG", quality=95, subsampling="4:4:4")
    return written.getvalue()


def _make(connection: Connection) -> None:
    if is_blank(connection):  # nobody was faster
        make_tables(connection)
        add_version(connection, CREATE, {})


def _done_before(connection: Connection, key: str | None) -> Version | None:
    """The version that a request with this key has made."""
    if key is None:
        return None
    if not key.isprintable() or not 0 < len(key) <= MAX_KEY:
        raise UsageError(f"a request's key has 1 to {MAX_KEY} printable characters")
    row = connection.execute(select(versions).where(versions.c.key == key)).one_or_none()
    return None if row is None else read_version(row)


def _set_model(connection: Connection, fingerprint: str, layout: Layout) -> None:
    connection.execute(delete(meta).where(meta.c.key.in_(("fingerprint", "layout"))))
    told = {"fingerprint": fingerprint, "layout": layout.to_json()}
    connection.execute(insert(meta), [{"key": key, "value": value} for key, value in told.items()])


def _is_member_at(version: int) -> ColumnElement[bool]:
    """Whether the photo of a row is in the gallery at a version, by this row or by another."""
    other = members.alias()
    return exists().where(other.c.photo == members.c.photo, at(version, other))


def _each_once(
    encoded: Iterable[tuple[int, Encoding]], missing: set[int], where: str
) -> Iterator[tuple[int, Encoding]]:
    """Pass on encodings of photos that are missing, crossing them out."""
    for photo, encoding in encoded:
        if photo not in missing:
            raise DataError(f"{where}: photo {photo} is not there, or was encoded twice")
        missing.remove(photo)
        yield photo, encoding
