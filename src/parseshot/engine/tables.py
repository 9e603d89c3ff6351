"""The tables that can be reproduced: rows that differ in one thing, each a shipped recipe with some values set."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from parseshot.methods import METHODS, takes_pairs

LADDER = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5)  # learning rates
RATES = LADDER[3:5]  # tried first; no method is judged by a learning rate that was found for another
# The same for all rows: what can be run in hours (the shipped model has a projection of 640), weights averaged over the
# last steps, and DOP's learning rate where no others are tried.
COMMON = (
    "model.projection=256",
    "training.lr=3e-3",
    "training.average=0.97",
    "training.watch_every=20",
    "training.validate_every=100",
)
WITHOUT = {"dop-span", "dop-whole"}  # bring projections of their own
LONGER = ("training.episodes=300", "training.decay_every=150", "training.blank_cells=0.2")  # as dop-span's recipe
LEADERS = ("dop-span", "dop", "deepemd", "frn", "srm", "bi-frn", "saml", "dn4")  # the best of the table of methods
SHORT = ("training.episodes=500", "training.decay_every=200", "training.average=0.97", "training.watch_every=20")


@dataclass(frozen=True)
class Row:
    """A line of a table: a shipped recipe for the data at hand, with some values set."""

    name: str
    recipe: str  # without the data set's name
    overrides: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()  # learning rates tried first, the best on val is kept; none: the recipe's


@dataclass(frozen=True)
class Table:
    """Rows that differ in one thing; differences are to the first."""

    title: str
    rows: tuple[Row, ...]
    splits: tuple[str, ...] = ("novel",)  # whose classes the rows are evaluated on
    ranked: bool = False  # the other rows by their accuracy instead of as they stand


def _common(method: str) -> tuple[str, ...]:
    return (*COMMON, "model.projection=0") if method in WITHOUT else COMMON


def _methods() -> Iterator[Row]:
    """Every method, and those that take flattened maps for Conv-4 and pooled ones for ResNets both ways."""
    for name, entry in METHODS.items():
        paired = ("model.backbone_options.paired=true",) if takes_pairs(name) else ()
        row = Row(name, "efficientnet-protonet", (*_common(name), f"model.method={name}", *paired), RATES)
        yield row
        if getattr(entry.config, "pooled", True) is False and f"{name}-pooled" not in METHODS:
            yield Row(f"{name}, pooled", row.recipe, (*row.overrides, "model.method_options.pooled=true"), RATES)


def _dop(name: str, *overrides: str, **options: object) -> Row:
    """A row of the default's recipe with options of DOP."""
    return Row(name, "efficientnet-dop", (*COMMON, *_options(options), *overrides))


def _leading(name: str, method: str, rates: tuple[float, ...] = RATES, **options: object) -> Row:
    """A preset of DOP as long trained as the leaders, and told all base classes apart."""
    more = (*_common(method), f"model.method={method}", *_options(options), *LONGER)
    return Row(name, "efficientnet-dop", more, rates)


def _options(options: dict[str, object]) -> Iterator[str]:
    return (f"model.method_options.{key}={json.dumps(value)}" for key, value in options.items())


def _span(name: str, *overrides: str, **options: object) -> Row:
    """A row of the recipe of `dop-span` with something changed."""
    watched = ("training.watch_every=20", "training.validate_every=150")
    return Row(name, "efficientnet-dop-span", (*watched, *_options(options), *overrides))


def _tries() -> Iterator[Row]:
    """What makes parts earn their place: `dop-span`, and one thing changed in each row."""
    yield _span("dop-span")
    yield _span("another seed", "training.seed=1")
    yield _span("K = 1", parts=1)
    yield _span("K = 1, as many weights and cells", parts=1, part_channels=896, cells=48)
    yield _span("K = 2, as many weights and cells", parts=2, part_channels=448, cells=24)
    yield _span("K = 8, as many weights and cells", parts=8, part_channels=112, cells=6)
    yield _span("K = 8, as many cells", parts=8, cells=6)
    yield _span("K = 8, no cells", parts=8, cells=0)
    yield _span("no cells, K = 1, as many weights", parts=1, part_channels=896, cells=0)
    yield _span("no cells, K = 8, as many weights", parts=8, part_channels=112, cells=0)
    yield _span("ν uniform", location="uniform")
    yield _span("ν by energy", location="energy")
    yield _span("η = 0.1", eta=0.1)
    yield _span("η = 3", eta=3.0)
    yield _span("ν starts at entropy 0.8", start_entropy=0.8)
    yield _span("one projection for all parts", "model.projection=896", part_channels=0)
    yield _span("no cells", cells=0)
    yield _span("20 cells a part", cells=20)
    yield _span("cells only count little (weight from 0.02)", cell_weight=0.02)
    yield _span("distance to the class mean", span=False)
    yield _span("no geometry", geometry=False)
    yield _span("all parts weigh alike", reweight=False)
    yield _span("scale 1 only", scales=[1])
    yield _span("without all base classes", representatives=0.0)
    yield _span("no blank cells", "training.blank_cells=0")
    yield _span("weights not averaged", "training.average=0")
    yield _span("200 episodes", "training.episodes=200", "training.decay_every=100")


