"""What is purged is gone: from the answers, from the history, from undoing, and from the bytes on the disk."""

import contextlib
import signal
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path

import photos
import pytest
from photos import MODEL, content, digest_of, encoding_of, new_photo
from postgres import Server
from sqlalchemy import select, text
from test_gallery import Where, check, enroll, gallery, places, processes, same, server, where

from parseshot.errors import DataError
from parseshot.recognition import storage, tables
from parseshot.recognition.gallery import Gallery

__all__ = ["gallery", "places", "processes", "server", "where"]  # fixtures of test_gallery

PAGE = 4096  # bytes, of SQLite
PICTURE = 30_000  # bytes: more than a page holds
FILES = """
    SELECT pg_relation_filepath(oid) FROM pg_class WHERE relkind IN ('r', 'i', 't') AND (
        relnamespace = current_schema()::regnamespace
        OR oid IN (SELECT reltoastrelid FROM pg_class WHERE relnamespace = current_schema()::regnamespace))
"""  # of the tables of a gallery, their indexes, and where large values lie


def fill(gallery: Gallery) -> None:
    """Files 1 to 6; of these 2, 5 and 6 are removed and with them the class "somebody"."""
    names = {1: "owl", 2: "somebody", 3: "wren", 4: "owl", 5: "owl", 6: "somebody"}
    gallery.add([new_photo(number, name, picture=PICTURE) for number, name in names.items()], MODEL)
    gallery.add([new_photo(2, "somebody"), new_photo(1, "owl")], MODEL)  # there already, which the history tells
    gallery.remove_class("somebody")
    gallery.remove_photo(5)


def traces(number: int) -> list[bytes]:
    """Bytes by which a photo is known: of its picture and its encoding wherever a page may cut them, and its digest."""
    picture = new_photo(number, "", picture=PICTURE).picture
    pieces = [picture[start : start + 64] for start in range(0, PICTURE, 500)]
    return [*pieces, encoding_of(number)["nu"].numpy().tobytes()[:64], digest_of(number).encode()]


def bytes_of(gallery: Gallery, request: pytest.FixtureRequest) -> bytes:
    """All that is on the disk of a gallery: the file and its log, or the server's tables."""
    file = gallery._storage.file
    if file is not None:
        return b"".join(path.read_bytes() for path in file.parent.glob(f"{file.name}*"))
    with gallery._storage._alone.connect() as connection:
        connection.execute(text("CHECKPOINT"))
        found = connection.execute(text(FILES)).scalars().all()
    folder = request.getfixturevalue("server")._folder / "data"
    return b"".join(path.read_bytes() for name in found for path in folder.glob(f"{name}*"))


def size_of(gallery: Gallery) -> int:
    """Bytes of the database, or on a server of its pictures."""
    told = "PRAGMA page_count" if gallery._storage.file else "SELECT pg_total_relation_size('pictures')"
    with gallery._storage.reading() as connection:
        return int(connection.execute(text(told)).scalar_one()) * (PAGE if gallery._storage.file else 1)


def test_purged_bytes_are_gone_and_the_rest_is_what_it_was(gallery: Gallery, request: pytest.FixtureRequest) -> None:
    fill(gallery)
    before, kept = gallery.snapshot(), {number: gallery.picture(number) for number in (1, 3, 4)}
    stored = bytes_of(gallery, request)
    size = size_of(gallery)
    for number in range(1, 7):
        found = [trace in stored for trace in traces(number)]
        assert sum(found) > len(found) // 2, number  # some lie across two pages
    assert b"somebody" in stored
    version = gallery.purge()
    assert version is not None
    assert (version.number, version.action, version.detail) == (5, "purge", {"photos": 3})
    after, left = gallery.snapshot(), bytes_of(gallery, request)
    assert content(after) == content(before) == {1: "owl", 3: "wren", 4: "owl"}
    same(before.after(gallery.changes(before.version)), after)
    assert after.classes == before.classes
    assert {number: gallery.picture(number) for number in kept} == kept
    assert [one.photo for one in gallery.pictures()] == [1, 3, 4]
    for number in (2, 5, 6):
        assert not any(trace in left for trace in traces(number)), number
    for number in (1, 3, 4):
        found = [trace in left for trace in traces(number)]
        assert sum(found) > len(found) // 2, number
    assert b"somebody" not in left
    assert size - size_of(gallery) > 0.8 * 3 * PICTURE
    if gallery._storage.file is not None:
        assert gallery._storage.file.stat().st_size == size_of(gallery)  # at once


