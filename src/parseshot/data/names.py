"""Class names are data, never paths: what is accepted, and how they are written where a program might read them."""

import unicodedata

from parseshot.errors import DataError

MAX_NAME = 200
_DIRECTION = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)  # reorders what is shown


def class_name(raw: str, where: str) -> str:
    """A name in one Unicode form without outer spaces; twins that look alike byte for byte become one class.

    >>> class_name("cafe\\u0301 ", "folder 3")
    'café'
    """
    name = unicodedata.normalize("NFC", printable(raw)).strip()
    if all(unicodedata.category(c) in ("Cf", "Zs", "Mn") for c in name):  # also when there is nothing
        raise DataError(f"{where}: the class name is empty")
    if len(name) > MAX_NAME:
        raise DataError(f"{where}: the class name has {len(name)} characters, at most {MAX_NAME} are allowed")
    bad = next((c for c in name if c in _DIRECTION or unicodedata.category(c) in ("Cc", "Zl", "Zp")), None)
    if bad is not None:
        raise DataError(f"{where}: the class name holds the control character U+{ord(bad):04X}")
    return name


def csv_cell(text: str) -> str:
    """A cell that no spreadsheet takes for a formula.

    >>> csv_cell("=1+1"), csv_cell("owl")
    ("'=1+1", 'owl')
    """
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def printable(text: str) -> str:
    """A file name as valid UTF-8, for terminals and files; undecodable bytes become \\xNN, lone surrogates \\uNNNN.

    >>> printable("owl\\udcff"), printable("owl\\ud800")
    ('owl\\\\xff', 'owl\\\\ud800')
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # half of a pair, as JSON may hold, which no file name is decoded to
        return text.encode("utf-8", "backslashreplace").decode("utf-8")
