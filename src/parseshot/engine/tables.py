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
WITHOUT = {"dop-span"}  # brings projections of its own


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


def _dop(name: str, **options: object) -> Row:
    """A row of the default's recipe with options of DOP."""
    chosen = (f"model.method_options.{key}={json.dumps(value)}" for key, value in options.items())
    return Row(name, "efficientnet-dop", (*COMMON, *chosen))


def tables() -> dict[str, Table]:
    """What can be reproduced, by name. The first row is what the others are compared with."""
    both = tuple(
        Row(f"{name}, all base classes", "efficientnet-dop", (*_common(name), f"model.method={name}"), RATES)
        for name in ("dop", "dop-span")
    )
    return {
        "methods": Table("Every method on the same frozen features", (*both, *_methods())),
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
