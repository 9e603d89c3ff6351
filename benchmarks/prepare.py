"""Preparing a data set: `parseshot data prepare` against the one-process loop one would write with Pillow.

    python benchmarks/prepare.py --source ../shared/data/CUB_200_2011.tgz [--name cub] [--repeats 5] [--workers 2]
    python benchmarks/prepare.py --source ../shared/data/CUB_200_2011.tgz --side 500

Both sides start from the archive, read the lists, crop to the box, resize to 84 px and end with the images in an .npy
file on the same disk; the loop does nothing else, ours also checks, hashes, looks for duplicates, syncs and writes the
index. They run in turn in this one process; the median of the paired ratios of wall time is printed. The pixels of both
must be the same.

The shared archive holds small copies of the photos (a box's longer side is at most 176 px). With --side 500 the first
--most photos are enlarged to the official data set's size, saved as JPEG in class folders and prepared from there as
`folder`. Enlarged photos are smoother than real ones, so they decode faster: the ratio is a lower bound.
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
from parseshot.data.source import Source, open_source, read


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


def enlarge(name: str, source: Source, side: int, most: int, out: Path) -> Path:
    """An archive of class folders with photos evenly taken from a source, their longer side `side` pixels."""
    listing = read_catalog(name, source)
    step = max(1, len(listing.items) // most)
    with tarfile.open(out, "w") as archive:
        for number, item in enumerate(listing.items[::step][:most]):
            image = Image.open(io.BytesIO(read(item.place))).convert("RGB")
            scale = side / max(image.size)
            stream = io.BytesIO()
            image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC).save(
                stream, "JPEG", quality=90
            )
            member = tarfile.TarInfo(f"{listing.classes[item.label]}/{number:06d}.jpg")
            member.size = stream.tell()
            stream.seek(0)
            archive.addfile(member, stream)
    return out


def inside(box: Box) -> Box:
    return max(box[0], 0.0), max(box[1], 0.0), box[2], box[3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--name", default="cub")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--side", type=int, help="enlarge the photos to this many pixels first")
    parser.add_argument("--most", type=int, default=4000, help="with --side: how many photos")
    arguments = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        name, archive = arguments.name, arguments.source
        if arguments.side:
            small = open_source(archive, folder)
            archive, name = enlarge(name, small, arguments.side, arguments.most, folder / "large.tar"), "folder"
        source = open_source(archive, folder)  # for its lists; the loop reads the archive itself
        for repeat in range(arguments.repeats):
            started = time.perf_counter()
            loop(name, source, 84, folder / "loop.npy")
            middle = time.perf_counter()
            pack = prepare(name, archive, folder / f"pack{repeat}", workers=arguments.workers)
            ended = time.perf_counter()
            if not np.array_equal(pack.images, np.load(folder / "loop.npy", mmap_mode="r")):
                raise SystemExit("the two sides made different pixels")
            shutil.rmtree(folder / f"pack{repeat}")
            ratios.append((middle - started) / (ended - middle))
            print(f"loop {middle - started:6.2f} s   parseshot {ended - middle:6.2f} s   {ratios[-1]:.2f}×", flush=True)
    print(f"{name}, {len(pack)} images: {statistics.median(ratios):.2f}× the one-process loop, same pixels")


if __name__ == "__main__":
    main()
