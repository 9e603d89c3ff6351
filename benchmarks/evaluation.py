"""Evaluation: each image encoded once and episodes scored many at a time, against re-encoding every episode.

    python benchmarks/evaluation.py --data data/cub [--threads 2] [--again 10] [--models conv4,resnet12] [--easyfsl DIR]

One run, medians where repeated, wall time in this process, random weights (the time does not depend on them):
(a) 5-way 1-shot and 5-shot episodes of 15 queries, every image of an episode through backbone and head again, as the
    peers do: one batch, PyTorch's own memory layout, the C library's own allocator. Measured on --again episodes of
    each, then multiplied by 600 and 10,000 (not measured). Also with our own layout, batches and allocator, so that one
    sees what comes from encoding once alone;
(b) all-in (read the pack, encode, head included, draw, score both numbers of shots) at 600 episodes against the bare
    forward passes of the backbone over the same images in the same batches;
(c) all-in at 10,000 episodes against 600; peak memory of the process. ResNet-12: (b) and memory only, it takes minutes.
Batch sizes and memory layouts of the bare backbone are timed beside, on 240 images. With --easyfsl DIR, where DIR was
made by `pip install --no-deps --target DIR easyfsl tqdm`, easyfsl's own `evaluate` runs its ProtoNet on the same
backbone and episodes. It imports torchvision, pandas and matplotlib, for plots and tables only: they are replaced by
stand-ins, and its TaskSampler, which does not work with this torch, by a list of tasks that are in memory already.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import torch

from parseshot.data.episodes import draw_episode
from parseshot.data.packed import Pack
from parseshot.engine.allocator import keep_freed_memory, peak_memory
from parseshot.engine.evaluation import evaluate
from parseshot.engine.model import BATCH, Model, ModelConfig
from parseshot.engine.protocol import Protocol

MODELS = {
    "conv4 dop": ModelConfig(method="dop", backbone_options={"pools": 3}),
    "conv4 protonet": ModelConfig(method="protonet"),
    "resnet12 dop": ModelConfig(backbone="resnet12", method="dop"),
}


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def images_of(pack: Pack, numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pack.pixels(numbers)).permute(0, 3, 1, 2)


@torch.inference_mode()
def bare(model: Model, images: torch.Tensor, batch: int = BATCH) -> None:
    for start in range(0, len(images), batch):
        model.backbone(images[start : start + batch])


def encode_again(model: Model, pack: Pack, shots: int, index: int, *, as_peers: bool) -> float:
    """One episode with all of its images through the network; its accuracy."""
    drawn = draw_episode(pack.by_class("novel"), way=5, shots=shots, queries=15, seed=0, index=index)
    images = images_of(pack, np.concatenate((drawn.support, drawn.query)))
    with torch.inference_mode():
        encoding = model(images.float().div_(255).contiguous()) if as_peers else model.encode(images)
        support, query = encoding.take(slice(len(drawn.support))), encoding.take(slice(len(drawn.support), None))
        logits = model.method.logits(query, support, torch.from_numpy(drawn.support_labels))
    return float((logits.argmax(1).numpy() == drawn.query_labels).mean())


def each_episode(model: Model, pack: Pack, count: int, *, as_peers: bool) -> dict[int, float]:
    """Median seconds of re-encoding an episode of 1 and of 5 shots."""
    if as_peers:
        model.backbone.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    encode_again(model, pack, 1, 0, as_peers=as_peers)
    found = {
        shots: statistics.median(
            seconds(lambda s=shots, i=at: encode_again(model, pack, s, i, as_peers=as_peers)) for at in range(count)
        )
        for shots in (1, 5)
    }
    model.backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return found


def easyfsl_episode(folder: Path, model: Model, pack: Pack, count: int) -> dict[int, float]:
    """Seconds an episode of easyfsl's `evaluate`, for 1 and 5 shots."""
    sys.path.insert(0, str(folder))
    for name in (
        "torchvision",
        "torchvision.models",
        "torchvision.models.resnet",
        "torchvision.datasets",
        "pandas",
        "matplotlib",
    ):
        sys.modules.setdefault(name, MagicMock())
    from easyfsl.methods import PrototypicalNetworks
    from easyfsl.utils import evaluate as theirs

    model.backbone.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    network = PrototypicalNetworks(torch.nn.Sequential(model.backbone, torch.nn.Flatten()))
    found = {}
    for shots in (1, 5):
        tasks = []
        for at in range(count + 1):
            drawn = draw_episode(pack.by_class("novel"), way=5, shots=shots, queries=15, seed=0, index=at)
            support, query = (images_of(pack, part).float().div_(255) for part in (drawn.support, drawn.query))
            labels = (torch.from_numpy(part) for part in (drawn.support_labels, drawn.query_labels))
            tasks.append((support.contiguous(), next(labels), query.contiguous(), next(labels), drawn.classes.tolist()))
        theirs(network, tasks[:1], device="cpu", use_tqdm=False)
        found[shots] = seconds(lambda t=tasks[1:]: theirs(network, t, device="cpu", use_tqdm=False)) / count
    model.backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return found


