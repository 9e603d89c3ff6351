"""A gallery: enrolling one more class, loading it whole, and bringing a held snapshot up to date; the database alone.

    python benchmarks/gallery.py [--where postgresql://…] [--photos 20000] [--bytes 15000] [--repeats 9] [--threads 2]

Classes have 5 photos, with an encoding of --bytes and a picture of --picture bytes. Enrolling is measured into 1,000
classes and is one transaction that is on the disk when it ends; loading, of all --photos, against reading as many bytes
from a plain file. Both are in the memory of the machine by then. Without --where it is an SQLite file in a temporary
directory; a database that is given must be empty. Medians.
"""

import argparse
import hashlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from parseshot.methods.base import Encoding
from parseshot.recognition.gallery import Gallery
from parseshot.recognition.records import NewPhoto

SHOTS = 5
CLASSES = 1_000  # when one more is enrolled
MODEL = "benchmark"


def median_ms(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return round(1000 * statistics.median(times), 2)


def photos_of(name: int, size: int, picture: int) -> list[NewPhoto]:
    """Parts as DOP has them: a large tensor and a few small ones."""
    made = []
    for number in range(name * SHOTS, (name + 1) * SHOTS):
        torch.manual_seed(number)
        encoding = Encoding(nu=torch.rand(1, size // 4 - 24), mu=torch.rand(1, 3, 4, 2))
        data = random.Random(number).randbytes(picture)
        digest = hashlib.sha256(data).hexdigest()
        made.append(NewPhoto(f"class {name}", f"{number}.jpg", digest, (number, number), 640, 480, data, encoding))
    return made


def grow(gallery: Gallery, start: int, end: int, size: int, picture: int) -> None:
    for first in range(start, end, 100):
        names = range(first, min(first + 100, end))
        gallery.add([photo for name in names for photo in photos_of(name, size, picture)], MODEL)


def measure(where: Path | str, asked: argparse.Namespace, folder: Path) -> dict[str, float]:
    gallery = Gallery.open(where, create=True)
    grow(gallery, 0, CLASSES, asked.bytes, asked.picture)
    more = iter([photos_of(name, asked.bytes, asked.picture) for name in range(CLASSES, CLASSES + asked.repeats)])
    found = {"enroll_a_class_ms": median_ms(lambda: gallery.add(next(more), MODEL), asked.repeats)}
    grow(gallery, CLASSES + asked.repeats, asked.photos // SHOTS, asked.bytes, asked.picture)
    gallery.close()

    def load() -> None:
        with Gallery.open(where, fingerprint=MODEL) as opened:
            opened.snapshot()

    load()
    found["load_ms"] = median_ms(load, asked.repeats)
    held = gallery.snapshot()
    assert held.encoding is not None
    np.zeros(len(held.photos) * asked.bytes, np.uint8).tofile(folder / "plain")
    found["plain_file_ms"] = median_ms(lambda: np.fromfile(folder / "plain", np.uint8), asked.repeats)
    found["nothing_changed_ms"] = median_ms(lambda: gallery.changes(held.version), asked.repeats)
    times = []
    for name in range(asked.photos // SHOTS, asked.photos // SHOTS + asked.repeats):
        gallery.add(photos_of(name, asked.bytes, asked.picture), MODEL)
        started = time.perf_counter()
        held = held.after(gallery.changes(held.version))
        times.append(time.perf_counter() - started)
    found["class_added_ms"] = round(1000 * statistics.median(times), 2)
    gallery.remove_class("class 7")
    found["class_removed_ms"] = median_ms(lambda: held.after(gallery.changes(held.version)), asked.repeats)
    gallery.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where")
    parser.add_argument("--photos", type=int, default=20_000)
    parser.add_argument("--bytes", type=int, default=15_000)
    parser.add_argument("--picture", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as name:
        found = measure(asked.where or Path(name) / "gallery", asked, Path(name))
    ratios = {
        "load_over_plain_file": round(found["load_ms"] / found["plain_file_ms"], 1),
        "load_over_class_added": round(found["load_ms"] / found["class_added_ms"], 1),
    }
    print(json.dumps({"photos": asked.photos, "bytes": asked.bytes} | found | ratios))


if __name__ == "__main__":
    main()
