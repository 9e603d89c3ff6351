"""Caching a frozen backbone's feature maps against the bare backbone's forward pass over the same images, in one run.

    python benchmarks/features.py --data data/cub-224 [--images 1024] [--repeats 3] [--threads 2]

The bare side has its images ready as bytes in channels_last and throws its maps away; the other reads the pack, and
stores float16 with all that makes the cache safe. In turn, on the same images; medians, and the median of the ratios.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from parseshot.data.augment import Augmentation
from parseshot.data.packed import Pack
from parseshot.engine import features
from parseshot.engine.allocator import keep_freed_memory, peak_memory
from parseshot.engine.model import BATCH, Model, ModelConfig


@torch.inference_mode()
def bare(model: Model, images: torch.Tensor) -> float:
    started = time.perf_counter()
    for part in images.split(BATCH):
        model.backbone(part)
    return time.perf_counter() - started


def caching(model: Model, pack: Pack, numbers: np.ndarray, views: int) -> float:
    folder = Path(tempfile.mkdtemp(prefix="parseshot-"))
    jobs = [(view, numbers) for view in range(views)]
    try:
        started = time.perf_counter()
        features._ensure(model, pack, folder / "maps", features.PLAIN, jobs, Augmentation(perspective=0.3), {}, None)
        return time.perf_counter() - started
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--level", default="head")
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    keep_freed_memory()
    pack = Pack(asked.data)
    options = {"level": asked.level}
    model = Model(
        ModelConfig(backbone="efficientnet_lite0", backbone_options=options, method="protonet", image_size=pack.size)
    ).eval()
    numbers = np.arange(min(asked.images, len(pack)))
    images = torch.from_numpy(pack.pixels(numbers)).permute(0, 3, 1, 2)
    bare(model, images[:64])
    caching(model, pack, numbers[:64], 1)
    times = []
    for _ in range(asked.repeats):
        pair = bare(model, images), caching(model, pack, numbers, 1)
        times.append(pair)
    each, whole = (statistics.median(side) for side in zip(*times, strict=True))
    print(
        json.dumps(
            {
                "backbone": f"efficientnet_lite0 {asked.level}",
                "size": pack.size,
                "images": len(numbers),
                "bare_images_a_second": round(len(numbers) / each, 1),
                "cached_images_a_second": round(len(numbers) / whole, 1),
                "ratio": round(statistics.median(second / first for first, second in times), 3),
                "minutes_for_11788": round(11_788 * whole / len(numbers) / 60, 2),
                "peak_gb": peak_memory(),
            }
        )
    )


if __name__ == "__main__":
    main()
