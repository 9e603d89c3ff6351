"""Part quality as one figure: a panel for each protocol, parts as bars, floors as lines over the bars they are for."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from parseshot.data.names import printable
from parseshot.figure_style import MUTED, new_figure, styled
from parseshot.figures import PART_COLOURS
from parseshot.part_quality.scores import PartQuality, Score
from parseshot.part_quality.summary import quality_notes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BARS = PART_COLOURS[5], PART_COLOURS[1]  # the protocol, and its variant
SLOT, BESIDE = 0.7, 0.46  # widths around a set of parts, of its bars and of half a floor's line; the next set is at 1
COLUMNS = 3  # panels side by side


class Panel(NamedTuple):
    """What a panel shows: fields of a score, the second one a variant of the protocol."""

    title: str
    unit: str
    fields: tuple[str, ...]


class Floor(NamedTuple):
    """How a floor is drawn; the dashes tell it apart without colour: lengths of ink and of nothing, in line widths."""

    label: str
    colour: str
    dashes: tuple[float, ...]


PANELS = (
    Panel("Keypoint regression", "error, % of the box; less is better", ("error", "error_active")),
    Panel("NMI", "%; more is better", ("nmi", "nmi_nu")),
    Panel("ARI", "%; more is better", ("ari", "ari_nu")),
    Panel("Purity", "%; more is better", ("purity", "purity_active")),
    Panel("Consistency", "%; more is better", ("consistency",)),
    Panel("Stability", "%; more is better", ("stability",)),
)
FLOORS = {  # by a word of the floor's name
    "centre": Floor("box centre", PART_COLOURS[0], ()),
    "random": Floor("random cell", PART_COLOURS[7], (1.0, 1.0)),
    "argmax": Floor("energy argmax", PART_COLOURS[3], (4.0, 1.2)),
    "strongest": Floor("strongest cells", PART_COLOURS[4], (2.2, 1.6)),
    "grid": Floor("regular grid", PART_COLOURS[2], (5.0, 1.2, 1.2, 1.2)),
}


@styled
def draw_quality(result: PartQuality, title: str) -> "Figure":
    """All panels, a headline above and the colours explained below."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = new_figure(6.6)
    figure.suptitle(printable(title), fontweight="bold")
    grid = figure.subplots(-(-len(PANELS) // COLUMNS), COLUMNS)
    for axes, panel in zip(grid.flat, PANELS, strict=True):
        _draw_panel(axes, result.scores, panel)
    labels = "parts, all photos", "where active; NMI, ARI: by ν"
    marks: list[Any] = [Patch(color=colour, label=label) for colour, label in zip(BARS, labels, strict=True)]
    marks += [Line2D([], [], **_line(floor), label=f"floor: {floor.label}") for floor in FLOORS.values()]
    figure.legend(handles=marks, loc="outside lower center", ncols=4, handlelength=3.2)
    return figure


def _draw_panel(axes: "Axes", scores: Sequence[Score], panel: Panel) -> None:
    from matplotlib.patheffects import withStroke

    parts = [one for one in scores if not one.is_floor]
    wide = SLOT / len(panel.fields)
    for number, field in enumerate(panel.fields):
        values = {at: value for at, one in enumerate(parts) if (value := getattr(one, field)) is not None}
        left = [at - SLOT / 2 + number * wide for at in values]
        axes.bar(left, list(values.values()), 0.96 * wide, align="edge", color=BARS[number], gid=field)
    halo = [withStroke(linewidth=4, foreground="#ffffff")]  # readable on a bar
    for at, one in enumerate(parts):
        for floor in floors_for(scores, one):
            value = getattr(floor, panel.fields[0])
            if value is not None:
                ends = at - BESIDE, at + BESIDE
                axes.plot(ends, (value, value), **_line(_kind(floor)), path_effects=halo, gid=floor.name)
    axes.set_title(panel.title, loc="left", fontweight="bold")
    axes.set_ylabel(panel.unit, color=MUTED)
    names = [one.name.removeprefix("parts, ").removesuffix(" of scales") for one in parts]
    axes.set_xticks(range(len(parts)), names)
    axes.set_xlim(-0.55, len(parts) - 0.45)
    drawn = [value for one in scores for field in panel.fields if (value := getattr(one, field)) is not None]
    axes.set_ylim(bottom=min([0.0, *drawn]))  # ARI may be below 0
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")


def floors_for(scores: Sequence[Score], parts: Score) -> list[Score]:
    """Of each kind of floor the one with the most places, but no more than these parts have."""
    found: dict[Floor, Score] = {}
    for one in scores:
        if one.is_floor and one.locations <= parts.locations:
            best = found.get(_kind(one))
            if best is None or one.locations > best.locations:
                found[_kind(one)] = one
    return list(found.values())


def _kind(floor: Score) -> Floor:
    return next(kind for word, kind in FLOORS.items() if word in floor.name)


def _line(floor: Floor) -> dict[str, Any]:
    style: Any = (0, floor.dashes) if floor.dashes else "solid"
    return {"color": floor.colour, "linestyle": style, "linewidth": 2}


def quality_caption(result: PartQuality) -> str:
    """What is drawn, and on what it was measured."""
    return (
        "How well the parts found agree with annotated ones: a panel a protocol, a group of bars a set of parts (the "
        "mean over scales, each scale, all scales beside each other), a line a floor, which knows nothing of parts. A "
        "floor over some parts has as many places as they have (strongest cells: at most all there are), but for the "
        "box centre and the energy's argmax, which are one. Light bars are a variant of the protocol: the error with "
        "inactive parts masked, purity only where a part is active, NMI and ARI by ν and without a background. "
        f"Measured: {'; '.join(quality_notes(result))}."
    )