def test_nothing_before_a_purge_is_undone_or_read(gallery: Gallery) -> None:
    fill(gallery)
    gallery.purge()
    with pytest.raises(DataError, match=r"nothing to undo since version 5, .* was purged"):
        gallery.undo()
    for version in range(5):
        with pytest.raises(DataError, match=f"cannot show version {version}: all before version 5 was purged"):
            gallery.snapshot(version)
    for number in (2, 5, 6):
        with pytest.raises(DataError, match=f"no photo {number} any more: it was purged"):
            gallery.picture(number)
    with pytest.raises(DataError, match=r"no photo 7$"):
        gallery.picture(7)
    told = gallery.history()
    assert [version.action for version in told] == ["create", "enroll", "enroll", "remove", "remove", "purge"]
    assert told[1].detail == {"photos": 6, "classes": {"owl": 3, "wren": 1}, "repeated": []}
    assert told[2].detail == {"photos": 0, "classes": {}, "repeated": [["1.jpg", 1]]}
    assert told[3].detail == {"photos": 2, "classes": {}}


def test_what_comes_after_a_purge_is_undone_as_ever(gallery: Gallery) -> None:
    fill(gallery)
    gallery.purge()
    state = content(gallery.snapshot())
    enroll(gallery, {7: "gull"})
    gallery.remove_class("owl")
    for undone in (7, 6):
        assert gallery.undo().detail["undoes"] == undone
    assert content(gallery.snapshot()) == state
    with pytest.raises(DataError, match="purged"):
        gallery.undo()
    version = gallery.purge()  # the gull
    assert version is not None
    assert version.detail == {"photos": 1}
    assert content(gallery.snapshot()) == state
    assert gallery.purge() is None
    assert gallery.version == version.number


def test_where_nothing_was_removed_nothing_is_purged(gallery: Gallery) -> None:
    assert gallery.purge() is None
    enroll(gallery, {1: "owl", 2: "wren"})
    gallery.remove_class("wren")
    gallery.undo()
    assert gallery.purge() is None
    assert gallery.version == 3
    gallery.undo()  # is still possible
    assert content(gallery.snapshot()) == {}
    assert gallery.purge() is not None
    assert (gallery.photos(), content(gallery.snapshot())) == ([], {})


def test_numbers_and_ids_are_never_given_again(gallery: Gallery) -> None:
    """A reader that holds a purged photo must not take a new one for it."""
    enroll(gallery, {1: "owl", 2: "wren", 3: "wren"})
    held = gallery.snapshot()
    gallery.remove_class("wren")
    gallery.purge()
    enroll(gallery, {2: "wren", 4: "crow"})
    now = gallery.snapshot()
    assert now.photos.tolist() == [1, 4, 5]
    assert [one.number for one in now.classes] == [1, 3, 4]
    assert now.classes[1].id != held.classes[1].id
    same(held.after(gallery.changes(held.version)), now)
    gallery.remove_photo(4)
    gallery.remove_photo(5)
    gallery.purge()
    gallery.remove_class("owl")
    gallery.purge()
    enroll(gallery, {6: "owl"})
    assert gallery.snapshot().photos.tolist() == [6]
    same(held.after(gallery.changes(held.version)), gallery.snapshot())


def test_photos_are_encoded_again_after_a_purge(gallery: Gallery) -> None:
    fill(gallery)
    gallery.purge()
    gallery.replace_encodings("other", ((one.photo, encoding_of(one.photo, "other")) for one in gallery.pictures()))
    assert content(gallery.snapshot(), "other") == {1: "owl", 3: "wren", 4: "owl"}


