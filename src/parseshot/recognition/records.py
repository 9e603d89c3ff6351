"""What goes into the tables of a gallery and comes out of them, inside of a transaction that the gallery has begun."""

import json
import secrets
import string
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from sqlalchemy import Column, ColumnElement, Connection, Row, exists, func, insert, literal, or_, select, update

from parseshot.data.names import printable
from parseshot.errors import DataError
from parseshot.methods.base import Encoding
from parseshot.recognition.layout import Layout
from parseshot.recognition.purging import read_purged
from parseshot.recognition.snapshot import EnrolledClass, Snapshot, label
from parseshot.recognition.tables import at, classes, encodings, members, photos, pictures, versions

ID_LENGTH = 12
ID_LETTERS = string.ascii_lowercase + string.digits
ROWS = 500  # that are asked for or inserted at once …
BYTES = 16 << 20  # … unless they are more bytes than this

T = TypeVar("T")
Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels


@dataclass(frozen=True)
class NewPhoto:
    """A photo to enroll, encoded; `data.duplicates.perceptual_hashes` and `gallery.stored_picture` make its parts."""

    class_name: str
    source: str  # what the file was called
    sha256: str  # of the file's bytes, in hexadecimal
    hashes: tuple[int, int]  # perceptual, of the picture and of its mirror image: 64 bits each
    width: int
    height: int
    picture: bytes
    encoding: Encoding  # of this one image
    box: Box | None = None  # what of it was encoded; None is all of it
    notes: tuple[str, ...] = ()


class EnrolledPhoto(NamedTuple):
    """What is known of a photo that is in the gallery."""

    id: int
    class_id: str
    class_name: str
    source: str
    sha256: str
    width: int
    height: int
    box: Box | None
    notes: tuple[str, ...]
    since: int  # the version with which it came, or came back


class StoredPicture(NamedTuple):
    """A photo to encode again."""

    photo: int
    data: bytes
    box: Box | None
    source: str


class Version(NamedTuple):
    """One change of a gallery; its detail says of which classes and photos."""

    number: int
    at: str  # UTC, ISO 8601
    action: str  # create, enroll, remove, undo, encode again or purge
    detail: dict[str, Any]


def newest(connection: Connection) -> int:
    return int(connection.execute(select(func.max(versions.c.number))).scalar_one())


def read_version(row: Row[Any]) -> Version:
    return Version(row.number, row.at, row.action, json.loads(row.detail))


def add_version(
    connection: Connection, action: str, detail: dict[str, Any], key: str | None = None, undoes: int | None = None
) -> Version:
    """To be written before what refers to it."""
    number, told = _next(connection, versions.c.number, -1), json.dumps(detail)
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    row = {"number": number, "at": now, "action": action, "detail": told, "key": key, "undoes": undoes}
    connection.execute(insert(versions), row)
    return Version(number, now, action, json.loads(told))


def read_photos(connection: Connection, name: str | None) -> list[EnrolledPhoto]:
    """Those that are in the gallery now, of one class or of all."""
    asked = select(photos, members.c.since, classes.c.id.label("class_id"), classes.c.name)
    asked = asked.join(members, members.c.photo == photos.c.id).join(classes).where(members.c.until.is_(None))
    if name is not None:
        asked = asked.where(classes.c.name == name)
    return [
        EnrolledPhoto(
            row.id, row.class_id, row.name, row.source, row.sha256, row.width, row.height,
            read_box(row.box), tuple(json.loads(row.notes)), row.since,
        )
        for row in connection.execute(asked.order_by(photos.c.id))
    ]  # fmt: skip


def read_box(text: str | None) -> Box | None:
    return None if text is None else tuple(json.loads(text))


