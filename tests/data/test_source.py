"""Folders and archives, hostile ones included; class names; MATLAB files; splits. Rows D6–D10 of the list of faults."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import signal
import socket
import struct
import tarfile
import tempfile
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
from hypothesis import given, settings
from hypothesis import strategies as st

from parseshot.data import matfile, source
from parseshot.data.matfile import read_mat
from parseshot.data.names import class_name, csv_cell, printable
from parseshot.data.source import Place, Source, open_source, read
from parseshot.data.split import SPLITS, Split, load_split, shipped_splits, split_by_column, split_by_seed
from parseshot.errors import DataError, PhotoError

PHOTOS = {
    "owl/1.jpg": b"first owl",
    "owl/2.jpg": b"second owl" * 1000,
    "wren/1.jpg": b"",
    "lists/a b.txt": b"\xef\xbb\xbfh\xc3\xa9",
}


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails instead of hanging."""

    def late(*_: object) -> None:
        raise AssertionError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Gives a function that says how many bytes Python had at most in the block."""
    most = []
    tracemalloc.start()
    try:
        yield lambda: most[0]
    finally:
        most.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()


def tar_of(members: list[tuple[tarfile.TarInfo | str, bytes]], **options) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", **options) as archive:
        for member, content in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def zip_of(members: list[tuple[zipfile.ZipInfo | str, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w", method) as archive:
        warnings.simplefilter("ignore")  # duplicate names are meant
        for member, content in members:
            archive.writestr(member, content)
    return stream.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    """A member of a tar that is no file."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


def listed(folder: Path, data: bytes, name: str = "photos.bin") -> Source:
    (folder / "staging").mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    return open_source(folder / name, folder / "staging")


def result_or_error(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except DataError as error:
        return error


def contents(opened: Source) -> dict[str, bytes]:
    return {name: read(place) for name, place in opened.files.items()}


def everything_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# Reading ------------------------------------------------------------------------------------------------------------

PACKERS = {
    "tar": lambda data: data, "tgz": gzip.compress, "tar.bz2": bz2.compress, "tar.xz": lzma.compress,
}  # fmt: skip


@pytest.mark.parametrize("kind", [*PACKERS, "zip", "stored zip", "folder"])
def test_the_same_files_from_every_kind_of_source(kind: str, tmp_path: Path) -> None:
    members = list(PHOTOS.items())
    if kind == "folder":
        for name, content in members:
            (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "in" / name).write_bytes(content)
        opened = open_source(tmp_path / "in", tmp_path)
    elif kind in PACKERS:
        opened = listed(tmp_path, PACKERS[kind](tar_of([special("owl", tarfile.DIRTYPE), *members])))
    else:
        opened = listed(tmp_path, zip_of([("owl/", b""), *members], 8 if kind == "zip" else 0))
    assert contents(opened) == PHOTOS
    assert not opened.ignored
    assert opened.refused == []
    assert opened.text("lists/a b.txt") == "hé"


def test_a_list_that_is_not_text_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "images.txt").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=r"images\.txt is not UTF-8 text .*at byte 2"):
        open_source(tmp_path, tmp_path).text("images.txt")


def test_a_leading_dot_and_longer_names_are_read(tmp_path: Path) -> None:
    long = "x" * 150 + "/" + "y" * 180 + ".jpg"
    for number, form in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        (tmp_path / str(number)).mkdir()
        opened = listed(tmp_path / str(number), tar_of([("./owl/1.jpg", b"owl"), (long, b"long")], format=form))
        assert contents(opened) == {"owl/1.jpg": b"owl", long: b"long"}


def test_find_takes_the_folder_nearest_to_the_top() -> None:
    place = Place("nowhere")
    names = ["a/b/images.txt", "z/images.txt", "c/images.txt", "other_images.txt", "top/data/x.txt"]
    opened = Source(Path("."), dict.fromkeys(names, place))
    assert opened.find("images.txt") == "c/"
    assert opened.find("data/x.txt") == "top/"
    assert opened.find("ages.txt") is None
    assert Source(Path("."), {"images.txt": place}).find("images.txt") == ""


def test_a_table_is_its_own_source_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    table = tmp_path / "photos.csv"
    table.write_text("file,class\n")
    assert contents(open_source(table, tmp_path)) == {"photos.csv": b"file,class\n"}
    with pytest.raises(DataError, match="does not exist; give a folder"):
        open_source(tmp_path / "none", tmp_path)


def test_a_file_that_went_away_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.jpg").write_bytes(b"owl")
    opened = open_source(tmp_path / "in", tmp_path)
    (tmp_path / "in" / "1.jpg").unlink()
    with pytest.raises(PhotoError, match=r"1\.jpg is not there any more") as caught:
        read(opened.files["1.jpg"])
    assert caught.value.code == "E_MISSING"


