"""Preparing a data set: `parseshot data prepare` against the one-process loop one would write with Pillow.

    python benchmarks/prepare.py --source ../shared/data/CUB_200_2011.tgz [--name cub] [--repeats 3] [--workers 2]

Both sides start from the archive, read the lists, crop to the box, resize to 84 px and end with the images in an .npy
file on the same disk; the loop does nothing else, ours also checks, hashes, looks for duplicates, syncs and writes the
index. They run in turn in this one process; the median of the paired ratios of wall time is printed. The pixels of both
must be the same.
"""

import argparse
import io
import shutil
import statistics
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from parseshot.data.catalog import read_catalog
from parseshot.data.prepare import prepare
from parseshot.data.render import Box
from parseshot.data.source import Source, open_source


def loop(name: str, source: Source, size: int, out: Path) -> None:
    """Read the lists; then every member in turn: decode, crop, resize; then save."""
    listing = read_catalog(name, source)
    boxes = {item.name: (inside(item.box) if item.box and listing.crop else None) for item in listing.items}
    images = {}
    with tarfile.open(source.path) as opened:
        for member in opened:
            if member.name in boxes:
                stream = opened.extractfile(member)
                assert stream is not None
                image = Image.open(io.BytesIO(stream.read())).convert("RGB")
                box = boxes[member.name]
                images[member.name] = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box))
    np.save(out, np.stack([images[name] for name in boxes]))


def inside(box: Box) -> Box:
    return max(box[0], 0.0), max(box[1], 0.0), box[2], box[3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--name", default="cub")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = open_source(arguments.source, folder)  # for its lists; the loop reads the archive itself
        for repeat in range(arguments.repeats):
            started = time.perf_counter()
            loop(arguments.name, source, 84, folder / "loop.npy")
            middle = time.perf_counter()
            pack = prepare(arguments.name, arguments.source, folder / f"pack{repeat}", workers=arguments.workers)
            ended = time.perf_counter()
            if not np.array_equal(pack.images, np.load(folder / "loop.npy", mmap_mode="r")):
                raise SystemExit("the two sides made different pixels")
            shutil.rmtree(folder / f"pack{repeat}")
            ratios.append((middle - started) / (ended - middle))
            print(f"loop {middle - started:6.2f} s   parseshot {ended - middle:6.2f} s   {ratios[-1]:.2f}×", flush=True)
    print(f"{arguments.name}, {len(pack)} images: {statistics.median(ratios):.2f}× the one-process loop, same pixels")


if __name__ == "__main__":
    main()
