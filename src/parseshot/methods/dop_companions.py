"""What goes with Deep Object Parsing in training only: further terms of its loss. Not in the paper."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from parseshot.methods.base import BasePhotos, Companion, Encoding, Pairs
from parseshot.parts import layout, losses
from parseshot.parts.distance import squared_distances
from parseshot.parts.parsing import unit_length
from parseshot.parts.warps import unfollowed

if TYPE_CHECKING:
    from parseshot.methods.dop import DOP


class Representatives(Companion):
    """A learned parse of every base class: each photo of a step is told apart from all classes, not from ten.

    The idea is the global term of SCEG (CVPR 2026). The distance is Eq. 7 without geometry, to expressions of unit
    length; α knows the photo's entropy only, as a class that was never seen has none.
    """

    labels: Tensor

    def __init__(self, method: "DOP", base: BasePhotos) -> None:
        super().__init__()
        config, channels = method.config, method.templates.maps[0].shape[1]
        shape = (base.classes, len(config.scales), config.parts, channels)
        self.z = nn.Parameter(0.05 + 0.02 * torch.randn(shape))  # expressions are not negative
        self.register_parameter("whole", None)
        if config.whole:
            self.whole = nn.Parameter(0.05 + 0.02 * torch.randn(base.classes, 1, 1, config.parts * channels))
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.logit_scale)))
        self.register_buffer("labels", base.labels, persistent=False)
        self.method = (method,)  # not a submodule: its weights are the model's

    def forward(self, encoding: Encoding, images: Tensor) -> dict[str, Tensor]:
        (method,) = self.method
        expression = squared_distances(encoding["z"], unit_length(self.z))  # [B, classes, S, S, K]
        weights = encoding["entropy"] * (0.0 if method.slopes is None else method.slopes[0])
        alpha = torch.softmax(weights, -1)[:, None, :, None]  # [B, 1, S, 1, K]
        total = (alpha * expression).sum((2, 3, 4)) / encoding["z"].shape[1] ** 2  # [B, classes]
        if self.whole is not None:
            entire = squared_distances(encoding["whole"], unit_length(self.whole)).flatten(1)
            total = total + method.log_whole_weight.exp() * entire
        ce = losses.cross_entropy(-self.log_scale.exp() * total, self.labels[images])
        return {"global_ce": method.config.representatives * ce}


class Layout(Companion):
    """Parts whose places tell where everything on the object lies, at each scale and on average over them."""

    photos = 1_500
    kinds = 64  # of cells

    def __init__(self, method: "DOP") -> None:
        super().__init__()
        self.weight = method.config.layout
        self.found: layout.Kinds | None = None

    @torch.no_grad()
    def begin(self, features: Tensor, generator: torch.Generator) -> None:
        self.found = layout.find_kinds(features, self.kinds, generator)

    @torch.no_grad()
    def observe(self, features: Tensor) -> dict[str, Tensor]:
        assert self.found is not None, "begin comes first"
        places, alike = layout.kind_places(features, self.found)
        return {"kind_places": places, "kind_counts": (alike >= self.found.least).to(places.dtype)}

    def forward(self, encoding: Encoding, images: Tensor) -> dict[str, Tensor]:
        size = encoding["nu"].shape[-1]
        views = [*encoding["mu"].unbind(1), encoding["mu"].mean(1)]
        told = [layout.untold(mu, encoding["kind_places"], encoding["kind_counts"], size) for mu in views]
        return {"layout": self.weight * torch.stack(told).mean()}


class Warps(Companion):
    """Parts that follow: the parse of a photo that is turned, scaled and shifted is to be the moved parse."""

    pairs = 16

    def __init__(self, method: "DOP") -> None:
        super().__init__()
        self.method = (method,)  # not a submodule: its weights are the model's

    def forward(self, encoding: Encoding, images: Tensor) -> dict[str, Tensor]:
        return {}

    def pair_terms(self, pairs: Pairs) -> dict[str, Tensor]:
        (method,) = self.method
        plain, warped = method.parse(torch.cat((pairs.plain, pairs.warped))).mu.chunk(2)
        return {"warps": method.config.warps * unfollowed(plain, warped, pairs.warps, pairs.plain.shape[-1])}
