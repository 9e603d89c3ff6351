"""ResNet-18: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, without its classifier."""

from torch import Tensor, nn

from parseshot.backbones.base import Backbone, initialise, pack_pair
from parseshot.backbones.normalise import Normalise


class ResNet18(Backbone):
    """The ImageNet network up to its last feature map: 11,176,512 parameters, G = 7 at 224 px.

    The parameters have torchvision's names, so its weights (less `fc`) load as they are. `paired` adds layer 3's map.
    """

    def __init__(self, *, paired: bool = False) -> None:
        super().__init__()
        self.out_channels, self.fine_channels = 512, 256 if paired else 0
        self.stride = 32
        self.normalise = Normalise()
        self.conv1 = nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, stride=1), BasicBlock(64, 64, stride=1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, stride=2), BasicBlock(128, 128, stride=1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, stride=2), BasicBlock(256, 256, stride=1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, stride=2), BasicBlock(512, 512, stride=1))
        initialise(self)

    def grid(self, size: int) -> int:
        """G for a square input of `size` pixels: every halving pads, so an odd last row is kept."""
        return -(-size // self.stride)

    def forward(self, images: Tensor) -> Tensor:
        x = self.normalise(images)  # [B, 3, 224, 224]
        x = self.relu(self.bn1(self.conv1(x)))  # [B, 64, 112, 112]
        x = self.layer1(self.maxpool(x))  # [B, 64, 56, 56]
        x = self.layer2(x)  # [B, 128, 28, 28]
        x = self.layer3(x)  # [B, 256, 14, 14]
        last = self.layer4(x)  # [B, 512, 7, 7]
        return pack_pair(last, x) if self.fine_channels else last


class BasicBlock(nn.Module):
    """Two convolutions 3×3 beside the identity, or beside a 1×1 convolution where the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))  # [B, out, H/stride, W/stride]
        out = self.bn2(self.conv2(out))
        return self.relu(out + self.downsample(x))
