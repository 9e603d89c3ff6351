"""Bad and unusual pictures: rows I1–I17 of the list of faults. Each file is made here; a test is named by its row."""

import functools
import io
import json
import multiprocessing
import os
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, WebPImagePlugin

from parseshot.data.photo import FORMATS, GREY, Photo, Square, open_photo, to_square
from parseshot.data.workers import Crew, Lost
from parseshot.errors import PhotoError

LOSSLESS = ("PNG", "WEBP", "TIFF")
D50 = np.array([0.9642, 1.0, 0.8249])
SRGB_TO_XYZ = np.array(
    [[0.4360747, 0.3850649, 0.1430804], [0.2225045, 0.7168786, 0.0606169], [0.0139322, 0.0971045, 0.7141733]]
)  # adapted to D50, the white of colour profiles


# Pictures and files -------------------------------------------------------------------------------------------------


def blocks(width: int = 128, height: int = 96, seed: int = 0) -> Image.Image:
    """Squares of 16 pixels in random colours: nothing about it is symmetric."""
    colours = np.random.default_rng(seed).integers(0, 256, (height // 16, width // 16, 3))
    return Image.fromarray(np.kron(colours, np.ones((16, 16, 1))).astype(np.uint8))


def saved(image: Image.Image, kind: str, **options) -> bytes:
    stream = io.BytesIO()
    if kind == "WEBP":
        options = {"lossless": True, **options}
    image.save(stream, kind, **options)
    return stream.getvalue()


def pixels(photo: Photo) -> np.ndarray:
    assert photo.image.mode == "RGB"
    return np.asarray(photo.image)


def refusal(source: Path | bytes, name: str = "", **options) -> PhotoError:
    with pytest.raises(PhotoError) as caught:
        open_photo(source, name, **options)
    return caught.value


def photo_or_error(source: bytes, name: str = "", **options) -> Photo | PhotoError:
    try:
        return open_photo(source, name, **options)
    except PhotoError as error:
        return error


def segment(marker: int, content: bytes) -> bytes:
    """A marker segment of a JPEG."""
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def with_segments(jpeg: bytes, *segments: bytes) -> bytes:
    return jpeg[:2] + b"".join(segments) + jpeg[2:]


def with_profile(jpeg: bytes, profile: bytes) -> bytes:
    parts = [profile[at : at + 65000] for at in range(0, len(profile), 65000)]
    heads = (b"ICC_PROFILE\0" + bytes([number, len(parts)]) for number in range(1, len(parts) + 1))
    return with_segments(jpeg, *(segment(0xE2, head + part) for head, part in zip(heads, parts, strict=True)))


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def with_chunk(png: bytes, kind: bytes, content: bytes) -> bytes:
    """A PNG with one more chunk, after the header."""
    return png[:33] + chunk(kind, content) + png[33:]


def png_header(width: int, height: int) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def icc(kind: bytes, space: bytes, connection: bytes, tags: dict[bytes, bytes]) -> bytes:
    """A colour profile (ICC version 2) of the given tags."""
    at, table, content = 128 + 4 + 12 * len(tags), b"", b""
    for name, tag in tags.items():
        table += struct.pack(">4sII", name, at + len(content), len(tag))
        content += tag + b"\0" * (-len(tag) % 4)
    white = b"".join(fixed(value) for value in D50)
    head = struct.pack(">4s4s4s4s4s12s4s", b"test", b"\x02\x10\0\0", kind, space, connection, b"\0" * 12, b"acsp")
    head = struct.pack(">I", at + len(content)) + head + b"\0" * 28 + white + b"\0" * 48
    return head + struct.pack(">I", len(tags)) + table + content


def fixed(value: float) -> bytes:
    return struct.pack(">i", round(value * 65536))


def wide_rgb() -> tuple[bytes, np.ndarray]:
    """The profile of a screen with the primaries of Adobe RGB and gamma 2.2, and its matrix to XYZ."""
    matrix = np.array([[0.60974, 0.20528, 0.14919], [0.31111, 0.62567, 0.06322], [0.01947, 0.06087, 0.74457]])
    tags = {b"wtpt": b"XYZ \0\0\0\0" + b"".join(fixed(value) for value in D50)}
    for name, column in zip((b"r", b"g", b"b"), matrix.T, strict=True):
        tags[name + b"XYZ"] = b"XYZ \0\0\0\0" + b"".join(fixed(value) for value in column)
        tags[name + b"TRC"] = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(2.2 * 256))
    return icc(b"mntr", b"RGB ", b"XYZ ", tags), matrix


def ink_colour(c: int, m: int, y: int, k: int) -> tuple[float, float, float]:
    """The L*a*b* colour that the printer of `press` makes of inks that are there (1) or not (0).

    Paper is white and all four inks together are black, so that nothing is left to black point compensation.
    """
    light, colourful = 100.0 - 24 * c - 28 * m - 8 * y - 40 * k, 1 - 0.8 * k
    return light, (35 * m - 20 * c - 2 * y) * colourful, (45 * y - 25 * c) * colourful


def press() -> bytes:
    """The profile of a printer with four inks: a table of the colours of their sixteen mixtures."""
    straight = bytes(range(256))
    mixtures = [(c, m, y, k) for c in (0, 1) for m in (0, 1) for y in (0, 1) for k in (0, 1)]
    table = b"".join(
        bytes([round(light * 2.55), round(a) + 128, round(b) + 128])
        for light, a, b in (ink_colour(*m) for m in mixtures)
    )
    identity = b"".join(fixed(float(row == column)) for row in range(3) for column in range(3))
    lut = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + identity + straight * 4 + table + straight * 3
    white = b"XYZ \0\0\0\0" + b"".join(fixed(value) for value in D50)
    return icc(b"prtr", b"CMYK", b"Lab ", {b"A2B0": lut, b"wtpt": white})


def xyz_to_lab(xyz: np.ndarray) -> np.ndarray:
    t = xyz / D50
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.stack((116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])), -1)


