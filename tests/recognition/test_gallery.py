"""A gallery is at one version or at another, never between, whatever happens to those who read and write it."""

import contextlib
import io
import multiprocessing
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path

import numpy as np
import photos
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from photos import MODEL, content, encoding_of, new_photo
from PIL import Image
from postgres import CannotStart, Server
from sqlalchemy import Connection, select, text, update

from parseshot.data.duplicates import perceptual_hashes
from parseshot.errors import DataError, ModelError, UsageError
from parseshot.methods.base import Encoding
from parseshot.recognition import layout, storage, tables
from parseshot.recognition.gallery import Gallery, stored_picture
from parseshot.recognition.snapshot import Snapshot

Where = Path | str
Places = Callable[[], Where]  # each call names a new place for a gallery


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    try:
        started = Server()
    except CannotStart as error:
        pytest.skip(f"no PostgreSQL: {error}")
    yield started
    started.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Places:
    if request.param == "postgresql":
        return request.getfixturevalue("server").new_database
    numbers = iter(range(10**6))
    return lambda: tmp_path / f"{next(numbers)}.gallery"


@pytest.fixture
def where(places: Places) -> Where:
    return places()


@pytest.fixture
def gallery(where: Where) -> Iterator[Gallery]:
    with Gallery.open(where, create=True) as opened:
        yield opened


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """Processes that have imported all, and share nothing else with the tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch", "parseshot.recognition.gallery"])
    return context


def enroll(gallery: Gallery, files: dict[int, str], *, key: str | None = None) -> int:
    return gallery.add([new_photo(number, name) for number, name in files.items()], MODEL, key=key).number


def same(one: Snapshot, other: Snapshot) -> None:
    """To the last bit."""
    assert (one.version, one.fingerprint, one.classes, one.digests) == (
        other.version, other.fingerprint, other.classes, other.digests,
    )  # fmt: skip
    assert torch.equal(one.photos, other.photos)
    assert torch.equal(one.labels, other.labels)
    assert np.array_equal(one.hashes, other.hashes)
    assert (one.encoding is None) == (other.encoding is None)
    if one.encoding is not None and other.encoding is not None:
        assert set(one.encoding) == set(other.encoding)
        for name, tensor in one.encoding.items():
            assert tensor.dtype == other.encoding[name].dtype
            assert tensor.shape == other.encoding[name].shape
            assert bits(tensor) == bits(other.encoding[name])


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


# What is stored comes back


def test_a_new_gallery_is_empty(gallery: Gallery) -> None:
    snapshot = gallery.snapshot()
    assert (gallery.version, gallery.fingerprint, snapshot.encoding, snapshot.classes) == (0, None, None, ())
    assert [version.action for version in gallery.history()] == ["create"]
    assert gallery.photos() == []
    assert list(gallery.pictures()) == []


def test_photos_come_back_bit_for_bit(gallery: Gallery, where: Where) -> None:
    torch.manual_seed(0)
    strange = torch.tensor([[0x7FC12345, -0x00800000, 1, -(1 << 31)]], dtype=torch.int32).view(torch.float32)
    tensors = {
        "nan": strange,  # a NaN with a payload, −inf, a denormal and −0
        "half": torch.randn(1, 3, 1).half(),
        "brain": torch.randn(1, 2).bfloat16(),
        "flag": torch.tensor([[True, False]]),
        "one": torch.tensor([7], dtype=torch.int16),
        "none": torch.zeros(1, 0, 3),
        "across": torch.randn(1, 4, 5).transpose(1, 2),
    }
    first = new_photo(1, "owl")
    gallery.add([replace(first, encoding=Encoding(**tensors))], MODEL)
    with Gallery.open(where, fingerprint=MODEL) as again:
        found = again.snapshot().encoding
        assert found is not None
        assert set(found) == set(tensors)
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert found[name].shape == tensor.shape
            assert bits(found[name]) == bits(tensor)


def test_all_that_is_known_of_a_photo_comes_back(gallery: Gallery) -> None:
    enroll(gallery, {1: "owl", 2: "wren", 5: "owl"})
    found = gallery.photos()
    for photo, number in zip(found, (1, 2, 5), strict=True):
        given = new_photo(number, "")
        assert (photo.source, photo.sha256, photo.width, photo.height) == (f"{number}.jpg", given.sha256, 640, 480)
        assert (photo.box, photo.notes, photo.since) == (given.box, given.notes, 1)
        assert gallery.picture(photo.id) == given.picture
        assert re.fullmatch("[a-z0-9]{12}", photo.class_id)
    assert [photo.class_name for photo in found] == ["owl", "wren", "owl"]
    assert found[0].class_id == found[2].class_id != found[1].class_id
    assert gallery.photos("owl") == [found[0], found[2]]
    assert gallery.photos("crow") == []
    kept = list(gallery.pictures())
    assert [(one.photo, one.data, one.box) for one in kept] == [
        (photo.id, gallery.picture(photo.id), photo.box) for photo in found
    ]
    with pytest.raises(DataError, match="no photo 99"):
        gallery.picture(99)


def test_many_photos_are_read_in_pieces(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    from parseshot.recognition import gallery as module
    from parseshot.recognition import records

    monkeypatch.setattr(records, "ROWS", 7)
    monkeypatch.setattr(module, "PICTURES", 4)
    files = {number: f"class {number % 11}" for number in range(45)}
    enroll(gallery, files)
    assert content(gallery.snapshot()) == files
    assert [one.data for one in gallery.pictures()] == [new_photo(number, "").picture for number in files]
    with pytest.raises(DataError, match="'class 3'"):
        enroll(gallery, {50: "new", 3: "new"})
    monkeypatch.setattr(records, "BYTES", 1)
    assert content(gallery.snapshot()) == files


def test_a_file_name_that_is_no_text(gallery: Gallery) -> None:
    photo = new_photo(1, "owl")
    gallery.add([replace(photo, source="o\udcffl\0.jpg", notes=("\0\udcff",))], MODEL)
    (found,) = gallery.photos()
    assert (found.source, found.notes) == ("o\\xffl\\x00.jpg", ("\0\udcff",))


# Versions


def test_every_change_is_a_version_and_undoing_walks_back(gallery: Gallery) -> None:
    states = [gallery.snapshot()]
    for change in (
        lambda: enroll(gallery, {1: "owl", 2: "owl", 3: "wren"}),
        lambda: enroll(gallery, {4: "crow"}),
        lambda: gallery.remove_photo(gallery.photos("wren")[0].id),
        lambda: gallery.remove_class("owl"),
    ):
        change()
        states.append(gallery.snapshot())
    assert [content(state) for state in states] == [
        {},
        {1: "owl", 2: "owl", 3: "wren"},
        {1: "owl", 2: "owl", 3: "wren", 4: "crow"},
        {1: "owl", 2: "owl", 4: "crow"},
        {4: "crow"},
    ]
    assert [one.name for one in states[2].classes] == ["owl", "wren", "crow"]
    for undone in (4, 3, 2):
        version = gallery.undo()
        assert version.detail == {"undoes": undone, "action": "enroll" if undone == 2 else "remove"}
        assert content(gallery.snapshot()) == content(states[undone - 1])
        assert gallery.snapshot().classes == states[undone - 1].classes
        assert torch.equal(gallery.snapshot().photos, states[undone - 1].photos)
    enroll(gallery, {5: "gull"})  # after undoing, a change is again what is undone first
    assert content(gallery.snapshot()) == {1: "owl", 2: "owl", 3: "wren", 5: "gull"}
    assert gallery.undo().detail["undoes"] == 8
    assert gallery.undo().detail["undoes"] == 1
    assert content(gallery.snapshot()) == {}
    with pytest.raises(DataError, match="nothing to undo"):
        gallery.undo()
    assert gallery.version == 10
    for version, state in enumerate(states[1:], start=1):  # and all that was is still there
        same(gallery.snapshot(version), state)
    told = gallery.history()
    assert [version.number for version in told] == list(range(11))
    assert [version.action for version in told] == [
        "create", "enroll", "enroll", "remove", "remove", "undo", "undo", "undo", "enroll", "undo", "undo",
    ]  # fmt: skip
    assert told[1].detail == {"photos": 3, "classes": {"owl": 2, "wren": 1}, "repeated": []}
    assert told[4].detail == {"photos": 2, "classes": {"owl": 2}}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", version.at) for version in told)


def test_a_class_keeps_its_id_when_it_comes_back(gallery: Gallery) -> None:
    enroll(gallery, {1: "owl", 2: "wren"})
    owl = gallery.snapshot().classes[0]
    gallery.remove_class("owl")
    assert [one.name for one in gallery.snapshot().classes] == ["wren"]
    enroll(gallery, {3: "owl"})
    assert gallery.snapshot().classes[0] == owl
    assert content(gallery.snapshot()) == {2: "wren", 3: "owl"}


def test_what_is_not_there_cannot_be_removed(gallery: Gallery) -> None:
    enroll(gallery, {1: "owl", 2: "wren"})
    (photo,) = gallery.photos("owl")
    gallery.remove_class("owl")
    for refused in (
        lambda: gallery.remove_class("owl"),
        lambda: gallery.remove_class("crow"),
        lambda: gallery.remove_photo(photo.id),
        lambda: gallery.remove_photo(99),
        lambda: gallery.snapshot(3),
        lambda: gallery.changes(3),
        lambda: gallery.changes(-1),
    ):
        with pytest.raises(DataError, match=r"has no (class|photo|version)"):
            refused()
    assert gallery.version == 2
    assert gallery.picture(photo.id) == new_photo(1, "").picture  # its picture is kept, for undoing


def test_a_key_makes_one_version(gallery: Gallery) -> None:
    first = gallery.add([new_photo(1, "owl"), new_photo(1, "owl"), new_photo(2, "wren")], MODEL, key="a")
    assert gallery.add([new_photo(3, "crow")], MODEL, key="a") == first
    assert gallery.version == 1
    removed = gallery.remove_class("owl", key="b")
    assert gallery.remove_class("owl", key="b") == removed
    taken = gallery.remove_photo(gallery.photos()[0].id, key="c")
    assert gallery.remove_photo(99, key="c") == taken
    assert gallery.undo(key="d") == gallery.undo(key="d")
    assert gallery.version == 4
    for bad in ("", "x" * 201, "a\0b", "\ud800"):
        with pytest.raises(UsageError, match="printable"):
            gallery.undo(key=bad)


def test_a_key_makes_one_version_when_sent_at_once(gallery: Gallery) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: enroll(gallery, {number: "owl"}, key="same"), range(16)))
    assert set(made) == {1}
    assert len(gallery.photos()) == 1


# The same photo, names, models


def test_the_same_file_in_its_class_is_one_photo(gallery: Gallery) -> None:
    version = gallery.add([new_photo(1, "owl"), new_photo(2, "owl"), new_photo(1, "owl")], MODEL)
    assert version.detail == {"photos": 2, "classes": {"owl": 2}, "repeated": [["1.jpg", 1]]}
    version = gallery.add([new_photo(2, "owl"), new_photo(3, "owl")], MODEL)
    assert version.detail == {"photos": 1, "classes": {"owl": 1}, "repeated": [["2.jpg", 2]]}
    assert content(gallery.snapshot()) == {1: "owl", 2: "owl", 3: "owl"}
    version = gallery.add([new_photo(1, "owl")], MODEL)
    assert (version.number, version.detail["photos"]) == (3, 0)
    gallery.undo()  # what changed nothing is not undone: this takes back version 2
    assert content(gallery.snapshot()) == {1: "owl", 2: "owl"}


def test_the_same_file_in_two_classes_is_refused_with_both_named(gallery: Gallery) -> None:
    enroll(gallery, {1: "owl"})
    for new in ([new_photo(2, "wren"), new_photo(1, "wren")], [new_photo(3, "owl"), new_photo(3, "wren")]):
        with pytest.raises(DataError, match=r"\d\.jpg cannot be in the class 'wren': the same photo is in 'owl'"):
            gallery.add(new, MODEL)
    assert content(gallery.snapshot()) == {1: "owl"}
    assert len(gallery.history()) == 2
    gallery.remove_class("owl")
    enroll(gallery, {1: "wren"})  # it is in no other class any more
    assert content(gallery.snapshot()) == {1: "wren"}


def test_names_that_look_alike_are_one_class(gallery: Gallery) -> None:
    composed, taken_apart = unicodedata.normalize("NFC", "café"), unicodedata.normalize("NFD", "café")
    assert composed != taken_apart
    enroll(gallery, {1: composed, 2: taken_apart, 3: f" {composed} "})
    assert [one.name for one in gallery.snapshot().classes] == [composed]
    assert len(gallery.photos(taken_apart)) == 3
    enroll(gallery, {4: "../../etc", 5: "CON", 6: "=1+1", 7: "🦉", 8: "Robert'); DROP TABLE photos;--"})
    assert len(gallery.snapshot().classes) == 6
    gallery.remove_class(taken_apart)
    for bad in ("", "  ", "a\0b", "a\u202eb", "x" * 201):
        with pytest.raises(DataError, match=r"9\.jpg"):
            enroll(gallery, {9: bad})
    assert [one.name for one in gallery.snapshot().classes] == [
        "../../etc", "CON", "=1+1", "🦉", "Robert'); DROP TABLE photos;--",
    ]  # fmt: skip


def test_no_photos_are_no_enrolment(gallery: Gallery) -> None:
    with pytest.raises(DataError, match="no photos"):
        gallery.add([], MODEL)
    assert gallery.version == 0


def test_another_model_is_refused(gallery: Gallery, where: Where) -> None:
    enroll(gallery, {1: "owl"})
    with pytest.raises(ModelError, match=f"model {MODEL}, not of other.*encoded again"):
        gallery.add([new_photo(2, "owl")], "other")
    with pytest.raises(ModelError, match="encoded again"):
        Gallery.open(where, fingerprint="other")
    photo = new_photo(2, "owl")
    for tensors in ({"nu": torch.zeros(1, 2)}, {**encoding_of(2), "mu": torch.zeros(1, 3, 2)}):
        wrong = replace(photo, encoding=Encoding(**tensors))
        with pytest.raises(ModelError, match="float32"):
            gallery.add([wrong], MODEL)
        with pytest.raises(ModelError, match=r"photo 3: its encoding holds .*float32"):
            gallery.add([photo, replace(wrong, sha256=photos.digest_of(3))], MODEL)
    two = replace(photo, encoding=Encoding.cat([encoding_of(2), encoding_of(3)]))
    with pytest.raises(ModelError, match="2 images"):
        gallery.add([two], MODEL)
    assert content(gallery.snapshot()) == {1: "owl"}
    assert gallery.fingerprint == MODEL


def test_photos_are_encoded_again_for_another_model(gallery: Gallery, where: Where) -> None:
    files = {number: f"class {number % 3}" for number in range(1, 41)}
    enroll(gallery, files)
    gallery.remove_class("class 0")
    now = content(gallery.snapshot())
    old = Gallery.open(where, fingerprint=MODEL)
    held = old.snapshot()

    def encode(model: str) -> Iterator[tuple[int, Encoding]]:
        for picture in gallery.pictures():
            assert content(old.snapshot()) == now  # readers see the old ones until the end
            yield picture.photo, encoding_of(picture.photo, model)

    version = gallery.replace_encodings("other", encode("other"))
    assert (version.number, version.action, version.detail) == (3, "encode again", {"from": MODEL, "to": "other"})
    assert gallery.fingerprint == "other"
    assert content(gallery.snapshot(), "other") == now
    changes = gallery.changes(held.version)
    assert len(changes.removed) == len(changes.added.photos) == len(now)
    same(held.after(changes), gallery.snapshot())
    for read in (old.snapshot, lambda: old.changes(held.version)):
        with pytest.raises(ModelError, match="encoded again"):
            read()
    old.close()
    gallery.undo()  # takes back the removal, not the model
    assert content(gallery.snapshot(), "other") == files
    gallery.replace_encodings("other", ((number, encoding_of(number, "other")) for number in files))
    assert content(gallery.snapshot(), "other") == files  # the same model again, where they are damaged


def test_encoding_again_that_fails_leaves_the_old_encodings(gallery: Gallery) -> None:
    files = dict.fromkeys(range(1, 6), "owl")
    enroll(gallery, files)

    def encode(*numbers: int, fail: bool = False) -> Iterator[tuple[int, Encoding]]:
        for number in numbers:
            yield number, encoding_of(number, "other")
        if fail:
            raise RuntimeError("the lights went out")

    with pytest.raises(RuntimeError, match="lights"):
        gallery.replace_encodings("other", encode(1, 2, 3, fail=True))
    with pytest.raises(DataError, match="photo 4 was not"):
        gallery.replace_encodings("other", encode(1, 2, 3, 5))
    for numbers in ((1, 2, 2, 3), (1, 2, 77)):
        with pytest.raises(DataError, match=f"photo {numbers[2]} is not there, or was encoded twice"):
            gallery.replace_encodings("other", encode(*numbers))
    with pytest.raises(ModelError, match="photo 2"):
        gallery.replace_encodings("other", [(1, encoding_of(1)), (2, Encoding(a=torch.zeros(1)))])
    with pytest.raises(DataError, match="no photo"):
        gallery.replace_encodings("other", [])
    assert (gallery.version, gallery.fingerprint, content(gallery.snapshot())) == (1, MODEL, files)


# A reader keeps up


class Changing(RuleBasedStateMachine):
    """A gallery beside a list of dicts; all snapshots that were held must come up to date."""

    def __init__(self, where: Where) -> None:
        super().__init__()
        self.gallery = Gallery.open(where, create=True)
        self.states: list[dict[int, str]] = [{}]
        self.to_undo: list[int] = []  # versions that changed something and are not undone
        self.held = [self.gallery.snapshot()]
        self.models = ["first", "second"]
        self.order: dict[int, int] = {}  # file → photo that it was last
        self.ever: list[int] = []  # file of each photo

    def now(self, state: dict[int, str], changes: bool) -> None:
        self.states.append(state)
        if changes:
            self.to_undo.append(len(self.states) - 1)

    @rule(files=st.dictionaries(st.integers(0, 25), st.sampled_from(("owl", "wren", "crow", "gull")), min_size=1))
    def enroll(self, files: dict[int, str]) -> None:
        before = self.states[-1]
        new = [new_photo(number, name) for number, name in files.items()]
        new = [replace(one, encoding=encoding_of(int(one.source[:-4]), self.models[0])) for one in new]
        if any(before.get(number, name) != name for number, name in files.items()):
            with pytest.raises(DataError, match="the same photo"):
                self.gallery.add(new, self.models[0])
            return
        self.gallery.add(new, self.models[0])
        fresh = [number for number in files if number not in before]
        self.ever += fresh
        self.now(before | files, bool(fresh))

    @rule(name=st.sampled_from(("owl", "wren", "crow", "gull")))
    def remove_class(self, name: str) -> None:
        before = self.states[-1]
        if name not in before.values():
            with pytest.raises(DataError, match="no class"):
                self.gallery.remove_class(name)
            return
        self.gallery.remove_class(name)
        self.now({number: other for number, other in before.items() if other != name}, True)

    @precondition(lambda self: self.states[-1])
    @rule(data=st.data())
    def remove_photo(self, data: st.DataObject) -> None:
        photo = data.draw(st.sampled_from(self.gallery.photos()))
        self.gallery.remove_photo(photo.id)
        gone = int(photo.source[:-4])
        self.now({number: name for number, name in self.states[-1].items() if number != gone}, True)

    @rule()
    def undo(self) -> None:
        if not self.to_undo:
            with pytest.raises(DataError, match="nothing to undo"):
                self.gallery.undo()
            return
        self.gallery.undo()
        self.now(self.states[self.to_undo.pop() - 1], False)

    @precondition(lambda self: self.ever)
    @rule()
    def encode_again(self) -> None:
        self.models.reverse()
        again = ((number, encoding_of(file, self.models[0])) for number, file in enumerate(self.ever, start=1))
        self.gallery.replace_encodings(self.models[0], again)
        self.now(self.states[-1], False)

    @rule()
    def hold(self) -> None:
        self.held = [self.held[-1], self.gallery.snapshot()]

    @invariant()
    def what_is_read_is_what_was_done(self) -> None:
        snapshot = self.gallery.snapshot()
        assert snapshot.version == len(self.states) - 1
        assert content(snapshot, self.models[0]) == self.states[-1]
        for held in self.held:
            same(held.after(self.gallery.changes(held.version)), snapshot)

    def teardown(self) -> None:
        assert {int(photo.source[:-4]): photo.class_name for photo in self.gallery.photos()} == self.states[-1]
        for version, state in enumerate(self.states):
            assert content(self.gallery.snapshot(version), self.models[0] if self.ever else MODEL) == state
        self.gallery.close()


@pytest.mark.slow
def test_whatever_is_done_readers_keep_up(places: Places) -> None:
    run_state_machine_as_test(
        lambda: Changing(places()),
        settings=settings(
            max_examples=8, stateful_step_count=20, deadline=None, derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


def test_what_comes_back_takes_its_old_place(gallery: Gallery) -> None:
    enroll(gallery, {1: "owl", 2: "wren", 3: "owl", 4: "crow"})
    gallery.remove_class("wren")
    gallery.remove_photo(3)
    held = gallery.snapshot()
    gallery.undo()
    gallery.undo()
    enroll(gallery, {5: "gull"})
    same(held.after(gallery.changes(3)), gallery.snapshot())


def test_a_snapshot_is_of_one_model_whatever_is_written_meanwhile(
    gallery: Gallery, where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {1: "owl", 2: "wren"}
    enroll(gallery, files)
    unpack = layout.Layout.from_json

    def replace_first(text: str, name: str) -> layout.Layout:
        """Between what is read of the model and what is read of its encodings."""
        monkeypatch.undo()
        with Gallery.open(where) as other:
            other.replace_encodings("other", [(number, encoding_of(number, "other")) for number in files])
        return unpack(text, name)

    monkeypatch.setattr(layout.Layout, "from_json", replace_first)
    assert content(gallery.snapshot()) == files
    assert content(gallery.snapshot(), "other") == files


def test_changes_of_another_version_are_refused(gallery: Gallery) -> None:
    enroll(gallery, {1: "owl"})
    held = gallery.snapshot()
    enroll(gallery, {2: "owl"})
    with pytest.raises(UsageError, match="since version 0 do not follow version 1"):
        held.after(gallery.changes(0))
    assert gallery.changes(1).added.photos.tolist() == [2]  # only what is new is read
    assert gallery.changes(2).added.photos.tolist() == []


def test_what_is_added_is_not_copied_and_never_written_over(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "SPARE", 3)
    enroll(gallery, {1: "owl"})
    held = gallery.snapshot()
    assert held.encoding is not None
    first = held
    for number in range(2, 20):  # until the room is used up, and on
        version = enroll(gallery, {number: "wren"})
        if number == 2:
            sibling = held.after(gallery.changes(1))
            assert sibling.encoding is not None
            assert sibling.encoding["nu"].data_ptr() == held.encoding["nu"].data_ptr()
        first = first.after(gallery.changes(version - 1))
    assert content(sibling) == {1: "owl", 2: "wren"}
    assert content(held) == {1: "owl"}
    same(first, gallery.snapshot())
    gallery.remove_photo(1)
    other = held.after(gallery.changes(1))
    same(first.after(gallery.changes(version)), other)
    assert content(first) == {1: "owl"} | dict.fromkeys(range(2, 20), "wren")


def test_readers_that_share_a_snapshot_go_their_own_ways(gallery: Gallery) -> None:
    enroll(gallery, {1: "owl", 2: "owl"})
    held = gallery.snapshot()
    enroll(gallery, dict.fromkeys(range(3, 30), "wren"))
    changes = gallery.changes(1)
    with torch.inference_mode(), ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: held.after(changes), range(64)):
            same(found, gallery.snapshot())
    first = held.after(changes)
    gallery.undo()
    enroll(gallery, dict.fromkeys(range(30, 60), "crow"))  # others in the place of those
    same(held.after(gallery.changes(1)), gallery.snapshot())
    same(first, gallery.snapshot(2))


# Many at once


def together(
    processes: ForkServerContext, where: Where, seconds: float, writers: int
) -> tuple[list[tuple[int, str, object]], list[tuple[int, dict[int, str]]]]:
    """Writers and a reader, each a process: what they did and what it saw."""
    started = []
    for writer in (None, *range(1, writers + 1)):
        here, there = processes.Pipe()
        process = processes.Process(target=photos.take_part, args=(where, seconds, writer, there))
        process.start()
        started.append((process, here))
    seen, *logs = [here.recv() for _, here in started]
    for process, _ in started:
        process.join()
    return [entry for log in logs for entry in log], seen


def check(gallery: Gallery, log: list[tuple[int, str, object]], seen: list[tuple[int, dict[int, str]]]) -> None:
    """No update is lost, and whatever was seen is what some version holds."""
    states = photos.replay(log)
    assert gallery.version == len(states) - 1
    assert content(gallery.snapshot()) == states[-1]
    assert len({version for version, _ in seen}) > 3
    for version, state in seen:
        assert state == states[version], version


def test_processes_write_and_read_at_once(gallery: Gallery, where: Where, processes: ForkServerContext) -> None:
    log, seen = together(processes, where, seconds=2.0, writers=2)
    assert len({entry[1] for entry in log}) == 4
    check(gallery, log, seen)


def test_threads_write_and_read_at_once(gallery: Gallery) -> None:
    with ThreadPoolExecutor(20) as pool:
        readers = [pool.submit(photos.read_for, 2.0, gallery) for _ in range(4)]
        writers = [pool.submit(photos.write_for, 2.0, gallery, number) for number in range(1, 17)]
        log = [entry for writer in writers for entry in writer.result()]
        seen = [entry for reader in readers for entry in reader.result()]
    check(gallery, log, seen)


def enroll_in_fork(gallery: Gallery) -> None:
    """Nothing that the parent had open may be there."""
    links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert not any(gallery.name in os.readlink(link) for link in links if link.is_symlink())
    enroll(gallery, {2: "wren"})


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at open files as Linux lists them")
def test_a_forked_process_uses_connections_of_its_own(gallery: Gallery) -> None:
    enroll(gallery, {1: "owl"})
    forks = multiprocessing.get_context("fork")
    child = forks.Process(target=enroll_in_fork, args=(gallery,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    enroll(gallery, {3: "crow"})
    assert content(gallery.snapshot()) == {1: "owl", 2: "wren", 3: "crow"}


@pytest.mark.slow
def test_a_killed_process_leaves_the_old_version_or_the_new(
    gallery: Gallery, where: Where, processes: ForkServerContext
) -> None:
    dice = random.Random(0)
    reached = set()
    for _ in range(20 if isinstance(where, Path) else 8):
        here, there = processes.Pipe()
        child = processes.Process(target=photos.enroll_without_end, args=(where, there))
        child.start()
        before = here.recv()
        time.sleep(dice.uniform(0, 0.15 if isinstance(where, Path) else 0.4))
        child.kill()
        child.join()
        version = gallery.version
        assert version >= before
        reached.add(version)
        expected = {file: name for number in range(1, version + 1) for file, name in photos.batch_of(number).items()}
        assert content(gallery.snapshot()) == expected
        with gallery._storage.reading() as connection:
            for table in (tables.photos, tables.pictures, tables.encodings, tables.members):
                assert len(connection.execute(select(table.primary_key.columns)).all()) == len(expected)
    assert len(reached) > 3


@pytest.mark.slow
def test_a_process_killed_at_any_statement_leaves_the_old_version(
    gallery: Gallery, where: Where, processes: ForkServerContext
) -> None:
    enroll(gallery, {1: "owl"})
    for statement in range(1, 100):
        child = processes.Process(target=photos.enroll_and_die, args=(where, statement))
        child.start()
        child.join()
        if child.exitcode == 0:  # it had no more statements than that
            break
        assert child.exitcode == -signal.SIGKILL
        assert (gallery.version, content(gallery.snapshot())) == (1, {1: "owl"})
    assert statement > 8
    assert content(gallery.snapshot()) == {1: "owl", 2: "wren", 3: "crow"}


# Faults


def test_a_damaged_photo_is_named(gallery: Gallery) -> None:
    enroll(gallery, {1: "owl", 2: "owl", 3: "wren"})
    whole = content(gallery.snapshot())

    def damage(table: str, change: str, photo: int) -> None:
        with gallery._storage.writing() as connection:
            connection.execute(text(f"UPDATE {table} SET {change} WHERE photo = {photo}"))

    with gallery._storage.reading() as connection:
        data = connection.execute(select(tables.encodings.c.data).where(tables.encodings.c.photo == 2)).scalar_one()
    intact = zlib.crc32(data)
    for bad, checksum in ((data[:-1] + bytes([data[-1] ^ 1]), intact), (b"", intact), (data[4:], zlib.crc32(data[4:]))):
        with gallery._storage.writing() as connection:
            row = update(tables.encodings).where(tables.encodings.c.photo == 2)
            connection.execute(row.values(data=bad, checksum=checksum))
        with pytest.raises(DataError, match="damaged: the encoding of photo 2"):
            gallery.snapshot()
    with gallery._storage.writing() as connection:
        connection.execute(row.values(data=data, checksum=intact))
    assert content(gallery.snapshot()) == whole
    damage("encodings", "fingerprint = 'x'", 3)
    with pytest.raises(DataError, match="photo 3 has no encoding"):
        gallery.snapshot()
    damage("pictures", "checksum = 1", 3)
    for read in (lambda: gallery.picture(3), lambda: list(gallery.pictures())):
        with pytest.raises(DataError, match="picture of photo 3"):
            read()
    assert gallery.picture(2) == new_photo(2, "").picture


@pytest.mark.parametrize(
    "bad", ["", "{", "[]", "[3]", '[["nu", "float99", [2]]]', '[["nu", "load", [2]]]', '[["nu", "float32", ["x"]]]']
)
def test_a_damaged_layout_is_told(gallery: Gallery, bad: str) -> None:
    enroll(gallery, {1: "owl"})
    with gallery._storage.writing() as connection:
        connection.execute(update(tables.meta).where(tables.meta.c.key == "layout").values(value=bad))
    for use in (gallery.snapshot, lambda: gallery.changes(0), lambda: enroll(gallery, {2: "owl"})):
        with pytest.raises(DataError, match="damaged: how its encodings are laid out"):
            use()


def test_another_schema_is_refused(gallery: Gallery, where: Where) -> None:
    for schema, hint in (("2", "newer parseshot"), ("0", "reads schema 1"), ("x", "schema x")):
        with gallery._storage.writing() as connection:
            connection.execute(update(tables.meta).where(tables.meta.c.key == "schema").values(value=schema))
        for create in (True, False):
            with pytest.raises(DataError, match=hint):
                Gallery.open(where, create=create)


def test_a_missing_table_is_named(gallery: Gallery, where: Where) -> None:
    with gallery._storage.writing() as connection:
        connection.execute(text("DROP TABLE members"))
    with pytest.raises(DataError, match="damaged: it has no table members"):
        Gallery.open(where)


def test_a_gallery_is_made_only_when_asked(places: Places) -> None:
    where = places()
    with pytest.raises(DataError, match=r"no gallery|not a gallery: it has no tables"):
        Gallery.open(where)
    if isinstance(where, Path):
        assert not where.exists()
    with Gallery.open(where, create=True) as first, Gallery.open(where, create=True) as second:
        enroll(first, {1: "owl"})
        assert content(second.snapshot()) == {1: "owl"}


def test_a_gallery_is_made_once_by_many(places: Places) -> None:
    where = places()
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda _: Gallery.open(where, create=True), range(8)))
    for number, gallery in enumerate(opened):
        enroll(gallery, {number: "owl"})
    assert content(opened[0].snapshot()) == dict.fromkeys(range(8), "owl")
    for gallery in opened:
        gallery.close()
    if isinstance(where, Path):
        assert list(where.parent.iterdir()) == [where]


def test_of_two_makers_of_a_file_the_first_one_wins(tmp_path: Path) -> None:
    def be_slower(connection: Connection) -> None:
        with Gallery.open(tmp_path / "gallery", create=True) as gallery:
            enroll(gallery, {1: "owl"})
        tables.make_tables(connection)

    storage.open_storage(tmp_path / "gallery", be_slower).close()
    with Gallery.open(tmp_path / "gallery") as gallery:
        assert content(gallery.snapshot()) == {1: "owl"}


def test_a_write_that_waits_too_long_says_so(gallery: Gallery, monkeypatch: pytest.MonkeyPatch, where: Where) -> None:
    enroll(gallery, {1: "owl"})
    monkeypatch.setattr(storage, "WAIT", 0.3)
    with Gallery.open(where) as other, gallery._storage.writing(), pytest.raises(DataError, match=r"others.*try again"):
        enroll(other, {2: "owl"})
    assert content(gallery.snapshot()) == {1: "owl"}


def test_tables_of_others_are_left_alone(places: Places) -> None:
    where = places()
    if isinstance(where, Path):
        with contextlib.closing(sqlite3.connect(where)) as other, other:
            other.execute("CREATE TABLE photos (mine INTEGER)")
        before = where.read_bytes()
    else:
        other_storage = storage.open_storage(where)
        with other_storage.writing() as connection:
            connection.execute(text("CREATE TABLE photos (mine INTEGER)"))
    for create in (True, False):
        with pytest.raises(DataError, match="not a gallery: a database of something else"):
            Gallery.open(where, create=create)
    if isinstance(where, Path):
        assert where.read_bytes() == before
        assert list(where.parent.iterdir()) == [where]
    else:
        with other_storage.reading() as connection:
            names = connection.execute(text("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"))
            assert names.scalars().all() == ["photos"]
        other_storage.close()


# Files


def fails(match: str, where: Where, *, create: bool = True, kind: type[Exception] = DataError) -> None:
    with pytest.raises(kind, match=match):
        Gallery.open(where, create=create)


def test_what_is_not_a_gallery_file(tmp_path: Path) -> None:
    for name, data in {"text": b"hello " * 1000, "short": b"x", "empty": b""}.items():
        file = tmp_path / name
        file.write_bytes(data)
        for create in (True, False):
            fails(f"{file} is not a gallery", file, create=create)
        assert file.read_bytes() == data
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        fails("not a gallery: not a file", tmp_path / name)
    fails(r"the folder .*/none does not exist", tmp_path / "none" / "gallery")
    fails("not a file name", "a\0b", kind=UsageError)
    assert {file.name for file in tmp_path.iterdir()} == {"text", "short", "empty", "folder", "pipe"}


def test_a_url_names_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for where in (f"sqlite:///{tmp_path}/a ä?#.db".replace("?", "%3F"), "sqlite:///b.db", "c.db", Path("d?e#%41.db")):
        with Gallery.open(where, create=True) as gallery:
            enroll(gallery, {1: "owl"})
    assert {file.name for file in tmp_path.iterdir()} >= {"b.db", "c.db", "d?e#%41.db"}
    for where in ("sqlite://", "sqlite:///x.db?mode=memory", "mysql://u:secret@h/x", "http://h/x", "nonsense://"):
        fails("a gallery is a file", where, kind=UsageError)


def test_a_damaged_file_says_so(tmp_path: Path) -> None:
    file = tmp_path / "gallery"
    with Gallery.open(file, create=True) as gallery:
        enroll(gallery, dict.fromkeys(range(300), "owl"))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=f"{file} is damaged"), Gallery.open(file) as gallery:
        gallery.snapshot()
    file.write_bytes(whole[:8192] + random.Random(0).randbytes(len(whole) - 8192))
    with pytest.raises(DataError, match=f"{file} is damaged"), Gallery.open(file) as gallery:
        gallery.snapshot()


def test_a_copy_without_a_log_gets_one(tmp_path: Path) -> None:
    file, copy = tmp_path / "gallery", tmp_path / "copy"
    with Gallery.open(file, create=True) as gallery:
        enroll(gallery, {1: "owl"})
        with contextlib.closing(sqlite3.connect(file)) as connection:
            connection.execute("VACUUM INTO ?", (str(copy),))
    with Gallery.open(copy) as gallery, contextlib.closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert content(gallery.snapshot()) == {1: "owl"}


def test_how_a_file_is_opened(tmp_path: Path) -> None:
    storage.open_storage(tmp_path / "new", tables.make_tables).close()
    assert (tmp_path / "new").read_bytes()[18:20] == b"\2\2"  # has a log from the first moment
    with Gallery.open(tmp_path / "gallery", create=True) as gallery, gallery._storage.reading() as connection:
        told = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert told == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 60_000}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """One megabyte."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small disk: {done.stderr.decode()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_leaves_the_old_version(small_disk: Path) -> None:
    with Gallery.open(small_disk / "gallery", create=True) as gallery:
        enroll(gallery, {1: "owl"})
        with pytest.raises(DataError, match=r"not saved .*is full.*needs about 3,\d+,\d+ bytes, [\d,]+ bytes are free"):
            gallery.add([new_photo(number, "large", picture=300_000) for number in range(10, 20)], MODEL)
        assert content(gallery.snapshot()) == {1: "owl"}
        enroll(gallery, {2: "owl"})  # what fits goes on
    with Gallery.open(small_disk / "gallery") as gallery:
        assert content(gallery.snapshot()) == {1: "owl", 2: "owl"}
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - 50_000))
    fails(r"not saved .*is full", small_disk / "second")
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free + 900_000 - 50_000))
    assert {file.name for file in small_disk.iterdir()} == {"gallery", "ballast"}


