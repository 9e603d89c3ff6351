"""An episode's images: from the pack, augmented, against decoding the JPEGs for it, and against a training step.

    python benchmarks/loading.py --pack data/cub --source ../shared/data/CUB_200_2011.tgz \\
        --photos ../shared/data/cub_raw_val.tgz [--threads 2] [--repeats 20]

150 images (10-way 5-shot 10-query). From the pack: draw the episode, read, flip, distort. From JPEGs: read each file,
decode, crop to the box, resize to 84 px, no augmentation. The step: Conv-4 and DOP, forward, backward and Adam on the
same 150 images. The shared CUB archive holds small copies of the photos; --photos names an archive of whole photos in
class folders (420 px, nearly the size of the official ones), as many of which are decoded beside. The sides run in
turn in this one process; medians of wall time are printed.
"""

import argparse
import dataclasses
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from parseshot.data.augment import Augmentation, augment
from parseshot.data.catalog import Item, read_catalog
from parseshot.data.episodes import draw_episode
from parseshot.data.packed import Pack
from parseshot.data.source import Place, open_source, read
from parseshot.engine.model import Model, ModelConfig
from parseshot.engine.training import TrainingConfig, train_step


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def in_turn(first: Callable[[int], object], second: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Median seconds of both, run in turn, and the median of second over first."""
    first(0), second()
    pairs = [(seconds(lambda s=step: first(s)), seconds(second)) for step in range(repeats)]
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    return ours, theirs, statistics.median(b / a for a, b in pairs)


def decode(items: list[Item], size: int) -> np.ndarray:
    images = []
    for item in items:
        with Image.open(io.BytesIO(read(item.place))) as opened:
            image = opened.convert("RGB")
        images.append(np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, item.box)))
    return np.stack(images)


def unpack(items: list[Item], folder: Path) -> list[Item]:
    """The same pictures as single files, as every peer keeps them."""
    placed = []
    for number, item in enumerate(items):
        file = folder / f"{number}.jpg"
        file.write_bytes(read(item.place))
        placed.append(dataclasses.replace(item, place=Place(str(file))))
    return placed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pack = Pack(arguments.pack)
    members = pack.by_class("base")
    config = TrainingConfig(seed=0)
    per_image = {"way": config.way, "shots": config.shots, "queries": config.queries, "seed": 0}

    def load(name: str, step: int) -> torch.Tensor:
        episode = draw_episode(members, index=step, **per_image)
        recipe = Augmentation.model_validate({"name": name})
        numbers = np.concatenate((episode.support, episode.query))
        return augment(pack.pixels(numbers, margin=recipe.margin), recipe, size=pack.size, seed=0, step=step)

    with tempfile.TemporaryDirectory() as folder:
        items = read_catalog(pack.name, open_source(arguments.source, Path(folder))).items
        by_name = {item.name: item for item in items}
        episode = draw_episode(members, index=0, **per_image)
        wanted = [by_name[pack.files[number]] for number in np.concatenate((episode.support, episode.query))]
        (Path(folder) / "jpegs").mkdir()
        jpegs = unpack(wanted, Path(folder) / "jpegs")
        large: list[Item] = []
        if arguments.photos:
            (Path(folder) / "photos").mkdir()
            listed = read_catalog("folder", open_source(arguments.photos, Path(folder))).items
            large = unpack(listed[:: len(listed) // len(wanted)][: len(wanted)], Path(folder) / "photos")
        share_of: dict[str, float] = {}
        for recipe in ("paper", "frn"):
            for name, pictures in (("JPEGs", jpegs), ("whole photos", large)):
                if pictures:
                    ours, theirs, ratio = in_turn(
                        lambda step, r=recipe: load(r, step), lambda p=pictures: decode(p, pack.size), arguments.repeats
                    )
                    print(
                        f"{recipe:6} {len(pictures)} images: pack {1e3 * ours:5.1f} ms  "
                        f"{name} {1e3 * theirs:5.1f} ms  {ratio:.1f}×"
                    )
                    share_of.setdefault(recipe, ours)
    torch.manual_seed(0)
    model = Model(ModelConfig())
    optimiser = torch.optim.Adam(model.parameters(), lr=config.lr)
    steps = [
        seconds(lambda s=s: train_step(model, optimiser, pack, draw_episode(members, index=s, **per_image), config, s))
        for s in range(arguments.steps + 1)
    ][1:]
    step = statistics.median(steps)
    share = 100 * share_of["paper"] / step
    print(f"Conv-4 training step {step:.2f} s; drawing and augmenting its images {share:.1f} % of it")


if __name__ == "__main__":
    main()