@pytest.mark.parametrize("kind", [*PACKERS, "zip", "text"])
def test_a_damaged_archive_is_an_error_with_its_name(kind: str, tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(30_000)
    if kind == "zip":
        whole = zip_of([("1.jpg", content)])
    elif kind == "text":
        whole = b"The owl sat on the branch.\n" * 1000
    else:
        whole = PACKERS[kind](tar_of([("1.jpg", content)]))
    with pytest.raises(DataError, match=r"photos\.bin"):
        listed(tmp_path, whole[: len(whole) // 2])
    if kind not in ("tar", "zip", "text"):  # those say nothing about their content
        broken = bytearray(whole)
        broken[len(whole) // 2 : len(whole) // 2 + 50] = b"\0" * 50
        with pytest.raises(DataError, match=r"photos\.bin"):
            listed(tmp_path, bytes(broken))
        with pytest.raises(DataError, match=r"photos\.bin"):
            listed(tmp_path, whole[:12])


def test_a_damaged_member_costs_itself_only(tmp_path: Path) -> None:
    data = bytearray(zip_of([("1.jpg", b"first" * 100), ("2.jpg", b"second" * 100)], zipfile.ZIP_STORED))
    at = data.index(b"firstfirst")
    data[at : at + 5] = b"wrong"
    opened = listed(tmp_path, bytes(data))
    with pytest.raises(PhotoError, match=r"1\.jpg cannot be read: Bad CRC") as caught:
        read(opened.files["1.jpg"])
    assert caught.value.code == "E_UNREADABLE"
    assert read(opened.files["2.jpg"]) == b"second" * 100


ARCHIVES = {
    "tar": tar_of(list(PHOTOS.items())), "pax": tar_of([("é" * 90, b"long")], format=tarfile.PAX_FORMAT),
    "tgz": gzip.compress(tar_of(list(PHOTOS.items())), mtime=0), "zip": zip_of(list(PHOTOS.items())),
}  # fmt: skip


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(sorted(ARCHIVES)),
    changes=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=5),
    from_the_end=st.booleans(),
)
def test_damaged_archives_give_files_or_errors_of_ours(
    kind: str, changes: list[tuple[float, int]], from_the_end: bool
) -> None:
    data = bytearray(ARCHIVES[kind])
    for place, value in changes:
        at = int(place**2 * min(len(data), 600))
        data[-1 - at if from_the_end else at] = value
    with tempfile.TemporaryDirectory() as folder, within(10):
        opened = result_or_error(listed, Path(folder), bytes(data))
        if isinstance(opened, DataError):
            assert "photos.bin" in str(opened)
            return
        for place in opened.files.values():
            content = result_or_error(read, place)
            assert isinstance(content, bytes) or content.code in ("E_UNREADABLE", "E_TOO_LARGE")


# D7: hostile archives -----------------------------------------------------------------------------------------------

OUTSIDE = ["../x.jpg", "owl/../../x.jpg", "/etc/x.jpg", "C:/x.jpg", "c:x.jpg", ".."]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_d7_names_that_lead_out_are_refused_and_listed(kind: str, tmp_path: Path) -> None:
    members = [
        ("owl/1.jpg", b"owl"),
        *((name, b"bad") for name in OUTSIDE),
        ("./../y.jpg", b"bad"),
        ("a..b/2.jpg", b"ok"),
    ]
    opened = listed(tmp_path, tar_of(members) if kind == "tar" else zip_of(members))
    assert contents(opened) == {"owl/1.jpg": b"owl", "a..b/2.jpg": b"ok"}
    names = [name for name, why in opened.refused if why == "leads out of the archive"]
    assert names[:-1] == OUTSIDE
    assert names[-1] in ("../y.jpg", "./../y.jpg")
    assert everything_in(tmp_path) == {"photos.bin", "staging"}


def test_d7_links_and_devices_in_a_tar_are_not_followed_but_counted(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    members = [
        ("owl/1.jpg", b"owl"),
        special("owl/2.jpg", tarfile.SYMTYPE, str(tmp_path / "secret.txt")),
        special("owl/3.jpg", tarfile.SYMTYPE, "1.jpg"),
        special("owl/4.jpg", tarfile.LNKTYPE, "owl/1.jpg"),
        special("owl/5.jpg", tarfile.LNKTYPE, "../secret.txt"),
        special("owl/6.jpg", tarfile.CHRTYPE),
        special("owl/7.jpg", tarfile.BLKTYPE),
        special("owl/8.jpg", tarfile.FIFOTYPE),
        special("loop", tarfile.SYMTYPE, "."),
    ]
    for data in (tar_of(members), gzip.compress(tar_of(members))):
        opened = listed(tmp_path, data)
        assert contents(opened) == {"owl/1.jpg": b"owl"}
        assert opened.ignored == {"links": 5, "pipes, sockets and devices": 3}
        assert everything_in(tmp_path) - {"staging/inflated.tar"} == {"photos.bin", "staging", "secret.txt"}


def test_d7_links_in_a_zip_are_not_followed_but_counted(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("owl/2.jpg")
    link.external_attr = 0o120777 << 16
    opened = listed(tmp_path, zip_of([("owl/1.jpg", b"owl"), (link, b"/etc/passwd")]))
    assert contents(opened) == {"owl/1.jpg": b"owl"}
    assert opened.ignored == {"links": 1}


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_d7_of_two_members_with_one_name_the_first_is_used(kind: str, tmp_path: Path) -> None:
    members = [("1.jpg", b"first"), ("2.jpg", b"other"), ("1.jpg", b"second")]
    opened = listed(tmp_path, tar_of(members) if kind == "tar" else zip_of(members))
    assert opened.refused == [("1.jpg", "is in the archive twice; the first is used")]
    assert contents(opened) == {"1.jpg": b"first", "2.jpg": b"other"}


def test_d7_an_encrypted_zip_is_refused(tmp_path: Path) -> None:
    data = bytearray(zip_of([("owl/1.jpg", b"owl")]))
    for head, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(head) + flags] |= 1
    with pytest.raises(DataError, match=r"photos\.bin is encrypted \(owl/1\.jpg\); unpack it yourself"):
        listed(tmp_path, bytes(data))


def test_d7_an_archive_in_an_archive_is_a_file_like_others(tmp_path: Path) -> None:
    inner = zip_of([("deep.jpg", b"deep")])
    opened = listed(tmp_path, zip_of([("owl/1.jpg", b"owl"), ("more.zip", inner)]))
    assert contents(opened) == {"owl/1.jpg": b"owl", "more.zip": inner}


@pytest.mark.parametrize("kind", ["zip", "tgz", "tar.bz2", "tar.xz"])
def test_d7_a_ratio_bomb_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "RATIO_FREE", 2_000_000)
    zeros = bytes(8_000_000)
    data = zip_of([("1.bin", zeros)]) if kind == "zip" else PACKERS[kind](tar_of([("1.bin", zeros)]))
    assert len(data) < 80_000
    with pytest.raises(DataError, match=r"photos\.bin inflates to \d MB or more from 0\.0 MB; refused"):
        listed(tmp_path, data)
    inflated = tmp_path / "staging" / "inflated.tar"
    assert not inflated.exists() or inflated.stat().st_size <= 3_200_000, "it stopped soon after the limit"
    monkeypatch.setattr(source, "RATIO_FREE", 20_000_000)
    assert list(listed(tmp_path, data).files) == ["1.bin"], "small archives may compress as well as they like"


@pytest.mark.parametrize("kind", ["zip", "tgz"])
def test_d7_the_total_is_limited_whatever_the_ratio(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_TOTAL", 2_000_000)
    noise = np.random.default_rng(0).bytes(1_500_000)
    members = [("1.bin", noise), ("2.bin", noise)]
    with pytest.raises(DataError, match="refused"):
        listed(tmp_path, zip_of(members) if kind == "zip" else gzip.compress(tar_of(members), 1))


def test_d7_a_zip_that_lies_about_a_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_BYTES", 1_000_000)
    data = bytearray(zip_of([("1.bin", bytes(5_000_000))]))
    struct.pack_into("<I", data, data.index(b"PK\x01\x02") + 24, 100)
    struct.pack_into("<I", data, data.index(b"PK\x03\x04") + 22, 100)
    opened = listed(tmp_path, bytes(data))
    with traced() as peak, pytest.raises(PhotoError) as caught:
        read(opened.files["1.bin"])
    assert caught.value.code == "E_UNREADABLE"
    assert peak() < 4_000_000


@pytest.mark.parametrize("kind", ["tar", "zip", "folder"])
def test_d7_a_file_above_the_limit_is_not_read_whole(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "MAX_BYTES", 1_000_000)
    big = bytes(10_000_000)
    if kind == "folder":
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "1.bin").write_bytes(big)
        opened = open_source(tmp_path / "in", tmp_path)
    else:
        opened = listed(tmp_path, tar_of([("1.bin", big)]) if kind == "tar" else zip_of([("1.bin", big)]))
    with traced() as peak, pytest.raises(PhotoError) as caught:
        read(opened.files["1.bin"])
    assert caught.value.code == "E_TOO_LARGE"
    assert peak() < 4_000_000


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize("members", ["files", "copies of one name", "names that lead out", "links", "junk"])
def test_d7_the_number_of_members_is_limited_whatever_they_are(
    kind: str, members: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "MAX_MEMBERS", 20)

    def one(number: int) -> tuple[Any, bytes]:
        if members == "links":
            if kind == "tar":
                return special(f"{number}.jpg", tarfile.SYMTYPE, "1.jpg")
            link = zipfile.ZipInfo(f"{number}.jpg")
            link.external_attr = 0o120777 << 16
            return link, b"1.jpg"
        names = {"files": f"{number}.jpg", "copies of one name": "1.jpg", "junk": f"{number}/.DS_Store"}
        return names.get(members, f"../{number}.jpg"), b""

    pack = tar_of if kind == "tar" else zip_of
    listed(tmp_path, pack([one(number) for number in range(20)]), "few.bin")
    with pytest.raises(DataError, match=r"many\.bin holds more than 20"):
        listed(tmp_path, pack([one(number) for number in range(30)]), "many.bin")


def test_d7_a_tar_that_leads_back_to_its_own_start_ends(tmp_path: Path) -> None:
    """A negative size makes the next header the same again (CVE-2025-8194)."""
    block = bytearray(tar_of([("1.jpg", b"")])[:512])
    block[124:136] = (-512).to_bytes(12, "big", signed=True)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    with within(2), contextlib.suppress(DataError):
        opened = listed(tmp_path, tar_of([("0.jpg", b"owl")])[:1024] + bytes(block) + bytes(1024))
        assert read(opened.files["0.jpg"]) == b"owl"
        assert "1.jpg" not in opened.files


# D8–D10: folders ----------------------------------------------------------------------------------------------------


def test_d8_loops_pipes_and_sockets_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "in"
    (folder / "owl").mkdir(parents=True)
    (folder / "owl" / "1.jpg").write_bytes(b"owl")
    (folder / "owl" / "loop").symlink_to(folder)
    (folder / "owl" / "2.jpg").symlink_to("1.jpg")
    (folder / "broken.jpg").symlink_to("nothing")
    os.mkfifo(folder / "owl" / "3.jpg")
    monkeypatch.chdir(folder)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as server, within(5):
        server.bind("4.jpg")
        opened = open_source(folder, tmp_path)
    assert contents(opened) == {"owl/1.jpg": b"owl"}
    assert opened.ignored == {"links": 3, "pipes, sockets and devices": 2}
    assert opened.refused == []


def test_d8_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("owl", "private", "wren"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").write_bytes(name.encode())
    scandir = os.scandir

    def guarded(path: Any = ".") -> Any:
        if Path(path).name == "private":  # root may list anything, so chmod alone does not show it
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    opened = open_source(tmp_path, tmp_path)
    monkeypatch.undo()
    assert contents(opened) == {"owl/1.jpg": b"owl", "wren/1.jpg": b"wren"}
    assert opened.refused == [("private/", "cannot be listed: Permission denied")]


def test_d8_many_files_are_listed_in_order(tmp_path: Path) -> None:
    names = [f"{number % 50:02d}/{number:05d}.jpg" for number in range(3000)]
    for number in range(50):
        (tmp_path / f"{number:02d}").mkdir()
    for name in names:
        (tmp_path / name).touch()
    with within(10):
        assert list(open_source(tmp_path, tmp_path).files) == sorted(names)


def test_d8_very_deep_folders_are_listed_or_named(tmp_path: Path) -> None:
    (tmp_path / "owl").mkdir()
    (tmp_path / "owl" / "1.jpg").write_bytes(b"owl")
    folders = [f"{tmp_path}/" + "/".join("d" * level) for level in range(1, 1101)]
    for folder in folders:
        os.mkdir(folder)
    try:
        opened = open_source(tmp_path, tmp_path)
        assert read(opened.files["owl/1.jpg"]) == b"owl"
    finally:
        for folder in reversed(folders):  # here, because what removes tmp_path recurses too
            os.rmdir(folder)


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_d9_names_that_are_not_utf8_are_kept_and_can_be_written(kind: str, tmp_path: Path) -> None:
    raw = b"h\xe9ron/1.jpg"
    name = raw.decode("utf-8", "surrogateescape")
    if kind == "folder":
        os.makedirs(os.path.join(os.fsencode(tmp_path), b"in", b"h\xe9ron"))
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), b"in", raw))).write_bytes(b"owl")
        opened = open_source(tmp_path / "in", tmp_path)
    else:
        opened = listed(tmp_path, tar_of([(name, b"owl")], encoding="utf-8", errors="surrogateescape"))
    assert contents(opened) == {name: b"owl"}
    assert printable(name) == "h\\xe9ron/1.jpg"
    written = json.dumps({"file": printable(name)}, ensure_ascii=False).encode("utf-8")
    assert json.loads(written) == {"file": "h\\xe9ron/1.jpg"}
    assert printable("héron 🦉") == "héron 🦉"


