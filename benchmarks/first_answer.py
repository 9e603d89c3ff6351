"""From nothing to an answer with the default model: a new process, five novel classes of Cars, five photos of each.

    python benchmarks/first_answer.py --source stanford_cars.tgz [--classes 5] [--queries 5] [--threads 2]

The photos are taken out of the archive before the clock starts. The timed process then starts Python, loads the model
by its name, reads the photos, learns the classes and recognises others; connecting to any network is made to fail.
"""

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np

SHOTS = 5


def take_photos(archive: Path, folder: Path, classes: int, queries: int) -> int:
    """Photos of novel classes into folder/CLASS, chosen by a seed."""
    from parseshot.data.split import load_split

    novel = {name for name, role in load_split("cars").classes.items() if role == "novel"}
    random = np.random.default_rng(0)
    with tarfile.open(archive) as tar:
        members: dict[str, list[tarfile.TarInfo]] = {}
        for member in tar:
            name = Path(member.name).parent.name
            if member.isfile() and name in novel:
                members.setdefault(name, []).append(member)
        for name in random.permutation(sorted(members))[:classes]:
            (folder / name).mkdir()
            for number in random.permutation(len(members[name]))[: SHOTS + queries]:
                data = tar.extractfile(members[name][number])
                assert data is not None
                (folder / name / Path(members[name][number].name).name).write_bytes(data.read())
    return len(list(folder.glob("*/*.jpg")))


def answer(folder: Path, threads: int) -> None:
    """The timed process."""
    import socket

    def refuse(*_: object) -> None:
        raise OSError("no network here")

    socket.socket.connect = refuse  # type: ignore[method-assign, assignment]
    import torch

    from parseshot.data.photo import open_photo, to_square
    from parseshot.engine.allocator import keep_freed_memory
    from parseshot.engine.model import Model

    torch.set_num_threads(threads)
    keep_freed_memory()
    imported = time.time()
    model = Model.from_pretrained("default")
    loaded = time.time()
    names = sorted(path.name for path in folder.iterdir())
    files = [sorted((folder / name).glob("*.jpg")) for name in names]
    photos = [to_square(open_photo(file).image, model.config.image_size).pixels for each in files for file in each]
    codes = model.encode(torch.from_numpy(np.stack(photos)).permute(0, 3, 1, 2))
    labels = torch.cat([torch.full((len(each),), number) for number, each in enumerate(files)])
    shown = torch.cat([torch.arange(len(each)) < SHOTS for each in files])
    with torch.inference_mode():
        logits = model.method.logits(codes.take(~shown), codes.take(shown), labels[shown])
    right = (logits.argmax(1) == labels[~shown]).double().mean()
    told = {"imported": imported, "loaded": loaded, "answered": time.time(), "accuracy": round(100 * float(right), 1)}
    print(json.dumps(told | {"classes": names, "recognised": int((~shown).sum())}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--classes", type=int, default=5)
    parser.add_argument("--queries", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.folder:
        answer(asked.folder, asked.threads)
        return
    with tempfile.TemporaryDirectory() as name:
        count = take_photos(asked.source, Path(name), asked.classes, asked.queries)
        for _ in range(asked.repeats):
            started = time.time()
            command = [sys.executable, __file__, "--folder", name, "--threads", str(asked.threads)]
            told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            steps = [told.pop(key) for key in ("imported", "loaded", "answered")]
            seconds = {
                "import": steps[0] - started,
                "load": steps[1] - steps[0],
                "photos and answers": steps[2] - steps[1],
            }
            print(
                json.dumps(
                    {
                        "photos": count,
                        "seconds": {key: round(value, 2) for key, value in seconds.items()},
                        "in_all": round(steps[2] - started, 2),
                        **told,
                    }
                )
            )


if __name__ == "__main__":
    main()
