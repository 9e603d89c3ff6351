"""A directory that appears whole or not at all: built beside its place under a lock, renamed when complete."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from parseshot.errors import DataError

try:
    import fcntl
except ImportError:  # Windows: two runs into one place are then not told apart
    fcntl = None  # type: ignore[assignment]

REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


@contextlib.contextmanager
def staging(path: Path) -> Iterator[Path]:
    """A directory beside `path` to build in; it becomes `path` when the block ends well and is removed otherwise.

    A killed run leaves it behind, unlocked; the next run finds it by its name and starts it afresh. Two runs at once
    are told apart by a lock on the directory itself, which dies with its process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.partial"
    lock = _lock(temporary, path)
    try:
        _empty(temporary)
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        temporary.rename(path)  # over an empty directory at most
        sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(lock)


@contextlib.contextmanager
def only_one(lock: Path, refusal: str, *, wait: bool = False) -> Iterator[None]:
    """Be the only process that holds a lock file; it is free when its process ends, however that ends."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                who = os.read(handle, 200).decode(errors="replace").strip()
                raise DataError(f"{refusal} ({who or 'just started'})") from None
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"pid {os.getpid()}, since {now}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Wait until a file or directory is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def reserve(handle: int, size: int, what: str) -> None:
    """Claim the space of a file before anything is written, so that a full disk is known at once."""
    free = shutil.disk_usage(os.path.dirname(what) or ".").free
    try:
        if size > free:
            raise OSError(28, "No space left on device")
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
        else:
            os.truncate(handle, size)
    except OSError as error:
        needed, left = f"{size / 1e6:.0f} MB", f"{free / 1e6:.0f} MB"
        raise DataError(f"{what} needs {needed}, {left} are free: {error.strerror}; nothing was written") from None


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: a temporary neighbour, on the disk, then renamed over the old one."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
        sync(path.parent)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise not_saved(path, len(data), error) from None
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def not_saved(path: Path, size: int, error: OSError) -> Exception:
    """What to say when the disk refuses; other errors stay what they are."""
    if error.errno not in REFUSALS:
        return error
    free = shutil.disk_usage(path.parent).free
    return DataError(
        f"{path}: not saved ({error.strerror}); it needs {size / 1e6:.1f} MB, {free / 1e6:.1f} MB are free. "
        "What was saved before is whole: make room, then run it again; a training goes on with --resume"
    )


def _lock(temporary: Path, path: Path) -> int:
    while True:
        temporary.mkdir(exist_ok=True)
        handle = os.open(temporary, os.O_RDONLY)
        if fcntl is None:
            return handle
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(temporary).st_ino == os.fstat(handle).st_ino:
                return handle
        except BlockingIOError:
            os.close(handle)
            raise DataError(f"another run is writing {path}; wait for it or choose another --out") from None
        except FileNotFoundError:  # the other run finished in between
            pass
        os.close(handle)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