JUNK = [
    "Thumbs.db",
    "owl/.DS_Store",
    "__MACOSX/owl/._1.jpg",
    "owl/._1.jpg",
    "owl/desktop.ini",
    ".git/config",
    "owl/thumbs.DB",
]
NOT_JUNK = ["owl/1.jpg", "owl/my Thumbs.db.jpg", "owl/x._1.jpg", "MACOSX/1.jpg", "owl/.hidden.jpg"]


@pytest.mark.parametrize("kind", ["folder", "tar", "zip"])
def test_d10_what_systems_leave_behind_is_ignored_and_counted(kind: str, tmp_path: Path) -> None:
    members = [(name, name.encode()) for name in JUNK + NOT_JUNK]
    if kind == "folder":
        for name, content in members:
            (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "in" / name).write_bytes(content)
        opened = open_source(tmp_path / "in", tmp_path)
    else:
        opened = listed(tmp_path, tar_of(members) if kind == "tar" else zip_of(members))
    assert contents(opened) == {name: name.encode() for name in NOT_JUNK}
    assert opened.ignored == {"system files": len(JUNK)}


# D6: names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["owl", "../../etc", "CON", "=1+1", "🦉 owl", "Été", "梟", "owl\u200dowl", "a/b\\c", "x" * 200]
)
def test_d6_names_are_data_and_kept(name: str) -> None:
    assert class_name(name, "here") == name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "is empty"),
        ("   ", "is empty"),
        ("\u3000\u00a0", "is empty"),
        ("x" * 10_000, "has 10000 characters, at most 200"),
        ("x" * 201, "has 201 characters, at most 200"),
        ("owl\0", r"U\+0000"),
        ("o\nwl", r"U\+000A"),
        ("o\x1bwl", r"U\+001B"),
        ("o\x85wl", r"U\+0085"),
        ("owl \u202egpj", r"U\+202E"),
        ("\u2066owl", r"U\+2066"),
        ("owl\u200f", r"U\+200F"),
    ],
)
def test_d6_names_that_hide_something_are_refused_with_their_place(name: str, why: str) -> None:
    with pytest.raises(DataError, match=rf"^folder 3: the class name .*{why}"):
        class_name(name, "folder 3")