def test_a_reader_keeps_what_it_is_reading(
    gallery: Gallery, where: Where, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the purge says that the bytes are still there, or waits for it; one that comes again completes it."""
    fill(gallery)
    monkeypatch.setattr(storage, "WAIT", 0.5)
    ids = select(tables.photos.c.id).order_by(tables.photos.c.id)
    pictures = select(tables.pictures.c.data).order_by(tables.pictures.c.photo)
    with Gallery.open(where) as purging, gallery._storage.reading() as connection:
        assert connection.execute(ids).scalars().all() == [1, 2, 3, 4, 5, 6]
        with pytest.raises(DataError, match=r"purge again|not made smaller, .*try again"):
            purging.purge()
        assert purging.version == 5
        assert content(purging.snapshot()) == {1: "owl", 3: "wren", 4: "owl"}
        assert connection.execute(ids).scalars().all() == [1, 2, 3, 4, 5, 6]
        assert [bytes(data) for data in connection.execute(pictures).scalars()] == [
            new_photo(number, "", picture=PICTURE).picture for number in range(1, 7)
        ]
    assert gallery.version == 5
    assert gallery.purge() is None
    left = bytes_of(gallery, request)
    assert not any(trace in left for number in (2, 5, 6) for trace in traces(number))


def test_a_purge_waits_for_a_reader(gallery: Gallery, where: Where, request: pytest.FixtureRequest) -> None:
    fill(gallery)
    with Gallery.open(where) as purging, ThreadPoolExecutor(1) as pool:
        with gallery._storage.reading() as connection:
            connection.execute(select(tables.photos.c.id)).all()
            waiting = pool.submit(purging.purge)
            threading.Event().wait(0.5)
            assert not waiting.done()
        assert waiting.result() is not None
    left = bytes_of(gallery, request)
    assert not any(trace in left for number in (2, 5, 6) for trace in traces(number))


def test_others_write_and_read_while_it_is_purged(gallery: Gallery) -> None:
    with ThreadPoolExecutor(8) as pool:
        readers = [pool.submit(photos.read_for, 2.0, gallery) for _ in range(2)]
        writers = [pool.submit(photos.write_for, 2.0, gallery, number) for number in range(1, 5)]
        purges = pool.submit(photos.purge_for, 2.0, gallery).result()
        log = [entry for writer in writers for entry in writer.result()]
        seen = [entry for reader in readers for entry in reader.result()]
    assert purges
    check(gallery, log + purges, seen)


@pytest.mark.slow
def test_a_process_killed_at_any_statement_purges_all_or_nothing(
    gallery: Gallery, where: Where, processes: ForkServerContext, request: pytest.FixtureRequest
) -> None:
    fill(gallery)
    kept, ends = content(gallery.snapshot()), []
    for statement in range(1, 100):
        child = processes.Process(target=photos.purge_and_die, args=(where, statement))
        child.start()
        child.join()
        if child.exitcode == 0:  # it had no more statements than that
            break
        assert child.exitcode == -signal.SIGKILL
        ends.append(gallery.version)
        assert content(gallery.snapshot()) == kept
        with gallery._storage.reading() as connection:
            counts = {
                table.name: len(connection.execute(select(table.primary_key.columns)).all())
                for table in (tables.photos, tables.pictures, tables.encodings, tables.members, tables.classes)
            }
        if gallery.version == 4:
            assert counts == {"photos": 6, "pictures": 6, "encodings": 6, "members": 6, "classes": 3}
            assert gallery.picture(2) == new_photo(2, "", picture=PICTURE).picture
        else:
            assert counts == {"photos": 3, "pictures": 3, "encodings": 3, "members": 3, "classes": 2}
    assert ends == sorted(ends)
    assert set(ends) == {4, 5}
    assert gallery.version == 5
    left = bytes_of(gallery, request)
    assert not any(trace in left for number in (2, 5, 6) for trace in traces(number))


def test_a_file_is_rid_of_them_even_if_it_could_not_be_made_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, or out of room, between the version and the smaller file: zeros are in their place."""
    file = tmp_path / "gallery"
    with Gallery.open(file, create=True) as gallery:
        fill(gallery)
        monkeypatch.setattr(storage.Storage, "shrink", lambda *_: None)
        gallery.purge()
    with contextlib.closing(sqlite3.connect(file)) as connection:  # whoever opens and closes it last clears the log
        connection.execute("SELECT count(*) FROM photos").fetchone()
    assert [path.name for path in tmp_path.iterdir()] == ["gallery"]
    left = file.read_bytes()
    assert not any(trace in left for number in (2, 5, 6) for trace in traces(number))


def test_who_may_only_read_purges_nothing(server: Server) -> None:
    url = server.new_database()
    with Gallery.open(url, create=True) as gallery:
        fill(gallery)
        with gallery._storage.writing() as connection:
            schema = connection.execute(text("SELECT current_schema()")).scalar_one()
            connection.execute(text("CREATE ROLE looker LOGIN"))
            connection.execute(text(f"GRANT USAGE ON SCHEMA {schema} TO looker"))
            connection.execute(text(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO looker"))
    with Gallery.open(url.replace("tester@", "looker@")) as gallery:
        with pytest.raises(DataError, match="can only be read: not saved"):
            gallery.purge()
        assert (gallery.version, len(list(gallery.pictures()))) == (4, 6)
