"""An explanation as one picture: the query, the examples its parts were matched with, and lines that link the parts."""

import contextlib
import functools
import itertools
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import NamedTuple, cast

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from parseshot.data.names import printable
from parseshot.figures import RING, draw_parts, part_colour
from parseshot.recognition.answer import Answer, percent
from parseshot.recognition.explain import FoundPart
from parseshot.recognition.explained import ClassLedger, Explained
from parseshot.recognition.ledger import EXPRESSION
from parseshot.recognition.records import Box

SHOWN = 2  # classes: the likeliest and the runner-up
LARGEST = 800  # pixels of the longer side of a photo as it is shown
WIDTH, TILE, QUERY = 1200, 300, 440  # of a row of examples at most, and sides of an example and of the query
NARROWEST, MARGIN, BETWEEN, ROWS_APART = 640, 24, 16, 56
LEAST_RING = 6.0  # as `figures.draw_parts` has it
TITLE, TEXT, SMALL = 26, 19, 15  # sizes of type
CAPTIONS = 1.6 * TEXT + 2 * SMALL  # the height of those of a row
SMOOTH = 2  # lines are painted this much larger, then reduced
INK, MUTED = "#2a2a24", "#625e50"
FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "Arial Unicode.ttf", "arial.ttf")  # Pillow's own is ASCII

Point = tuple[float, float]
Line = tuple[Point, Point]


def draw_explained(explained: Explained) -> Image.Image:
    """The examples of the likeliest class above the query, those of the runner-up below, and lines part by part."""
    shown = link_classes(explained)
    across = max([NARROWEST, *(min(WIDTH, len(one.examples) * (TILE + BETWEEN) - BETWEEN) for one in shown)])
    words, top = _headline(explained, across)
    first = row_of(shown[0].shown, top + CAPTIONS, across, TILE, LEAST_RING)
    words += _captions(shown[0], first, role(0, explained.answer), across, (top, top + 1.6 * TEXT))
    (query,) = row_of([query_view(explained)], bottom_of(first) + ROWS_APART, across, QUERY, LEAST_RING)
    rows, bottom = [first], query.top + query.height
    for one in shown[1:]:
        rows.append(row_of(one.shown, bottom + ROWS_APART, across, TILE, LEAST_RING))
        bottom = bottom_of(rows[-1])
        heights = bottom + 2.3 * SMALL, bottom + 0.5 * SMALL
        words += _captions(one, rows[-1], role(1, explained.answer), across, heights)
        bottom += CAPTIONS
    lines = [line for one, row in zip(shown, rows, strict=True) for line in links_between(query, row, one)]
    return _paint((round(across), math.ceil(bottom)), [query, *itertools.chain(*rows)], lines, words)


@dataclass(frozen=True)
class View:
    """A photo to show; places and the frame of what was looked at are in its pixels."""

    image: Image.Image
    parts: tuple[FoundPart, ...]
    frame: Box | None

    def reduced(self) -> "View":
        factor = LARGEST / max(self.image.size)
        return self if factor >= 1 else self.resized(factor)

    def resized(self, factor: float) -> "View":
        width, height = (max(1, round(side * factor)) for side in self.image.size)
        across, down = width / self.image.width, height / self.image.height
        parts = tuple(
            replace(part, x=(part.x + 0.5) * across - 0.5, y=(part.y + 0.5) * down - 0.5) for part in self.parts
        )
        frame = self.frame and tuple(edge * (across, down)[at % 2] for at, edge in enumerate(self.frame))
        image = self.image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)
        return View(image, parts, frame)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Tile:
    """A view, and where it lies among others."""

    view: View
    left: float
    top: float
    zoom: float
    least_ring: float

    @property
    def width(self) -> float:
        return self.view.image.width * self.zoom

    @property
    def height(self) -> float:
        return self.view.image.height * self.zoom

    @property
    def ring(self) -> float:
        return max(self.least_ring, RING * min(self.width, self.height))

    def at(self, part: int) -> Point:
        """The middle of a part; inside even where the part is on the grey beside a long photo."""
        x, y = ((edge + 0.5) * self.zoom for edge in (self.view.parts[part].x, self.view.parts[part].y))
        return self.left + min(max(x, 0), self.width), self.top + min(max(y, 0), self.height)


class Linked(NamedTuple):
    """A class, and what of it is shown: the examples that the parts of the query are nearest to."""

    ledger: ClassLedger
    views: tuple[View, ...]  # of all its examples
    links: tuple[int | None, ...]  # the example of each part, at the surest scale of the query

    @property
    def examples(self) -> list[int]:
        """Those that most parts are linked with first."""
        found = [example for example in self.links if example is not None]
        return sorted(set(found), key=lambda example: (-found.count(example), example))

    @property
    def shown(self) -> list[View]:
        return [self.views[example] for example in self.examples]