@pytest.mark.parametrize("name", ["\u200b", "\u2060\ufeff", "owl\u061c", "o\u2028wl", "o\u2029wl"])
def test_d6_names_that_show_nothing_or_break_lines_are_refused(name: str) -> None:
    """Zero-width characters alone, the Arabic letter mark, line and paragraph separators."""
    with pytest.raises(DataError, match="folder 3"):
        class_name(name, "folder 3")


def test_d6_a_name_of_undecodable_bytes_is_refused_or_can_be_written() -> None:
    """D9: the folder of a class may be named so."""
    result = result_or_error(class_name, "h\udce9ron", "folder 3")
    if isinstance(result, DataError):
        assert str(result).encode("utf-8").startswith(b"folder 3: ")
    else:
        assert result.encode("utf-8") == b"h\\xe9ron"


def test_d6_twins_are_one_class_and_spaces_around_are_dropped() -> None:
    assert class_name("he\u0301ron", "here") == class_name("h\u00e9ron", "here") == "h\u00e9ron"
    assert class_name("  snowy owl ", "here") == "snowy owl"
    assert class_name("e\u0301" * 200, "here") == "\u00e9" * 200, "the length is counted after composing"


def test_d6_no_cell_is_taken_for_a_formula() -> None:
    for text in ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"):
        assert csv_cell(text) == "'" + text
    for text in ("owl", "", "1=1", " owl", "'quoted"):
        assert csv_cell(text) == text


