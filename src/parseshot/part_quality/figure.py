"""Part quality as one picture: a panel for each protocol, parts as bars, floors as lines over the bars they are for."""

from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from parseshot.figures import PART_COLOURS
from parseshot.part_quality.scores import PartQuality, Score

INK, MUTED, RULE = "#2a2a24", "#625e50", "#dddace"
BARS = PART_COLOURS[5], PART_COLOURS[1]  # the protocol, and its variant
WIDTH, HEIGHT, COLUMNS = 620, 420, 3  # of a panel, and how many stand side by side
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 64, 48  # around the bars of a panel
TITLE, TEXT = 22, 17  # sizes of type
KEY = 110  # height of the explanation of colours
STEPS = 5  # lines of a scale at most


class Panel(NamedTuple):
    """What a panel shows: fields of a score, the second one a variant of the protocol."""

    title: str
    unit: str
    fields: tuple[str, ...]


class Floor(NamedTuple):
    """How a floor is drawn; the dashes tell it apart without colour: lengths of ink and of nothing."""

    label: str
    colour: str
    dashes: tuple[int, int]


PANELS = (
    Panel("Keypoint regression", "error, % of the box; less is better", ("error", "error_active")),
    Panel("NMI", "%; more is better", ("nmi", "nmi_nu")),
    Panel("ARI", "%; more is better", ("ari", "ari_nu")),
    Panel("Purity", "%; more is better", ("purity", "purity_active")),
    Panel("Consistency", "%; more is better", ("consistency",)),
    Panel("Stability", "%; more is better", ("stability",)),
)
FLOORS = {  # by a word of the floor's name
    "centre": Floor("box centre", PART_COLOURS[0], (1, 0)),
    "random": Floor("random cell", PART_COLOURS[7], (4, 4)),
    "argmax": Floor("energy argmax", PART_COLOURS[3], (14, 5)),
    "strongest": Floor("strongest cells", PART_COLOURS[4], (8, 8)),
    "grid": Floor("regular grid", PART_COLOURS[2], (20, 10)),
}


def draw_quality(result: PartQuality, title: str) -> Image.Image:
    """All panels, a headline above and the colours explained below."""
    rows = -(-len(PANELS) // COLUMNS)
    figure = Image.new("RGB", (COLUMNS * WIDTH, TOP + rows * HEIGHT + KEY), "#ffffff")
    pen = ImageDraw.Draw(figure)
    pen.text((LEFT / 2, 18), title, fill=INK, font=_font(TITLE))
    for at, panel in enumerate(PANELS):
        _draw_panel(pen, result.scores, panel, at % COLUMNS * WIDTH, TOP + at // COLUMNS * HEIGHT)
    _draw_key(pen, TOP + rows * HEIGHT)
    return figure


def _draw_panel(pen: ImageDraw.ImageDraw, scores: Sequence[Score], panel: Panel, left: int, top: int) -> None:
    parts, floors = ([one for one in scores if one.is_floor is wanted] for wanted in (False, True))
    values = [value for one in scores for name in panel.fields if (value := getattr(one, name)) is not None]
    step = _step(max([*values, 1e-9]))
    ends = left + LEFT, left + WIDTH - RIGHT
    bottom, high = top + HEIGHT - BOTTOM, HEIGHT - TOP - BOTTOM
    per = high / (step * max(1, -(-max([*values, 1e-9]) // step)))  # pixels of one per cent
    pen.text((left + LEFT, top + 4), panel.title, fill=INK, font=_font(TITLE))
    pen.text((left + LEFT, top + 32), panel.unit, fill=MUTED, font=_font(TEXT))
    for count in range(int(high / per / step + 1.5)):
        y = bottom - count * step * per
        pen.line((ends[0], y, ends[1], y), fill=RULE)
        pen.text((ends[0] - 8, y), f"{count * step:g}", fill=MUTED, font=_font(TEXT), anchor="rm")
    slot = (ends[1] - ends[0]) / len(parts)
    for at, one in enumerate(parts):
        x, wide = ends[0] + (at + 0.15) * slot, 0.7 * slot / len(panel.fields)
        for number, name in enumerate(panel.fields):
            value = getattr(one, name)
            if value is not None:
                box = (x + number * wide, bottom - max(value, 0) * per, x + (number + 1) * wide - 2, bottom)
                pen.rectangle(box, fill=BARS[number])
        name = one.name.removeprefix("parts, ").removesuffix(" of scales")
        pen.text((ends[0] + (at + 0.5) * slot, bottom + 8), name, fill=INK, font=_font(TEXT), anchor="ma")
        for floor in floors:  # those with fewer places and none of their kind that has as many
            best = [other for other in floors if _kind(other) == _kind(floor) and other.locations <= one.locations]
            value = getattr(floor, panel.fields[0])
            if best and floor is max(best, key=lambda other: other.locations) and value is not None:
                y = bottom - max(value, 0) * per
                _dashed(pen, ends[0] + at * slot + 4, ends[0] + (at + 1) * slot - 4, y, _kind(floor))


def _draw_key(pen: ImageDraw.ImageDraw, top: int) -> None:
    x = float(LEFT)
    for label, colour in (("parts, all", BARS[0]), ("only where active (NMI, ARI: by the location map)", BARS[1])):
        pen.rectangle((x, top + 12, x + 22, top + 30), fill=colour)
        x = _label(pen, x + 30, top + 21, label)
    x = float(LEFT)
    for kind in FLOORS.values():
        _dashed(pen, x, x + 60, top + 62, kind)
        x = _label(pen, x + 70, top + 62, f"floor: {kind.label}")


def _label(pen: ImageDraw.ImageDraw, x: float, y: float, text: str) -> float:
    """Write beside a sample of a colour; where the next one goes."""
    pen.text((x, y), text, fill=INK, font=_font(TEXT), anchor="lm")
    return x + _font(TEXT).getlength(text) + 36


def _dashed(pen: ImageDraw.ImageDraw, start: float, end: float, y: float, kind: Floor) -> None:
    ink, nothing = kind.dashes if kind.dashes[1] else (end - start, 1)
    while start < end:
        pen.line((start, y, min(start + ink, end), y), fill="#ffffff", width=6)  # readable on a bar
        pen.line((start, y, min(start + ink, end), y), fill=kind.colour, width=4)
        start += ink + nothing


def _kind(floor: Score) -> Floor:
    return next(kind for word, kind in FLOORS.items() if word in floor.name)


def _step(largest: float) -> float:
    """A round distance of the lines of a scale."""
    return next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if step * STEPS >= largest or step == 50)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