def test_a_limit_on_files_leaves_the_old_version(tmp_path: Path, processes: ForkServerContext) -> None:
    with Gallery.open(tmp_path / "gallery", create=True) as gallery:
        enroll(gallery, {1: "owl"})
        here, there = processes.Pipe()
        child = processes.Process(target=photos.enroll_with_limit, args=(tmp_path / "gallery", 1 << 20, there))
        child.start()
        kind, message, left = here.recv()
        child.join()
        assert (child.exitcode, kind, left) == (0, DataError, {1: "owl"})
        assert re.search(r"not saved .*bytes are free.*nothing is lost", message)
        assert content(gallery.snapshot()) == {1: "owl"}
        enroll(gallery, {2: "owl"})


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, which no folder stops."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that others can reach too."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)
        Path(name).chmod(0o755)


def test_where_nothing_can_be_written_a_gallery_is_read(open_folder: Path) -> None:
    file = open_folder / "gallery"
    with Gallery.open(file, create=True) as gallery:
        enroll(gallery, {1: "owl"})
    open_folder.chmod(0o555)
    with as_nobody():
        for create in (True, False):
            with Gallery.open(file, create=create) as gallery:
                assert content(gallery.snapshot()) == {1: "owl"}
                for change in (lambda: enroll(gallery, {2: "owl"}), gallery.undo, lambda: gallery.remove_class("owl")):
                    with pytest.raises(DataError, match="gallery can only be read: not saved"):
                        change()
        fails("could not be opened: Permission denied", open_folder / "other")
    assert [path.name for path in open_folder.iterdir()] == ["gallery"]
    file.chmod(0o000)
    with as_nobody():
        fails("could not be", file)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user, so root")
