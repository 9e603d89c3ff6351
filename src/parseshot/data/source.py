"""Where raw pictures come from: a folder, or a tar or zip archive that is read member by member and never unpacked.

A member's name is only ever a key: nothing is written under it, no link is followed, and only regular files count. A
compressed tar has no index, so it is inflated once into a plain tar in the staging directory, from which worker
processes read by offset. What is passed over is counted by kind; names that would leave the folder are listed.
"""

import bz2
import functools
import lzma
import os
import re
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from parseshot.data.photo import MAX_BYTES
from parseshot.errors import DataError, PhotoError

MAX_MEMBERS = 500_000
MAX_TOTAL = 500_000_000_000  # bytes an archive may inflate to
MAX_RATIO = 100  # inflated to stored; photos hardly compress
LEAST_FREE = 512_000_000  # bytes that must be left on the disk while a tar is inflated
RATIO_FREE = 100_000_000  # below this many bytes no ratio is suspicious
JUNK = re.compile(r"(^|/)(__MACOSX/|\.DS_Store$|Thumbs\.db$|desktop\.ini$|\._|\.git/)", re.IGNORECASE)
DAMAGE = (
    tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, struct.error, EOFError,
    NotImplementedError, ValueError, KeyError, OverflowError, RecursionError,
)  # fmt: skip
MAX_BLOCK = 1 << 20  # bytes inflated at a time


@dataclass(frozen=True)
class Place:
    """Where the bytes of a file are; small, so that it can be sent to a worker process."""

    path: str  # the file, or the archive that holds it
    member: str | None = None  # of a zip
    offset: int = 0  # in a tar; of a zip, where the member begins, as two may have one name
    size: int | None = None  # in a tar


@dataclass
class Source:
    """The regular files of a folder or archive by name (with /), and what was passed over."""

    path: Path
    files: dict[str, Place] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)  # kind → how many
    refused: list[tuple[str, str]] = field(default_factory=list)  # (name, why)
    entries: int = 0  # all that was looked at

    def text(self, name: str) -> str:
        """The content of a small text file."""
        try:
            return read(self.files[name]).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}: {name} is not UTF-8 text ({error.reason} at byte {error.start})") from None

    def find(self, ending: str) -> str | None:
        """The folder (with a final / or empty) nearest to the top that holds `ending`, or None."""
        hits = [name for name in self.files if name == ending or name.endswith("/" + ending)]
        return min(hits, key=lambda name: (name.count("/"), name))[: -len(ending)] if hits else None

    def count(self) -> None:
        """One more file, link or whatever else: there is an end to it."""
        self.entries += 1
        if self.entries > MAX_MEMBERS:
            raise DataError(f"{self.path} holds more than {MAX_MEMBERS} files")

    def add(self, name: str, place: Place) -> None:
        if JUNK.search(name):
            self.ignored["system files"] += 1
        elif name in self.files:
            self.refused.append((name, "is in the archive twice; the first is used"))
        elif name.startswith("/") or ".." in name.split("/") or re.match(r"[A-Za-z]:", name) or "\0" in name:
            self.refused.append((name, "leads out of the archive"))
        else:
            self.files[name] = place


def open_source(path: Path | str, staging: Path) -> Source:
    """List a folder or archive. `staging` is where a compressed tar may be inflated to."""
    path = Path(path)
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise DataError(f"--source {path} does not exist; give a folder or a tar, tgz or zip archive")
    if is_table(path):
        return Source(path, {path.name: Place(str(path))})
    with path.open("rb") as stream:
        head = stream.read(8)
    try:
        if zipfile.is_zipfile(path) and head[:2] == b"PK":
            return _zip(path)
        inflate = next((blocks for magic, blocks in INFLATE.items() if head.startswith(magic)), None)
        plain = path
        if inflate is not None:
            plain = staging / "inflated.tar"
            _inflate(path, inflate(path), plain)
        return _tar(path, plain)
    except DataError:
        raise
    except DAMAGE as error:
        raise DataError(f"{path} is not a complete tar, tgz or zip archive: {error}") from None


def is_table(path: Path) -> bool:
    return path.suffix.lower() in (".csv", ".tsv")


def read(place: Place) -> bytes:
    """The bytes of a file; errors name it."""
    name = place.member or place.path
    try:
        if place.member is not None:
            data = _read_zip_member(place)
        else:
            data = _read_file(place) if place.size is None else _read_tar_member(place, place.size)
    except FileNotFoundError:
        raise PhotoError("E_MISSING", f"{name} is not there any more") from None
    except (OSError, RuntimeError, *DAMAGE) as error:
        raise PhotoError("E_UNREADABLE", f"{name} cannot be read: {error}") from None
    if len(data) > MAX_BYTES:
        raise PhotoError("E_TOO_LARGE", f"{name} is larger than {MAX_BYTES // 1_000_000} MB")
    return data


def _folder(root: Path) -> Source:
    source = Source(root)
    seen: set[tuple[int, int]] = set()

    waiting: list[tuple[str, str]] = [(str(root), "")]
    while waiting:
        folder, prefix = waiting.pop()
        try:
            state = os.stat(folder)
            with os.scandir(folder) as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
        except OSError as error:
            source.refused.append((prefix or folder, f"cannot be listed: {error.strerror}"))
            continue
        if (state.st_dev, state.st_ino) in seen:
            continue
        seen.add((state.st_dev, state.st_ino))
        for entry in entries:
            source.count()
            if entry.is_symlink():
                source.ignored["links"] += 1
            elif entry.is_dir(follow_symlinks=False):
                waiting.append((entry.path, f"{prefix}{entry.name}/"))
            elif entry.is_file(follow_symlinks=False):
                source.add(prefix + entry.name, Place(entry.path))
            else:
                source.ignored["pipes, sockets and devices"] += 1
    source.files = dict(sorted(source.files.items()))
    return source


