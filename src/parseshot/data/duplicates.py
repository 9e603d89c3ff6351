"""The same photo twice: byte for byte by digest, and resized, re-compressed or mirrored by a perceptual hash.

The hash has a bit for each of 8×8 places: is it darker than its right neighbour? Photos of one scene differ in a few
bits. Candidates are then compared as 24×24 colour pictures, because smooth skies and cars on white share a hash.
"""

import itertools
from collections.abc import Sequence

import numpy as np
from PIL import Image

BITS = 4  # that may differ
BANDS = BITS + 1  # so that at least one of them is the same in both
LEAST_CORRELATION = 0.98  # of the small pictures; re-compressed copies have 0.995 and more
SMALL = 24
CROWDED = 200  # neighbours with the same band that are looked at; more of them are flat pictures


def perceptual_hashes(images: np.ndarray) -> np.ndarray:
    """64 bits of each square picture (uint8 [n, H, H, 3]) and of its mirror image, as uint64 [n, 2].

    Of the green channel: half of what the eye calls brightness, and a third of the work.
    """
    side, hashes = images.shape[1], []
    rows, columns = (np.linspace(0, side, count + 1).astype(int) for count in (8, 9))
    areas = np.diff(rows)[:, None] * np.diff(columns)  # [8, 9]
    for start in range(0, len(images), 256):
        green = images[start : start + 256, :, :, 1]
        sums = np.add.reduceat(green, rows[:-1], axis=1, dtype=np.uint32)  # [b, 8, H]
        levels = np.add.reduceat(sums, columns[:-1], axis=2) / areas  # [b, 8, 9]
        both = np.stack((levels, levels[:, :, ::-1]), 1)  # [b, 2, 8, 9]
        bits = np.packbits(both[..., :-1] < both[..., 1:], axis=-1)  # [b, 2, 8, 1]
        hashes.append(np.ascontiguousarray(bits[..., 0]).view(np.uint64)[..., 0])  # [b, 2]
    return np.concatenate(hashes)


def exact_groups(digests: Sequence[bytes]) -> list[list[int]]:
    """Images whose files are the same, two or more each."""
    groups: dict[bytes, list[int]] = {}
    for number, digest in enumerate(digests):
        groups.setdefault(digest, []).append(number)
    return [group for group in groups.values() if len(group) > 1]


def near_pairs(images: np.ndarray) -> np.ndarray:
    """Pairs [m, 2] (first < second) of images [n, H, H, 3] that show the same photo."""
    found = set()
    for first, second, mirrored in _candidates(perceptual_hashes(images)):
        if _correlation(images[first], images[second], mirrored=mirrored) >= LEAST_CORRELATION:
            found.add((first, second))
    return np.array(sorted(found), dtype=np.int64).reshape(-1, 2)


def same_photo(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two squares [H, H, 3] show the same photo, or one of them its mirror image."""
    return max(_correlation(one, other, mirrored=way) for way in (False, True)) >= LEAST_CORRELATION


def _correlation(one: np.ndarray, other: np.ndarray, *, mirrored: bool) -> float:
    a, b = _small(one), _small(other)
    return float((a * (b[:, ::-1] if mirrored else b)).sum())


def _candidates(hashes: np.ndarray) -> set[tuple[int, int, bool]]:
    """Pairs whose hashes differ in at most BITS bits, found through the band they must share.

    Sorted by a band, those that share it are neighbours: each is compared with its next, next but one, and so on.
    """
    count = len(hashes)
    both = np.concatenate((hashes[:, 0], hashes[:, 1]))  # the mirror images follow
    found: set[tuple[int, int, bool]] = set()
    edges = np.linspace(0, 64, BANDS + 1).astype(int)
    for low, high in itertools.pairwise(edges):
        band = (both >> np.uint64(low)) & np.uint64((1 << int(high - low)) - 1)
        order = np.argsort(band, kind="stable")
        band, hashed = band[order], both[order]
        start = np.arange(len(order))
        for distance in range(1, CROWDED):
            start = start[start < len(order) - distance]
            start = start[band[start] == band[start + distance]]
            if len(start) == 0:
                break
            close = differing_bits(hashed[start] ^ hashed[start + distance]) <= BITS
            for a, b in np.stack((order[start[close]], order[start[close] + distance]), 1).tolist():
                first, second = sorted((a % count, b % count))
                if first != second and min(a, b) < count:
                    found.add((first, second, (a < count) != (b < count)))
    return found


def _small(pixels: np.ndarray) -> np.ndarray:
    """A small colour picture without its brightness and contrast: the product of two is their correlation."""
    reduced = Image.fromarray(np.ascontiguousarray(pixels)).resize((SMALL, SMALL), Image.Resampling.BOX)
    levels = np.asarray(reduced, dtype=np.float64)
    levels = levels - levels.mean()
    return levels / max(float(np.linalg.norm(levels)), 1e-9)


def differing_bits(values: np.ndarray) -> np.ndarray:
    """How many bits are set in each of uint64 [n], the exclusive or of two hashes."""
    return np.unpackbits(values[:, None].view(np.uint8), axis=1).sum(1)
