"""Images in [0, 1], or bytes → the zero-mean, unit-deviation input that ImageNet-style networks expect."""

import torch
from torch import Tensor, nn

IMAGENET_MEAN = (0.485, 0.456, 0.406)  # red, green, blue
IMAGENET_STD = (0.229, 0.224, 0.225)


class Normalise(nn.Module):
    """The first layer of every backbone, so that no caller normalises by hand.

    The constants follow the module to its device and dtype but are not saved: they are code, not weights.

    >>> Normalise()(torch.tensor(IMAGENET_MEAN).view(1, 3, 1, 1)).flatten().tolist()
    [0.0, 0.0, 0.0]
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        *,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
    ) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1), persistent=False)  # [1, 3, 1, 1]
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1), persistent=False)  # [1, 3, 1, 1]

    def forward(self, images: Tensor) -> Tensor:
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype) / 255
        return (images - self.mean) / self.std  # [B, 3, H, W]