# MATLAB files -------------------------------------------------------------------------------------------------------


def mat(variables: dict[str, Any], *, compressed: bool) -> bytes:
    stream = io.BytesIO()
    scipy.io.savemat(stream, variables, do_compression=compressed)
    return stream.getvalue()


def structs(rows: list[dict[str, Any]]) -> np.ndarray:
    """A 1×n struct array, as MATLAB writes one."""
    array = np.empty((1, len(rows)), dtype=[(name, "O") for name in rows[0]])
    for number, row in enumerate(rows):
        array[0, number] = tuple(row.values())
    return array


def cells(values: list[Any]) -> np.ndarray:
    array = np.empty((1, len(values)), dtype=object)
    array[0, :] = values
    return array


CARS = {
    "annotations": structs(
        [
            {
                "bbox_x1": np.uint16([[39]]),
                "class": np.uint8([[116]]),
                "fname": "00001.jpg",
                "test": np.bool_([[True]]),
            },
            {
                "bbox_x1": np.uint16([[612]]),
                "class": np.uint8([[7]]),
                "fname": "00002 é.jpg",
                "test": np.bool_([[False]]),
            },
        ]
    ),
    "class_names": cells(["AM General Hummer SUV 2000", "Citroën C3", "smart fortwo"]),
}


@pytest.mark.parametrize("compressed", [False, True])
def test_cars_are_read_as_scipy_wrote_them(compressed: bool) -> None:
    found = read_mat(mat(CARS, compressed=compressed), "cars.mat")
    assert list(found) == ["annotations", "class_names"]
    assert found["class_names"] == ["AM General Hummer SUV 2000", "Citroën C3", "smart fortwo"]
    plain = [
        {name: one if isinstance(one, str) else one.tolist() for name, one in row.items()}
        for row in found["annotations"]
    ]
    assert plain == [
        {"bbox_x1": [[39]], "class": [[116]], "fname": "00001.jpg", "test": [[1]]},
        {"bbox_x1": [[612]], "class": [[7]], "fname": "00002 é.jpg", "test": [[0]]},
    ]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"])
