"""Open a photo: upright, sRGB, of bounded size; anything else is an error with a code that names the file.

Content decides, not the name: the first bytes are compared with an allow-list before any decoder runs, and the size is
checked from the header before any pixel is decoded. What was done to the photo on the way is kept as notes.
"""

import contextlib
import functools
import io
import math
import re
import threading
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from PIL import Image, ImageCms, ImageFile, ImageOps

from parseshot.errors import PhotoError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # only these decoders are ever run
SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"), "PNG": (".png", ".apng"), "WEBP": (".webp",),
    "GIF": (".gif",), "BMP": (".bmp", ".dib"), "TIFF": (".tif", ".tiff"),
}  # fmt: skip
PHOTO_SUFFIXES = frozenset(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
MAX_PIXELS = 50_000_000
MAX_BYTES = 200_000_000
MAX_PROFILE = 4_000_000  # bytes of an ICC profile that is still looked at …
PNG_PROFILE = 1_000_000  # … and of one in a PNG, where Pillow stops
MAX_EXIF = 65_536
ORIENTATION = 0x0112  # the EXIF tag
MIN_SIDE = 16
MAX_ASPECT = 4.0  # a longer photo is put on a square of grey instead of being squeezed
GREY = (128, 128, 128)  # behind transparent pixels and beside letterboxed photos

_HEADS = (
    (rb"\xff\xd8\xff", "JPEG"), (rb"\x89PNG\r\n\x1a\n", "PNG"), (rb"GIF8[79]a", "GIF"), (rb"RIFF....WEBP", "WEBP"),
    (rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0", "BMP"), (rb"II\*\0|MM\0\*", "TIFF"),
    (rb"....ftyp(heic|heix|hevc|heim|heis|mif1|msf1)", "HEIC"), (rb"....ftyp(avif|avis)", "AVIF"), (rb"%PDF", "PDF"),
    (rb"%!PS|\xc5\xd0\xd3\xc6", "EPS"), (rb"8BPS", "PSD"), (rb"SIMPLE  =", "FITS"),
    (rb"(\xef\xbb\xbf)?\s*<(\?xml|!DOCTYPE svg|svg)", "SVG or XML"), (rb"PK\x03\x04", "zip archive"),
)  # fmt: skip
_decoding = threading.Lock()  # Pillow's switch for truncated files and Python's list of warnings are global


class Photo(NamedTuple):
    """A decoded picture (RGB) and what was done to it on the way."""

    image: Image.Image
    notes: tuple[str, ...] = ()


class Square(NamedTuple):
    """What a model sees of a photo, and the region of the photo it shows (in its pixels, edges)."""

    pixels: np.ndarray  # uint8 [size, size, 3]
    left: float
    top: float
    width: float
    height: float

    def to_photo(self, x: float, y: float) -> tuple[float, float]:
        """From pixels of the square to pixels of the photo; the centre of the top left pixel is (0, 0) in both."""
        return to_photo(x, y, self[1:], len(self.pixels))

    def from_photo(self, points: np.ndarray) -> np.ndarray:
        """The other way round, for points [..., 2]."""
        return to_pixels(points, np.array(self[1:]), len(self.pixels))


def to_photo(x: float, y: float, region: Sequence[float], size: int) -> tuple[float, float]:
    """From pixels of the size×size square that shows a region (left, top, width, height) of a photo to its own."""
    left, top, width, height = region
    return (x + 0.5) * width / size + left - 0.5, (y + 0.5) * height / size + top - 0.5


def to_pixels(points: np.ndarray, region: np.ndarray, size: int) -> np.ndarray:
    """Points [..., 2] of a photo in the square of size×size pixels that shows its region [..., 4] (see `Square`)."""
    return (points + 0.5 - region[..., :2]) * (size / region[..., 2:]) - 0.5


def open_photo(
    source: Path | str | bytes | IO[bytes], name: str = "", *, lenient: bool = False, upright: bool = True
) -> Photo:
    """Decode the first frame of a picture from a path, bytes or an open file.

    name: what to call it in messages. lenient: accept a truncated file, with a note. upright: turn it by its EXIF tag;
    data sets whose annotations are in stored pixels want False.
    """
    name = name or (str(source) if isinstance(source, (str, Path)) else "the picture")
    data = read_bytes(source, name)
    kind = sniff(data)
    if kind not in FORMATS:
        raise PhotoError("E_FORMAT", f"{name} is {_what(kind)}; parseshot reads {', '.join(FORMATS)}{_hint(kind)}")
    try:
        return _open(data, kind, name, upright=upright)
    except PhotoError as error:
        if error.code != "E_TRUNCATED" or not lenient:
            raise
        photo = _open(data, kind, name, upright=upright, lenient=True)
        return Photo(photo.image, (*photo.notes, "cut off; what is missing is blank"))


def take_image(image: Image.Image, name: str = "the picture") -> Photo:
    """A picture that somebody has opened already, brought to the same form."""
    notes: list[str] = []
    _check_size(image, name, notes)
    try:
        return Photo(_bare(image, notes, upright=True), tuple(notes))
    except (OSError, ValueError) as error:  # it is decoded only now
        raise PhotoError("E_DECODE", f"{name} cannot be decoded: {error}") from None


def _open(data: bytes, kind: str, name: str, *, upright: bool, lenient: bool = False) -> Photo:
    notes: list[str] = []
    suffix = Path(name).suffix.lower()
    if suffix in PHOTO_SUFFIXES and suffix not in SUFFIXES[kind]:
        notes.append(f"named {suffix} but is a {kind}")
    try:
        with _decoding, warnings.catch_warnings(record=True) as caught, _truncation_allowed(lenient):
            warnings.simplefilter("always")
            image = _decode(data, kind, name, notes, upright=upright)
    except PhotoError:
        raise
    except MemoryError:
        raise PhotoError("E_TOO_LARGE", f"{name} does not fit into memory") from None
    except Image.DecompressionBombError:
        raise PhotoError("E_TOO_LARGE", f"{name} has more than {MAX_PIXELS // 1_000_000} million pixels") from None
    except Exception as error:  # decoders raise whatever they like on damaged files
        message = re.sub(r" ?<[^<>]* at 0x[0-9a-f]+>", "", str(error)) or type(error).__name__  # same words every time
        if "truncated" in message.lower() or "premature" in message.lower() or isinstance(error, EOFError):
            raise PhotoError("E_TRUNCATED", f"{name} is cut off ({message}); --lenient reads what is there") from None
        raise PhotoError("E_DECODE", f"{name} cannot be decoded: {message}") from None
    notes += sorted({str(warning.message) for warning in caught})
    return Photo(image, tuple(notes))


def sniff(data: bytes) -> str | None:
    """What the first bytes of a file say it is, or None."""
    return next((kind for pattern, kind in _HEADS if re.match(pattern, data[:64], re.DOTALL)), None)


def to_square(image: Image.Image, size: int, box: tuple[float, float, float, float] | None = None) -> Square:
    """Resize a photo, or the box (left, top, right, bottom) of it, to size×size as the paper does: aspect not kept.

    A whole photo longer than 4 : 1 is letterboxed instead.
    """
    region = shown_region(image.size, box)
    if box is None and _is_long(image.size):
        lying = image if image.width >= image.height else image.transpose(Image.Transpose.TRANSPOSE)
        pixels = _letterbox(lying, size)
        return Square(pixels if lying is image else np.ascontiguousarray(pixels.swapaxes(0, 1)), *region)
    return Square(_resize(image, size, (0, 0, *image.size) if box is None else box), *region)


def shown_region(
    size: tuple[int, int], box: tuple[float, float, float, float] | None
) -> tuple[float, float, float, float]:
    """What `to_square` shows of a photo of this width and height: left, top, width, height in its pixels."""
    if box is not None:
        return box[0], box[1], box[2] - box[0], box[3] - box[1]
    if not _is_long(size):
        return 0, 0, *size
    side = max(size)
    return (size[0] - side) / 2, (size[1] - side) / 2, side, side


def _is_long(size: tuple[int, int]) -> bool:
    return max(size) > MAX_ASPECT * min(size)


def _letterbox(image: Image.Image, size: int) -> np.ndarray:
    """A wide image in the middle of a grey square; never as large in memory as the square of its own width."""
    scale = image.width / size
    rows = math.ceil(image.height / scale)
    rows += (size - rows) % 2  # as much grey above as below
    band = image.resize((size, image.height), Image.Resampling.BILINEAR)
    margin = math.ceil((rows * scale - image.height) / 2)
    padded = Image.new("RGB", (size, image.height + 2 * margin), GREY)
    padded.paste(band, (0, margin))
    top = (padded.height - rows * scale) / 2
    canvas = Image.new("RGB", (size, size), GREY)
    middle = padded.resize((size, rows), Image.Resampling.BILINEAR, box=(0, top, size, padded.height - top))
    canvas.paste(middle, (0, (size - rows) // 2))
    return np.asarray(canvas)


def _resize(image: Image.Image, size: int, box: tuple[float, float, float, float]) -> np.ndarray:
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))


def read_bytes(source: Path | str | bytes | IO[bytes], name: str) -> bytes:
    """What a file holds; there is an end to it."""
    if isinstance(source, (str, Path)):
        path = Path(source)
        try:
            if path.exists() and not path.is_file():  # a directory, or a pipe that would never end
                raise PhotoError("E_MISSING", f"{name} is not a file")
            with path.open("rb") as stream:
                data = stream.read(MAX_BYTES + 1)
        except FileNotFoundError:
            raise PhotoError("E_MISSING", f"{name} does not exist") from None
        except OSError as error:
            raise PhotoError("E_UNREADABLE", f"{name} cannot be read: {error.strerror}") from None
        except ValueError as error:  # a NUL in the name
            raise PhotoError("E_MISSING", f"{name!r} is not a file name: {error}") from None
    else:
        data = source if isinstance(source, bytes) else source.read(MAX_BYTES + 1)
    if not data:
        raise PhotoError("E_EMPTY", f"{name} is empty")
    if len(data) > MAX_BYTES:
        raise PhotoError("E_TOO_LARGE", f"{name} is larger than {MAX_BYTES // 1_000_000} MB")
    return data


def _decode(data: bytes, kind: str, name: str, notes: list[str], *, upright: bool) -> Image.Image:
    with Image.open(io.BytesIO(_without_large_profile(data, kind, notes)), formats=[kind]) as image:
        _check_size(image, name, notes)
        if getattr(image, "is_animated", False):
            notes.append("several frames; the first is used")
        _check_exif(image.info.get("exif"), notes)
        if kind == "TIFF" and not upright:
            _keep_as_stored(image)
        image.load()
        return _bare(image, notes, upright=upright)


def _check_size(image: Image.Image, name: str, notes: list[str]) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise PhotoError(
            "E_TOO_LARGE", f"{name} has {width}×{height} pixels, more than {MAX_PIXELS // 1_000_000} million"
        )
    if min(width, height) < MIN_SIDE:
        raise PhotoError("E_TOO_SMALL", f"{name} has {width}×{height} pixels; each side needs {MIN_SIDE}")
    if max(width, height) > MAX_ASPECT * min(width, height):
        notes.append(f"very long ({width}×{height}); letterboxed when used whole")


def _bare(image: Image.Image, notes: list[str], *, upright: bool) -> Image.Image:
    """The picture as sRGB, without what else a file may hold."""
    converted = _to_srgb(_upright(image, notes) if upright else image, notes)
    converted = converted.copy() if converted is image else converted  # the opened file keeps its metadata
    converted.info = {}  # comments, EXIF and places must not travel on
    return converted


def _check_exif(exif: bytes | None, notes: list[str]) -> None:
    if exif and not re.match(rb"(Exif\0\0)?(II\*\0|MM\0\*)", exif):
        notes.append("EXIF ignored: damaged")
    elif exif and len(exif) > MAX_EXIF:
        notes.append(f"EXIF of {len(exif)} bytes; only its orientation is used")


def _keep_as_stored(image: Image.Image) -> None:
    """Keep Pillow from turning a TIFF while it loads."""
    tags = getattr(image, "tag_v2", {})
    if tags.get(ORIENTATION, 1) != 1:
        tags[ORIENTATION] = 1
        image.getexif()[ORIENTATION] = 1


def _without_large_profile(data: bytes, kind: str, notes: list[str]) -> bytes:
    """A PNG without a colour profile that inflates to megabytes, for which Pillow would refuse the picture."""
    if kind != "PNG":
        return data
    at = data.find(b"iCCP", 0, 1 << 16) - 4
    if at < 8:
        return data
    length = int.from_bytes(data[at : at + 4], "big")
    start = data.find(b"\0", at + 8, at + 8 + 81) + 2
    inflater = zlib.decompressobj()
    try:
        inflater.decompress(data[start : at + 8 + length], PNG_PROFILE)
    except zlib.error:
        return data
    if not inflater.unconsumed_tail:
        return data
    notes.append("colour profile ignored: too large")
    return data[:at] + data[at + 12 + length :]


def _upright(image: Image.Image, notes: list[str]) -> Image.Image:
    try:
        if image.getexif().get(ORIENTATION, 1) == 1:  # Pillow would copy it, which costs as much as decoding
            return image
        return ImageOps.exif_transpose(image)
    except Exception as error:  # damaged EXIF must not cost the photo
        notes.append(f"EXIF ignored: {error}")
        return image


def _to_srgb(image: Image.Image, notes: list[str]) -> Image.Image:
    """8-bit RGB: colour profiles applied, deeper pixels scaled, transparency on grey."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _scale_deep(image, notes)
    profile, alpha = image.info.get("icc_profile"), None
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        alpha = image.getchannel("A")
    plain = image if image.mode in ("RGB", "CMYK") else image.convert("RGB")
    colours = _apply_profile(plain, profile, notes) if profile else None
    colours = colours or (plain if plain.mode == "RGB" else plain.convert("RGB"))
    return colours if alpha is None else Image.composite(colours, Image.new("RGB", image.size, GREY), alpha)


def _scale_deep(image: Image.Image, notes: list[str]) -> Image.Image:
    values = np.asarray(image, dtype=np.float64)
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    if image.mode.startswith("I;16"):
        low, high, said = 0.0, 65535.0, "16-bit values scaled to 8"
    elif values.min() >= 0 and values.max() <= 1:
        low, high, said = 0.0, 1.0, "values from 0 to 1 scaled to 8 bits"
    elif values.min() >= 0 and values.max() <= 65535 and image.mode == "I":
        low, high, said = 0.0, 65535.0, "16-bit values scaled to 8"
    else:
        low, high = float(values.min()), float(values.max())
        said = f"values from {low:g} to {high:g} scaled to 8 bits"
    notes.append(said)
    levels = np.rint((values - low) * (255.0 / max(high - low, 1e-12))).astype(np.uint8)
    return Image.fromarray(levels).convert("RGB")


def _apply_profile(image: Image.Image, profile: bytes, notes: list[str]) -> Image.Image | None:
    if len(profile) > MAX_PROFILE:
        notes.append(f"colour profile of {len(profile)} bytes ignored")
        return None
    try:
        transform = _transform(profile, image.mode)
        return image if transform is None else ImageCms.applyTransform(image, transform)
    except Exception as error:  # a damaged profile must not cost the photo
        notes.append(f"colour profile ignored: {error}")
        return None


@functools.lru_cache(maxsize=16)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """From a profile to sRGB; None where it is sRGB already."""
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    if mode == "RGB" and "sRGB" in (ImageCms.getProfileDescription(source) or ""):
        return None
    return ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")


@contextlib.contextmanager
def _truncation_allowed(allowed: bool) -> Iterator[None]:
    ImageFile.LOAD_TRUNCATED_IMAGES = allowed
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = False


def _what(kind: str | None) -> str:
    return "not a picture" if kind is None else f"a {kind} file"


def _hint(kind: str | None) -> str:
    return "; save it as JPEG or PNG first" if kind in ("HEIC", "AVIF", "PSD", "PDF", "EPS", "SVG or XML") else ""
