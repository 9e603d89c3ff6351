"""Pictures with their parts: the colour of each part, its ring and its number; and sheets of many pictures."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from parseshot.data.names import printable
from parseshot.data.packed import Pack
from parseshot.errors import DataError
from parseshot.recognition.explain import FoundPart

# Okabe and Ito's colours, which colour-blind people can tell apart, with grey in place of black (lost on dark pages).
PART_COLOURS: tuple[str, ...] = (
    "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#cc79a7", "#0072b2", "#f0e442", "#999999",
)  # fmt: skip
UNCERTAIN = 0.5  # entropy from which a part counts as not found for sure
FAINT = 0.65  # opacity of the ring of such a part
RING = 0.075  # radius of a ring, as a share of the shorter side of the picture
NUMBER = 0.5  # radius of the disc of a part's number, as a share of the ring's
TURNS = (0, 45, -45, 90, -90, 135, -135, 180)  # degrees by which a number may leave its direction, the nearest first
CROP = 0.32  # side of the square shown of a part, as a share of the shorter side of the picture
DASHES = 9
OVERSAMPLING = 4  # rings are painted this much larger, then reduced: smooth edges


def part_colour(part: int) -> str:
    """The colour of part number `part` (from 0); more parts than colours start again."""
    return PART_COLOURS[part % len(PART_COLOURS)]


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on a colour (WCAG relative luminance).

    >>> ink_on("#f0e442"), ink_on("#0072b2")
    ('#000000', '#ffffff')
    """
    levels = (channel / 255 for channel in ImageColor.getrgb(colour)[:3])
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in levels)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def label_direction(part: int, parts: int, x: float, y: float) -> tuple[float, float]:
    """Unit vector from a part to its number: another one for each part, so that parts in one place stay readable.

    x, y: where the part is, as shares of the picture's width and height; near an edge the number turns inwards.
    """
    angle, margin = 2 * math.pi * part / max(parts, 1) - math.pi / 4, 1.5 * RING

    def inwards(way: float, at: float) -> float:
        return abs(way) if at < margin else -abs(way) if at > 1 - margin else way

    return inwards(math.cos(angle), x), inwards(math.sin(angle), y)


def label_directions(parts: Sequence[FoundPart], width: int, height: int) -> list[tuple[float, float]]:
    """A unit vector for each part as `label_direction` has it, turned where its number would hide an earlier one.

    >>> one, other = FoundPart(50.0, 50.0, 0.1, ()), FoundPart(60.6, 39.4, 0.1, ())  # both towards (55.3, 44.7)
    >>> [(round(x, 1), round(y, 1)) for x, y in label_directions([one, other], 100, 100)]
    [(0.7, -0.7), (-0.7, -0.7)]
    """
    radius = RING * min(width, height)
    numbers: list[tuple[float, float]] = []  # where they are
    found = []
    for part, place in enumerate(parts):
        wanted = label_direction(part, len(parts), place.x / width, place.y / height)
        best, most = wanted, -math.inf
        for turn in TURNS:
            way = _turned(wanted, turn)
            x, y = place.x + radius * way[0], place.y + radius * way[1]
            inside = min(x, y, width - 1 - x, height - 1 - y) >= NUMBER * radius
            free = min((math.hypot(x - a, y - b) / radius for a, b in numbers), default=math.inf)
            if (inside or not turn) and (free := min(free, 2 * NUMBER)) > most:
                best, most = way, free
        numbers.append((place.x + radius * best[0], place.y + radius * best[1]))
        found.append(best)
    return found


def _turned(way: tuple[float, float], degrees: float) -> tuple[float, float]:
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return way[0] * cosine - way[1] * sine, way[0] * sine + way[1] * cosine