def test_numbers_keep_their_type_shape_and_order(dtype: str, compressed: bool) -> None:
    values = (np.arange(24).reshape(2, 3, 4) * 5).astype(dtype)
    found = read_mat(
        mat({"v": values, "one": values[:1, :1, 0], "none": values[:0, 0]}, compressed=compressed), "x.mat"
    )
    assert np.array_equal(found["v"], values)
    assert found["v"].dtype == values.dtype
    assert found["one"].tolist() == [[0]]
    assert found["none"].shape == (0, 4)


@pytest.mark.parametrize("compressed", [False, True])
def test_nested_empty_and_long_values(compressed: bool) -> None:
    variables = {
        "deep": structs([{"a": structs([{"b": cells(["x", np.float64([[1.5]])])}])}]),
        "text": "梟 owl " * 3000,
        "nothing": "",
        "n": 7.25,
    }
    found = read_mat(mat(variables, compressed=compressed), "x.mat")
    inner = found["deep"][0]["a"][0]["b"]
    assert inner[0] == "x"
    assert inner[1].tolist() == [[1.5]]
    assert found["text"] == "梟 owl " * 3000
    assert found["nothing"] == ""
    assert found["n"].tolist() == [[7.25]]


def element(order: str, kind: int, content: bytes) -> bytes:
    return struct.pack(order + "II", kind, len(content)) + content + bytes(-len(content) % 8)


def matrix(order: str, kind: int, shape: tuple[int, ...], name: bytes, *values: bytes) -> bytes:
    """An array of a MATLAB file, by hand."""
    flags = element(order, 6, struct.pack(order + "II", kind, 0))
    head = flags + element(order, 5, struct.pack(f"{order}{len(shape)}i", *shape)) + element(order, 1, name)
    return element(order, 14, head + b"".join(values))


def mat_header(order: str) -> bytes:
    return b"MATLAB 5.0 MAT-file".ljust(124) + (b"\0\x01IM" if order == "<" else b"\x01\0MI")


@pytest.mark.parametrize("order", ["<", ">"])
def test_both_byte_orders_written_by_hand(order: str) -> None:
    numbers = element(order, 3, struct.pack(order + "6h", 1, 2, 3, 4, 5, -600))
    text = element(order, 4, "owl é".encode("utf-16-le" if order == "<" else "utf-16-be"))
    data = mat_header(order) + matrix(order, 10, (2, 3), b"v", numbers) + matrix(order, 4, (1, 5), b"t", text)
    found = read_mat(data, "x.mat")
    assert found["v"].tolist() == [[1, 3, 5], [2, 4, -600]]
    assert found["t"] == "owl é"


@pytest.mark.parametrize("compressed", [False, True])
def test_what_cannot_be_said_in_a_list_is_refused_not_changed(compressed: bool) -> None:
    """Complex numbers and text of several rows are no part of the annotations of Cars."""
    for value in (np.array([[1 + 2j]]), np.array(["ab", "cd"])):
        data = mat({"v": value}, compressed=compressed)
        with pytest.raises(DataError, match=r"x\.mat"):
            read_mat(data, "x.mat")


def test_other_files_are_refused_by_name() -> None:
    for data in (b"", b"not a MATLAB file", b"MATLAB 5.0".ljust(126) + b"XX", bytes(500)):
        with pytest.raises(DataError, match=r"^x\.mat is not a MATLAB 5 file$"):
            read_mat(data, "x.mat")
    newer = b"MATLAB 7.3 MAT-file, Platform: GLNXA64, HDF5 schema 1.00 .".ljust(124) + b"\0\x02IM"
    with pytest.raises(DataError, match=r"^x\.mat is a MATLAB 7\.3 file; save it with -v7$"):
        read_mat(newer + bytes(384) + b"\x89HDF\r\n\x1a\n" + bytes(500), "x.mat")