def test_a_reader_without_rights_sees_what_others_write(open_folder: Path) -> None:
    file = open_folder / "gallery"
    with Gallery.open(file, create=True) as writer:
        enroll(writer, {1: "owl"})
        with as_nobody():
            reader = Gallery.open(file)
            held = reader.snapshot()
            assert content(held) == {1: "owl"}
        enroll(writer, {2: "owl"})
        with as_nobody():
            assert content(held.after(reader.changes(1))) == {1: "owl", 2: "owl"}
    with as_nobody():
        assert content(reader.snapshot()) == {1: "owl", 2: "owl"}


# Servers


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://somebody:se%40cret@127.0.0.1:1/birds?password=se%40cret"
    with pytest.raises(DataError, match=r"postgresql://somebody@127.0.0.1:1/birds could not be.*refused") as caught:
        Gallery.open(url)
    shown = "".join(traceback.format_exception(caught.value))
    assert "cret" not in shown
    assert "cret" not in repr(Gallery(storage.open_storage(url)))
    for bad in ("postgresql://u:se@cret@h/x", "postgresql://u:secret@h:port/x"):
        with pytest.raises(UsageError, match="the gallery's URL") as usage:
            Gallery.open(bad)
        assert "cret" not in "".join(traceback.format_exception(usage.value))
    monkeypatch.setitem(sys.modules, "psycopg", None)
    fails(r"pip install 'parseshot\[postgres\]'", url, kind=UsageError)