def lab(srgb: np.ndarray | list) -> np.ndarray:
    """L*a*b* of sRGB levels [..., 3] from 0 to 255."""
    v = np.asarray(srgb, dtype=float) / 255
    linear = np.where(v <= 0.04045, v / 12.92, ((v + 0.055) / 1.055) ** 2.4)
    return xyz_to_lab(linear @ SRGB_TO_XYZ.T)


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """The largest ΔE (CIE 1976) of two lists of L*a*b* colours."""
    return float(np.linalg.norm(one - other, axis=-1).max())


def patches(colours: list[tuple[int, ...]], mode: str) -> Image.Image:
    """Stripes of 32 pixels, one of each colour."""
    row = np.array(colours, dtype=np.uint8)[None].repeat(96, 0).repeat(32, 1)
    return Image.merge(mode, [Image.fromarray(np.ascontiguousarray(row[..., n])) for n in range(row.shape[-1])])


def centres(photo: Photo) -> np.ndarray:
    return pixels(photo)[16, 16::32]


def measured(script: str, *arguments: str) -> dict[str, float]:
    """What a script prints as JSON from a fresh process that may not take more than 1 GB of address space more.

    `peak()` is the most memory it has had, in bytes.
    """
    prelude = """
import json, resource, sys, time
import numpy as np
from PIL import Image
from parseshot.data.photo import open_photo, to_square
from parseshot.errors import PhotoError
def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
def peak():
    return status("VmHWM")
resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + (1 << 30),) * 2)
Image.init()
"""
    command = [sys.executable, "-c", prelude + script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc, as on Linux")


@functools.cache
def shipped_model():
    from parseshot.engine.model import Model  # here, so that worker processes that import this file do without torch

    with resources.as_file(resources.files("parseshot") / "models" / "birds-conv4") as path:
        return Model.from_pretrained(path)


def encoding(squares: list[Square]):
    import torch

    images = torch.from_numpy(np.stack([square.pixels for square in squares])).permute(0, 3, 1, 2).float() / 255
    return shipped_model().encode(images)


# I1–I7: whole files, by name and size -------------------------------------------------------------------------------


def test_i01_an_empty_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "owl.jpg"
    file.touch()
    error = refusal(file)
    assert error.code == "E_EMPTY"
    assert str(file) in str(error)
    assert refusal(b"", "owl.png").code == "E_EMPTY"
    assert str(refusal(b"", "owl.png")) == "owl.png is empty"
    assert refusal(io.BytesIO(b""), "owl.png").code == "E_EMPTY"


def test_i01_what_is_no_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    for path in (tmp_path / "pipe.jpg", tmp_path, tmp_path / "none.jpg", "owl\0.jpg"):
        assert refusal(path).code == "E_MISSING"


@pytest.mark.parametrize("progressive", [False, True])
def test_i02_a_truncated_jpeg_is_refused_and_read_only_when_asked(progressive: bool) -> None:
    whole = saved(blocks(), "JPEG", quality=95, progressive=progressive)
    cut = whole[: len(whole) * 3 // 4]
    error = refusal(cut, "owl.jpg")
    assert error.code == "E_TRUNCATED"
    assert "owl.jpg" in str(error)
    photo = open_photo(cut, "owl.jpg", lenient=True)
    assert [note for note in photo.notes if "cut off" in note] == list(photo.notes)
    assert photo.image.size == (128, 96)
    if not progressive:
        assert np.abs(pixels(photo)[:16].astype(int) - np.asarray(blocks())[:16]).mean() < 10
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    assert refusal(cut).code == "E_TRUNCATED"
    assert open_photo(whole, lenient=True).notes == ()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_i02_what_is_missing_is_as_the_note_says(kind: str) -> None:
    """The note says "what is missing is grey"; the last row is missing here."""
    options = {"JPEG": {"quality": 95, "subsampling": 0}}.get(kind, {})
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (96, 128, 3), dtype=np.uint8))
    whole = saved(image, kind, **options)
    photo = open_photo(whole[: len(whole) * 3 // 4], lenient=True)
    assert any("cut off" in note for note in photo.notes)
    if any("grey" in note for note in photo.notes):
        assert np.abs(pixels(photo)[-1].astype(int) - GREY).max() <= 2


@pytest.mark.parametrize("kind", FORMATS)
def test_i02_every_cut_is_refused_in_plain_words_that_are_the_same_each_time(kind: str) -> None:
    whole = saved(blocks(64, 48), kind)
    for length in (3, 10, 14, 20, 40, 60, len(whole) // 2, len(whole) * 9 // 10):
        error, again = (refusal(bytes(bytearray(whole[:length])), "owl.jpg") for _ in range(2))
        assert error.code in ("E_TRUNCATED", "E_DECODE", "E_FORMAT")
        assert "owl.jpg" in str(error)
        assert " at 0x" not in str(error), "an address in memory makes two equal runs write different packs"
        assert str(error) == str(again)


def test_i02_one_threads_lenience_is_not_anothers() -> None:
    """While one thread reads cut files leniently, others still refuse them."""
    whole = saved(Image.effect_noise((1500, 1500), 80), "JPEG", quality=90)
    cut, results, stop = whole[: len(whole) * 9 // 10], [], threading.Event()

    def lenient() -> None:
        while not stop.is_set():
            open_photo(cut, lenient=True)

    reader = threading.Thread(target=lenient)
    reader.start()
    try:
        until = time.monotonic() + 0.7
        while time.monotonic() < until:
            results.append(photo_or_error(cut))
    finally:
        stop.set()
        reader.join()
    assert {getattr(result, "code", "accepted") for result in results} == {"E_TRUNCATED"}


def test_i03_a_junk_tail_is_not_in_the_picture_or_its_copy() -> None:
    clean = saved(blocks(), "JPEG", quality=95)
    page = b"<html><script>alert(1)</script></html>"
    for dirty in (clean + page, with_segments(clean, segment(0xFE, page)), with_segments(clean, segment(0xED, page))):
        photo = open_photo(dirty, "owl.jpg")
        assert np.array_equal(pixels(photo), pixels(open_photo(clean)))
        for kind in FORMATS:
            assert b"<script>" not in saved(photo.image, kind), f"kept in a copy saved as {kind}"
    png = saved(blocks(), "PNG")
    assert np.array_equal(pixels(open_photo(png + page)), np.asarray(blocks()))


def test_i04_content_decides_not_the_name(tmp_path: Path) -> None:
    (tmp_path / "notes.jpg").write_text("The owl sat on the branch and looked at us.\n" * 10)
    error = refusal(tmp_path / "notes.jpg")
    assert error.code == "E_FORMAT"
    assert "notes.jpg is not a picture" in str(error)
    (tmp_path / "owl.png").write_bytes(saved(blocks(), "JPEG", quality=95))
    photo = open_photo(tmp_path / "owl.png")
    assert photo.notes == ("named .png but is a JPEG",)
    assert np.abs(pixels(photo).astype(int) - np.asarray(blocks())).mean() < 10
    (tmp_path / "owl.JPEG").write_bytes(saved(blocks(), "JPEG"))
    assert open_photo(tmp_path / "owl.JPEG").notes == ()
    (tmp_path / "owl.dat").write_bytes(saved(blocks(), "PNG"))
    assert np.array_equal(pixels(open_photo(tmp_path / "owl.dat")), np.asarray(blocks()))


def test_i04_text_that_begins_like_a_bitmap_is_still_text() -> None:
    error = refusal(b"BMW makes cars, and this is a text about them.\n" * 10, "cars.jpg")
    assert error.code == "E_FORMAT"
    assert "cut off" not in str(error)


FOREIGN = {
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="100" height="100"/>',
    "SVG with a declaration": b'\xef\xbb\xbf<?xml version="1.0"?><svg/>',
    "PDF": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n",
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n",
    "EPS with a preview": b"\xc5\xd0\xd3\xc6" + bytes(28),
    "FITS": b"SIMPLE  =                    T / conforms to FITS standard".ljust(2880),
    "PSD": b"8BPS\0\x01" + bytes(6) + struct.pack(">HIIHH", 3, 100, 100, 8, 3),
    "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(40),
    "PPM": b"P6\n100 100\n255\n" + bytes(30000),
    "icon": b"\0\0\x01\0\x01\0" + bytes(40),
    "zip": b"PK\x03\x04" + bytes(40),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_i05_other_formats_never_reach_a_decoder(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr(Image, "open", lambda *arguments, **options: opened.append(arguments))
    error = refusal(FOREIGN[kind], "owl.jpg")
    assert error.code == "E_FORMAT"
    assert "owl.jpg" in str(error)
    assert "JPEG, PNG" in str(error)
    assert opened == []


def test_i05_only_the_decoder_of_the_first_bytes_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, original = [], Image.open
    monkeypatch.setattr(
        Image, "open", lambda *a, **options: asked.append(options["formats"]) or original(*a, **options)
    )
    for kind in FORMATS:
        assert open_photo(saved(blocks(), kind)).image.size == (128, 96)
    assert asked == [[kind] for kind in FORMATS]


def gif_header(width: int, height: int) -> bytes:
    frame = b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x08\x01\0\0;"
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + frame


def tiff_header(width: int, height: int) -> bytes:
    tags = ((256, width), (257, height), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, height), (279, 9))
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + bytes(4)


def bmp_header(width: int, height: int) -> bytes:
    return b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)


def webp_header(width: int, height: int) -> bytes:
    size = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    frame = bytes(6) + struct.pack("<I", 31)[:3] * 2 + bytes(4) + saved(blocks(32, 32), "WEBP")[12:]
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + size + b"ANIM" + struct.pack("<IIH", 6, 0, 0)
    body += b"ANMF" + struct.pack("<I", len(frame)) + frame
    return b"RIFF" + struct.pack("<I", len(body)) + body


def jpeg_header(width: int, height: int) -> bytes:
    whole = saved(blocks(), "JPEG")
    at = whole.index(b"\xff\xc0") + 5
    return whole[:at] + struct.pack(">HH", height, width) + whole[at + 4 :]


BOMBS = {
    "PNG of 10 000 million pixels": png_header(100_000, 100_000),
    "PNG just above the limit": png_header(10_000, 5_001),
    "JPEG": jpeg_header(65_000, 65_000),
    "GIF": gif_header(65_535, 65_535),
    "TIFF": tiff_header(100_000, 100_000),
    "BMP": bmp_header(100_000, 100_000),
    "WebP": webp_header(16_000, 16_000),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_i06_a_giant_is_refused_from_its_header(kind: str) -> None:
    assert len(BOMBS[kind]) < 10_000
    error = refusal(BOMBS[kind], "big.png")
    assert error.code == "E_TOO_LARGE"
    assert "big.png" in str(error)
    assert "50 million" in str(error)
    started = time.thread_time()
    refusal(BOMBS[kind])
    assert time.thread_time() - started < 0.05


@linux
def test_i06_giants_take_no_memory(tmp_path: Path) -> None:
    for number, bomb in enumerate(BOMBS.values()):
        (tmp_path / f"{number}.bin").write_bytes(bomb)
    script = """
from pathlib import Path
from typing import Any
before, codes = peak(), []
for file in sorted(Path(sys.argv[1]).iterdir()):
    try:
        open_photo(file)
    except PhotoError as error:
        codes.append(error.code)
print(json.dumps({"codes": codes, "growth": peak() - before}))
"""
    told = measured(script, str(tmp_path))
    assert told["codes"] == ["E_TOO_LARGE"] * len(BOMBS)
    assert told["growth"] < 50_000_000


def test_i06_the_limit_itself_is_allowed() -> None:
    """A header of exactly 50 million pixels passes the check of the size; its pixels are not there."""
    assert refusal(png_header(10_000, 5_000)).code == "E_TRUNCATED"


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (1, 20_000), (20_000, 1), (15, 16), (16, 15)])
def test_i07_tiny_pictures_are_refused(size: tuple[int, int]) -> None:
    error = refusal(saved(Image.new("RGB", size), "PNG"), "dot.png")
    assert error.code == "E_TOO_SMALL"
    assert f"dot.png has {size[0]}×{size[1]} pixels; each side needs 16" in str(error)


def test_i07_long_pictures_are_noted_and_square_ones_are_not() -> None:
    assert open_photo(saved(Image.new("RGB", (16, 16)), "PNG")).notes == ()
    assert open_photo(saved(Image.new("RGB", (64, 16)), "PNG")).notes == ()
    [note] = open_photo(saved(Image.new("RGB", (16, 65)), "PNG")).notes
    assert "16×65" in note
    assert "letterbox" in note


def test_i07_a_long_picture_lies_in_the_middle_of_grey() -> None:
    tall = to_square(Image.new("RGB", (16, 160)), 80).pixels
    assert (tall[:, 37:43] == 0).all()  # the photo fills columns 36 to 43; its edges are blurred by the resizing
    assert (tall[:, :35] == GREY[0]).all()
    assert (tall[:, 45:] == GREY[0]).all()
    assert (tall[:, [35, 44]] > 100).all()
    assert (tall[:, [36, 43]] < 28).all()
    wide = to_square(Image.new("RGB", (160, 16)), 80).pixels
    assert np.array_equal(wide, tall.transpose(1, 0, 2))
    assert (to_square(Image.new("RGB", (40, 160)), 80).pixels == 0).all(), "up to 4 : 1 the whole square is photo"


@linux
def test_i07_a_very_long_picture_takes_little_memory() -> None:
    script = """
image = Image.new("RGB", (16, 20_000), (255, 0, 0))
before = peak()
square = to_square(image, 84)
print(json.dumps({"growth": peak() - before, "shape": square.pixels.shape, "side": [square.width, square.height]}))
"""
    told = measured(script)
    assert told["shape"] == [84, 84, 3]
    assert told["side"] == [20_000, 20_000]
    assert told["growth"] < 50_000_000


@pytest.mark.parametrize(
    ("size", "box"),
    [((100, 60), None), ((61, 300), None), ((333, 21), None), ((100, 60), (10.5, 3.0, 90.0, 33.25)), ((84, 84), None)],
)
def test_i07_to_photo_and_from_photo_are_inverse(
    size: tuple[int, int], box: tuple[float, float, float, float] | None
) -> None:
    square = to_square(Image.new("RGB", size), 84, box)
    points = np.random.default_rng(0).uniform(-20, 350, (50, 2))
    back = np.array([square.to_photo(*point) for point in square.from_photo(points)])
    np.testing.assert_allclose(back, points, atol=1e-9)
    forth = square.from_photo(np.array([square.to_photo(*point) for point in points]))
    np.testing.assert_allclose(forth, points, atol=1e-9)


@pytest.mark.parametrize(("size", "box"), [((320, 22), None), ((21, 320), None), ((200, 160), (20, 10, 180, 130))])
def test_i07_a_dot_is_where_from_photo_says(size: tuple[int, int], box: tuple[int, int, int, int] | None) -> None:
    image = Image.new("RGB", size)
    x, y = size[0] // 2 + 5, size[1] // 2 - 4
    image.putpixel((x, y), (0, 255, 0))
    square = to_square(image, 320, box)
    bright = square.pixels[..., 1].astype(float) - square.pixels[..., 0]  # neither black nor grey has any
    rows, columns = np.indices(bright.shape)
    found = np.array([(columns * bright).sum(), (rows * bright).sum()]) / bright.sum()
    np.testing.assert_allclose(found, square.from_photo(np.array([x, y])), atol=0.6)
    np.testing.assert_allclose(square.to_photo(*found), (x, y), atol=0.4)


# I8–I10: colours ----------------------------------------------------------------------------------------------------

INKS = [
    (0, 0, 0, 0),
    (255, 0, 0, 0),
    (0, 255, 0, 0),
    (0, 0, 255, 0),
    (0, 0, 0, 255),
    (200, 50, 20, 30),
    (30, 90, 160, 60),
]


def plain_colour(c: int, m: int, y: int, k: int) -> tuple[float, ...]:
    """The reference without a profile: ink takes away light, R = 255 (1 − C)(1 − K)."""
    return tuple((255 - ink) * (255 - k) / 255 for ink in (c, m, y))


def ycck(colours: list[tuple[int, ...]]) -> bytes:
    """A JPEG as Adobe writes it: the inks C, M, Y as luma and chroma, K inverted.

    Pillow writes what it is given inverted and marks it as CMYK; so it is given the inverse, and the mark is changed.
    """
    inks = np.array(colours, dtype=np.uint8)
    luma = np.asarray(Image.fromarray(inks[None, :, :3]).convert("YCbCr"))[0]
    stored = [(*(255 - int(v) for v in one), int(k)) for one, k in zip(luma, inks[:, 3], strict=True)]
    data = bytearray(saved(patches(stored, "CMYK"), "JPEG", quality=100))
    mark = data.index(b"Adobe")
    assert data[mark + 11] == 0
    data[mark + 11] = 2
    return bytes(data)


@pytest.mark.parametrize("kind", ["CMYK", "YCCK"])
def test_i08_inks_become_the_colours_they_print(kind: str) -> None:
    data = saved(patches(INKS, "CMYK"), "JPEG", quality=100) if kind == "CMYK" else ycck(INKS)
    assert Image.open(io.BytesIO(data)).mode == "CMYK"
    expected = lab([plain_colour(*inks) for inks in INKS])
    assert difference(lab(centres(open_photo(data))), expected) < 5


@pytest.mark.parametrize("kind", ["CMYK", "YCCK"])
def test_i08_a_printers_profile_is_applied(kind: str) -> None:
    """The reference is the table in the profile."""
    mixtures = [(c, m, y, k) for k in (0, 1) for c, m, y in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1))]
    inks = [tuple(255 * ink for ink in mixture) for mixture in mixtures]
    data = saved(patches(inks, "CMYK"), "JPEG", quality=100) if kind == "CMYK" else ycck(inks)
    photo = open_photo(with_profile(data, press()))
    assert photo.notes == ()
    expected = np.array([ink_colour(*mixture) for mixture in mixtures])
    assert difference(lab(centres(photo)), expected) < 5
    assert difference(lab([plain_colour(*one) for one in inks]), expected) > 20, "the profile says something else"


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_i08_a_screens_profile_is_applied_in_every_mode(mode: str) -> None:
    profile, matrix = wide_rgb()
    colours = [(200, 60, 60), (110, 150, 90), (70, 80, 200), (128, 128, 128), (230, 220, 200)]
    image = patches(colours, "RGB")
    image = image.quantize(16, dither=Image.Dither.NONE) if mode == "P" else image.convert(mode)
    photo = open_photo(saved(image, "PNG", icc_profile=profile))
    expected = xyz_to_lab((np.array(colours) / 255) ** 2.2 @ matrix.T)
    assert difference(lab(colours), expected) > 10, "the profile says something else"
    assert difference(lab(centres(photo)), expected) < 5


def ramp(steps: int, top: float, dtype: str, height: int = 16) -> np.ndarray:
    return np.linspace(0, top, steps).round(6 if dtype == "<f4" else 0).astype(dtype)[None].repeat(height, 0)


def deep_png(values: np.ndarray) -> bytes:
    """A PNG of 16 bits a channel: [H, W] is grey, [H, W, 3] is RGB."""
    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, 16, 0 if values.ndim == 2 else 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def test_i09_deep_values_are_scaled_not_clipped() -> None:
    grey = ramp(64, 65535, "u2")
    files = {
        "16-bit grey PNG": deep_png(grey),
        "16-bit RGB PNG": deep_png(np.stack((grey,) * 3, -1)),
        "I;16 TIFF": saved(Image.fromarray(grey), "TIFF"),
        "I TIFF": saved(Image.fromarray(ramp(64, 65535, "<i4")), "TIFF"),
        "I TIFF of large values": saved(Image.fromarray(ramp(64, 2_000_000_000, "<i4")), "TIFF"),
        "F TIFF from 0 to 1": saved(Image.fromarray(ramp(64, 1.0, "<f4")), "TIFF"),
        "F TIFF of large values": saved(Image.fromarray(ramp(64, 1e6, "<f4")), "TIFF"),
        "F TIFF below zero": saved(Image.fromarray(ramp(64, 1e6, "<f4") - 1e3), "TIFF"),
    }
    expected = np.linspace(0, 255, 64)
    for name, data in files.items():
        shown = pixels(open_photo(data)).astype(int)
        assert (np.diff(shown[0, :, 0]) > 0).all(), name
        np.testing.assert_allclose(
            shown, np.broadcast_to(expected[None, :, None], shown.shape), atol=1.01, err_msg=name
        )


def test_i09_all_256_levels_of_16_bits_stay_apart_and_the_scaling_is_noted() -> None:
    values = (np.arange(256, dtype=np.uint16) * 257)[None].repeat(16, 0)
    photo = open_photo(deep_png(values))
    assert np.array_equal(pixels(photo)[3, :, 1], np.arange(256))
    assert photo.notes == ("very long (256×16); letterboxed when used whole", "16-bit values scaled to 8")


def test_i09_a_dark_16_bit_picture_stays_dark_and_nan_is_black() -> None:
    assert pixels(open_photo(deep_png(np.full((16, 16), 300, dtype=np.uint16)))).max() == 1
    values = np.full((16, 16), 0.5, dtype=np.float32)
    values[0, :3] = np.nan, np.inf, -np.inf
    shown = pixels(open_photo(saved(Image.fromarray(values), "TIFF")))
    assert (shown[0, :3] == 0).all()
    assert (shown[1] == 128).all()


def on_grey(colour: tuple[int, ...], alpha: float) -> np.ndarray:
    return np.array(colour) * alpha + np.array(GREY) * (1 - alpha)


def test_i10_transparent_pixels_lie_on_grey() -> None:
    colours, alphas = [(255, 0, 0), (0, 0, 255), (250, 240, 10)], [0, 51, 255]
    expected = np.array([on_grey(colour, alpha / 255) for colour, alpha in zip(colours, alphas, strict=True)])
    rgba = patches([(*colour, alpha) for colour, alpha in zip(colours, alphas, strict=True)], "RGBA")
    numbers = np.array([0, 1, 2], dtype=np.uint8)[None].repeat(32, 0).repeat(32, 1)
    palette = Image.fromarray(numbers).convert("P")
    palette.putpalette([level for colour in colours for level in colour])
    files = {
        "RGBA PNG": saved(rgba, "PNG"),
        "RGBA WebP": saved(rgba, "WEBP", exact=True),
        "RGBA TIFF": saved(rgba, "TIFF"),
        "palette PNG": saved(palette, "PNG", transparency=bytes(alphas)),
    }
    for name, data in files.items():
        one, two = pixels(open_photo(data)), pixels(open_photo(data))
        np.testing.assert_allclose(one[16, 16::32], expected, atol=1, err_msg=name)
        assert np.array_equal(one, two)


def test_i10_grey_with_alpha_and_single_transparent_colours() -> None:
    grey = patches([(255, 0), (255, 51), (10, 255)], "LA")
    shown = centres(open_photo(saved(grey, "PNG")))
    np.testing.assert_allclose(shown, [(v,) * 3 for v in (128, 128 * 0.8 + 255 * 0.2, 10)], atol=1)
    keyed = patches([(255, 0, 0), (0, 255, 0), (0, 0, 255)], "RGB")
    shown = centres(open_photo(saved(keyed, "PNG", transparency=(0, 255, 0))))
    assert shown.tolist() == [[255, 0, 0], list(GREY), [0, 0, 255]]
    numbers = Image.fromarray(np.array([0, 1, 2], dtype=np.uint8)[None].repeat(32, 0).repeat(32, 1)).convert("P")
    numbers.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    shown = centres(open_photo(saved(numbers, "GIF", transparency=1)))
    assert shown.tolist() == [[255, 0, 0], list(GREY), [0, 0, 255]]


# I11–I14: metadata, frames and decoders -----------------------------------------------------------------------------

TURNS = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,  # "turn me clockwise": stored turned the other way
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def as_stored(orientation: int) -> Image.Image:
    turn = TURNS[orientation]
    return blocks() if turn is None else blocks().transpose(turn)


def turned(orientation: int, kind: str, **options) -> bytes:
    """The upright picture as a camera stores it with this EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(as_stored(orientation), kind, exif=exif, **options)


@pytest.mark.parametrize("kind", LOSSLESS)
def test_i11_eight_orientations_give_the_same_upright_pixels(kind: str) -> None:
    for orientation in TURNS:
        photo = open_photo(turned(orientation, kind))
        assert np.array_equal(pixels(photo), np.asarray(blocks())), orientation


def test_i11_eight_orientations_of_a_jpeg_differ_by_its_noise_only() -> None:
    for orientation in TURNS:
        shown = pixels(open_photo(turned(orientation, "JPEG", quality=100, subsampling=0))).astype(int)
        assert shown.shape == (96, 128, 3)
        assert np.abs(shown - np.asarray(blocks())).max() <= 6, orientation


@pytest.mark.parametrize("kind", LOSSLESS)
def test_i11_stored_pixels_are_left_alone_when_asked(kind: str) -> None:
    for orientation in TURNS:
        photo = open_photo(turned(orientation, kind), upright=False)
        assert np.array_equal(pixels(photo), np.asarray(as_stored(orientation))), orientation


def test_i11_the_parts_are_found_at_the_same_pixels() -> None:
    squares = [to_square(open_photo(turned(orientation, "PNG")).image, 84) for orientation in TURNS]
    found = encoding(squares)["mu"].double().numpy() * 84 / shipped_model().grid  # [8, S, K, 2]
    shown = [
        [square.to_photo(*point) for point in points.reshape(-1, 2)]
        for square, points in zip(squares, found, strict=True)
    ]
    assert np.ptp(np.array(shown[0]), axis=0).min() > 1, "the parts are not all in one place"
    np.testing.assert_allclose(np.array(shown), np.array(shown[:1]).repeat(8, 0), atol=0.05)


def exif_of(*entries: tuple[int, int, int, int], tail: bytes = b"") -> bytes:
    """An EXIF block with these (tag, type, count, value) entries."""
    table = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + table + bytes(4) + tail


CORRUPT_EXIF = {
    "garbage": b"\xff" * 100,
    "a directory that runs past the end": b"II*\0\x08\0\0\0\xff\xff" + b"\xff" * 100,
    "a value larger than the file": exif_of((0x010F, 2, 0x7FFFFFFF, 8), tail=bytes(60_000)),
}


@pytest.mark.parametrize("kind", CORRUPT_EXIF)
def test_i12_corrupt_exif_costs_a_note_not_the_photo(kind: str) -> None:
    clean = saved(blocks(), "JPEG", quality=95)
    photo = open_photo(with_segments(clean, segment(0xE1, b"Exif\0\0" + CORRUPT_EXIF[kind])), "owl.jpg")
    assert np.array_equal(pixels(photo), pixels(open_photo(clean)))
    assert len(photo.notes) == 1


def test_i12_exif_that_points_at_itself_or_is_empty_is_harmless() -> None:
    clean = saved(blocks(), "JPEG", quality=95)
    for block in (exif_of((0x8769, 4, 1, 8)), exif_of((0x8825, 4, 1, 8), (0xA005, 4, 1, 8)), b""):
        started = time.thread_time()
        photo = open_photo(with_segments(clean, segment(0xE1, b"Exif\0\0" + block)))
        assert time.thread_time() - started < 1
        assert np.array_equal(pixels(photo), pixels(open_photo(clean)))


def test_i12_huge_exif_is_ignored_with_a_note() -> None:
    block = b"II*\0\x08\0\0\0" + b"\xff" * 10_000_000
    started = time.thread_time()
    photo = open_photo(with_chunk(saved(blocks(), "PNG"), b"eXIf", block))
    assert time.thread_time() - started < 2
    assert np.array_equal(pixels(photo), np.asarray(blocks()))
    assert len(photo.notes) == 1


def test_i12_orientation_survives_nonsense_beside_it() -> None:
    block = exif_of((0x0112, 3, 1, 6), (0x9286, 7, 0x7FFFFFFF, 8))
    data = with_chunk(saved(as_stored(6), "PNG"), b"eXIf", block)
    assert np.array_equal(pixels(open_photo(data)), np.asarray(blocks()))


BAD_PROFILES = {
    "junk": b"junk" * 100,
    "a header and nothing else": struct.pack(">I", 128) + bytes(32) + b"acsp" + bytes(88),
    "5 MB": b"x" * 5_000_000,
    "cut off": press()[:600],
    "a printer's, for a picture in RGB": press(),
}


@pytest.mark.parametrize("kind", BAD_PROFILES)
def test_i12_a_bad_colour_profile_costs_a_note_not_the_photo(kind: str) -> None:
    clean = saved(blocks(), "JPEG", quality=95)
    photo = open_photo(with_profile(clean, BAD_PROFILES[kind]), "owl.jpg")
    assert np.array_equal(pixels(photo), pixels(open_photo(clean)))
    [note] = photo.notes
    assert "profile" in note
    assert "ignored" in note


@pytest.mark.parametrize("size", [2_000_000, 100_000_000])
def test_i12_a_profile_that_inflates_to_a_bomb_is_ignored_with_a_note(size: int) -> None:
    bomb = b"icc\0\0" + zlib.compress(bytes(size), 9)
    photo = open_photo(with_chunk(saved(blocks(), "PNG"), b"iCCP", bomb), "owl.png")
    assert np.array_equal(pixels(photo), np.asarray(blocks()))
    assert len(photo.notes) == 1


def test_i12_a_text_that_inflates_to_a_bomb_is_ignored_or_refused() -> None:
    bomb = b"Comment\0\0" + zlib.compress(b"a" * 100_000_000, 9)
    result = photo_or_error(with_chunk(saved(blocks(), "PNG"), b"zTXt", bomb), "owl.png")
    if isinstance(result, PhotoError):
        assert result.code == "E_DECODE"
        assert "owl.png" in str(result)
    else:
        assert np.array_equal(pixels(result), np.asarray(blocks()))


@pytest.mark.parametrize("kind", FORMATS)
def test_i12_where_and_by_whom_is_not_in_a_copy(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F], exif[0x013B] = 6, "SECRET camera", "SECRET artist"
    exif.get_ifd(0x8825).update({1: "N", 2: (47.0, 22.0, 11.0), 0x1D: "SECRET day"})
    data = saved(as_stored(6), "JPEG", quality=95, exif=exif, comment=b"SECRET comment", xmp=b"<x>SECRET xmp</x>")
    assert data.count(b"SECRET") >= 4
    for upright in (True, False):
        photo = open_photo(data, upright=upright)
        assert photo.image.size == ((128, 96) if upright else (96, 128))
        copy = saved(photo.image, kind)
        assert b"SECRET" not in copy
        assert not Image.open(io.BytesIO(copy)).getexif().get_ifd(0x8825)


def several_frames(kind: str) -> bytes:
    frames = [blocks(64, 48, seed) for seed in range(3)]
    if kind == "GIF":  # few colours, so that nothing is lost
        frames = [frame.quantize(64, dither=Image.Dither.NONE) for frame in frames]
    options = {} if kind == "TIFF" else {"duration": 100}
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    with Image.open(io.BytesIO(data)) as image:
        assert image.n_frames == 3
    return data


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_i13_only_the_first_frame_is_decoded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, decoded = several_frames(kind), []
    get_decoder, get_next = Image._getdecoder, WebPImagePlugin.WebPImageFile._get_next
    monkeypatch.setattr(Image, "_getdecoder", lambda *a, **k: decoded.append(a[1]) or get_decoder(*a, **k))
    monkeypatch.setattr(
        WebPImagePlugin.WebPImageFile, "_get_next", lambda self: decoded.append("next") or get_next(self)
    )
    photo = open_photo(data)
    monkeypatch.undo()
    assert len([name for name in decoded if kind != "WEBP" or name == "next"]) == 1
    assert np.array_equal(pixels(photo), np.asarray(blocks(64, 48, 0)))
    assert photo.notes == ("several frames; the first is used",)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_i13_damage_in_a_later_frame_does_not_matter(kind: str) -> None:
    data = bytearray(several_frames(kind))
    if kind == "PNG":
        at = data.index(b"fdAT")
        data[at + 8 : at + 60] = b"\xff" * 52
    else:
        data[-4000:] = b"\xff" * 4000
    photo = open_photo(bytes(data))
    assert np.array_equal(pixels(photo), np.asarray(blocks(64, 48, 0)))


def test_i13_one_frame_is_not_noted() -> None:
    for kind in FORMATS:
        assert open_photo(saved(blocks(), kind)).notes == ()


def test_i14_progressive_jpegs_decode_like_others() -> None:
    plain, progressive = (saved(blocks(), "JPEG", quality=95, progressive=one) for one in (False, True))
    assert b"\xff\xc2" in progressive
    assert np.array_equal(pixels(open_photo(progressive)), pixels(open_photo(plain)))


def arithmetic(scan: bytes) -> bytes:
    """A grey JPEG of 32×32 pixels with arithmetic coding."""
    head = segment(0xDB, b"\0" + b"\x10" * 64) + segment(0xC9, struct.pack(">BHHB", 8, 32, 32, 1) + b"\x01\x11\0")
    head += segment(0xCC, b"\0\x10\x10\x05") + segment(0xDA, b"\x01\x01\0\0\x3f\0")
    return b"\xff\xd8" + head + scan + b"\xff\xd9"


def test_i14_arithmetic_coding_decodes_or_is_refused() -> None:
    """The scan says: no block differs from mid-grey."""
    result = photo_or_error(arithmetic(b"\x1e\xc3"), "owl.jpg")
    if isinstance(result, PhotoError):
        assert result.code in ("E_FORMAT", "E_DECODE")
        assert "owl.jpg" in str(result)
    else:
        assert (pixels(result) == 128).all()


@pytest.mark.parametrize(("marker", "depth"), [(0xC1, 12), (0xC0, 16), (0xC3, 8), (0xC5, 8), (0xCB, 8)])
def test_i14_other_kinds_of_jpeg_are_refused(marker: int, depth: int) -> None:
    """12 and 16 bits; lossless, hierarchical and lossless arithmetic coding."""
    data = bytearray(saved(blocks(), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 1], data[at + 4] = marker, depth
    started = time.thread_time()
    error = refusal(bytes(data), "owl.jpg")
    assert time.thread_time() - started < 1
    assert error.code in ("E_FORMAT", "E_DECODE")
    assert "owl.jpg" in str(error)
    assert " at 0x" not in str(error)


def run_isolated(function: Callable, items: list, *, workers: int) -> Iterator[tuple[int, Any]]:
    with Crew(function, workers=workers, timeout=1.0) as crew:
        yield from crew.run(items)


def behave(item: str) -> str:
    """Runs in a worker process: does what the item says."""
    if item == "hang":
        time.sleep(1000)
    if item == "exit":
        os._exit(3)
    if item == "abort":
        os.abort()
    return item.upper()


def take_turns(item: tuple[int, str]) -> int:
    """Runs in two worker processes: item 1 waits until the other worker is at item 32, and 32 for the caller's word."""
    number, folder = item
    if number == 32:
        Path(folder, "begun").touch()
    waits_for = {1: "begun", 32: "word"}.get(number)
    while waits_for and not Path(folder, waits_for).exists():
        time.sleep(0.01)
    time.sleep(0.005)
    return number * 10


def test_i14_an_item_that_hangs_or_kills_its_worker_costs_itself_only() -> None:
    items = ["a", "hang", "b", "exit", "c", "abort", "d"]
    results = list(run_isolated(behave, items, workers=2))
    assert sorted(index for index, _ in results) == list(range(len(items)))
    told = dict(results)
    assert {index: one for index, one in told.items() if not isinstance(one, Lost)} == {0: "A", 2: "B", 4: "C", 6: "D"}
    assert str(told[1]) == "not decoded within 1 s"
    assert str(told[3]) == "the decoder crashed (exit code 3)"
    assert str(told[5]) == "the decoder crashed (exit code -6)"
    assert multiprocessing.active_children() == []


def test_i14_one_worker_runs_in_this_process_and_none_is_needed_for_nothing() -> None:
    assert list(run_isolated(behave, ["a", "b"], workers=1)) == [(0, "A"), (1, "B")]
    assert list(run_isolated(behave, [], workers=2)) == []


def test_i14_a_slow_caller_does_not_lose_items(tmp_path: Path) -> None:
    """What a worker finished in time, while the caller was busy, is not held against it."""
    items, results = [(number, str(tmp_path)) for number in range(40)], []
    for index, result in run_isolated(take_turns, items, workers=2):
        if index == 5:
            (tmp_path / "word").touch()
            time.sleep(1.2)
        results.append((index, result))
    assert sorted(results, key=lambda one: one[0]) == [(number, number * 10) for number in range(40)]


# I15–I17: what the model is given -----------------------------------------------------------------------------------


def test_i15_empty_and_noisy_pictures_give_finite_parses() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=np.uint8)
    images = [Image.new("RGB", (160, 120), colour) for colour in ("black", "white", (90, 140, 30))]
    images += [Image.fromarray(noise), Image.new("RGB", (16, 200), "black")]
    squares = [to_square(open_photo(saved(image, "PNG")).image, 84) for image in images]
    found = encoding(squares)
    assert found.images == 5
    for name, tensor in found.items():
        assert bool(tensor.isfinite().all()), name
    grid = shipped_model().grid
    assert float(found["mu"].min()) >= 0
    assert float(found["mu"].max()) <= grid - 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_i16_a_tensor_that_is_not_finite_is_refused_by_name(value: float) -> None:
    import torch

    images = torch.zeros(3, 3, 84, 84)
    images[1, 2, 40, 40] = value
    with pytest.raises(ValueError, match="images"):
        shipped_model().encode(images)


