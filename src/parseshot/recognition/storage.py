"""Where a gallery lies: an SQLite file or a PostgreSQL database, its transactions, and what to say when one fails.

A write is one transaction, and only one is under way at a time; a read sees the state that one of them left.
"""

import contextlib
import functools
import os
import shutil
import sqlite3
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft
from sqlalchemy.pool import NullPool, Pool, QueuePool

from parseshot.data.names import printable
from parseshot.data.staging import sync
from parseshot.errors import DataError, UsageError

WAIT = 60.0  # seconds that a write waits for others
REACH = 10  # seconds to reach a server
CONNECTIONS = 15  # of one process; more threads than that wait for one
KEPT_LOG = 64 << 20  # bytes of SQLite's write-ahead log that stay after a large write
LOCK = 0x70617273  # "pars", which of a PostgreSQL database's advisory locks is ours

# what SQLite says, or PostgreSQL's SQLSTATE
FULL = ("database or disk is full", "disk i/o error", "53100", "58030")
READ_ONLY = ("readonly database", "25006", "42501")
BUSY = ("database is locked", "55p03")
STRANGE = ("file is not a database",)
DAMAGED = ("malformed", "xx001", "xx002")

_storages: "weakref.WeakSet[Storage]" = weakref.WeakSet()


class Storage:
    """A database and its transactions. Threads share one, and so do processes that are forked."""

    def __init__(self, name: str, engine: Engine, file: Path | None) -> None:
        self.name, self.file, self._engine = name, file, engine
        self._inherited: list[Pool] = []
        if file is not None:
            self._alone = engine
            self._reader = engine.execution_options(begin_with="BEGIN")
            self._writer = engine.execution_options(begin_with="BEGIN IMMEDIATE")
        else:
            self._alone = engine.execution_options(isolation_level="AUTOCOMMIT")
            self._reader = engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            self._writer = engine.execution_options(isolation_level="READ COMMITTED")  # sees what the last write left
        _watch_forks()
        _storages.add(self)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """One state of the database, whatever is written meanwhile."""
        with self._explained("read"), self._reader.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self, needed: int = 0, *, erase: bool = False) -> Iterator[Connection]:
        """All of the block or nothing of it. needed: the bytes it will take, to be said if they are not there.

        erase: SQLite overwrites what is deleted with zeros; `shrink` does the rest.
        """
        with self._explained("saved", needed), self._writer.begin() as connection:
            if self.file is None:
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {1000 * WAIT:.0f}")
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({LOCK}, hashtext(current_schema()))")
            elif erase:
                connection.exec_driver_sql("PRAGMA secure_delete = ON")
            yield connection

    def shrink(self, tables: Sequence[str]) -> None:
        """Write the tables anew without the room, and the remains, of what was deleted. Others may read and write.

        A file is then no larger than what is in it, and its log is empty, which waits for readers of an earlier state.
        On a server readers wait for the table that is being written.
        """
        with self._explained("made smaller"), self._alone.connect() as connection:
            if self.file is None:
                connection.exec_driver_sql(f"SET lock_timeout = {1000 * WAIT:.0f}")
                try:
                    for table in tables:  # waits for those who may see what was deleted, holding no other table
                        connection.exec_driver_sql(f"BEGIN; LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE; COMMIT")
                    connection.exec_driver_sql(f"VACUUM (FULL, ANALYZE) {', '.join(tables)}")
                finally:
                    connection.invalidate()  # not to be used again with this limit
                return
            connection.exec_driver_sql("VACUUM")
            if connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()[0]:
                raise DataError(
                    f"{self.name}: what was deleted is shown to nobody any more, but it is still in the file: "
                    f"somebody has been reading an earlier state for {WAIT:.0f} seconds; purge again"
                )

    def keep_log(self) -> None:
        """Have SQLite write ahead into a log, so that readers need not wait; a copy made by VACUUM INTO does not."""
        if self.file is not None and _can_write(self.file):
            with self._explained("read"), self._engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA journal_mode = WAL")

    def close(self) -> None:
        """Close what is not in use; it is opened again when it is needed."""
        self._engine.dispose()

    def leave_inherited(self) -> None:
        """A forked process must neither use nor close what a thread of its parent had in use."""
        self._inherited.append(self._engine.pool)
        self._engine.dispose(close=False)

    @contextlib.contextmanager
    def _explained(self, done: str, needed: int = 0) -> Iterator[None]:
        try:
            yield
        except NoConnectionLeft:
            raise DataError(f"{self.name}: all {CONNECTIONS} connections were in use for {WAIT:.0f} seconds") from None
        except DBAPIError as error:
            raise self._refusal(error, done, needed) from None

    def _refusal(self, error: DBAPIError, done: str, needed: int) -> Exception:
        """What to tell the user; an error that is ours stays what it is."""
        said = str(error.orig).strip().split("\n")[0]
        signs = (getattr(error.orig, "sqlstate", said) or "").lower()
        is_any = {kind: any(sign in signs for sign in kind) for kind in (FULL, READ_ONLY, BUSY, STRANGE, DAMAGED)}
        if is_any[STRANGE]:
            return DataError(f"{self.name} is not a gallery: {said}")
        if is_any[DAMAGED]:
            return DataError(f"{self.name} is damaged ({said}); take a copy of it from before")
        if is_any[READ_ONLY]:
            return DataError(f"{self.name} can only be read: not {done} ({said})")
        if is_any[BUSY]:
            return DataError(f"{self.name}: not {done}, others have been writing for {WAIT:.0f} seconds; try again")
        if is_any[FULL] and done == "saved":
            return DataError(f"{self.name}: not saved ({said}){self._room(needed)}. It is as it was, nothing is lost")
        if isinstance(error, OperationalError):
            return DataError(f"{self.name} could not be {done}: {said}")
        return error

    def _room(self, needed: int) -> str:
        if self.file is None:
            return ""
        return f"; it needs about {needed:,} bytes, {shutil.disk_usage(self.file.parent).free:,} bytes are free"