@pytest.mark.parametrize("compressed", [False, True])
def test_a_cut_mat_file_is_an_error_wherever_it_is_cut(compressed: bool) -> None:
    whole = mat(CARS, compressed=compressed)
    ends = [128]  # a cut between two variables leaves a whole file
    while ends[-1] < len(whole):
        ends.append(ends[-1] + 8 + struct.unpack_from("<I", whole, ends[-1] + 4)[0])
    assert ends[-1] == len(whole)
    assert len(ends) == 3
    silent = []
    for length in range(len(whole)):
        if length in ends:
            continue
        result = result_or_error(read_mat, whole[:length], "x.mat")
        if not isinstance(result, DataError):
            silent.append(length)
    assert silent == []


MATS = [mat(CARS, compressed=compressed) for compressed in (False, True)]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    whole=st.sampled_from(MATS),
    changes=st.lists(
        st.tuples(st.floats(0, 0.999), st.sampled_from([0, 1, 2, 4, 5, 6, 9, 14, 15, 32, 255]) | st.integers(0, 255)),
        min_size=1,
        max_size=5,
    ),
    inflated=st.booleans(),
)
def test_a_changed_mat_file_is_read_or_an_error_of_ours(
    whole: bytes, changes: list[tuple[float, int]], inflated: bool
) -> None:
    data = bytearray(whole)
    for place, value in changes:
        data[128 + int(place * (len(data) - 128))] = value
    if inflated:  # damage under a compression that is whole
        packed = zlib.compress(bytes(data[128:]))
        data[128:] = struct.pack("<II", 15, len(packed)) + packed
    result = result_or_error(read_mat, bytes(data), "x.mat")
    assert isinstance(result, dict) or str(result).startswith("x.mat ")


def test_field_names_of_no_length_are_damage() -> None:
    for width in (0, -1, -8):
        fields = element("<", 5, struct.pack("<i", width)) + element("<", 1, b"a".ljust(8, b"\0"))
        with pytest.raises(DataError, match=r"x\.mat is damaged"):
            read_mat(mat_header("<") + matrix("<", 2, (1, 1), b"s", fields), "x.mat")


def test_sizes_that_are_not_numbers_are_damage() -> None:
    body = element("<", 6, struct.pack("<II", 6, 0)) + element("<", 9, struct.pack("<2d", float("inf"), 1.0))
    body += element("<", 1, b"v") + element("<", 9, struct.pack("<d", 1.0))
    with pytest.raises(DataError, match=r"x\.mat is damaged"):
        read_mat(mat_header("<") + element("<", 14, body), "x.mat")


def test_cells_in_cells_without_end_are_damage() -> None:
    nested = matrix("<", 6, (1, 1), b"", element("<", 9, struct.pack("<d", 1.0)))
    for _ in range(3000):
        nested = matrix("<", 1, (1, 1), b"", nested)
    with pytest.raises(DataError, match=r"x\.mat is damaged"):
        read_mat(mat_header("<") + nested, "x.mat")


def test_a_variable_that_inflates_to_a_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matfile, "MAX_BYTES", 1 << 20)
    data = mat({"v": np.zeros(1_000_000)}, compressed=True)
    with traced() as peak, pytest.raises(DataError, match=r"x\.mat holds a variable of more than 1 MB"):
        read_mat(data, "x.mat")
    assert peak() < 4_000_000


# Splits -------------------------------------------------------------------------------------------------------------


def write(folder: Path, content: Any, name: str = "mine.json") -> str:
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(file)


def test_shipped_lists_have_the_counts_they_state() -> None:
    assert shipped_splits() == ["aircraft", "cars", "cub", "cub_closerlook", "cub_feat", "dogs"]
    prints = set()
    for name in shipped_splits():
        split = load_split(name)
        stated = json.loads((resources.files("parseshot") / "data" / "splits" / f"{name}.json").read_text("utf-8"))
        assert split.name == name
        assert {role: list(split.classes.values()).count(role) for role in SPLITS} == stated["counts"]
        assert len(split.classes) == len(stated["classes"])
        prints.add(split.fingerprint)
    assert len(prints) == 6


def test_the_lists_of_cub_follow_their_rules() -> None:
    rule = {0: "base", 2: "base", 1: "val", 3: "novel"}
    for name, role in load_split("cub").classes.items():
        assert role == rule[int(name[:3]) % 4], name
    for name, role in load_split("cub_closerlook").classes.items():
        assert role == rule[(int(name[:3]) - 1) % 4], name
    assert sorted(load_split("cub").classes) == sorted(load_split("cub_closerlook").classes)
    assert sorted(load_split("cub").classes) == sorted(load_split("cub_feat").classes)


