"""Scores of encodings against an exported gallery, in NumPy alone: copy this file beside an ONNX model and use it so.

    session = onnxruntime.InferenceSession("model.onnx")
    outputs = [output.name for output in session.get_outputs()]
    encoding = dict(zip(outputs, session.run(outputs, {"images": pixels})))  # float32 [Q, 3, H, W] in [0, 1]
    matcher = Matcher.load("gallery.npz")
    matcher.names[matcher.scores(encoding).argmax(1)]

The model and the gallery belong together if `session.get_modelmeta().custom_metadata_map["fingerprint"]` is
`matcher.fingerprint`. The mathematics is Eq. 7 as in parseshot's parts/distance.py, and recognition/calibration.py.

Letters: Q queries, N classes, S scales, T = S or 1 of them in a class, K parts, C channels, R = K(K−1)/2 pairs of
parts; M, m, n vectors that a query is regressed on, of all classes together.
"""

import zipfile
import zlib
from collections.abc import Mapping
from os import PathLike

import numpy as np

FORMAT = "parseshot gallery"
SCHEMA_VERSION = 2
SIDE = 1e-6  # length (in cells) below which a side of the polygon of parts counts as a point
ALWAYS = {
    "format": "",
    "schema_version": "",
    "fingerprint": "",  # of the model
    "names": "N",
    "photos": "N",  # how many each class has
    "normalised": "",  # means instead of the printed sums
    "scale": "",  # of the score
    "entropy": "NTK",
    "psi": "NSR",
    "psi_square": "NS",
    "advantage": "",  # of a class of many photos, times 1 − 1/n
    "temperature": "4",  # ln T: constant, by ln N, by mean and spread of ln photos
}
GROUPS: tuple[dict[str, str], ...] = (  # each may be left out, but not in part
    {"slopes": "2"},  # of the weights of parts; without them all weigh alike
    {"gamma": ""},  # weight of the geometry; without it there is none
    {"z": "NSKC"},  # mean expressions, or …
    {"z_vectors": "KMC", "z_counts": "N"},  # … what expressions are regressed on
    {"cells_vectors": "KmC", "cells_counts": "N", "cells_weight": ""},
    {"whole_vectors": "1nW", "whole_counts": "N", "whole_weight": ""},
    {"known": "7", "threshold": ""},  # of P(one of these), and below which it is none of these, where calibrated
)
KINDS = {"names": "U", "format": "U", "fingerprint": "U", "normalised": "b"} | dict.fromkeys(
    ("schema_version", "photos", "z_counts", "cells_counts", "whole_counts"), "iu"
)


