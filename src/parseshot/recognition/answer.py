"""What a recogniser says of a photo, in words and as JSON."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from parseshot.data.names import printable
from parseshot.errors import ParseshotError
from parseshot.recognition.records import Box

SCHEMA_VERSION = 1
CLOSE = 0.5  # a second class at least this share as likely as the first is named beside it


def percent(probability: float) -> str:
    """A probability in words that never claim certainty: "97%", "<1%", ">99%"."""
    if probability < 0.01 or probability > 0.99:
        return "<1%" if probability < 0.01 else ">99%"
    return f"{100 * probability:.0f}%"


class Candidate(NamedTuple):
    """A class that a photo may belong to."""

    id: str
    name: str
    score: float  # the method's; larger is likelier
    probability: float  # calibrated; with those of the other classes and of none of them it makes 1


class Twin(NamedTuple):
    """A photo that looks like an enrolled one, in the same class or in another."""

    source: str
    class_name: str
    photo: int | None  # the enrolled one; None where it comes in the same enrolment
    of_class: str
    other_source: str = ""

    def __str__(self) -> str:
        other = self.other_source or f"photo {self.photo}"
        where = "" if self.of_class == self.class_name else f", which is in {self.of_class!r}"
        return f"{self.source} looks like {other}{where}"


class Failure(NamedTuple):
    """A photo that could not be used."""

    source: str
    code: str
    message: str

    @staticmethod
    def of(source: object, name: str, error: ParseshotError) -> "Failure":
        shown = name or (str(source) if isinstance(source, (str,)) or hasattr(source, "__fspath__") else "")
        return Failure(printable(shown), error.code, printable(str(error)))

    def to_json(self) -> dict[str, Any]:
        return {"photo": self.source, "error": {"code": self.code, "message": self.message}}


@dataclass(frozen=True)
class Answer:
    """What a photo shows, most likely; all from one version of the gallery."""

    source: str
    candidates: tuple[Candidate, ...]  # the likeliest first, five at most
    known: float  # calibrated probability that it is one of the enrolled classes
    threshold: float | None  # below which it is none of them; None where the model was not calibrated
    crop: Box  # what of the photo was looked at, in its pixels (edges)
    crop_is: str  # "given", "found" or "whole"
    size: tuple[int, int]  # of the photo: width, height
    duplicate_of: int | None  # an enrolled photo that is the very same file
    warnings: tuple[str, ...]
    version: int  # of the gallery
    fingerprint: str  # of the model

    @property
    def rejected(self) -> bool:
        """None of the enrolled classes."""
        return self.threshold is not None and self.known < self.threshold

    @property
    def either(self) -> tuple[Candidate, Candidate] | None:
        """The two likeliest classes, where they are too close to call."""
        if self.rejected or len(self.candidates) < 2:
            return None
        first, second = self.candidates[:2]
        return (first, second) if second.probability >= CLOSE * first.probability else None

    @property
    def name(self) -> str | None:
        """The likeliest class; None where it is none of them."""
        return None if self.rejected else self.candidates[0].name

    def __str__(self) -> str:
        best = self.candidates[0]
        if self.rejected:
            return f"none of these ({percent(1 - self.known)}; nearest is {best.name})"
        if self.either:
            first, second = self.either
            return f"{first.name} ({percent(first.probability)}) or {second.name} ({percent(second.probability)})"
        return f"{best.name} ({percent(best.probability)})"

    def to_json(self) -> dict[str, Any]:
        """Numbers as they are, so that library, command line and server give the same bytes."""
        return {
            "photo": self.source,
            "answer": self.name,
            "either": [one.name for one in self.either] if self.either else None,
            "rejected": self.rejected,
            "known": self.known,
            "threshold": self.threshold,
            "candidates": [one._asdict() for one in self.candidates],
            "crop": {"box": list(self.crop), "is": self.crop_is},
            "size": list(self.size),
            "duplicate_of": self.duplicate_of,
            "warnings": list(self.warnings),
            "gallery_version": self.version,
            "model": self.fingerprint,
        }