def read_snapshot(
    connection: Connection, version: int, which: ColumnElement[bool], told: dict[str, str], where: str
) -> Snapshot:
    """Some members, with their encodings. told: what the gallery knows of its model; where: what to call it."""
    asked = select(members.c.photo, members.c.class_number, photos.c.sha256, photos.c.hash, photos.c.mirror)
    asked = asked.join(photos, photos.c.id == members.c.photo).where(which).order_by(members.c.photo)
    rows = connection.execute(asked).all()
    known = _read_classes(connection, {row.class_number for row in rows})
    occurring, labels = label(known, torch.tensor([row.class_number for row in rows], dtype=torch.int64))
    ids = [row.photo for row in rows]
    fingerprint, encoding = told.get("fingerprint"), None
    if fingerprint is not None:
        layout = Layout.from_json(told.get("layout", ""), where)
        encoding = layout.unpack(len(ids), _read_encodings(connection, ids, layout, fingerprint, where))
    return Snapshot(
        version,
        fingerprint,
        occurring,
        torch.tensor(ids, dtype=torch.int64),
        labels,
        tuple(row.sha256 for row in rows),
        np.array([(row.hash, row.mirror) for row in rows], dtype=np.int64).reshape(-1, 2).view(np.uint64),
        encoding,
    )


def _read_classes(connection: Connection, numbers: set[int]) -> dict[int, EnrolledClass]:
    found = {}
    for some in portions(numbers, ROWS):
        for row in connection.execute(select(classes).where(classes.c.number.in_(some))):
            found[row.number] = EnrolledClass(row.number, row.id, row.name)
    return found


def _read_encodings(
    connection: Connection, ids: list[int], layout: Layout, fingerprint: str, where: str
) -> Iterator[list[bytes]]:
    for wanted in portions(ids, _rows_of(layout)):
        asked = select(encodings).where(encodings.c.photo.in_(wanted), encodings.c.fingerprint == fingerprint)
        rows = connection.execute(asked.order_by(encodings.c.photo).execution_options(raw_bytes=True)).all()
        if missing := set(wanted) - {row.photo for row in rows}:
            raise DataError(f"{where} is damaged: photo {min(missing)} has no encoding")
        for row in rows:
            check_bytes(row, "encoding", where, layout.size)
        yield [row.data for row in rows]


def check_bytes(row: Row[Any], what: str, where: str, size: int | None = None) -> None:
    """Refuse bytes that are not those that were written."""
    if (size is not None and len(row.data) != size) or zlib.crc32(row.data) != row.checksum:
        raise DataError(f"{where} is damaged: the {what} of photo {row.photo} is not what was stored")


def sort_out(
    connection: Connection, new: Sequence[NewPhoto], names: Sequence[str]
) -> tuple[list[tuple[NewPhoto, str]], list[tuple[str, int]]]:
    """The photos that are new, with their class; and the source of each that is there already, with its photo."""
    there = _find_files(connection, [photo.sha256 for photo in new])
    next_id = _next_photo(connection)
    fresh: list[tuple[NewPhoto, str]] = []
    repeated = []
    for photo, name in zip(new, names, strict=True):
        source = _storable(photo.source)
        if photo.sha256 not in there:
            there[photo.sha256] = next_id + len(fresh), name
            fresh.append((photo, name))
            continue
        number, other = there[photo.sha256]
        if other != name:
            raise DataError(f"{source} cannot be in the class {name!r}: the same photo is in {other!r}")
        repeated.append((source, number))
    return fresh, repeated


def _find_files(connection: Connection, digests: list[str]) -> dict[str, tuple[int, str]]:
    """Which of these files are in the gallery now: digest → (photo, class name)."""
    asked = select(photos.c.sha256, photos.c.id, classes.c.name)
    asked = asked.join(members, members.c.photo == photos.c.id).join(classes).where(members.c.until.is_(None))
    found = {}
    for some in portions(digests, ROWS):
        for digest, photo, name in connection.execute(asked.where(photos.c.sha256.in_(some))):
            found[digest] = (photo, name)
    return found


def add_photos(
    connection: Connection, new: Sequence[tuple[NewPhoto, str]], layout: Layout, fingerprint: str, version: int
) -> None:
    """Store photos that are not there, each in its class, from a version on."""
    numbers = _class_numbers(connection, dict.fromkeys(name for _, name in new))
    rows = list(enumerate(new, start=_next_photo(connection)))
    for some in portions(rows, ROWS):
        connection.execute(insert(photos), [_photo_row(number, photo) for number, (photo, _) in some])
        connection.execute(insert(pictures), [_bytes_row(number, photo.picture) for number, (photo, _) in some])
        add_encodings(connection, ((number, photo.encoding) for number, (photo, _) in some), layout, fingerprint)
        joined = [{"photo": number, "since": version, "class_number": numbers[name]} for number, (_, name) in some]
        connection.execute(insert(members), joined)