def draw_parts(image: np.ndarray, parts: Sequence[FoundPart], scale: int = 4) -> Image.Image:
    """The picture (uint8 [H, W, 3]), `scale` times larger, with a ring a part: dashed, faint if uncertain."""
    check_picture(image)
    height, width = image.shape[:2]
    figure = Image.fromarray(image).resize((width * scale, height * scale), Image.Resampling.BICUBIC)
    radius = max(6.0, RING * min(width, height) * scale)
    stamps = [_ring(number, radius, certain=part.entropy < UNCERTAIN) for number, part in enumerate(parts)]
    for stamp, part in zip(stamps, parts, strict=True):
        _put(figure, stamp, (part.x + 0.5) * scale, (part.y + 0.5) * scale)
    directions = label_directions(parts, width, height)
    for number, (part, (across, down)) in enumerate(zip(parts, directions, strict=True)):  # above all rings
        x, y = (part.x + 0.5) * scale + radius * across, (part.y + 0.5) * scale + radius * down
        _put(figure, _number(number, NUMBER * radius), x, y)
    return figure


def svg_marks(parts: Sequence[FoundPart], width: int, height: int) -> list[dict[str, Any]]:
    """The same rings for an SVG template, in pixels of the picture; `window` is a viewBox around the part.

    The template draws a ring of radius 10 around (0, 0), its number at `label`, and moves both by `place`.
    """
    shorter = min(width, height)
    side = CROP * shorter
    marks = []
    directions = label_directions(parts, width, height)
    for number, (part, (across, down)) in enumerate(zip(parts, directions, strict=True)):
        left, top = (min(max(at - side / 2, -0.5), end - side - 0.5) for at, end in ((part.x, width), (part.y, height)))
        marks.append(
            {
                "x": round(part.x, 2),
                "y": round(part.y, 2),
                "place": f"translate({part.x:.2f} {part.y:.2f}) scale({RING * shorter / 10:.3f})",
                "dot": round(0.06 * shorter, 1),
                "label": f"{10 * across:.2f} {10 * down:.2f}",
                "window": f"{left:.1f} {top:.1f} {side:.1f} {side:.1f}",
                "colour": part_colour(number),
                "ink": ink_on(part_colour(number)),
                "certainty": f"{100 * min(1.0, max(0.0, 1 - part.entropy)):.0f}%",
                "certain": part.entropy < UNCERTAIN,
            }
        )
    return marks


def svg_lines(parts: Sequence[FoundPart]) -> str:
    """SVG path of the lines between all pairs of parts, whose relative lengths are the geometry of Eq. 7."""
    return " ".join(f"M{a.x:.1f} {a.y:.1f}L{b.x:.1f} {b.y:.1f}" for a, b in itertools.combinations(parts, 2))


