"""Open a user's photo: upright, RGB, of bounded size; anything else is an error that names the file."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from parseshot.errors import DataError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # only these decoders are ever run
MAX_PIXELS = 50_000_000
MIN_SIDE = 16


def open_photo(path: Path | str) -> Image.Image:
    """The first frame of a picture, turned upright by its EXIF tag, as RGB on mid-grey where it is transparent."""
    path = Path(path)
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty")
        with Image.open(path, formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise DataError(f"{path} has {width}×{height} pixels, more than {MAX_PIXELS // 1_000_000} million")
            if min(width, height) < MIN_SIDE:
                raise DataError(f"{path} has {width}×{height} pixels; the shorter side must be at least {MIN_SIDE}")
            image.load()
            upright = ImageOps.exif_transpose(image)
            if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
                layer = upright.convert("RGBA")
                grey = Image.new("RGBA", layer.size, (128, 128, 128, 255))
                return Image.alpha_composite(grey, layer).convert("RGB")
            return upright.convert("RGB")
    except (FileNotFoundError, IsADirectoryError):
        raise DataError(f"{path} is not a file") from None
    except UnidentifiedImageError:
        raise DataError(f"{path} is not a picture in one of {', '.join(FORMATS)}") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be decoded: {error}") from None


def to_square(image: Image.Image, size: int) -> np.ndarray:
    """Resize to size×size, uint8 [size, size, 3], as the paper does (the aspect is not kept)."""
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))