def test_every_way_to_write_a_split_says_the_same(tmp_path: Path) -> None:
    ways = [
        {"base": ["owl", "wren"], "val": ["héron"], "novel": ["kite"]},
        {"train": ["wren", "owl"], "valid": ["he\u0301ron"], "test": ["kite "]},
        {"owl": "base", "wren": "train", "héron": "validation", "kite": "test"},
        {"origin": "me", "classes": {"owl": "base", "wren": "base", "héron": "val", "kite": "novel"}},
    ]
    splits = [load_split(write(tmp_path, way)) for way in ways]
    for split in splits:
        assert split.name == "mine"
        assert split.classes == {"owl": "base", "wren": "base", "héron": "val", "kite": "novel"}
        assert split.record() == {"name": "mine", "fingerprint": splits[0].fingerprint}
    other = load_split(write(tmp_path, {**ways[2], "kite": "base"}))
    assert other.fingerprint != splits[0].fingerprint


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", r"mine\.json is not a JSON file"),
        ("[]", r"a split is \{"),
        ("{}", r"a split is \{"),
        ('{"classes": {}}', r"a split is \{"),
        ('"base"', r"a split is \{"),
        ({"owl": "training"}, "'owl' → 'training': a role is one of train"),
        ({"owls": ["snowy owl"]}, "'snowy owl' → 'owls'"),
        ({"base": [3]}, "3 → 'base'"),
        ({"owl": None}, "'owl' → None"),
        ({"owl": {"base": 1}}, "'owl' →"),
        ({"base": ["owl"], "val": ["owl"]}, "class 'owl' is both base and val"),
        ({"base": ["h\u00e9ron"], "novel": ["he\u0301ron"]}, "is both base and novel"),
        ({"base": ["o\u202ewl"]}, r"U\+202E"),
        ({"base": [""]}, "class name is empty"),
    ],
)
def test_a_wrong_split_is_an_error_that_says_what(content: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=why) as caught:
        load_split(write(tmp_path, content))
    assert "mine.json" in str(caught.value)


def test_a_split_that_is_no_text_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_bytes(b'{"base": ["\xff"]}')
    with pytest.raises(DataError, match=r"bad\.json is not a JSON file"):
        load_split(str(tmp_path / "bad.json"))
    for name in ("none", str(tmp_path), "x\0y", "x" * 300):
        with pytest.raises(DataError, match="is neither a file nor one of aircraft, cars, cub"):
            load_split(name)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"deep\.json"):
        load_split(str(tmp_path / "deep.json"))


def test_roles_are_in_the_order_asked_and_unknown_classes_are_named() -> None:
    split = Split("mine", {"owl": "base", "wren": "val", "kite": "novel"})
    assert split.roles(["kite", "owl", "kite"]) == ["novel", "base", "novel"]
    with pytest.raises(DataError, match=r"split 'mine' does not say what to do with 2 classes: crow, gull$"):
        split.roles(["owl", "crow", "gull"])
    with pytest.raises(DataError, match=r"7 classes: a, b, c, d, e …$"):
        split.roles(list("abcdefg"))


def test_a_fingerprint_is_of_the_roles_alone() -> None:
    one = Split("one", {"owl": "base", "wren": "val"})
    assert Split("two", {"wren": "val", "owl": "base"}).fingerprint == one.fingerprint
    assert Split("one", {"wren": "base", "owl": "val"}).fingerprint != one.fingerprint
    assert split_by_column({"wren": "val", "owl": "base"}).record() == {"name": "csv", "fingerprint": one.fingerprint}
    assert len(one.fingerprint) == 16


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, (0, 0, 1)), (3, (0, 0, 3)), (4, (2, 1, 1)), (5, (3, 1, 1)), (200, (100, 50, 50))]
)
def test_a_seed_gives_half_a_quarter_and_a_quarter(count: int, sizes: tuple[int, int, int]) -> None:
    classes = [f"class {number}" for number in range(count)]
    split = split_by_seed(classes, 3)
    assert split.name == "seed-3"
    assert sorted(split.classes) == sorted(classes)
    assert tuple(list(split.classes.values()).count(role) for role in SPLITS) == sizes


@given(order=st.permutations([f"class {number}" for number in range(12)]), seed=st.integers(0, 5))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_a_seed_does_not_depend_on_the_order_of_the_classes(order: list[str], seed: int) -> None:
    assert split_by_seed(order, seed).fingerprint == split_by_seed(sorted(order), seed).fingerprint


def test_seeds_differ() -> None:
    classes = [f"class {number}" for number in range(20)]
    assert len({split_by_seed(classes, seed).fingerprint for seed in range(20)}) == 20
