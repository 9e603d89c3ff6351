"""Read the MATLAB 5 files that Stanford Cars is annotated with: structs, cells, text and numbers, nothing else.

Format: a 128-byte header, then elements of (type, size, content); an array is an element whose content is again
elements: flags, dimensions, name, values. Only data is ever made from a file, never code.
"""

import struct
import zlib
from typing import Any

import numpy as np

from parseshot.errors import DataError

_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_TEXT = {1: "latin-1", 2: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16", 18: "utf-32"}
_MATRIX, _COMPRESSED = 14, 15
_CELL, _STRUCT, _CHAR = 1, 2, 4
MAX_BYTES = 1 << 28  # of one compressed variable


def read_mat(data: bytes, name: str) -> dict[str, Any]:
    """The variables of a file: a struct array is a list of dicts, a cell array a list, text a string, else an array."""
    if b"MATLAB 7.3" in data[:128]:
        raise DataError(f"{name} is a MATLAB 7.3 file; save it with -v7")
    if len(data) < 128 or data[126:128] not in (b"IM", b"MI"):
        raise DataError(f"{name} is not a MATLAB 5 file")
    order = "<" if data[126:128] == b"IM" else ">"
    try:
        variables = {}
        for kind, content in _elements(data[128:], order):
            if kind == _COMPRESSED:
                inflater = zlib.decompressobj()
                content = inflater.decompress(content, MAX_BYTES)
                if inflater.unconsumed_tail:
                    raise DataError(f"{name} holds a variable of more than {MAX_BYTES >> 20} MB")
                [(kind, content)] = _elements(content, order)
            if kind == _MATRIX:
                variable, value = _matrix(content, order)
                variables[variable] = value
        return variables
    except DataError:
        raise
    except (struct.error, zlib.error, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise DataError(f"{name} is damaged: {error}") from None


def _elements(data: bytes, order: str) -> list[tuple[int, bytes]]:
    """The (type, content) pairs of a run of elements; a short one keeps its content inside the tag."""
    found, at = [], 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from(order + "II", data, at)
        if kind >> 16:  # short: size and type share the first word
            kind, size = kind & 0xFFFF, kind >> 16
            found.append((kind, data[at + 4 : at + 4 + size]))
            at += 8
            continue
        if at + 8 + size > len(data):
            raise ValueError("cut off")
        found.append((kind, data[at + 8 : at + 8 + size]))
        at += 8 + size
        if kind != _COMPRESSED:
            at += -size % 8
    if at < len(data):
        raise ValueError("cut off")
    return found


def _matrix(content: bytes, order: str) -> tuple[str, Any]:
    elements = _elements(content, order)
    if not elements:
        return "", np.zeros(0)
    flags = _numbers(*elements[0], order)
    shape = tuple(int(n) for n in _numbers(*elements[1], order))
    name = elements[2][1].decode("latin-1")
    kind, values = int(flags[0]) & 0xFF, elements[3:]
    if int(flags[0]) >> 8 & 0x08:
        raise ValueError(f"{name} holds complex numbers")
    if kind == _CELL:
        return name, [_matrix(inner, order)[1] for _, inner in values]
    if kind == _STRUCT:
        width = int(_numbers(*values[0], order)[0])
        if width < 1:
            raise ValueError(f"{name} has field names of no length")
        packed = values[1][1]
        fields = [
            packed[at : at + width].split(b"\0")[0].decode("latin-1")
            for at in range(0, len(packed) // width * width, width)
        ]
        cells = [_matrix(inner, order)[1] for _, inner in values[2:]]
        return name, [dict(zip(fields, row, strict=True)) for row in zip(*[iter(cells)] * len(fields), strict=True)]
    if kind == _CHAR:
        if shape[0] > 1:
            raise ValueError(f"{name} holds text of several rows")
        encoding = _TEXT[values[0][0]]
        suffix = ("-le" if order == "<" else "-be") if encoding in ("utf-16", "utf-32") else ""
        return name, values[0][1].decode(encoding + suffix)
    return name, _numbers(*values[0], order).reshape(shape, order="F")


def _numbers(kind: int, content: bytes, order: str) -> np.ndarray:
    return np.frombuffer(content, dtype=np.dtype(order + _NUMBERS[kind]))
