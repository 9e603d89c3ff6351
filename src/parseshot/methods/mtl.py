"""Meta-transfer learning: frozen convolutions, whose filters are scaled and shifted; a linear head fitted anew."""

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils import parametrize

from parseshot.config import Config
from parseshot.methods.base import Encoding, Method
from parseshot.methods.fitting import Standardise, photo_weights, softmax_steps
from parseshot.parts.distance import class_mean


class MTLConfig(Config):
    """The inner loop at test time, and in training alike."""

    steps: int = Field(20, ge=1)
    rate: float = Field(1.0, gt=0, lt=4)


class MTL(Method):
    """Sun, Liu, Chua, Schiele, "Meta-Transfer Learning for Few-Shot Learning", CVPR 2019.

    The weights of the convolutions are learned in pre-training, where a recipe has one, and then stay as they are;
    learned in episodes are a scale of each filter and a shift of each output channel. In an episode a linear classifier
    is fitted on the support photos by gradient steps from a learned start, and the loss of the queries is that of the
    fitted one.

    As in the authors' code (yaoyao-liu/meta-transfer-learning-pytorch, models/conv2d_mtl.py) a filter is the k×k kernel
    from one channel to another. Where that is a single number, in 1×1 convolutions, it is all kernels of an output
    channel. The shift is that of the convolution's bias or, where it has none, the bias of the batch norm behind it:
    batch norms go on learning. Only what could be trained is changed. A wholly frozen backbone stays untouched; for
    its sake the same two act on the channels of the features, which do so behind a changed backbone as well.

    Different: the paper's start is a vector for each of five class numbers; ours, for any number of classes in any
    order, is a learned factor of each channel, with which a class begins at its mean, like a nearest centroid. The step
    is in units of the features' square. Episodes are drawn as for every method, so there is no mining of hard tasks.
    """

    def __init__(self, channels: int, size: int, config: MTLConfig) -> None:
        super().__init__()
        self.config = config
        self.standardise = Standardise(channels)
        self.scale = nn.Parameter(torch.ones(channels))
        self.shift = nn.Parameter(torch.zeros(channels))
        self.start = nn.Parameter(torch.full((channels,), 4.0 / channels))

    @classmethod
    def adapt(cls, backbone: nn.Module, config: MTLConfig) -> None:
        for layer in list(backbone.modules()):
            if isinstance(layer, nn.Conv2d) and layer.weight.requires_grad:
                parametrize.register_parametrization(layer, "weight", FilterScale(layer.weight))
                if layer.bias is not None:
                    parametrize.register_parametrization(layer, "bias", FilterShift(layer.bias))
        cls.hold(backbone, True)

    @classmethod
    def hold(cls, backbone: nn.Module, held: bool) -> None:
        for layer in backbone.modules():
            if isinstance(layer, parametrize.ParametrizationList) and isinstance(layer[0], FilterScale | FilterShift):
                layer.original.requires_grad_(not held)
                layer[0].requires_grad_(held)

    def encode(self, features: Tensor) -> Encoding:
        return Encoding(f=self.scale * self.standardise(features.mean((-1, -2))) + self.shift)  # [B, C]

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        photos, classes = support["f"], int(labels.max()) + 1
        targets, weights = photo_weights(labels, classes, photos)
        means = class_mean(photos, labels, classes)  # [N, C]
        begin = (self.start * means).T, -(self.start * means.square()).sum(1) / 2  # −½ Σ a(x − mean)², but for x²
        weight, bias = softmax_steps(photos, targets, weights, begin, steps=self.config.steps, rate=self.config.rate)
        return query["f"] @ weight + bias  # [Q, N]

    def initialise(self, features: Tensor) -> None:
        self.standardise.initialise(features.mean((-1, -2)))


class FilterScale(nn.Module):
    """A factor of each filter of a convolution's weight [out, in / groups, k, k]."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        outputs, inputs, *sides = weight.shape
        self.scale = nn.Parameter(weight.new_ones(outputs, 1 if max(sides) == 1 else inputs, 1, 1))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale


class FilterShift(nn.Module):
    """What is added to a convolution's bias [out]."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros_like(bias))

    def forward(self, bias: Tensor) -> Tensor:
        return bias + self.shift
