"""Conv-4: the four-layer network of Vinyals et al., "Matching Networks for One Shot Learning", NeurIPS 2016."""

from torch import Tensor, nn

from parseshot.backbones.base import Backbone, initialise
from parseshot.backbones.normalise import Normalise


class Conv4(Backbone):
    """Four times convolution 3×3, batch norm, ReLU, max-pooling 2×2: 113,088 parameters at 64 channels.

    The convolutions keep their bias, as in the published code of the field, although batch norm makes it redundant
    (112,832 parameters without). `last_pool=False` drops the fourth pooling: G = 10 instead of 5 at 84 px.
    """

    def __init__(self, *, channels: int = 64, last_pool: bool = True) -> None:
        super().__init__()
        self.out_channels = channels
        self.stride = 16 if last_pool else 8
        self.normalise = Normalise()
        self.block1 = conv_block(3, channels, pool=True)
        self.block2 = conv_block(channels, channels, pool=True)
        self.block3 = conv_block(channels, channels, pool=True)
        self.block4 = conv_block(channels, channels, pool=last_pool)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.normalise(images)  # [B, 3, 84, 84]
        x = self.block1(x)  # [B, 64, 42, 42]
        x = self.block2(x)  # [B, 64, 21, 21]
        x = self.block3(x)  # [B, 64, 10, 10]
        return self.block4(x)  # [B, 64, 5, 5], or [B, 64, 10, 10] without the last pooling


def conv_block(in_channels: int, out_channels: int, *, pool: bool) -> nn.Sequential:
    block = nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )
    if pool:
        block.append(nn.MaxPool2d(kernel_size=2))
    return block