def _from_scratch() -> Iterator[Row]:
    """The best methods on Conv-4: the same steps and images; DOP on the 10×10 grid of its recipe, peers on 5×5."""
    for name, narrow in (("dop-whole", {"part_channels": 64, "cells": 0}), ("dop", {})):  # as wide as Conv-4's map
        told = _options({"representatives": 1.0, **narrow})
        yield Row(f"{name}, all base classes", "conv4-dop", (*SHORT, f"model.method={name}", *told))
    for name in ("deepemd", "bi-frn", "frn", "protonet"):
        yield Row(name, "conv4-protonet", (*SHORT, f"model.method={name}"))
    yield Row("frn, 10×10 grid", "conv4-dop", (*SHORT, "model.method=frn"))


def tables() -> dict[str, Table]:
    """What can be reproduced, by name. The first row is what the others are compared with."""
    both = tuple(
        Row(f"{name}, all base classes", "efficientnet-dop", (*_common(name), f"model.method={name}"), RATES)
        for name in ("dop-whole", "dop-span", "dop")
    )
    return {
        "methods": Table("Every method on the same frozen features", (*both, *_methods()), ranked=True),
        "leaders": Table(
            "The leaders, all trained as long as the recipe of dop-span and with blank cells",
            (
                _leading("dop-whole, all base classes", "dop-whole", ()),  # at 3e-3, as its recipe
                _leading("dop-whole, one part as wide", "dop-whole", (), parts=1, part_channels=896, cells=48),
                _leading("dop-whole, no cells", "dop-whole", (), cells=0),
                _leading("dop-whole, no cells, uniform ν", "dop-whole", (), location="uniform", cells=0),
                _leading("dop-span, 8 parts, all base classes", "dop-span", parts=8, cells=6),
                _leading("dop-span, all base classes", "dop-span"),
                *(
                    Row(name, "efficientnet-protonet", (*_common(name), f"model.method={name}", *LONGER), RATES)
                    for name in LEADERS
                ),
                *(  # with as many weights as four projections to 224 channels, at the rate that was best with fewer
                    Row(
                        f"{name}, as wide",
                        "efficientnet-protonet",
                        (*COMMON, f"model.method={name}", *LONGER, "model.projection=896", "training.lr=1e-3"),
                    )
                    for name in ("deepemd", "frn")
                ),
            ),
        ),
        "conv4": Table("Conv-4 from scratch, the same 500 episodes of 100 images", tuple(_from_scratch())),
        "tries": Table("Parts that earn their place: one thing changed in dop-span", tuple(_tries()), ("novel", "val")),
        "presets": Table(
            "Preset against preset",
            (
                _dop("lasso"),
                Row("paper", "efficientnet-dop", (*COMMON, "model.method=dop-paper")),
                Row("span", "efficientnet-dop", (*_common("dop-span"), "model.method=dop-span")),
                Row("whole", "efficientnet-dop", (*_common("dop-whole"), "model.method=dop-whole")),
            ),
        ),
        "grid": Table(
            "The grid, and what lies in it",
            (
                _dop("7×7, 1,280 channels"),
                _dop("7×7, 320 channels", "model.backbone_options.level=stride32"),
                _dop("14×14, 112 channels", "model.backbone_options.level=stride16"),
            ),
        ),
        "terms": Table(
            "Weights of parts and geometry (the paper's α and γ)",
            (
                _dop("α and geometry"),
                _dop("α only", geometry=False),
                _dop("geometry only", reweight=False),
                _dop("neither", reweight=False, geometry=False),
            ),
        ),
        "scales": Table(
            "Scales of the templates",
            (
                _dop("[1, 3, 5]"),
                _dop("[1]", scales=[1]),
                _dop("[3]", scales=[3]),
                _dop("[5]", scales=[5]),
                _dop("[3, 5]", scales=[3, 5]),
            ),
        ),
        "parts": Table(
            "Number of parts", (_dop("K = 4"), *(_dop(f"K = {count}", parts=count) for count in (1, 2, 3, 5, 6, 8)))
        ),
        "location": Table(
            "How parts are located",
            (
                _dop("by templates (Eq. 5)"),
                _dop("by energy, all parts together", location="energy"),
                _dop("everywhere alike (uniform ν)", location="uniform"),
                _dop("one part, everywhere alike", location="uniform", parts=1),
            ),
        ),
    }