def contact_sheet(pack: Pack, *, columns: int = 10, rows: int = 6, cell: int = 168) -> Image.Image:
    """Pictures from classes evenly spread over a data set, with their boxes and visible annotated parts.

    Chosen by rule, not by hand: the middle picture of every n-th class.
    """
    chosen = np.unique(np.linspace(0, len(pack.classes) - 1, columns * rows).round().astype(int))
    members = {number: np.flatnonzero(pack.labels == number) for number in chosen.tolist()}
    shown = [(number, int(images[len(images) // 2])) for number, images in members.items()]
    return _tiles(pack, shown, columns, cell)


def twin_sheet(pack: Pack, *, most: int = 24, cell: int = 168) -> Image.Image | None:
    """Pairs of pictures that show the same photo or nearly so, side by side; None where there are none.

    Pairs across classes come first: they are the ones to look at.
    """
    across = pack.labels[pack.twins[:, 0]] != pack.labels[pack.twins[:, 1]]
    order = np.argsort(~across, kind="stable")[:most]
    shown = [(int(pack.labels[image]), int(image)) for pair in pack.twins[order, :2] for image in pair]
    return _tiles(pack, shown, 8, cell) if shown else None


def _tiles(pack: Pack, shown: Sequence[tuple[int, int]], columns: int, cell: int) -> Image.Image:
    """(class, picture) pairs in a grid, each with its class name below."""
    caption, gap = 16, 4
    font, columns = ImageFont.load_default(11), min(columns, len(shown))
    height = math.ceil(len(shown) / columns) * (cell + caption + gap) + gap
    sheet = Image.new("RGB", (columns * (cell + gap) + gap, height), "#ffffff")
    pen = ImageDraw.Draw(sheet)
    for at, (number, image) in enumerate(shown):
        x, y = gap + at % columns * (cell + gap), gap + at // columns * (cell + caption + gap)
        sheet.paste(_annotated(pack, image, cell), (x, y))
        name = printable(pack.classes[number])
        while name and font.getlength(name) > cell:
            name = name[:-2].rstrip() + "…" if len(name) > 2 else ""
        pen.text((x, y + cell + 2), name, fill="#333333", font=font)
    return sheet


def _annotated(pack: Pack, image: int, cell: int) -> Image.Image:
    tile = Image.fromarray(pack.pixels([image])[0]).resize((cell, cell), Image.Resampling.BICUBIC)
    pen, zoom = ImageDraw.Draw(tile), cell / pack.size
    if pack.boxes is not None:
        corners = [(float(side) + 0.5) * zoom for side in pack.boxes[image]]
        inside = [min(max(side, 1.0), cell - 2.0) for side in corners]
        pen.rectangle(inside, outline="#ffffff", width=3)
        pen.rectangle(inside, outline="#000000", width=1)
    if pack.parts is not None:
        for part, (x, y, visible) in enumerate(pack.parts[image].tolist()):
            if visible > 0.5:
                at, radius = ((x + 0.5) * zoom, (y + 0.5) * zoom), 0.024 * cell
                dot = (at[0] - radius, at[1] - radius, at[0] + radius, at[1] + radius)
                pen.ellipse(dot, fill=part_colour(part), outline="#ffffff")
    return tile


def check_picture(image: np.ndarray) -> None:
    """Refuse anything but uint8 [H, W, 3]."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise DataError(f"a picture is uint8 [H, W, 3]; this one is {image.dtype}{list(image.shape)}")


def _put(figure: Image.Image, stamp: Image.Image, x: float, y: float) -> None:
    """Paint a stamp centred at (x, y), measured from the corner of the figure; what lies outside is lost."""
    figure.paste(stamp, (math.floor(x - stamp.width / 2 + 0.5), math.floor(y - stamp.height / 2 + 0.5)), stamp)


def _blank(radius: float) -> tuple[Image.Image, int]:
    """A transparent square for something of this radius, to be reduced when painted; and where its centre is."""
    half = OVERSAMPLING * math.ceil(radius / OVERSAMPLING)
    return Image.new("RGBA", (2 * half, 2 * half), (255, 255, 255, 0)), half


def _ring(part: int, radius: float, *, certain: bool) -> Image.Image:
    radius *= OVERSAMPLING
    line = 0.16 * radius
    stamp, middle = _blank(radius + 1.5 * line)
    pen, step = ImageDraw.Draw(stamp), 360 / DASHES
    arcs = [(0.0, 360.0)] if certain else [(step * dash, step * (dash + 0.62)) for dash in range(DASHES)]
    for colour, extra in (("#ffffff", 0.5 * line), (part_colour(part), 0.0)):  # the halo first
        edge, grow = radius + line / 2 + extra, math.degrees(extra / radius)
        box = (middle - edge, middle - edge, middle + edge, middle + edge)
        for start, end in arcs:
            pen.arc(box, start - grow, end + grow, fill=colour, width=round(line + 2 * extra))
    if not certain:
        stamp.putalpha(stamp.getchannel("A").point(lambda alpha: FAINT * alpha))
    return stamp.reduce(OVERSAMPLING)


def _number(part: int, radius: float) -> Image.Image:
    radius *= OVERSAMPLING
    stamp, middle = _blank(radius)
    pen = ImageDraw.Draw(stamp)
    box = (middle - radius, middle - radius, middle + radius, middle + radius)
    pen.ellipse(box, fill=part_colour(part), outline="#ffffff", width=round(0.16 * radius))
    font = ImageFont.load_default(radius * (1.3 if part < 9 else 1.0))
    pen.text((middle, middle), str(part + 1), fill=ink_on(part_colour(part)), font=font, anchor="mm")
    return stamp.reduce(OVERSAMPLING)
