"""Deep Object Parsing: recognise by the parts found, the templates they express and how they lie to each other."""

import functools
import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from parseshot.config import Config
from parseshot.errors import UsageError
from parseshot.methods.base import BasePhotos, Companion, Companions, Encoding, Method
from parseshot.methods.dop_companions import Layout, Representatives, Warps
from parseshot.parts import losses
from parseshot.parts.distance import Distance, Regression, Shown, compare, show
from parseshot.parts.parsing import (
    Cells,
    Parse,
    entropy,
    likeliest_cells,
    parse,
    parse_apart,
    unit_length,
    unit_rms,
)
from parseshot.parts.templates import Templates


def _odd_sides(scales: tuple[int, ...]) -> tuple[int, ...]:
    if any(side < 1 or side % 2 == 0 for side in scales) or len(set(scales)) != len(scales) or not scales:
        raise ValueError(f"scales must be different odd numbers from 1, got {list(scales)}")
    return scales


class DOPConfig(Config):
    """What the ablations vary; everything else is decided once (docs/paper.md). Defaults are the `lasso` preset."""

    preset: Literal["lasso", "paper", "span", "whole"] = "lasso"  # the name this configuration started from
    parts: int = Field(4, ge=1, le=64)  # K
    scales: Annotated[tuple[int, ...], AfterValidator(_odd_sides)] = (1, 3, 5)  # S
    spacing: int = Field(1, ge=1, le=8)  # cells from one entry of a template to the next: 2 behind a dilated backbone
    exact: bool = True  # the scalar LASSO solution and masked norms; otherwise Eq. 4–6 as printed
    normalised: bool = True  # unit RMS, unit length, means instead of sums, learned T, gamma and logit scale
    lam: float = Field(0.05, ge=0)  # λ of Eq. 1, in units of φ·D
    zeta: float = Field(0.05, ge=0)  # ζ of Eq. 6, as printed only
    temperature: float = Field(0.01, gt=0)  # T of Eq. 5, as printed only; normalised: learned from `start_entropy`
    start_entropy: float = Field(0.5, gt=0, lt=1)  # mean normalised entropy of ν before training, normalised only
    gamma: float = Field(0.1, ge=0)  # weight of the geometric term; normalised: where it starts
    logit_scale: float = Field(10.0, gt=0)  # where the learned scale of −d starts, normalised only
    eta: float = Field(1.0, ge=0)  # weight of the diversity prior, Algorithm 2
    reweight: bool = True  # α of Eq. 7; False weighs all parts alike
    geometry: bool = True  # the geometric term of Eq. 7
    # where parts are: Eq. 5, or for all of them where the features are strong, or everywhere alike
    location: Literal["templates", "energy", "uniform"] = "templates"
    span: bool = False  # a class is what its photos span, part by part, not their mean; not in the paper
    ridge: float = Field(0.1, gt=0)  # where the learned strength of that regression starts
    part_channels: int = Field(0, ge=0)  # of a projection of its own for each part, 0: they share one; not in the paper
    cells: int = Field(0, ge=0)  # so many of a part's likeliest cells are compared one by one; not in the paper
    cell_weight: float = Field(0.2, gt=0)  # where the learned weight of that comparison starts …
    cell_ridge: float = Field(0.01, gt=0)  # … and the strength of its regression
    whole: float = Field(0.0, ge=0)  # where the learned weight of the whole object starts, 0: none; not in the paper
    representatives: float = Field(0.0, ge=0)  # weight in training of telling all base classes apart, not in the paper
    layout: float = Field(
        0.0, ge=0
    )  # … of parts whose places tell where all else lies (frozen backbones only), neither
    warps: float = Field(0.0, ge=0)  # … of parts that follow a moved photo (cached features only), neither


PRESETS = {
    "lasso": DOPConfig(),
    "span": DOPConfig(preset="span", span=True, part_channels=224, cells=12),
    "whole": DOPConfig(preset="whole", span=True, part_channels=224, cells=12, whole=1.0),
    "paper": DOPConfig(preset="paper", exact=False, normalised=False, lam=0.05, gamma=0.01),
}