def test_a_server_of_any_spelling(server: Server) -> None:
    url = server.new_database()
    for spelling in ("postgresql://", "postgres://", "postgresql+psycopg://"):
        with Gallery.open(url.replace("postgresql://", spelling), create=True) as gallery:
            assert repr(gallery) == "Gallery('postgresql://tester@/postgres')"
    fails("could not be .*does not exist", url.replace("/postgres?", "/none?"))


def test_a_server_that_only_reads(server: Server) -> None:
    url = server.new_database()
    with Gallery.open(url, create=True) as gallery:
        enroll(gallery, {1: "owl"})
        with gallery._storage.writing() as connection:
            schema = connection.execute(text("SELECT current_schema()")).scalar_one()
            connection.execute(text("CREATE ROLE guest LOGIN"))
            connection.execute(text(f"GRANT USAGE ON SCHEMA {schema} TO guest"))
            connection.execute(text(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO guest"))
    with Gallery.open(url.replace("tester@", "guest@"), create=True) as gallery:
        assert content(gallery.snapshot()) == {1: "owl"}
        with pytest.raises(DataError, match="can only be read: not saved"):
            enroll(gallery, {2: "owl"})


def test_a_lost_connection_is_made_again(server: Server) -> None:
    url = server.new_database()
    with Gallery.open(url, create=True) as gallery:
        enroll(gallery, {1: "owl"})
        end = text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid != pg_backend_pid()")

        def encode() -> Iterator[tuple[int, Encoding]]:
            with Gallery.open(url) as other, other._storage.reading() as connection:
                connection.execute(end)
            yield 1, encoding_of(1)

        with pytest.raises(DataError, match=r"could not be saved: .*terminating connection"):
            gallery.replace_encodings("other", encode())
        assert gallery.fingerprint == MODEL
        with Gallery.open(url) as other, other._storage.reading() as connection:
            connection.execute(end)
        enroll(gallery, {2: "owl"})
        assert content(gallery.snapshot()) == {1: "owl", 2: "owl"}


# Pictures


def test_a_stored_picture_is_nothing_but_pixels(birds_picture: Image.Image) -> None:
    carrying = birds_picture.copy()
    carrying.info = {"exif": b"Exif\0\0II*\0secret", "comment": b"secret", "icc_profile": b"secret", "dpi": (1, 1)}
    data = stored_picture(carrying)
    with Image.open(io.BytesIO(data)) as stored:
        assert stored.format == "JPEG"
        assert stored.size == birds_picture.size
        assert not {"exif", "comment", "icc_profile"} & set(stored.info)
        assert stored.layer[0][1:3] == (1, 1)  # no colour is thinned out
        difference = np.asarray(stored, dtype=int) - np.asarray(birds_picture, dtype=int)
        assert np.abs(difference).mean() < 2
    assert b"secret" not in data
    assert carrying.info["comment"] == b"secret"  # the given one is not touched


@pytest.fixture
def birds_picture() -> Image.Image:
    row, column = np.mgrid[:60, :90]
    return Image.fromarray(np.stack((row * 4, column * 2, 255 - row * 3), -1).astype(np.uint8))


def test_a_very_long_picture_is_stored_too() -> None:
    data = stored_picture(Image.new("RGB", (70_000, 16), (1, 2, 3)))
    with Image.open(io.BytesIO(data)) as stored:
        assert (stored.format, stored.size, stored.getpixel((69_999, 15))) == ("PNG", (70_000, 16), (1, 2, 3))


def test_perceptual_hashes_fit(gallery: Gallery) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    hashes = perceptual_hashes(pictures)  # uint64 [6, 2]
    assert (hashes >> np.uint64(63)).any()
    one = [new_photo(number, "owl") for number in range(6)]
    new = [replace(photo, hashes=tuple(pair)) for photo, pair in zip(one, hashes, strict=True)]
    gallery.add(new, MODEL)
    assert np.array_equal(gallery.snapshot().hashes, hashes)
