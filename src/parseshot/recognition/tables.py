"""The tables of a gallery. Photos and what belongs to them are never changed, only purged; members say which are in it.

A gallery at version v is the members with since ≤ v that have no end, or one after v. Pictures lie apart from what is
known of them, so that going through all photos does not read megabytes.
"""

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    ForeignKey,
    FromClause,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    and_,
    insert,
    inspect,
    or_,
    select,
)

from parseshot.errors import DataError

SCHEMA = 1  # counted up when the tables change
KIND = "parseshot gallery"

_tables = MetaData()
_Number = BigInteger().with_variant(Integer, "sqlite")  # SQLite's own row number has this very name

meta = Table(
    "meta",
    _tables,
    Column("key", String, primary_key=True),  # kind, schema; fingerprint and layout since the first enrolment; purged
    Column("value", Text, nullable=False),
)
versions = Table(
    "versions",
    _tables,
    Column("number", _Number, primary_key=True, autoincrement=False),
    Column("at", String, nullable=False),  # UTC, ISO 8601
    Column("action", String, nullable=False),
    Column("detail", Text, nullable=False),  # JSON
    Column("key", String, unique=True),  # of the request that made it, where it gave one
    Column("undoes", _Number, ForeignKey("versions.number"), unique=True),
)
classes = Table(
    "classes",
    _tables,
    Column("number", _Number, primary_key=True, autoincrement=False),  # in the order in which they came
    Column("id", String(12), nullable=False, unique=True),
    Column("name", String, nullable=False, unique=True),
)
photos = Table(
    "photos",
    _tables,
    Column("id", _Number, primary_key=True, autoincrement=False),  # in the order in which they came
    Column("sha256", String(64), nullable=False, index=True),  # of the file it came as
    Column("hash", BigInteger, nullable=False),  # perceptual, 64 bits as a signed number
    Column("mirror", BigInteger, nullable=False),  # that of the mirror image
    Column("width", Integer, nullable=False),
    Column("height", Integer, nullable=False),
    Column("box", Text),  # JSON: left, top, right, bottom; null for the whole photo
    Column("notes", Text, nullable=False),  # JSON
    Column("source", Text, nullable=False),
)
pictures = Table(
    "pictures",
    _tables,
    Column("photo", _Number, ForeignKey("photos.id"), primary_key=True, autoincrement=False),
    Column("checksum", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
)
encodings = Table(
    "encodings",
    _tables,
    Column("photo", _Number, ForeignKey("photos.id"), primary_key=True, autoincrement=False),
    Column("fingerprint", String, nullable=False),
    Column("checksum", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),  # see layout.py
)
members = Table(
    "members",
    _tables,
    Column("photo", _Number, ForeignKey("photos.id"), primary_key=True, autoincrement=False),
    Column("since", _Number, ForeignKey("versions.number"), primary_key=True, autoincrement=False, index=True),
    Column("until", _Number, ForeignKey("versions.number"), index=True),
    Column("class_number", _Number, ForeignKey("classes.number"), nullable=False, index=True),
)


def at(version: int, rows: FromClause = members) -> ColumnElement[bool]:
    """The members that a version has."""
    return and_(rows.c.since <= version, or_(rows.c.until.is_(None), rows.c.until > version))


def is_blank(connection: Connection) -> bool:
    """Whether no table has a name of ours; a database may hold others."""
    return set(_tables.tables).isdisjoint(inspect(connection).get_table_names())


def table_names() -> list[str]:
    return list(_tables.tables)


def make_tables(connection: Connection) -> None:
    _tables.create_all(connection, checkfirst=False)
    connection.execute(insert(meta), [{"key": "kind", "value": KIND}, {"key": "schema", "value": str(SCHEMA)}])


def check_tables(connection: Connection, name: str) -> None:
    """Refuse what is not a gallery, or one of another time; `name` is what to call it."""
    there = set(inspect(connection).get_table_names())
    told = read_meta(connection) if meta.name in there else {}
    if told.get("kind") != KIND:
        raise DataError(f"{name} is not a gallery: {'a database of something else' if there else 'it has no tables'}")
    if told.get("schema") != str(SCHEMA):
        newer = told.get("schema", "").isdecimal() and int(told["schema"]) > SCHEMA
        hint = "; it was made by a newer parseshot: upgrade this one" if newer else ""
        raise DataError(f"{name} has schema {told.get('schema')}, this parseshot reads schema {SCHEMA}{hint}")
    if missing := sorted(set(_tables.tables) - there):
        raise DataError(f"{name} is damaged: it has no table {missing[0]}")


def read_meta(connection: Connection) -> dict[str, str]:
    return {row.key: row.value for row in connection.execute(select(meta))}
