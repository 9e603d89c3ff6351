"""RENet: maps that know how their cells relate, to each other and to those of the other image."""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from parseshot.config import Config
from parseshot.methods.base import BaseClassifier, BasePhotos, Companion, Encoding, Method
from parseshot.parts.distance import class_mean

TOGETHER = 15  # queries, of which the 4-D tensors stay small enough for a processor's cache: 1.4 times as fast as 75
REACH = 2  # cells around each that it is correlated with: a 5×5 neighbourhood, which two 3×3 convolutions read


class RENetConfig(Config):
    """Temperatures and weights are those published for CUB; `hidden` is 16 there, at four times the cost."""

    width: int = Field(64, ge=1)  # channels of the self-correlation's convolutions, and of the cross-correlation
    hidden: int = Field(4, ge=1)  # channels between the two 4-D convolutions
    each_photo: bool = False  # match the query with each support photo, as published, not with the mean of a class
    attention_temperature: float = Field(2.0, gt=0)
    temperature: float = Field(0.2, gt=0)
    episode_weight: float = Field(1.5, gt=0)  # of the episode's cross-entropy against that of the base classes


class RENet(Method):
    """Kang, Kwon, Min, Cho, "Relational Embedding for Few-Shot Classification", ICCV 2021.

    Self-correlation (SCR): a convolutional summary of each cell's products with its 5×5 neighbours is added to the map.
    Cross-correlation attention (CCA): the 4-D tensor of cosines between the cells of query and class, refined by two
    separable 4-D convolutions both ways round, says where each of the two is to be looked at; the score is the cosine
    of the two attended means. A linear classifier of the base classes learns along. Differs from the paper:
    - the 4-D convolutions have 4 hidden channels, not 16, and see the mean map of a class, not each of its photos
      (`hidden`, `each_photo`), because they are most of the cost;
    - they have no batch norm, since a score may not depend on the other queries: cosines have a known scale, and what
      comes out is standardised anyway. They start as the identity with noise;
    - consecutive linear parts of a 4-D convolution are one kernel;
    - the base classifier sees the episode's photos, there is no further batch; its loss is divided by `episode_weight`
      instead of multiplying the episode's;
    - maps are divided by their root mean square on a first batch.
    """

    scale: Tensor

    def __init__(self, channels: int, size: int, config: RENetConfig) -> None:
        super().__init__()
        self.config, self.channels, self.size = config, channels, size
        self.register_buffer("scale", torch.ones(()))
        width, hidden = config.width, config.hidden
        self.reduce = nn.Sequential(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.summary = nn.Sequential(  # 5×5 → 3×3 → 1×1
            nn.Conv2d(width, width, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        self.expand = nn.Sequential(nn.Conv2d(width, channels, 1, bias=False), nn.BatchNorm2d(channels))
        self.key = nn.Sequential(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        shapes = ((1, 1), (hidden, 1), (hidden, hidden), (1, hidden))
        self.kernels = nn.ParameterList(_near_identity(*shape) for shape in shapes)  # support, query, support, query
        self.biases = nn.ParameterList(torch.zeros(out) for out, _ in shapes[:-1])

    def initialise(self, features: Tensor) -> None:
        self.scale.copy_(features.square().mean().clamp_min(1e-12).rsqrt())

    def companion(self, base: BasePhotos) -> Companion:
        return BaseClassifier(self.channels, base, weight=1 / self.config.episode_weight)

    def encode(self, features: Tensor) -> Encoding:
        features = features * self.scale
        features = (features + self.self_correlation(features)).relu()
        centred = features - features.mean(1, keepdim=True)
        cells, keys = (each.flatten(2).transpose(1, 2).contiguous() for each in (features, self.key(centred)))
        return Encoding(f=cells, key=keys)  # [B, r, C], [B, r, width]

    def self_correlation(self, features: Tensor) -> Tensor:
        """Maps [B, C, G, G] → the same shape, from each cell's products with its neighbours, cells out of sight 0."""
        unit = F.normalize(features.relu(), dim=1) * self.channels**0.5  # products near 1, as batch norm starts from
        size, side = features.shape[-1], 2 * REACH + 1
        padded = F.pad(unit, (REACH,) * 4)
        shifts = [padded[..., y : y + size, x : x + size] for y in range(side) for x in range(side)]
        linear, *rest = self.reduce  # channels are reduced at once: all products together would be 25 maps an image
        found = torch.cat([linear(unit * shifted) for shifted in shifts], 3)  # [B, width, G, 25·G], side by side
        for layer in rest:
            found = layer(found)
        found = found.unflatten(3, (side, side, size)).permute(0, 2, 5, 1, 3, 4)  # [B, G, G, width, 5, 5]
        found = self.summary(found.flatten(0, 2))  # [B·G·G, width, 1, 1]
        found = found.view(len(features), size, size, -1).permute(0, 3, 1, 2)
        return self.expand(found)

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        classes = int(labels.max()) + 1
        shown, shown_keys, shown_labels = support["f"], support["key"], labels
        if not self.config.each_photo:
            shown, shown_keys = (class_mean(each, labels, classes) for each in (shown, shown_keys))
            shown_labels = torch.arange(classes, device=labels.device)
        mine, other = self.attention(query["key"], shown_keys)  # [Q, M, r] on the query's cells, on the shown ones'
        cells, shown = (each - each.mean(-1, keepdim=True) for each in (query["f"], shown))  # [Q, r, C], [M, r, C]
        mine = class_mean(mine.transpose(0, 1), shown_labels, classes)  # [N, Q, r]
        of_query = torch.einsum("nqi,qic->nqc", mine, cells)
        of_class = class_mean(torch.einsum("qmj,mjc->mqc", other, shown), shown_labels, classes)  # [N, Q, C]
        return F.cosine_similarity(of_query, of_class, dim=-1).T / self.config.temperature  # [Q, N]

    def attention(self, query: Tensor, shown: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of query cells and of shown cells, [Q, M, r] each, from keys [Q, r, width] and [M, r, width]."""
        matrices = [self.over_cells(kernel) for kernel in self.kernels]
        query, shown = F.normalize(query, dim=-1), F.normalize(shown, dim=-1)
        few = [self._attention(some, shown, matrices) for some in query.split(TOGETHER)]
        mine, other = (torch.cat(each) for each in zip(*few, strict=True))
        return mine, other

    def _attention(self, query: Tensor, shown: Tensor, matrices: list[Tensor]) -> tuple[Tensor, Tensor]:
        cosine = torch.einsum("qic,mjc->qmij", query, shown)
        back = self.refined(cosine.transpose(-1, -2), matrices).transpose(-1, -2)
        refined = self.refined(cosine, matrices) + back  # [Q, M, r query, r shown]
        weights = []
        for side in (-2, -1):
            centred = refined - refined.mean(side, keepdim=True)
            variance = centred.square().sum(side, keepdim=True) / (refined.shape[side] - 1)
            sharp = (variance + 1e-5).rsqrt() / self.config.attention_temperature
            weights.append(torch.softmax(centred * sharp, side).mean(-3 - side))
        return weights[0], weights[1]

    def refined(self, x: Tensor, matrices: list[Tensor]) -> Tensor:
        """Two separable 4-D convolutions of x [..., r, r'], each first over r', then over r.

        A 3×3 kernel on a small grid is written out as a matrix [r·out, r·in] over its cells, which is faster for many
        grids.
        """
        cells, hidden = x.shape[-1], self.config.hidden
        first, second, third = (bias.repeat(cells) for bias in self.biases)
        x = F.linear(x, matrices[0], first).relu_().transpose(-1, -2)  # [..., r', r]
        x = F.linear(x, matrices[1], second).relu_().unflatten(-1, (cells, hidden))  # [..., r', r, h]
        x = F.linear(x.transpose(-2, -3).flatten(-2), matrices[2], third).relu_()  # [..., r, r'·h]
        x = x.unflatten(-1, (cells, hidden)).transpose(-2, -3).flatten(-2)  # [..., r', r·h]
        return F.linear(x, matrices[3]).transpose(-1, -2)

    def over_cells(self, kernel: Tensor) -> Tensor:
        """A convolution [out, in, 3, 3] with padding 1 as the matrix [r·out, r·in] it is, channels last."""
        (out, into), size = kernel.shape[:2], self.size
        each = torch.eye(size * size * into, dtype=kernel.dtype, device=kernel.device).view(-1, size, size, into)
        found = F.conv2d(each.permute(0, 3, 1, 2), kernel, padding=1)  # [r·in, out, G, G]
        return found.permute(2, 3, 1, 0).reshape(size * size * out, -1)


def _near_identity(out: int, into: int) -> Tensor:
    kernel = 0.1 * torch.randn(out, into, 3, 3)
    kernel[:, :, 1, 1] += torch.eye(out) if out == into else 1 / into
    return kernel