class DOP(Method):
    """ "Fine-grained Few-shot Recognition by Deep Object Parsing", 2022 (no public code).

    Each image is parsed once into K parts at S scales (Algorithm 1). A query is compared with a class part by part,
    over all pairs of scales, weighted by how sure both locations are, plus the difference of the part polygons (Eq. 7).
    """

    separable = True

    def __init__(self, channels: int, size: int, config: DOPConfig) -> None:
        super().__init__()
        self.config = config
        reach = (max(config.scales) - 1) * config.spacing + 1
        if reach > size:
            raise UsageError(f"scales {list(config.scales)}: {reach} is larger than the grid {size}×{size}")
        beyond = [name for name in ("span", "part_channels", "cells") if getattr(config, name)]
        if beyond and not config.normalised:
            raise UsageError(f"{beyond[0]}: needs normalised features, so not the preset paper")
        if config.whole and not (config.span and config.part_channels):
            raise UsageError("whole: needs span and part_channels, the channels in which the object is seen as a whole")
        self.shares: nn.Module = nn.Identity()
        if config.part_channels:
            self.shares = nn.Conv2d(channels, config.parts * config.part_channels, 1, bias=False)
            nn.init.orthogonal_(self.shares.weight)
        self.templates = Templates(
            config.part_channels or channels,
            parts=config.parts,
            scales=config.scales,
            own_channels=config.normalised and not config.part_channels,  # where they share them
        )
        if config.reweight and config.parts > 1:
            self.slopes = nn.Parameter(torch.full((2,), -1.0))  # a sure location weighs more
        else:
            self.register_parameter("slopes", None)
        self.log_gamma: nn.Parameter | None = None
        if config.normalised:
            self.log_temperature = nn.Parameter(torch.zeros(len(config.scales)))
            self.log_scale = nn.Parameter(torch.tensor(math.log(config.logit_scale)))
            if config.geometry and config.parts > 1 and config.gamma > 0:
                self.log_gamma = nn.Parameter(torch.tensor(math.log(config.gamma)))
        if config.span:
            self.log_ridge = nn.Parameter(torch.tensor(math.log(config.ridge)))
            self.log_rho = nn.Parameter(torch.zeros(()))
        if config.cells:
            self.log_cell_ridge = nn.Parameter(torch.tensor(math.log(config.cell_ridge)))
            self.log_cell_rho = nn.Parameter(torch.zeros(()))
            self.log_cell_weight = nn.Parameter(torch.tensor(math.log(config.cell_weight)))
        if config.whole:
            self.log_whole_ridge = nn.Parameter(torch.tensor(math.log(config.ridge)))
            self.log_whole_rho = nn.Parameter(torch.zeros(()))
            self.log_whole_weight = nn.Parameter(torch.tensor(math.log(config.whole)))

    @property
    def temperature(self) -> Tensor:
        """T of Eq. 5 for each scale, [S]."""
        if self.config.normalised:
            return self.log_temperature.exp()
        return self.templates.maps[0].new_full((len(self.config.scales),), self.config.temperature)

    def parse(self, features: Tensor, *, hard: bool = False) -> Parse:
        """Algorithm 1 with this model's templates; `hard` takes the argmax of Eq. 4 instead of the softmax of Eq. 5."""
        return self._parse(features, self.shares(features), hard=hard)

    def _parse(self, features: Tensor, shares: Tensor, *, hard: bool = False) -> Parse:
        config = self.config
        return (parse_apart if config.part_channels else parse)(
            shares,
            self.templates(),
            None if hard else self.temperature,
            lam=config.lam,
            exact=config.exact,
            normalised=config.normalised,
            zeta=config.zeta,
            located=None if config.location == "templates" else self.located(features, hard=hard),
            spacing=config.spacing,
        )

    def located(self, features: Tensor, *, hard: bool = False) -> Tensor:
        """ν of all parts by the energy of each cell, or uniform, for each scale: [B, C, G, G] → [B, S, G, G]."""
        scales = len(self.config.scales)
        if self.config.location == "uniform":
            cells = features.shape[-1] * features.shape[-2]
            return features.new_full((features.shape[0], scales, *features.shape[-2:]), 1 / cells)
        score = self.energy(features).flatten(2)  # [B, 1, G²]
        if hard:
            nu = torch.zeros_like(score).scatter_(2, score.argmax(2, keepdim=True), 1.0).expand(-1, scales, -1)
        else:
            nu = torch.softmax(score / self.temperature[:, None], 2)
        return nu.unflatten(2, features.shape[-2:])

    def energy(self, features: Tensor) -> Tensor:
        """The score of each cell that Eq. 5 would give it with θ = 1 and λ = 0: [B, 1, G, G]."""
        square = (unit_rms(features) if self.config.normalised else features).square()
        return square.mean(1, keepdim=True) if self.config.normalised else square.sum(1, keepdim=True)

    def encode(self, features: Tensor) -> Encoding:
        config = self.config
        shares = self.shares(features)
        found = self._parse(features, shares)
        if config.normalised:
            more = {}
            if config.cells:  # by the first scale: a cell is what its template sees there
                chosen = likeliest_cells(shares, found.nu[:, 0], config.cells, apart=bool(config.part_channels))
                more = {"cells": chosen.features, "cell_weights": chosen.weights}
            if config.whole:
                more["whole"] = self.whole(shares)
            return Encoding(z=unit_length(found.z), entropy=found.entropy, mu=found.mu, nu=found.nu, **more)
        log_cells = math.log(features.shape[-1] * features.shape[-2])  # the paper's entropy is not normalised
        return Encoding(z=found.z, entropy=found.entropy * log_cells, mu=found.mu, nu=found.nu)

    def whole(self, shares: Tensor) -> Tensor:
        """What all parts' templates of the first scale express in the mean over the picture, as one vector.

        [B, K·C, G, G] → [B, 1, 1, K·C], of unit length: one part at one scale that is everywhere and hears everything.
        """
        cells = shares.shape[-1] * shares.shape[-2]
        found = parse_apart(
            shares,
            self.templates()[:1],
            self.temperature[:1],
            lam=self.config.lam,
            exact=self.config.exact,
            normalised=True,
            located=shares.new_full((shares.shape[0], 1, *shares.shape[-2:]), 1 / cells),
            spacing=self.config.spacing,
        )
        return unit_length(found.z.flatten(2))[:, :, None]

    def distance(self, query: Encoding, support: Encoding, labels: Tensor) -> Distance:
        """Eq. 7, term by term, for Q queries and the N classes of the support set."""
        return self.terms(query, self.prepare(support, labels))

    def prepare(self, support: Encoding, labels: Tensor) -> Shown:
        span = Regression(self.log_ridge.exp(), _rho(self.log_rho)) if self.config.span else None
        photos = support["z"], support["entropy"], support["mu"]
        return show(photos, labels, span=span, cells=self._cells(support), whole=self._whole(support))

    def terms(self, query: Encoding, shown: Shown) -> Distance:
        """Eq. 7, term by term, for Q queries and N classes that were prepared."""
        gamma: Tensor | None = None
        if self.log_gamma is not None:
            gamma = self.log_gamma.exp()
        elif self.config.geometry and not self.config.normalised:
            gamma = query["z"].new_tensor(self.config.gamma)
        return compare(
            (query["z"], query["entropy"], query["mu"]),
            shown,
            slopes=self.slopes,
            gamma=gamma,
            normalised=self.config.normalised,
            cells=self._cells(query),
            whole=self._whole(query),
        )

    def _cells(self, encoding: Encoding) -> tuple[Cells, Regression] | None:
        """Those of each part, and how they are regressed, where they are asked for."""
        if not self.config.cells:
            return None
        how = Regression(self.log_cell_ridge.exp(), _rho(self.log_cell_rho), self.log_cell_weight.exp())
        return Cells(encoding["cells"], encoding["cell_weights"]), how

    def _whole(self, encoding: Encoding) -> tuple[Tensor, Regression] | None:
        """The object as a whole, and how it is regressed, where that is asked for."""
        if not self.config.whole:
            return None
        how = Regression(self.log_whole_ridge.exp(), _rho(self.log_whole_rho), self.log_whole_weight.exp())
        return encoding["whole"], how

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        return self.score(query, self.prepare(support, labels))

    def score(self, query: Encoding, prepared: Shown) -> Tensor:
        return self.as_score(self.terms(query, prepared).total)

    def as_score(self, distance: Tensor) -> Tensor:
        """What Eq. 8 takes the softmax of."""
        return -self.log_scale.exp() * distance if self.config.normalised else -distance

    def loss(self, query: Encoding, support: Encoding, labels: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Algorithm 2, averaged over the queries."""
        normalised = self.config.normalised
        prior = losses.episode_diversity(
            losses.diversity(query["nu"], normalised=normalised), losses.diversity(support["nu"], normalised=normalised)
        )
        ce = losses.cross_entropy(self.logits(query, support, labels), targets)
        return {"ce": ce, "diversity": self.config.eta * prior}

    def companion(self, base: BasePhotos) -> Companion | None:
        wanted: list[Companion] = []
        if self.config.representatives:
            wanted.append(Representatives(self, base))
        if self.config.layout:
            wanted.append(Layout(self))
        if self.config.warps:
            wanted.append(Warps(self))
        return Companions(wanted) if len(wanted) > 1 else next(iter(wanted), None)

    @torch.no_grad()
    def monitor(self, query: Encoding, support: Encoding, labels: Tensor, targets: Tensor) -> dict[str, float]:
        terms = self.distance(query, support, labels)
        silent = (query["z"] == 0).double().mean()
        return super().monitor(query, support, labels, targets) | {
            "entropy": float(query["entropy"].mean()),  # how sure the locations are
            "sparsity": float(silent),  # share of templates not expressed
            "geometry_share": float(terms.geometry.sum() / terms.total.sum().clamp_min(1e-12)),
        }

    @torch.no_grad()
    def initialise(self, features: Tensor) -> None:
        """Normalised: T of each scale so that ν starts with the configured entropy on these features.

        As printed: one factor on all templates so that the mean distance between two of these images is 1. D → k·D
        divides expressions by k, so ‖D‖ is the temperature of Eq. 8; at 1 the first cross-entropy is near ln N.
        """
        if self.config.normalised:
            score = self.parse(features).score  # [B, S, K, G, G]
            if self.config.location == "energy":
                score = self.energy(features)[:, None].expand(-1, len(self.config.scales), -1, -1, -1)
            target = self.config.start_entropy
            for index, maps in enumerate(score.unbind(1)):
                above = functools.partial(_entropy_above, maps, target)
                self.log_temperature[index] = _bisect(above, low=-20.0, high=20.0)
            return
        start = [template.clone() for template in self.templates.maps]

        def spread(log_factor: float) -> float:
            for template, original in zip(self.templates.maps, start, strict=True):
                template.copy_(original * math.exp(log_factor))
            codes = self.encode(features)
            each = torch.arange(codes.images)
            return 1.0 - float(self.distance(codes, codes, each).total.sum() / (codes.images * (codes.images - 1)))

        spread(_bisect(spread, low=-15.0, high=15.0))


def _rho(log_rho: Tensor) -> Tensor:
    """ρ of a regression, from 0 to 2: beyond, what a class explains wholly would be further from it than nothing is."""
    return log_rho.exp().clamp_max(2.0)


def _entropy_above(score: Tensor, target: float, log_temperature: float) -> float:
    nu = torch.softmax(score.flatten(-2) * math.exp(-log_temperature), -1).view_as(score)
    return float(entropy(nu).mean()) - target


def _bisect(function: Callable[[float], float], *, low: float, high: float, steps: int = 40) -> float:
    """Where an increasing function crosses 0."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) > 0 else (middle, high)
    return (low + high) / 2
