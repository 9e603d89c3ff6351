"""One look for all figures: type, colours, photos with their parts; and files that are the same bytes every time.

No text is read as mathematics, so a class may be called `$_{`. Nothing here touches matplotlib's global state.
"""

import base64
import functools
import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
from PIL import Image

from parseshot.data.names import printable
from parseshot.data.staging import replace_file
from parseshot.errors import UsageError
from parseshot.figures import RING, UNCERTAIN, ink_on, label_directions, part_colour
from parseshot.recognition.explain import FoundPart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 11.0  # inches of every figure
DPI = 192
INK, MUTED, RULE = "#2a2a24", "#625e50", "#ddd5c1"  # those of the pages
LEVELS, SIGNED, HEAT = "cividis", "PuOr_r", "plasma"  # colour maps: not negative, with a sign, over a grey photo
FALLBACKS = ("Noto Sans", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "Arial Unicode MS", "Segoe UI", "Segoe UI Emoji")
LOOK: dict[str, Any] = {
    "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9, "legend.fontsize": 8, "figure.titlesize": 10,
    "xtick.labelsize": 8, "ytick.labelsize": 8, "axes.titlepad": 4,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.linewidth": 0.7, "grid.color": RULE, "grid.linewidth": 0.6,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "legend.frameon": False,
    "figure.facecolor": "#ffffff", "savefig.facecolor": "#ffffff", "savefig.dpi": DPI,
    "text.parse_math": False, "text.usetex": False, "axes.formatter.use_mathtext": False,
    "svg.fonttype": "path", "svg.hashsalt": "parseshot", "pdf.fonttype": 42,
}  # fmt: skip
PHOTO = "photo"  # the gid of an image that is a photo
FORMATS = ("svg", "png", "pdf")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def styled(draw: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that draws in this look, whatever the user's own settings are."""

    @functools.wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        import matplotlib

        with matplotlib.rc_context(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a box is shown; the page has the name
            settings: Any = LOOK | {"font.family": _families()}
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(settings)
            return draw(*args, **kwargs)

    return drawn


@functools.cache
def _families() -> list[str]:
    """Matplotlib's own font first, then those of this machine that hold more scripts."""
    from matplotlib import font_manager

    there = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(name for name in FALLBACKS if name in there)]


def new_figure(height: float) -> "Figure":
    """An empty figure; to be called by `styled` functions only."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def blocks(figure: Any, rows: int, columns: int, **options: Any) -> np.ndarray:
    """Subfigures, always as an array [rows, columns]."""
    found: np.ndarray = figure.subfigures(rows, columns, squeeze=False, **options)
    return found


def short(name: str, most: int = 24) -> str:
    """A class name that fits over a photo; what is too long loses its middle, for names often differ at the end.

    >>> short("Black-footed_Albatross"), short("Audi S5 Convertible 2012", 18)
    ('Black-footed Albatross', 'Audi S5 Con…e 2012')
    """
    name, end = printable(name).replace("_", " "), most // 3
    return name if len(name) <= most else f"{name[: most - 1 - end].rstrip()}…{name[len(name) - end :].lstrip()}"


def bare(axes: "Axes") -> None:
    """No ticks, no frame."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def show_photo(
    axes: "Axes", pixels: np.ndarray, parts: Sequence[FoundPart] = (), *, grey: bool = False, line: float = 1.1
) -> None:
    """A photo (uint8 [H, W, 3]) and rings around its parts, dashed where they are unsure. Units are its pixels."""
    height, width = pixels.shape[:2]
    shown = np.asarray(Image.fromarray(pixels).convert("L").convert("RGB")) if grey else pixels
    axes.imshow(shown, gid=PHOTO)
    bare(axes)
    axes.spines[:].set(visible=True, color=RULE, linewidth=0.5)  # a white photo has an edge too
    radius = RING * min(height, width)
    for number, part in enumerate(parts):
        ring(axes, part.x, part.y, number, radius, line, certain=part.entropy < UNCERTAIN)
    directions = label_directions(parts, width, height)
    for number, (part, (across, down)) in enumerate(zip(parts, directions, strict=True)):  # above all rings
        part_number(axes, part.x + radius * across, part.y + radius * down, number, 3 + 2 * line)
    axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))