def link_classes(explained: Explained) -> list[Linked]:
    """The likeliest class and the runner-up."""
    return [_link(one, len(explained.parts)) for one in explained.classes[:SHOWN]]


def _link(one: ClassLedger, parts: int) -> Linked:
    def surest(part: int) -> int | None:
        rows = [row for row in one.ledger.rows if row.part == part and row.kind == EXPRESSION]
        return min(rows, key=lambda row: row.entropy or 0.0).matched if rows else None

    views = tuple(View(each.image, each.parts, each.photo.box).reduced() for each in one.examples)
    return Linked(one, views, tuple(surest(part) for part in range(parts)))


def query_view(explained: Explained) -> View:
    answer = explained.answer
    return View(explained.image, explained.parts, None if answer.crop_is == "whole" else answer.crop).reduced()


def row_of(views: Sequence[View], top: float, across: float, side: float, least_ring: float) -> list[Tile]:
    """Photos side by side in the middle of a row, each as large as fits into a square of this side, or of less."""
    side = min(side, (across + BETWEEN) / max(1, len(views)) - BETWEEN)
    left = (across - len(views) * (side + BETWEEN) + BETWEEN) / 2
    zooms = [side / max(view.image.size) for view in views]
    highest = max((view.image.height * zoom for view, zoom in zip(views, zooms, strict=True)), default=0.0)
    tiles = []
    for number, (view, zoom) in enumerate(zip(views, zooms, strict=True)):
        aside, above = ((room - edge * zoom) / 2 for room, edge in zip((side, highest), view.image.size, strict=True))
        tiles.append(Tile(view, left + number * (side + BETWEEN) + aside, top + above, zoom, least_ring))
    return tiles


def bottom_of(row: Sequence[Tile]) -> float:
    return max(tile.top + tile.height for tile in row)


def links_between(query: Tile, row: Sequence[Tile], one: Linked) -> list[tuple[str, Line]]:
    """The colour of each part, and where its line goes; the row shows `one.examples`."""
    return [
        (part_colour(part), _between(query, row[one.examples.index(example)], part))
        for part, example in enumerate(one.links)
        if example is not None
    ]


def _between(one: Tile, other: Tile, part: int) -> Line:
    """From the ring of a part to the ring of the same part."""
    (x, y), (across, down) = one.at(part), other.at(part)
    length = math.dist((x, y), (across, down)) or 1.0
    step = (across - x) / length, (down - y) / length
    start, end = min(one.ring, length / 2), min(other.ring, length / 2)
    return (x + start * step[0], y + start * step[1]), (across - end * step[0], down - end * step[1])


def role(number: int, answer: Answer) -> str:
    return "Runner-up" if number else "Nearest" if answer.rejected else "Likeliest"


def looked_at(answer: Answer) -> str:
    if answer.crop_is == "whole":
        return "the whole photo"
    left, top, right, bottom = (round(edge) for edge in answer.crop)
    how = "found by its edges" if answer.crop_is == "found" else "given with the photo"
    return f"{right - left} by {bottom - top} pixels from ({left}, {top}), {how}"


def file_name(source: str) -> str:
    return PurePath(source).name or source


def says(explained: Explained) -> list[tuple[str, bool]]:
    """The answer in words, as pieces that are the name of a class or not: a name may be written from right to left."""
    names = sorted({one.name for one in explained.answer.candidates}, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, names))})", str(explained))
    return [(piece, at % 2 == 1) for at, piece in enumerate(pieces) if piece]


class _Word(NamedTuple):
    """A line of text: where its left end, or its middle, is at the top."""

    x: float
    y: float
    text: str
    size: int
    ink: str
    middle: bool = False


def _headline(explained: Explained, across: float) -> tuple[list[_Word], float]:
    """The answer in words; and where what follows may begin."""
    answer, words, top = explained.answer, [], 0.0
    title = "".join(_isolated(_writable(piece)) if is_name else piece for piece, is_name in says(explained))
    told = f"{_isolated(_writable(file_name(answer.source)))}; looked at: {looked_at(answer)}"
    for text, size, ink in ((title, TITLE, INK), (told, SMALL, MUTED)):
        for line in _wrapped(text, size, across):
            words.append(_Word(0, top, line, size, ink))
            top += 1.35 * size
        top += 0.3 * size
    return words, top + SMALL


def _captions(one: Linked, row: Sequence[Tile], role: str, across: float, heights: tuple[float, float]) -> list[_Word]:
    """The class with its probability, and what each photo is called: where no line crosses them."""
    candidate = one.ledger.candidate
    before, after = f"{role}: ", f", {percent(candidate.probability)}"
    name = _fitted(_writable(candidate.name), TEXT, across - _font(TEXT).getlength(before + after))
    words = [_Word(0, heights[0], before + _isolated(name) + after, TEXT, INK)]
    for tile, example in zip(row, one.examples, strict=True):
        source = _writable(file_name(one.ledger.examples[example].photo.source))
        text = _fitted(source, SMALL, max(tile.width, tile.height))  # the side of its square
        words.append(_Word(tile.left + tile.width / 2, heights[1], text, SMALL, MUTED, True))
    return words


