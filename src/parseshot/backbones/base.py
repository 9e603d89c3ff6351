"""What every backbone promises: images [B, 3, H, W] in [0, 1], or bytes → a feature map [B, C, G, G].

B images, C channels, G grid cells a side; the shape comments of the backbones are for the input size named beside them.
"""

from torch import Tensor, nn


class Backbone(nn.Module):
    """A feature extractor that ends before any pooling or classifier, and normalises its own input."""

    out_channels: int  # C
    stride: int  # pixels from one grid cell to the next

    def grid(self, size: int) -> int:
        """G for a square input of `size` pixels; here for networks whose poolings drop an odd last row."""
        return size // self.stride

    def forward(self, images: Tensor) -> Tensor:
        raise NotImplementedError


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