def measure(name: str, pack: Pack, count: int, easyfsl: Path | None) -> None:
    torch.manual_seed(0)
    model = Model(MODELS[name]).eval()
    numbers = np.concatenate(list(pack.by_class("novel").values()))
    images = images_of(pack, numbers)
    small = name.startswith("conv4")
    again: dict[str, dict[int, float]] = {}
    if small:
        again["as the peers do"] = each_episode(model, pack, count, as_peers=True)
    if easyfsl and name == "conv4 protonet":
        again["by easyfsl"] = easyfsl_episode(easyfsl, model, pack, count)
    keep_freed_memory()
    if small:
        again["our way"] = each_episode(model, pack, count, as_peers=False)
    bare(model, images[:64])
    pairs = [
        (seconds(lambda: bare(model, images)), seconds(lambda: evaluate(model, pack, Protocol(episodes=600))))
        for _ in range(3 if small else 1)
    ]
    short = statistics.median(pair[1] for pair in pairs)
    of_bare = statistics.median(b / a for a, b in pairs)
    print(f"{name}: {len(numbers)} images, 600 and 10,000 episodes of 1 and as many of 5 shots")
    print(f"  bare backbone, each image once   {statistics.median(pair[0] for pair in pairs):8.1f} s")
    print(f"  all-in, 600 episodes             {short:8.1f} s   {of_bare:.2f}× the bare backbone", flush=True)
    if small:
        long = seconds(lambda: evaluate(model, pack, Protocol(episodes=10_000)))
        print(f"  all-in, 10,000 episodes          {long:8.1f} s   {long / short:.2f}× that of 600")
    print(f"  peak memory of the process       {peak_memory():8.2f} GB", flush=True)
    for text, found in again.items():
        both = sum(found.values())
        print(
            f"  encoding again, {text}: {1e3 * found[1]:.0f} ms a 1-shot episode, {1e3 * found[5]:.0f} ms 5-shot "
            f"({count} of each); extrapolated {600 * both:.0f} s, {600 * both / short:.0f}× for 600; "
            f"{10_000 * both:.0f} s, {10_000 * both / long:.0f}× for 10,000"
        )


def layouts(pack: Pack) -> None:
    numbers = np.concatenate(list(pack.by_class("novel").values()))[:240]
    for backbone in ("conv4", "resnet12"):
        torch.manual_seed(0)
        model = Model(ModelConfig(backbone=backbone, method="protonet")).eval()
        images = images_of(pack, numbers if backbone == "conv4" else numbers[:64])
        told = []
        for layout in (torch.channels_last, torch.contiguous_format):
            model.backbone.to(memory_format=layout)  # type: ignore[call-overload]
            laid = images.contiguous(memory_format=layout)
            for batch in (4, 8, 16, 64):
                bare(model, laid[:batch], batch)
                best = min(seconds(lambda m=model, b=batch, i=laid: bare(m, i, b)) for _ in range(2))
                told.append(f"{'last' if layout == torch.channels_last else 'first'} {batch}: "
                            f"{1e3 * best / len(images):.1f}")  # fmt: skip
        print(f"{backbone}, ms an image, channels last or first, batch: {', '.join(told)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--again", type=int, default=10)
    parser.add_argument("--easyfsl", type=Path)
    parser.add_argument("--models", default="conv4,resnet12")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # one model a process, for its peak memory
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pack = Pack(arguments.data)
    if arguments.one:
        measure(arguments.one, pack, arguments.again, arguments.easyfsl)
        return
    keep_freed_memory()
    layouts(pack)
    for name in MODELS:
        if name.split()[0] in arguments.models.split(","):
            subprocess.run([sys.executable, *sys.argv, "--one", name], check=True)


if __name__ == "__main__":
    main()
