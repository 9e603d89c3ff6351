"""ResNet-12 of MetaOptNet (Lee et al., CVPR 2019) and RFS (Tian et al., ECCV 2020): widths 64, 160, 320, 640."""

from torch import Tensor, nn

from parseshot.backbones.base import Backbone, initialise, pack_pair
from parseshot.backbones.dropblock import DropBlock
from parseshot.backbones.normalise import Normalise

NEGATIVE_SLOPE = 0.1  # of every LeakyReLU


class ResNet12(Backbone):
    """Four residual blocks of three convolutions, each halving the map: 12,424,320 parameters, G = 5 at 84 px.

    The first two blocks end in dropout, the last two in DropBlock, both with `drop_rate`. `paired` adds block 3's map.
    """

    def __init__(self, *, drop_rate: float = 0.1, block_size: int = 5, paired: bool = False) -> None:
        super().__init__()
        self.out_channels, self.fine_channels = 640, 320 if paired else 0
        self.stride = 16
        self.normalise = Normalise()
        self.block1 = ResidualBlock(3, 64, drop=nn.Dropout(drop_rate))
        self.block2 = ResidualBlock(64, 160, drop=nn.Dropout(drop_rate))
        self.block3 = ResidualBlock(160, 320, drop=DropBlock(drop_rate=drop_rate, block_size=block_size))
        self.block4 = ResidualBlock(320, 640, drop=DropBlock(drop_rate=drop_rate, block_size=block_size))
        initialise(self, negative_slope=NEGATIVE_SLOPE)

    def forward(self, images: Tensor) -> Tensor:
        x = self.normalise(images)  # [B, 3, 84, 84]
        x = self.block1(x)  # [B, 64, 42, 42]
        x = self.block2(x)  # [B, 160, 21, 21]
        x = self.block3(x)  # [B, 320, 10, 10]
        last = self.block4(x)  # [B, 640, 5, 5]
        return pack_pair(last, x) if self.fine_channels else last


class ResidualBlock(nn.Module):
    """Three convolutions 3×3 beside a 1×1 shortcut, then max-pooling 2×2 and `drop`."""

    def __init__(self, in_channels: int, out_channels: int, *, drop: nn.Module) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.conv3 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=1, bias=False), nn.BatchNorm2d(out_channels)
        )
        self.relu = nn.LeakyReLU(NEGATIVE_SLOPE, inplace=True)
        self.pool = nn.MaxPool2d(kernel_size=2)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))  # [B, out, H, W]
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out = self.relu(out + self.shortcut(x))
        return self.drop(self.pool(out))  # [B, out, H/2, W/2]
