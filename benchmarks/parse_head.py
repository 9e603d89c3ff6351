"""The parse head, forward and backward: ours against the obvious grouped-convolution form, and against the backbone.

    python benchmarks/parse_head.py [--threads 2] [--repeats 5] [--skip-backbones]

Both sides run in this one process, in turn, on the same tensors; the median of the paired ratios is printed. Peak
memory is measured in a fresh process for each side (growth of the resident set while one forward and backward runs).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from parseshot.backbones import build_backbone
from parseshot.parts.parsing import Parse, entropy, expected_location, parse, unit_rms
from parseshot.parts.templates import correlate, squared_norms, visible_squared_norms

SIZES = [(64, 5, 150), (640, 5, 150), (512, 7, 50), (320, 7, 150), (384, 16, 16)]  # C, G, images
PARTS, SCALES, LAM = 4, (1, 3, 5), 0.05


def obvious(phi: Tensor, templates: list[Tensor], temperature: Tensor) -> Parse:
    """The same equations with the operators one would reach for: a grouped convolution and broadcasting."""
    phi = unit_rms(phi)
    size = phi.shape[-1]
    maps, expressions, scores = [], [], []
    for index, template in enumerate(templates):
        r = correlate(phi, template).transpose(1, 2)  # [B, C, K, G, G], a grouped convolution
        norm = squared_norms(template).sqrt().T[:, :, None, None]  # [C, K, 1, 1]
        visible = visible_squared_norms(template, size).transpose(0, 1)  # [C, K, G, G]
        x = F.relu(r * (norm / visible) - LAM / (2 * norm))
        score = x.square().mean(1)  # [B, K, G, G]
        nu = torch.softmax(score.flatten(2) / temperature[index], -1).view_as(score)
        expressions.append((nu.unsqueeze(1) * x / norm).sum((-1, -2)).transpose(1, 2))  # [B, K, C]
        maps.append(nu)
        scores.append(score.detach())
    nu = torch.stack(maps, 1)
    return Parse(nu, expected_location(nu), torch.stack(expressions, 1), entropy(nu), torch.stack(scores, 1))


def ours(phi: Tensor, templates: list[Tensor], temperature: Tensor) -> Parse:
    return parse(phi, templates, temperature, lam=LAM, exact=True, normalised=True)


def make(channels: int, size: int, images: int) -> tuple[Tensor, list[Tensor], Tensor]:
    torch.manual_seed(0)
    phi = torch.randn(images, channels, size, size).relu().requires_grad_()
    templates = [(0.1 * (1 + 0.5 * torch.randn(PARTS, channels, s, s)) / s).requires_grad_() for s in SCALES]
    return phi, templates, torch.full((len(SCALES),), 0.3, requires_grad=True)


def step(head, phi: Tensor, templates: list[Tensor], temperature: Tensor) -> tuple[float, list[Tensor]]:
    """Seconds of one forward and backward, and the gradients."""
    leaves = [phi, *templates, temperature]
    for leaf in leaves:
        leaf.grad = None
    started = time.perf_counter()
    found = head(phi, templates, temperature)
    loss = found.nu.square().sum() + found.mu.sin().sum() + found.z.square().mean() + found.entropy.sum()
    loss.backward()
    return time.perf_counter() - started, [leaf.grad.clone() for leaf in leaves]


def backbone_step(name: str, images: int, repeats: int) -> float:
    """Median seconds of the bare backbone's forward and backward at 84 px, channels_last."""
    backbone = build_backbone(name).to(memory_format=torch.channels_last).train()
    pixels = torch.rand(images, 3, 84, 84).contiguous(memory_format=torch.channels_last)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        backbone(pixels).sum().backward()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def peak_memory(head: str, size: tuple[int, int, int], threads: int) -> float:
    """MB by which a fresh process grows during one forward and backward."""
    command = [sys.executable, __file__, "--memory-of", head, json.dumps(size), "--threads", str(threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def grow(head: str, size: tuple[int, int, int]) -> float:
    step({"ours": ours, "obvious": obvious}[head], *make(8, 5, 2))  # load what is loaded lazily
    tensors = make(*size)
    before = resident("VmRSS")
    step({"ours": ours, "obvious": obvious}[head], *tensors)
    return resident("VmHWM") - before


def resident(field: str) -> float:
    """VmRSS (now) or VmHWM (the most so far) of this process, in MB (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def bandwidth() -> float:
    """GB/s of a copy far larger than the caches: what an element-wise pass can reach at best."""
    source = torch.rand(64 << 20)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return 2 * source.numel() * 4 / min(seconds) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--skip-backbones", action="store_true")
    parser.add_argument("--memory-of", nargs=2, metavar=("HEAD", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(grow(options.memory_of[0], tuple(json.loads(options.memory_of[1]))))
        return
    print(f"K = {PARTS}, scales {SCALES}, {options.threads} threads, float32, forward + backward")
    print(f"memory bandwidth of a large copy: {bandwidth():.1f} GB/s")
    print(
        f"{'C, G, images':>16} {'obvious':>9} {'ours':>9} {'ratio':>6} {'MB':>9} {'ours':>8} {'share':>6} {'error':>8}"
    )
    seconds_of = {}
    for size in SIZES:
        tensors = make(*size)
        step(obvious, *tensors), step(ours, *tensors)
        pairs, worst = [], 0.0
        for _ in range(options.repeats):
            (slow, expected), (fast, found) = step(obvious, *tensors), step(ours, *tensors)
            pairs.append((slow, fast))
            worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(expected, found, strict=True))
        slow, fast = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        del tensors
        memory = [peak_memory(head, size, options.threads) for head in ("obvious", "ours")]
        seconds_of[size] = fast
        print(
            f"{size!s:>16} {slow:8.3f}s {fast:8.3f}s {ratio:5.1f}× {memory[0]:9.0f} {memory[1]:8.0f} "
            f"{memory[1] / memory[0]:5.0%} {worst:8.1e}",
            flush=True,
        )
    if not options.skip_backbones:
        for name, size, repeats in (("conv4", (64, 5, 150), 5), ("resnet12", (640, 5, 150), 1)):
            whole = backbone_step(name, size[2], repeats)
            head = statistics.median(step(ours, *make(*size))[0] for _ in range(5))
            print(
                f"{name}: bare step of {size[2]} images {whole:.2f} s; the head adds {head:.3f} s = {head / whole:.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
