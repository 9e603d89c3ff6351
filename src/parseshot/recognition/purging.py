"""Deleting for good what was removed from a gallery: the rows of the photos that are in no class now, and their names.

Versions before the purge stay in the history as numbers, dates and counts; none of them can be read or undone.
"""

import json
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, Table, delete, func, insert, select, update

from parseshot.recognition.tables import classes, encodings, members, meta, photos, pictures, versions

PURGED = "purged"  # its row in `meta`


class Purged(NamedTuple):
    """The last purge. Numbers that were given once are never given again: a reader may still hold what had them."""

    version: int = 0  # that it made; 0 where there was none
    photo: int = 0  # the highest number of a photo until then …
    class_number: int = 0  # … and of a class


def read_purged(connection: Connection) -> Purged:
    told = connection.execute(select(meta.c.value).where(meta.c.key == PURGED)).scalar_one_or_none()
    return Purged() if told is None else Purged(*json.loads(told))


def count_removed(connection: Connection) -> int:
    """How many photos the gallery holds only so that removing them can be undone."""
    return int(connection.execute(select(func.count()).select_from(photos).where(_is_removed(photos))).scalar_one())


def delete_removed(connection: Connection, version: int) -> None:
    """To be done in the transaction that makes the version."""
    before = read_purged(connection)
    numbers = [connection.execute(select(func.max(column))).scalar_one() for column in (photos.c.id, classes.c.number)]
    told = Purged(version, max(before.photo, numbers[0] or 0), max(before.class_number, numbers[1] or 0))
    connection.execute(delete(members).where(members.c.until.is_not(None)))
    for table in (pictures, encodings, photos, classes):
        connection.execute(delete(table).where(_is_removed(table)))
    _forget_names(connection, version)
    connection.execute(delete(meta).where(meta.c.key == PURGED))
    connection.execute(insert(meta), {"key": PURGED, "value": json.dumps(told)})


def _is_removed(table: Table) -> ColumnElement[bool]:
    """Whether no member of now refers to a row."""
    (own,) = table.primary_key.columns
    named = members.c.class_number if table is classes else members.c.photo
    return own.not_in(select(named).where(members.c.until.is_(None)))


def _forget_names(connection: Connection, version: int) -> None:
    """Earlier versions tell of classes and files by name; those that are gone are left out."""
    names = set(connection.execute(select(classes.c.name)).scalars())
    numbers = set(connection.execute(select(photos.c.id)).scalars())
    for row in connection.execute(
        select(versions.c.number, versions.c.detail).where(versions.c.number < version)
    ).all():
        detail = json.loads(row.detail)
        if "classes" in detail:
            detail["classes"] = {name: count for name, count in detail["classes"].items() if name in names}
        if "repeated" in detail:
            detail["repeated"] = [[source, photo] for source, photo in detail["repeated"] if photo in numbers]
        if (told := json.dumps(detail)) != row.detail:
            connection.execute(update(versions).where(versions.c.number == row.number).values(detail=told))
