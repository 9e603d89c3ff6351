"""Conv-4: the four-layer network of Vinyals et al., "Matching Networks for One Shot Learning", NeurIPS 2016."""

from torch import Tensor, nn

from parseshot.backbones.base import Backbone, initialise, pack_pair
from parseshot.backbones.normalise import Normalise
from parseshot.errors import UsageError


class Conv4(Backbone):
    """Four times convolution 3×3, batch norm, ReLU, max-pooling 2×2: 113,088 parameters at 64 channels.

    The convolutions keep their bias, as in the published code of the field, although batch norm makes it redundant
    (112,832 parameters without). `pools` drops the last poolings: G = 5, 10 or 21 at 84 px for 4, 3 or 2 of them.
    `paired` adds the map before the last pooling (10×10 beside 5×5), for methods that compare maps of two strides.
    `mirror=True` makes every kernel its own mirror image: parts cannot mean "the left edge" and swap when a bird turns.
    """

    def __init__(self, *, channels: int = 64, pools: int = 4, mirror: bool = False, paired: bool = False) -> None:
        super().__init__()
        if not 1 <= pools <= 4:
            raise UsageError(f"conv4 pools one to four times, not {pools}")
        if paired and pools < 4:
            raise UsageError("conv4 paired: maps of two strides need all four poolings")
        self.out_channels, self.fine_channels = channels, channels if paired else 0
        self.stride = 2**pools
        self.normalise = Normalise()
        self.block1 = conv_block(3, channels, pool=True, mirror=mirror)
        self.block2 = conv_block(channels, channels, pool=pools > 1, mirror=mirror)
        self.block3 = conv_block(channels, channels, pool=pools > 2, mirror=mirror)
        self.block4 = conv_block(channels, channels, pool=pools > 3, mirror=mirror)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.normalise(images)  # [B, 3, 84, 84]
        x = self.block1(x)  # [B, 64, 42, 42]
        x = self.block2(x)  # [B, 64, 21, 21]
        x = self.block3(x)  # [B, 64, 10, 10]
        last = self.block4(x)  # [B, 64, 5, 5]
        return pack_pair(last, x) if self.fine_channels else last


class MirrorConv2d(nn.Conv2d):
    """A convolution whose kernels are their own mirror image, so that a mirrored picture gives mirrored features."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, (self.weight + self.weight.flip(-1)) / 2, self.bias)


def conv_block(in_channels: int, out_channels: int, *, pool: bool, mirror: bool) -> nn.Sequential:
    convolution = MirrorConv2d if mirror else nn.Conv2d
    block = nn.Sequential(
        convolution(in_channels, out_channels, kernel_size=3, padding=1),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )
    if pool:
        block.append(nn.MaxPool2d(kernel_size=2))
    return block
