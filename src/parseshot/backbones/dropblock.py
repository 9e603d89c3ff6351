"""DropBlock: Ghiasi et al., NeurIPS 2018, on the schedule of MetaOptNet (Lee et al., CVPR 2019)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DropBlock(nn.Module):
    """Zeroes square blocks of each channel in training, and scales what is kept so that the expected sum stays.

    The dropped share rises linearly from 0 to `drop_rate` over the first `ramp_batches` training batches. Their count
    is a buffer, so a resumed run continues the schedule. Differs from MetaOptNet's code: batches in eval mode do not
    count, and a map smaller than the block is dropped in blocks of the map's size.
    """

    num_batches_tracked: Tensor

    def __init__(self, *, drop_rate: float = 0.1, block_size: int = 5, ramp_batches: int = 40_000) -> None:
        super().__init__()
        if not 0 <= drop_rate < 1:
            raise ValueError(f"drop_rate must be in [0, 1), not {drop_rate}")
        if block_size < 1 or ramp_batches < 1:
            raise ValueError(f"block_size and ramp_batches must be at least 1, not {block_size} and {ramp_batches}")
        self.drop_rate = drop_rate
        self.block_size = block_size
        self.ramp_batches = ramp_batches
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))

    def dropped_share(self) -> Tensor:
        """min(drop_rate / ramp · batches, drop_rate), a scalar that stays on its device (MetaOptNet: 1 − keep_rate)."""
        return (self.drop_rate / self.ramp_batches * self.num_batches_tracked).clamp(max=self.drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        self.num_batches_tracked += 1
        keep = block_mask(x.shape, share=self.dropped_share(), block_size=self.block_size)  # [B, C, H, W]
        scale = keep.numel() / keep.sum().clamp(min=1)  # scalar
        return x * (keep * scale).to(x.dtype)  # [B, C, H, W]


def block_mask(shape: torch.Size, *, share: Tensor, block_size: int) -> Tensor:
    """1 where kept, 0 in the dropped blocks; every block lies whole inside the map.

    A block's upper left corner is drawn with probability gamma (Eq. 1 of DropBlock) at the cells where it fits.
    """
    batch, channels, height, width = shape
    block = min(block_size, height, width)
    rows, columns = height - block + 1, width - block + 1  # where a corner fits
    gamma = share / block**2 * (height * width) / (rows * columns)
    corners = torch.bernoulli(gamma.clamp(max=1).expand(batch, channels, rows, columns))  # [B, C, rows, columns]
    around = (block - 1,) * 4
    return 1 - F.max_pool2d(F.pad(corners, around), kernel_size=block, stride=1)  # [B, C, H, W]