def test_i17_heic_and_avif_are_refused_with_a_hint() -> None:
    files = {
        "HEIC": [b"\0\0\0\x18ftyp" + brand + b"\0\0\0\0mif1heic" for brand in (b"heic", b"heix", b"mif1", b"msf1")],
        "AVIF": [b"\0\0\0\x18ftyp" + brand + b"\0\0\0\0mif1avif" for brand in (b"avif", b"avis")],
    }
    if "AVIF" in Image.registered_extensions().values() and "AVIF" in Image.SAVE:
        files["AVIF"].append(saved(blocks(), "AVIF"))
    for kind, contents in files.items():
        for content in contents:
            error = refusal(content + bytes(100), "owl.jpg")
            assert error.code == "E_FORMAT"
            assert f"owl.jpg is a {kind} file" in str(error)
            assert "save it as JPEG or PNG" in str(error)


# Anything -----------------------------------------------------------------------------------------------------------

WHOLE = {kind: saved(blocks(64, 48), kind) for kind in FORMATS}
HEADS = [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF\x40\0\0\0WEBPVP8 ", b"BM", b"II*\0", b"MM\0*"]


def check_any(data: bytes, lenient: bool) -> None:
    result = photo_or_error(data, "owl.jpg", lenient=lenient)
    if isinstance(result, PhotoError):
        assert result.code in ("E_EMPTY", "E_FORMAT", "E_TRUNCATED", "E_DECODE", "E_TOO_LARGE", "E_TOO_SMALL")
        assert "owl.jpg" in str(result)
    else:
        assert min(result.image.size) >= 16
        assert pixels(result).shape == (result.image.height, result.image.width, 3)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(head=st.sampled_from(HEADS), tail=st.binary(max_size=200), lenient=st.booleans())
def test_any_bytes_give_a_photo_or_a_photo_error(head: bytes, tail: bytes, lenient: bool) -> None:
    check_any(head + tail, lenient)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["JPEG", "JPEG", "PNG", "PNG", *FORMATS]),
    changes=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=6),
    cut=st.none() | st.floats(0.01, 0.999),
    lenient=st.booleans(),
)
def test_damaged_files_give_a_photo_or_a_photo_error(
    kind: str, changes: list[tuple[float, int]], cut: float | None, lenient: bool
) -> None:
    data = bytearray(WHOLE[kind])
    for place, value in changes:
        data[int(place**3 * len(data))] = value  # mostly near the head
    check_any(bytes(data if cut is None else data[: max(1, int(cut * len(data)))]), lenient)
