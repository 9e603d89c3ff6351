"""Killed while enrolling, and many at once: is every gallery that is seen one that was committed?

    python benchmarks/stress.py [--where postgresql://…] [--kills 20] [--seconds 60] [--processes 8]

First `parseshot enroll` is killed with SIGKILL at moments spread over the second half of its run and a little beyond
its usual end; each time the gallery must hold the photos of before or of after, and recognise by them. Then half of the
processes enroll classes of their own and remove some of them, and half recognise the same photos, for a minute; each
answer names the version it is from, and must be that of this version, read again at the end; and every class that an
enrolment was confirmed for, and no other, must be there. Drawn birds, the model `birds-conv4`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from parseshot.data.synthetic import draw_many, make_species
from parseshot.recognition.gallery import Gallery
from parseshot.recognition.prepared import PreparedGallery
from parseshot.recognition.recognizer import Item, Recognizer

MODEL = "birds-conv4"
FIRST, LAST = 0.6, 1.5  # moments of the kills, in usual runs: loading comes before, and the machine may be busy
CLOSE = 1e-3  # by which scores of the same photos may differ between processes


def draw(folder: Path) -> None:
    """Five species to start with, two to enroll, and photos to recognise."""
    images, labels, *_ = draw_many(make_species(24, seed=911)[::3], 6, seed=4)
    for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        kind = "asked" if number % 6 == 5 else "first" if label < 5 else "more"
        place = folder / kind / f"species {label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number}.png")


def asked_photos(folder: Path) -> list[Path]:
    return sorted((folder / "asked").glob("*/*.png"))[:4]


def scores_at(recognizer: Recognizer, folder: Path, version: int) -> dict[str, list[float]]:
    """Class → its scores of the photos that are asked, by the photos of a version."""
    snapshot = recognizer.opened.snapshot(version)
    if not snapshot.classes:
        return {}
    encoding = recognizer.encode([recognizer.see(Item(path)) for path in asked_photos(folder)])
    scores = PreparedGallery(recognizer.loaded.method).of(snapshot).scores(encoding)
    return {one.name: scores[:, at].tolist() for at, one in enumerate(snapshot.classes)}


def kill(where: str, folder: Path, moments: int) -> dict[str, object]:
    command = [sys.executable, "-m", "parseshot", "enroll", where, str(folder / "more"), "--model", MODEL]
    recognizer = Recognizer(MODEL, where)
    recognizer.enroll([(path.parent.name, Item(path)) for path in sorted((folder / "first").glob("*/*.png"))])
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    usual = time.perf_counter() - started
    after = set(recognizer.classes_)
    recognizer.opened.undo()
    before = set(recognizer.classes_)
    outcomes = {"before": 0, "after": 0}
    for number in range(moments):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(usual * (FIRST + (LAST - FIRST) * number / max(1, moments - 1)))
        process.kill()
        process.wait()
        held = Recognizer(MODEL, where)
        names = set(held.classes_)
        if names not in (before, after):
            raise SystemExit(f"kill {number + 1} of {moments}: neither the old gallery nor the new one")
        photos = held.opened.photos()
        if any(len(held.opened.picture(photo.id)) == 0 for photo in photos):
            raise SystemExit("a photo without its picture")
        held.recognise(asked_photos(folder))
        outcomes["after" if names == after else "before"] += 1
        if names == after:
            held.opened.undo()
        held.close()
    return {"kills": moments, "usual_seconds": round(usual, 1), **outcomes}


def work(where: str, folder: Path, role: str, seconds: float, log: Path) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    recognizer = Recognizer(MODEL, where)
    own = np.random.default_rng(abs(hash(role)) % 2**32)
    end, number, lines = time.monotonic() + seconds, 0, []
    while time.monotonic() < end:
        if role.startswith("enroll"):
            name, number = f"{role} {number}", number + 1
            pixels = own.integers(0, 256, (2, 40, 40, 3), dtype=np.uint8)
            recognizer.add_class(name, list(pixels))
            lines.append({"added": name})
            if number % 3 == 0:
                recognizer.remove(name)
                lines.append({"removed": name})
        else:
            for row, answer in enumerate(recognizer.recognise(asked_photos(folder))):
                told = {one.name: one.score for one in answer.candidates}
                lines.append({"photo": row, "version": answer.version, "scores": told})
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))


def together(where: str, folder: Path, processes: int, seconds: float) -> dict[str, object]:
    running, logs = [], []
    for number in range(processes):
        role = f"{'enroll' if number % 2 else 'ask'}-{number}"
        logs.append(folder / f"{role}.jsonl")
        command = [sys.executable, __file__, "--work", role, "--where", where, "--folder", str(folder)]
        running.append(subprocess.Popen([*command, "--seconds", str(seconds), "--log", str(logs[-1])]))
    if any(process.wait() for process in running):
        raise SystemExit("a process failed")
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    recognizer = Recognizer(MODEL, where)
    wanted = {line["added"] for line in lines if "added" in line} - {
        line["removed"] for line in lines if "removed" in line
    }
    there = {name for name in recognizer.classes_ if name.startswith("enroll-")}
    if wanted != there:
        raise SystemExit(f"lost {sorted(wanted - there)[:3]}, left over {sorted(there - wanted)[:3]}")
    answers = [line for line in lines if "version" in line]
    worst = 0.0
    known: dict[int, dict[str, list[float]]] = {}
    for line in answers:
        if line["version"] not in known:
            known[line["version"]] = scores_at(recognizer, folder, line["version"])
        truth = known[line["version"]]
        best = sorted((scores[line["photo"]] for scores in truth.values()), reverse=True)[: len(line["scores"])]
        apart = [abs(truth[name][line["photo"]] - score) for name, score in line["scores"].items()]
        apart += [
            abs(one - other) for one, other in zip(best, sorted(line["scores"].values(), reverse=True), strict=True)
        ]
        worst = max(worst, *apart)
    if worst > CLOSE:
        raise SystemExit(f"an answer is {worst} away from that of the version it names")
    return {
        "processes": processes, "seconds": seconds, "enrolments": sum("added" in line for line in lines),
        "removals": sum("removed" in line for line in lines), "answers": len(answers), "versions_seen": len(known),
        "largest_difference": worst,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=8)
    for hidden in ("--work", "--folder", "--log"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        work(asked.where, Path(asked.folder), asked.work, asked.seconds, Path(asked.log))
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw(folder)
        where = asked.where or str(folder / "birds.gallery")
        Gallery.open(where, create=True).close()
        print(json.dumps({"killed": kill(where, folder, asked.kills)}), flush=True)
        if asked.seconds:
            print(json.dumps({"together": together(where, folder, asked.processes, asked.seconds)}))


if __name__ == "__main__":
    main()