def _paint(
    size: tuple[int, int], tiles: Sequence[Tile], lines: Sequence[tuple[str, Line]], words: Sequence[_Word]
) -> Image.Image:
    """Photos, then all lines, then the rings above them; the margin comes last."""
    sheet = Image.new("RGB", size, "#ffffff")
    places, shown = [], []
    for tile in tiles:
        places.append((round(tile.left), round(tile.top)))
        shown.append(tile.view.resized(tile.zoom))
        sheet.paste(shown[-1].image, places[-1])
    sheet.paste(*_lines(size, tiles, lines))
    for view, (left, top) in zip(shown, places, strict=True):
        under = np.asarray(sheet.crop((left, top, left + view.image.width, top + view.image.height)))
        sheet.paste(draw_parts(under, view.parts, scale=1), (left, top))
    pen, direction = ImageDraw.Draw(sheet), "ltr" if _turns() else None
    for word in words:
        at, anchor = (word.x, word.y), "ma" if word.middle else "la"
        pen.text(at, word.text, fill=word.ink, font=_font(word.size), anchor=anchor, direction=direction)
    framed = Image.new("RGB", (size[0] + 2 * MARGIN, size[1] + 2 * MARGIN), "#ffffff")
    framed.paste(sheet, (MARGIN, MARGIN))
    return framed


def _lines(
    size: tuple[int, int], tiles: Sequence[Tile], links: Sequence[tuple[str, Line]]
) -> tuple[Image.Image, tuple[int, int], Image.Image]:
    """What `paste` takes: smooth lines between the parts of each photo, frames of what was looked at, and links."""
    much = SMOOTH
    layer = Image.new("RGBA", (size[0] * much, size[1] * much), (255, 255, 255, 0))
    pen = ImageDraw.Draw(layer)

    def line(points: Sequence[Point], colour: str, width: float) -> None:
        pen.line([(x * much, y * much) for x, y in points], fill=colour, width=round(width * much))

    thin = [pair for tile in tiles for pair in itertools.combinations(map(tile.at, range(len(tile.view.parts))), 2)]
    frames = [_corners(tile) for tile in tiles if tile.view.frame]
    for colour, width in (("#00000080", 3.0), ("#ffffffe0", 1.5)):
        for points in (*thin, *frames):
            line(points, colour, width)
    for halo in (True, False):
        for colour, points in links:
            line(points, "#ffffff" if halo else colour, 4.5 if halo else 2.5)
    layer = layer.reduce(much)
    return layer.convert("RGB"), (0, 0), layer.getchannel("A")


def _corners(tile: Tile) -> list[Point]:
    """Of the frame of what was looked at, round to where it began; all of it stays inside of the photo."""
    assert tile.view.frame is not None
    left, top, right, bottom = (edge * tile.zoom for edge in tile.view.frame)
    left, top = max(left, 1.0) + tile.left, max(top, 1.0) + tile.top
    right, bottom = min(right, tile.width - 1) + tile.left, min(bottom, tile.height - 1) + tile.top
    return [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    for name in FONTS:
        with contextlib.suppress(OSError):
            return ImageFont.truetype(name, size)
    return cast(ImageFont.FreeTypeFont, ImageFont.load_default(size))


def _turns() -> bool:
    """Whether Pillow can write from right to left with this font."""
    return _font(TEXT).layout_engine == ImageFont.Layout.RAQM


def _writable(text: str) -> str:
    """One line of what the font has, without marks that turn what comes after them round."""
    text = " ".join(printable(text).split())
    text = "".join(c for c in text if unicodedata.category(c) not in ("Cc", "Cf"))
    if _font(TEXT).getname()[0] != "Aileron":
        return text
    plain = (c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return "".join(c if c.isascii() or c == "…" else "?" for c in plain)


def _isolated(name: str) -> str:
    """A name that may be written from right to left, among words that are not."""
    return f"\u2068{name}\u2069" if _turns() and not name.isascii() else name


def _fitted(text: str, size: int, room: float) -> str:
    """A line no longer than there is room, its end cut off where it must be."""
    if _font(size).getlength(text) <= room:
        return text
    while text and _font(size).getlength(text + "…") > room:
        text = text[:-1].rstrip()
    return text + "…"


def _wrapped(text: str, size: int, room: float, most: int = 3) -> list[str]:
    """As many lines as it takes, the last one cut off where they are too many."""
    lines: list[str] = []
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and (_font(size).getlength(longer) <= room or len(lines) == most):
            lines[-1] = longer
        else:
            lines.append(word)
    return [_fitted(line, size, room) for line in lines]