def open_storage(where: Path | str, fill: Callable[[Connection], None] | None = None) -> Storage:
    """A path or URL of an SQLite file, or the URL of a PostgreSQL database. fill: makes the tables of a new file."""
    if not isinstance(where, str) or "://" not in where:
        return _open_file(Path(where), fill)
    try:
        url = make_url(where)
    except (ArgumentError, ValueError):
        raise UsageError("the gallery's URL cannot be read; it has the form postgresql://user@host:port/name") from None
    kind = url.drivername.split("+")[0]
    if kind == "sqlite" and url.database and not url.query:
        return _open_file(Path(url.database), fill)
    if kind in ("postgresql", "postgres"):
        return _open_server(url)
    raise UsageError(f"a gallery is a file, sqlite:///FILE or postgresql://…, not {kind}:// of this form")


def _open_file(path: Path, fill: Callable[[Connection], None] | None) -> Storage:
    name = printable(str(path))
    if "\0" in name:
        raise UsageError(f"{name!r} is not a file name")
    try:
        if not path.parent.is_dir():
            raise DataError(f"{name}: the folder {printable(str(path.parent))} does not exist")
        if not path.exists() and fill is None:
            raise DataError(f"no gallery {name}: the file does not exist")
        if not path.exists() and fill is not None:
            _make_file(path.absolute(), name, fill)
        if not path.is_file() or path.stat().st_size == 0:
            raise DataError(f"{name} is not a gallery: {'the file is empty' if path.is_file() else 'not a file'}")
        return _file_storage(path.resolve(), name)
    except OSError as error:
        raise DataError(f"{name} could not be opened: {error.strerror}") from None


def _make_file(path: Path, name: str, fill: Callable[[Connection], None]) -> None:
    """Made whole beside its place, then linked there: nobody sees half of it, and of two makers the first one wins."""
    with tempfile.TemporaryDirectory(prefix=".gallery-", dir=path.parent) as folder:
        made = Path(folder) / "made"
        made.touch()
        with contextlib.closing(_file_storage(made, name)) as storage:
            storage.keep_log()
            with storage.writing() as connection:
                fill(connection)
        try:
            os.link(made, path)
        except FileExistsError:
            return
        except OSError:  # a file system without links; two makers are then not told apart
            made.rename(path)
    sync(path.parent)


def _file_storage(file: Path, name: str) -> Storage:
    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(_uri(file), uri=True, timeout=WAIT, isolation_level=None, check_same_thread=False)
        for pragma in ("foreign_keys = ON", "synchronous = FULL", f"journal_size_limit = {KEPT_LOG}"):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    if _can_write(file):
        engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool, **_pool())
    else:
        engine = create_engine("sqlite://", creator=connect, poolclass=NullPool, hide_parameters=True)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        statement = connection.get_execution_options().get("begin_with")
        if statement is not None:
            connection.exec_driver_sql(statement)

    return Storage(name, engine, file)


def _uri(file: Path) -> str:
    """Where nothing can be written, SQLite reads only if it is told so, or that nobody else writes either."""
    if _can_write(file):
        return f"{file.as_uri()}?mode=rw"
    return f"{file.as_uri()}?mode=ro" if Path(f"{file}-wal").exists() else f"{file.as_uri()}?mode=ro&immutable=1"


def _can_write(file: Path) -> bool:
    """The log lies in the folder, so both must be writable."""
    effective = os.access in os.supports_effective_ids
    return all(os.access(path, os.W_OK, effective_ids=effective) for path in (file, file.parent))


def _open_server(url: URL) -> Storage:
    name = URL.create("postgresql", url.username, None, url.host, url.port, url.database).render_as_string()
    if "@" in (url.host or ""):
        raise UsageError("the gallery's URL holds two @; write one that belongs to the password as %40")
    arguments = {"connect_timeout": REACH} if "connect_timeout" not in url.query else {}
    try:
        engine = create_engine(
            url.set(drivername="postgresql+psycopg"), connect_args=arguments, pool_pre_ping=True, **_pool()
        )
    except ImportError:
        raise UsageError(f"{name}: psycopg is not installed; pip install 'parseshot[postgres]'") from None
    event.listen(engine, "before_cursor_execute", _ask_for_raw_bytes)
    return Storage(name, engine, None)


def _ask_for_raw_bytes(
    connection: Connection, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
) -> None:
    """Where a statement says so, not as hexadecimal digits, which take twice as long."""
    if context is not None and context.execution_options.get("raw_bytes"):
        from psycopg.pq import Format

        cursor.format = Format.BINARY


@functools.cache
def _watch_forks() -> None:
    """SQLite keeps its locks by process: a fork that inherits an open file believes it holds locks that it does not."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_close_idle, after_in_child=_leave_inherited)


def _close_idle() -> None:
    for storage in _storages:
        storage.close()


def _leave_inherited() -> None:
    for storage in _storages:
        storage.leave_inherited()


def _pool() -> dict[str, Any]:
    """No parameters in messages: they are pictures, and names that people gave."""
    return {"pool_size": CONNECTIONS, "max_overflow": 0, "pool_timeout": WAIT, "hide_parameters": True}