def ring(axes: "Axes", x: float, y: float, part: int, radius: float, line: float, *, certain: bool) -> None:
    from matplotlib.patches import Circle
    from matplotlib.patheffects import withStroke

    style: Any = "solid" if certain else (0, (2.2, 1.4))
    circle = Circle((x, y), radius, fill=False, edgecolor=part_colour(part), linewidth=line, linestyle=style, zorder=3)
    circle.set_path_effects([withStroke(linewidth=1.9 * line, foreground="#ffffff", alpha=0.9 if certain else 0.6)])
    axes.add_patch(circle)
    circle.set_clip_on(False)  # whole, at the edge of a photo too …
    circle.set_in_layout(False)  # … where it takes no room from the photos


def part_number(axes: "Axes", x: float, y: float, part: int, size: float = 6.5) -> None:
    """The number of a part on a disc of its colour."""
    colour = part_colour(part)
    disc = {"boxstyle": "circle,pad=0.16", "facecolor": colour, "edgecolor": "#ffffff", "linewidth": 0.5}
    axes.text(x, y, str(part + 1), fontsize=size, color=ink_on(colour), ha="center", va="center", bbox=disc, zorder=4)


def part_legend(figure: "Figure", parts: int, more: Sequence[Any] = ()) -> None:
    """The colours of the parts, below a figure."""
    from matplotlib.lines import Line2D

    marks: list[Any] = [
        Line2D([], [], marker="o", linestyle="", color=part_colour(part), label=f"part {part + 1}")
        for part in range(parts)
    ]
    figure.legend(handles=[*marks, *more], loc="outside lower center", ncols=len(marks) + len(more))


def write_numbers(axes: "Axes", values: np.ndarray, digits: int = 2) -> None:
    """The numbers of a small heat map that `axes` shows, in its cells."""
    image = axes.images[0]
    for (row, column), value in np.ndenumerate(values):
        red, green, blue, _ = image.to_rgba(np.array([value]))[0]
        colour = "#{:02x}{:02x}{:02x}".format(*(round(255 * float(level)) for level in (red, green, blue)))
        axes.text(column, row, f"{value:.{digits}f}", ha="center", va="center", fontsize=8, color=ink_on(colour))


def has_photos(figure: "Figure") -> bool:
    return any(image.get_gid() == PHOTO for axes in figure.axes for image in axes.images)


@styled
def to_bytes(figure: "Figure", kind: str, caption: str = "") -> bytes:
    """The figure as SVG, PDF or PNG, its caption inside of it; photos keep all their pixels where it is a drawing."""
    if kind not in FORMATS:
        raise UsageError(f"figures are written as {', '.join(FORMATS)}, not as {kind!r}")
    caption = printable(caption)
    about: dict[str, dict[str, str | None]] = {
        "svg": {"Date": None, "Creator": "parseshot", "Description": caption},
        "pdf": {"CreationDate": None, "Creator": "parseshot", "Producer": "matplotlib", "Subject": caption},
        "png": {"Software": "parseshot", "Description": caption},
    }
    for axes in figure.axes:
        for image in axes.images:
            if image.get_gid() == PHOTO:
                image.set_interpolation("auto" if kind == "png" else "none")
    written = io.BytesIO()
    figure.savefig(written, format=kind, metadata=about[kind])
    return written.getvalue()


def write_figure(figure: "Figure", path: Path, caption: str, kinds: Sequence[str] = ("svg", "png")) -> dict[str, bytes]:
    """Write `path` with the ending of each kind, whole or not at all; what was written, by kind."""
    written = {kind: to_bytes(figure, kind, caption) for kind in kinds}
    for kind, data in written.items():
        replace_file(path.with_name(f"{path.name}.{kind}"), data)
    return written


def data_uri(drawing: bytes, picture: bytes | None = None) -> str:
    """An SVG for a page; or a PNG as lossy WebP, which is smaller where there are photos."""
    if picture is None:
        return "data:image/svg+xml;base64," + base64.b64encode(drawing).decode("ascii")
    written = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").save(written, "WEBP", quality=86, method=4)
    return "data:image/webp;base64," + base64.b64encode(written.getvalue()).decode("ascii")