class Matcher:
    """The classes of a gallery, and how a model compares a query with them."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = dict(arrays)
        self._sizes = _checked(self._arrays)
        self.names: np.ndarray = self._arrays["names"]
        self.fingerprint = str(self._arrays["fingerprint"])
        self.threshold = float(self._arrays["threshold"]) if "threshold" in self._arrays else None

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Matcher":
        """Read what `parseshot.export.export_gallery` wrote; a ValueError says why it is not that."""
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"{damaged} is damaged")
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            return cls(arrays)
        except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
            raise ValueError(f"{path} is not a gallery that parseshot exported, or is damaged: {error}") from None

    def scores(self, encoding: Mapping[str, np.ndarray]) -> np.ndarray:
        """[Q, N] of an encoding: z [Q, S, K, C], entropy [Q, S, K], mu [Q, S, K, 2], cells and whole where used."""
        own, scales, parts = self._arrays, self._sizes["S"], self._sizes["K"]
        asked = self._asked(encoding)
        z, entropy = asked["z"], asked["entropy"]
        expression = self._expression(z)  # [Q, N, S, T, K]
        alpha = np.full((1, 1, 1, 1, parts), 1 / parts, z.dtype)
        if "slopes" in own:
            by_query = own["slopes"][0] * entropy[:, None, :, None]  # [Q, 1, S, 1, K]
            alpha = _softmax(by_query + own["slopes"][1] * own["entropy"][:, None])  # [Q, N, S, T, K]
        total = (alpha * expression).sum((2, 3, 4))  # [Q, N]
        if "gamma" in own and parts > 1:
            geometry = own["gamma"] * self._geometry(asked["mu"])
            total = total + (geometry * (parts * (parts - 1) / 2) if own["normalised"] else geometry)
        if own["normalised"]:
            total = total / scales**2
        if "cells_vectors" in own:
            beside = self._cells(asked["cells"], asked["cell_weights"])  # [Q, N, K]
            total = total + own["cells_weight"] * (alpha.mean((2, 3)) * beside).sum(2)
        if "whole_vectors" in own:
            left = _left_over(asked["whole"][:, 0, 0][None], own["whole_vectors"], own["whole_counts"])  # [1, N, Q]
            total = total + own["whole_weight"] * left[0].T
        return -own["scale"] * total + own["advantage"] * (1 - 1 / own["photos"])

    def probabilities(self, encoding: Mapping[str, np.ndarray]) -> np.ndarray:
        """Of each class, [Q, N], if each photo is of one of these classes."""
        scores = self.scores(encoding).astype(np.float64)
        logs = np.log(self._arrays["photos"])
        about = np.array((1.0, np.log(len(logs)), logs.mean(), logs.std()))
        return _softmax(scores / np.exp(about @ self._arrays["temperature"]))

    def known(self, encoding: Mapping[str, np.ndarray]) -> np.ndarray:
        """P(one of these), [Q]: less than `threshold` is none of these. 1 for a model that was not calibrated."""
        scores = self.scores(encoding).astype(np.float64)
        if "known" not in self._arrays:
            return np.ones(len(scores))
        classes, best = scores.shape[1], scores.max(1)
        above_second = above_others = np.zeros_like(best)
        if classes > 1:
            above_second = best - np.partition(scores, -2, 1)[:, -2]
            above_others = best - (scores.sum(1) - best) / (classes - 1)
        alone = np.full_like(best, float(classes == 1))
        number, own = np.full_like(best, np.log(classes)), np.log(self._arrays["photos"])[scores.argmax(1)]
        features = np.column_stack((best, above_second, above_others, alone, number, own))
        weights = self._arrays["known"]
        return 0.5 + 0.5 * np.tanh((features @ weights[1:] + weights[0]) / 2)  # a logistic that cannot overflow

    def _asked(self, encoding: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        shapes = {"z": "QSKC", "entropy": "QSK", "mu": "QSK2"}
        if "cells_vectors" in self._arrays:
            shapes |= {"cells": "QKPC", "cell_weights": "QKP"}
        if "whole_vectors" in self._arrays:
            shapes["whole"] = "Q11W"
        missing = [name for name in shapes if name not in encoding]
        if missing:
            raise ValueError(f"the encoding has no {missing[0]!r}: it holds {', '.join(encoding) or 'nothing'}")
        asked = {name: np.asarray(encoding[name]) for name in shapes}
        _fit(asked, shapes, dict(self._sizes))
        return asked

    def _expression(self, z: np.ndarray) -> np.ndarray:
        """What parts look like: [Q, S, K, C] → [Q, N, S, S, K], or [Q, N, S, 1, K] where a class's scales are one."""
        own, (queries, scales, parts, channels) = self._arrays, z.shape
        left = z.transpose(2, 0, 1, 3).reshape(parts, queries * scales, channels)
        if "z_vectors" in own:
            errors = _left_over(left, own["z_vectors"], own["z_counts"])  # [K, N, Q·S]
            return scales * errors.reshape(parts, -1, queries, scales).transpose(2, 1, 3, 0)[:, :, :, None]
        right = own["z"].transpose(2, 0, 1, 3).reshape(parts, -1, channels)  # [K, N·S, C]
        squares = (left**2).sum(-1)[:, :, None] + (right**2).sum(-1)[:, None] - 2 * (left @ right.swapaxes(1, 2))
        return np.maximum(squares, 0).reshape(parts, queries, scales, -1, scales).transpose(1, 3, 2, 4, 0)

    def _geometry(self, mu: np.ndarray) -> np.ndarray:
        """How parts lie: the sides of their polygon, of unit sum, against those of a class: [Q, S, K, 2] → [Q, N]."""
        first, second = np.triu_indices(mu.shape[2], 1)
        sides = np.sqrt(((mu[:, :, first] - mu[:, :, second]) ** 2).sum(-1) + SIDE**2)  # [Q, S, R]
        psi = sides / sides.sum(-1, keepdims=True)
        inner = np.tensordot(psi, self._arrays["psi"], (2, 2)).transpose(0, 2, 1, 3)  # [Q, N, S, S]
        squares = (psi**2).sum(-1)[:, None, :, None] + self._arrays["psi_square"][:, None]
        return np.maximum(squares - 2 * inner, 0).sum((2, 3))

    def _cells(self, cells: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """What a class's cells of each part leave over of the query's: [Q, K, P, C], [Q, K, P] → [Q, N, K]."""
        own, (queries, parts, count, channels) = self._arrays, cells.shape
        left = cells.swapaxes(0, 1).reshape(parts, queries * count, channels)
        errors = _left_over(left, own["cells_vectors"], own["cells_counts"])  # [K, N, Q·P]
        errors = errors.reshape(parts, -1, queries, count) * weights.swapaxes(0, 1)[:, None]
        return errors.sum(-1).transpose(2, 1, 0)


def _left_over(asked: np.ndarray, vectors: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """What a ridge regression on each class's vectors leaves over of vectors [K, P, C]: [K, N, P]."""
    products = asked @ vectors.swapaxes(1, 2)  # [K, P, M]
    told = np.add.reduceat(products**2, np.cumsum(counts) - counts, axis=2)  # [K, P, N]
    return np.maximum((asked**2).sum(-1, keepdims=True) - told, 0).swapaxes(1, 2)


def _softmax(values: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    powers = np.exp(values - values.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _checked(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """The size that each letter stands for, where all that is stored fits together."""
    shapes, sizes = _expected(arrays), dict[str, int]()
    for name in shapes:
        if name not in arrays:
            raise ValueError(f"{name} is missing")
        if arrays[name].dtype.kind not in KINDS.get(name, "f"):
            raise ValueError(f"{name} holds {arrays[name].dtype}")
        if arrays[name].dtype.kind == "f" and not np.isfinite(arrays[name]).all():
            raise ValueError(f"{name} holds NaN or infinity")
    _fit(arrays, shapes, sizes)
    parts = sizes["K"]
    if (
        min(sizes[one] for one in "NSKC") < 1
        or sizes["T"] not in (1, sizes["S"])
        or sizes["R"] != parts * (parts - 1) // 2
    ):
        raise ValueError("its classes, scales and parts do not fit together")
    for name, vectors in (("z_counts", "M"), ("cells_counts", "m"), ("whole_counts", "n")):
        if name in shapes:
            counts = arrays[name].astype(np.int64)
            if counts.min() < 1 or counts.sum() != sizes[vectors]:
                raise ValueError(f"{name} do not add up")
    return sizes


def _expected(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """The shapes of what a gallery of this kind holds."""
    if str(arrays.get("format")) != FORMAT:
        raise ValueError("it does not say that it is one")
    version = str(arrays.get("schema_version"))
    if version != str(SCHEMA_VERSION):
        raise ValueError(f"its schema_version is {version}, this file reads {SCHEMA_VERSION}")
    shapes = dict(ALWAYS)
    for group in GROUPS:
        if any(name in arrays for name in group):
            shapes |= group
    if ("z" in shapes) == ("z_vectors" in shapes):
        raise ValueError("it must hold either z or what z is regressed on")
    return shapes


def _fit(arrays: Mapping[str, np.ndarray], shapes: Mapping[str, str], sizes: dict[str, int]) -> None:
    """Check shapes written in letters, each of which stands for one size everywhere; a digit stands for itself."""
    for name, letters in shapes.items():
        shape = arrays[name].shape
        for one, size in zip(letters, shape, strict=False):
            sizes.setdefault(one, int(one) if one.isdigit() else size)
        if list(shape) != [sizes.get(one) for one in letters]:
            told = ", ".join(str(sizes.get(one, one)) for one in letters)
            raise ValueError(f"{name} has the shape {list(shape)}, not [{told}]")