def add_encodings(
    connection: Connection, pairs: Iterable[tuple[int, Encoding]], layout: Layout, fingerprint: str
) -> None:
    """As they come, a portion at a time."""
    for some in portions(pairs, _rows_of(layout)):
        packed = [_bytes_row(photo, layout.pack(encoding, f"photo {photo}")) for photo, encoding in some]
        connection.execute(insert(encodings), [row | {"fingerprint": fingerprint} for row in packed])


def _photo_row(number: int, photo: NewPhoto) -> dict[str, Any]:
    return {
        "id": number, "sha256": photo.sha256, "hash": _signed(photo.hashes[0]), "mirror": _signed(photo.hashes[1]),
        "width": int(photo.width), "height": int(photo.height), "notes": json.dumps(photo.notes),
        "box": None if photo.box is None else json.dumps([float(edge) for edge in photo.box]),
        "source": _storable(photo.source),
    }  # fmt: skip


def _bytes_row(photo: int, data: bytes) -> dict[str, Any]:
    return {"photo": photo, "checksum": zlib.crc32(data), "data": data}


def _class_numbers(connection: Connection, names: Iterable[str]) -> dict[str, int]:
    """Of each name; a class that is new gets the next one, one that had photos before keeps its own."""
    names = list(names)
    numbers: dict[str, int] = {}
    for some in portions(names, ROWS):
        asked = select(classes.c.name, classes.c.number).where(classes.c.name.in_(some))
        numbers |= {row.name: row.number for row in connection.execute(asked)}
    added = [name for name in names if name not in numbers]
    next_number = _next(connection, classes.c.number, read_purged(connection).class_number)
    for number, name in enumerate(added, start=next_number):
        numbers[name] = number
        made = "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))
        connection.execute(insert(classes), {"number": number, "id": made, "name": name})
    return numbers


def end_members(connection: Connection, which: ColumnElement[bool], version: int) -> None:
    """Let members leave with a version."""
    connection.execute(update(members).where(members.c.until.is_(None), which).values(until=version))


def last_change(connection: Connection, after: int) -> Version | None:
    """The last version after one that brought or took photos, was not itself an undoing, and was not undone."""
    undone = select(versions.c.undoes).where(versions.c.undoes.is_not(None))
    changed = exists().where(or_(members.c.since == versions.c.number, members.c.until == versions.c.number))
    asked = select(versions).where(versions.c.undoes.is_(None), versions.c.number.not_in(undone), changed)
    asked = asked.where(versions.c.number > after)
    row = connection.execute(asked.order_by(versions.c.number.desc()).limit(1)).one_or_none()
    return None if row is None else read_version(row)


def bring_back(connection: Connection, earlier: int, version: int) -> None:
    """Let a version have the members that an earlier one had."""
    wanted = select(members.c.photo).where(at(earlier))
    end_members(connection, members.c.photo.not_in(wanted), version)
    staying = select(members.c.photo).where(members.c.until.is_(None))
    back = select(members.c.photo, literal(version), members.c.class_number).where(at(earlier))
    connection.execute(
        insert(members).from_select(["photo", "since", "class_number"], back.where(members.c.photo.not_in(staying)))
    )


def _next_photo(connection: Connection) -> int:
    return _next(connection, photos.c.id, read_purged(connection).photo)


def _next(connection: Connection, column: Column[int], given: int) -> int:
    """The number after those that are there, and after those that were given before."""
    return max(int(connection.execute(select(func.coalesce(func.max(column), given))).scalar_one()), given) + 1


def _rows_of(layout: Layout) -> int:
    """How many encodings are read or written at once."""
    return max(1, min(ROWS, BYTES // max(1, layout.size)))


def portions(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """So many at a time."""
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some


def _signed(bits: int) -> int:
    """64 bits as databases count them."""
    return int(bits) - (1 << 64) if int(bits) >> 63 else int(bits)


def _storable(text: str) -> str:
    return printable(text).replace("\0", "\\x00")