def _tar(path: Path, plain: Path) -> Source:
    source = Source(path)
    with tarfile.open(plain, "r:") as archive:
        for member in archive:
            source.count()
            if member.size < 0 or member.offset_data < 0:
                raise DataError(f"{path} is damaged: {member.name} has a negative size")
            if member.isdir():
                continue
            if member.issym() or member.islnk():
                source.ignored["links"] += 1
            elif not member.isreg() or member.issparse():
                source.ignored["pipes, sockets and devices"] += 1
            else:
                place = Place(str(plain), offset=member.offset_data, size=member.size)
                source.add(member.name.removeprefix("./"), place)
    return source


def _zip(path: Path) -> Source:
    source = Source(path)
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        _refuse_bomb(path, sum(member.file_size for member in members), path.stat().st_size)
        for member in members:
            source.count()
            if member.is_dir():
                continue
            if member.flag_bits & 1:
                raise DataError(f"{path} is encrypted ({member.filename}); unpack it yourself and give the folder")
            if stat.S_ISLNK(member.external_attr >> 16):
                source.ignored["links"] += 1
            else:
                source.add(member.filename, Place(str(path), member=member.filename, offset=member.header_offset))
    return source


def _read_file(place: Place) -> bytes:
    with open(place.path, "rb") as stream:
        return stream.read(MAX_BYTES + 1)


def _read_tar_member(place: Place, size: int) -> bytes:
    data = os.pread(_open_tar(place.path), min(size, MAX_BYTES + 1), place.offset)
    if len(data) < min(size, MAX_BYTES + 1):
        raise EOFError("the archive ends before")
    return data


_open_tars: dict[str, int] = {}  # opened once a process: every worker reads thousands of members


def _open_tar(path: str) -> int:
    if path not in _open_tars:
        _open_tars[path] = os.open(path, os.O_RDONLY)
    return _open_tars[path]


def close_archives() -> None:
    """Let go of archives: another may come to lie at the same place."""
    while _open_tars:
        os.close(_open_tars.popitem()[1])
    while _open_zips:
        _open_zips.popitem()[1].close()
    _zip_members.cache_clear()


_open_zips: dict[str, zipfile.ZipFile] = {}  # the index of a large zip is read once a process


def _read_zip_member(place: Place) -> bytes:
    assert place.member is not None
    archive = _open_zips.get(place.path)
    if archive is None:
        archive = _open_zips[place.path] = zipfile.ZipFile(place.path)
    with archive.open(_zip_members(archive)[place.offset]) as stream:
        return stream.read(MAX_BYTES + 1)


@functools.lru_cache(maxsize=4)
def _zip_members(archive: zipfile.ZipFile) -> dict[int, zipfile.ZipInfo]:
    return {member.header_offset: member for member in archive.infolist()}


def _inflate(path: Path, blocks: Iterator[bytes], plain: Path) -> None:
    stored, done, look_at = path.stat().st_size, 0, 0
    with plain.open("wb", buffering=0) as out:
        for block in blocks:
            done += len(block)
            _refuse_bomb(path, done, stored)
            if done > look_at:
                look_at = done + LEAST_FREE // 2
                if shutil.disk_usage(plain.parent).free < LEAST_FREE:
                    raise DataError(f"{plain.parent} is nearly full; {path} needs more to be inflated")
            out.write(block)


def _gzip_blocks(path: Path) -> Iterator[bytes]:
    """Twice as fast as the gzip module, which reads 8 KB at a time; several streams may follow each other."""
    inflater = zlib.decompressobj(wbits=31)
    with path.open("rb", buffering=0) as packed:
        while data := packed.read(1 << 18):
            while data:
                if inflater.eof:
                    inflater = zlib.decompressobj(wbits=31)
                yield inflater.decompress(data, MAX_BLOCK)
                data = inflater.unconsumed_tail or inflater.unused_data.lstrip(b"\0")
    if not inflater.eof:
        raise EOFError("it is cut off")


def _other_blocks(path: Path, opener: type[bz2.BZ2File] | type[lzma.LZMAFile]) -> Iterator[bytes]:
    try:
        with opener(path) as packed:
            while block := packed.read(MAX_BLOCK):
                yield block
    except OSError as error:  # bz2 says damage so
        raise DataError(f"{path} is damaged: {error}") from None


def _refuse_bomb(path: Path, inflated: int, stored: int) -> None:
    if inflated > MAX_TOTAL or (inflated > RATIO_FREE and inflated > MAX_RATIO * stored):
        raise DataError(
            f"{path} inflates to {inflated // 1_000_000} MB or more from {stored / 1_000_000:.1f} MB; refused"
        )


INFLATE: dict[bytes, Callable[[Path], Iterator[bytes]]] = {
    b"\x1f\x8b": _gzip_blocks,
    b"BZh": functools.partial(_other_blocks, opener=bz2.BZ2File),
    b"\xfd7zXZ": functools.partial(_other_blocks, opener=lzma.LZMAFile),
}
