"""Photos to enroll that tell who they are: file number i has the digest, the picture and the encoding of i.

And what the processes of the tests do with them; importable without the tests.
"""

import hashlib
import itertools
import os
import random
import resource
import signal
import time
import zlib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from sqlalchemy import event

from parseshot.errors import DataError, ParseshotError
from parseshot.methods.base import Encoding
from parseshot.recognition.gallery import Gallery
from parseshot.recognition.records import NewPhoto, Version
from parseshot.recognition.snapshot import Snapshot

MODEL = "0123456789abcdef"
BATCH = 12  # photos that a killed process enrolls at once


def digest_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def encoding_of(number: int, model: str = MODEL) -> Encoding:
    """Different for each file and model, and of several types."""
    random_bits = torch.Generator().manual_seed(number ^ zlib.crc32(model.encode()) << 20)
    return Encoding(
        nu=torch.randn(1, 2, 3, 5, generator=random_bits),
        mu=torch.randn(1, 3, 2, generator=random_bits).to(torch.bfloat16),
        file=torch.tensor([number]),
    )


def new_photo(number: int, class_name: str, *, picture: int = 500) -> NewPhoto:
    return NewPhoto(
        class_name,
        f"{number}.jpg",
        digest_of(number),
        ((1 << 64) - 1 - number, number),
        640,
        480,
        random.Random(number).randbytes(picture),
        encoding_of(number),
        (0.1, 2.0, 3.5, 4.0) if number % 2 else None,
        ("several frames; the first is used",) * (number % 3),
    )


def content(snapshot: Snapshot, model: str = MODEL) -> dict[int, str]:
    """File number → class name, after a check that every row tells of one and the same file."""
    if snapshot.encoding is None:
        assert len(snapshot.photos) == 0
        return {}
    assert snapshot.fingerprint == model
    numbers = snapshot.encoding["file"].tolist()
    whole = [encoding_of(number, model) for number in numbers]
    for name, tensor in snapshot.encoding.items():
        assert tensor.shape[0] == len(snapshot.labels) == len(snapshot.photos) == len(numbers)
        assert not whole or torch.equal(tensor, torch.cat([one[name] for one in whole]))
    assert snapshot.digests == tuple(digest_of(number) for number in numbers)
    assert snapshot.hashes.tolist() == [[(1 << 64) - 1 - number, number] for number in numbers]
    assert set(snapshot.labels.tolist()) == set(range(len(snapshot.classes)))
    names = [snapshot.classes[label].name for label in snapshot.labels.tolist()]
    return dict(zip(numbers, names, strict=True))


def batch_of(version: int) -> dict[int, str]:
    """What the process that is killed enrolls as this version."""
    return {version * BATCH + row: f"class {(version + row) % 7}" for row in range(BATCH)}


def enroll_without_end(where: Path | str, ready: Connection) -> None:
    """Until it is killed."""
    torch.set_num_threads(1)
    gallery = Gallery.open(where)
    version = gallery.version
    ready.send(version)
    while True:
        version += 1
        photos = [new_photo(number, name, picture=20_000) for number, name in batch_of(version).items()]
        assert gallery.add(photos, MODEL).number == version


def enroll_and_die(where: Path | str, statement: int) -> None:
    """Killed before a statement of the transaction, the first being 1; if it has that many."""
    doomed(where, statement).add([new_photo(2, "wren"), new_photo(3, "crow")], MODEL)


def purge_and_die(where: Path | str, statement: int) -> None:
    """Killed before a statement of the purge, the first being 1; if it has that many."""
    doomed(where, statement).purge()


def doomed(where: Path | str, statement: int) -> Gallery:
    """A gallery whose process is killed before it executes that many statements more."""
    torch.set_num_threads(1)
    gallery = Gallery.open(where)
    numbers = itertools.count(1)

    def die(*_: object) -> None:
        if next(numbers) == statement:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(gallery._storage._engine, "before_cursor_execute", die)
    return gallery


def purge_for(seconds: float, gallery: Gallery) -> list[tuple[int, str, Any]]:
    """Again and again, at least until there was something to purge, and which version each became."""
    log: list[tuple[int, str, Any]] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or not log:
        made = gallery.purge()
        if made is not None:
            log.append((made.number, "purge", None))
    return log


def enroll_with_limit(where: Path | str, limit: int, answer: Connection) -> None:
    """Under a limit on the size of files, as a quota would be."""
    torch.set_num_threads(1)
    with Gallery.open(where) as gallery:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            answer.send(gallery.add([new_photo(number, "large", picture=300_000) for number in range(100, 110)], MODEL))
        except ParseshotError as error:
            answer.send((type(error), str(error), content(gallery.snapshot())))


def write_for(seconds: float, gallery: Gallery, writer: int) -> list[tuple[int, str, Any]]:
    """Random changes, and which version each became: (version, action, what of it)."""
    dice, log = random.Random(writer), []
    files = iter(range(writer * 100_000, (writer + 1) * 100_000))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            log.append(_change(gallery, dice, files))
        except DataError as error:  # what it meant to remove or undo is gone
            if " has no " not in str(error) and "nothing to undo" not in str(error):
                raise
    return log


def _change(gallery: Gallery, dice: random.Random, files: Iterator[int]) -> tuple[int, str, Any]:
    action = dice.choices(("enroll", "photo", "class", "undo"), (6, 2, 1, 2))[0]
    made: Version
    if action == "enroll":
        new = {next(files): f"class {dice.randrange(5)}" for _ in range(dice.randint(1, 3))}
        made = gallery.add([new_photo(number, name) for number, name in new.items()], MODEL)
        return made.number, action, new
    if action == "class":
        name = f"class {dice.randrange(5)}"
        return gallery.remove_class(name).number, action, name
    if action == "photo":
        there = gallery.photos()
        if not there:
            raise DataError("it has no photos")
        photo = dice.choice(there)
        return gallery.remove_photo(photo.id).number, action, int(photo.source.removesuffix(".jpg"))
    made = gallery.undo()
    return made.number, action, made.detail["undoes"]


def read_for(seconds: float, gallery: Gallery) -> list[tuple[int, dict[int, str]]]:
    """What was seen, read whole and brought up to date in turn."""
    held = gallery.snapshot()
    seen = [(held.version, content(held))]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        held = held.after(gallery.changes(held.version))
        whole = gallery.snapshot()
        seen += [(held.version, content(held)), (whole.version, content(whole))]
    return seen


def replay(log: list[tuple[int, str, Any]]) -> list[dict[int, str]]:
    """The content of every version, from what was done: a list because each version was made exactly once."""
    states: list[dict[int, str]] = [{}]
    for version, action, what in sorted(log, key=lambda entry: entry[0]):
        assert version == len(states)
        before = states[-1]
        if action == "enroll":
            states.append(before | what)
        elif action == "photo":
            assert what in before
            states.append({number: name for number, name in before.items() if number != what})
        elif action == "class":
            assert what in before.values()
            states.append({number: name for number, name in before.items() if name != what})
        elif action == "purge":
            states.append(before)
        else:
            states.append(states[what - 1])
    return states


def take_part(where: Path | str, seconds: float, writer: int | None, answer: Connection) -> None:
    """A process of its own that writes, or reads where writer is None."""
    torch.set_num_threads(1)
    with Gallery.open(where, fingerprint=MODEL) as gallery:
        answer.send(read_for(seconds, gallery) if writer is None else write_for(seconds, gallery, writer))
