"""What every backbone promises: images [B, 3, H, W] in [0, 1], or bytes → a feature map [B, C, G, G].

B images, C channels, G grid cells a side; the shape comments of the backbones are for the input size named beside them.
"""

import hashlib
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Backbone(nn.Module):
    """A feature extractor that ends before any pooling or classifier, and normalises its own input."""

    out_channels: int  # C
    stride: int  # pixels from one grid cell to the next
    fine_channels: int = 0  # with `paired`: of the map at half the stride that comes packed behind the C channels
    source: str | None = None  # which published weights it started from

    def grid(self, size: int) -> int:
        """G for a square input of `size` pixels; here for networks whose poolings drop an odd last row."""
        return size // self.stride

    def from_elsewhere(self) -> list[str]:
        """Names of the modules whose weights never change and are found where they came from: not kept with a model."""
        return []

    def forward(self, images: Tensor) -> Tensor:
        raise NotImplementedError


def pack_pair(coarse: Tensor, fine: Tensor) -> Tensor:
    """Maps of two strides in one tensor: [B, C, G, G], [B, F, 2G, 2G] → [B, C + 4F, G, G].

    Each cell carries its four fine cells as channels, so that caches, batches and processes need to know of one map
    only. A row too many at the bottom or right, which a pooling drops, is dropped; one too few is repeated.
    """
    side = 2 * coarse.shape[-1]
    lacking = max(0, side - fine.shape[-1])
    if lacking:
        fine = F.pad(fine, (0, lacking, 0, lacking), mode="replicate")
    return torch.cat((coarse, F.pixel_unshuffle(fine[..., :side, :side], 2)), 1)


def unpack_pair(features: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """What `pack_pair` packed, `channels` of them coarse: [B, C, G, G] and [B, F, 2G, 2G]."""
    return features[:, :channels], F.pixel_shuffle(features[:, channels:], 2)


def turned(features: Tensor, channels: int) -> Tensor:
    """The mirror image of feature maps, the first `channels` of them coarse, the rest a packed pair's."""
    if features.shape[1] == channels:
        return features.flip(-1)
    coarse, fine = unpack_pair(features, channels)
    return pack_pair(coarse.flip(-1), fine.flip(-1))


def initialise(module: nn.Module, *, negative_slope: float = 0.0) -> None:
    """He et al. (2015) "fan out" for every convolution, batch norm as the identity; a slope of 0 is ReLU's gain √2."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, a=negative_slope, mode="fan_out", nonlinearity="leaky_relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.BatchNorm2d):
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of named tensors: names, shapes, types and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
