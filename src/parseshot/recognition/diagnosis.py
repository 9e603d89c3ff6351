"""What the doctor says of a gallery: findings, and how well it should recognise; in words and as JSON."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from parseshot.engine.statistics import Z95

SCHEMA_VERSION = 1
MISLABELLED, DUPLICATE, ACROSS = "mislabelled", "duplicate", "duplicate across classes"
BLURRED, TINY, NO_PARTS, MORE = "blurred", "tiny", "parts not found", "needs more photos"
KINDS = {  # in the order in which they are told → what `sure` is
    MISLABELLED: "probability of the other class, of these two",
    ACROSS: "share of the bits of their perceptual hashes that agree",
    DUPLICATE: "share of the bits of their perceptual hashes that agree",
    NO_PARTS: "mean entropy of the parts' locations: 1 is anywhere",
    BLURRED: "how much less steep its edges are than usual in this gallery",
    TINY: "share of the pixels that are lacking",
    MORE: "share of the class's photos that are not recognised",
}


@dataclass(frozen=True)
class Finding:
    """Something to look at: of a photo, or of a class as a whole."""

    kind: str
    class_name: str
    sentence: str
    sure: float  # 0 … 1; KINDS says of what
    photo: int | None = None  # None: the class as a whole
    source: str = ""
    other_class: str | None = None
    other_photo: int | None = None

    def __str__(self) -> str:
        what = self.class_name if self.photo is None else f"{self.source} (photo {self.photo} of {self.class_name})"
        return f"{what}: {self.sentence} [{self.sure:.0%}]"


class Share(NamedTuple):
    """So many of so many."""

    right: int
    asked: int

    @property
    def value(self) -> float | None:
        return self.right / self.asked if self.asked else None

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval, which holds for few photos and for none or all of them.

        >>> [round(edge, 3) for edge in Share(9, 10).interval], Share(0, 0).interval
        ([0.596, 0.982], (0.0, 1.0))
        """
        if not self.asked:
            return 0.0, 1.0
        share, spread = self.right / self.asked, Z95**2 / self.asked
        half = Z95 * math.sqrt((share * (1 - share) + spread / 4) / self.asked)
        low, high = ((share + spread / 2 + side * half) / (1 + spread) for side in (-1, 1))
        return max(0.0, low), min(1.0, high)

    def to_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {"right": self.right, "photos": self.asked, "share": self.value, "low": low, "high": high}

    def __str__(self) -> str:
        if self.value is None:
            return "unknown"
        low, high = self.interval
        return f"{100 * self.value:.1f} % (95 % interval {100 * low:.0f} to {100 * high:.0f} %)"


@dataclass(frozen=True)
class ClassDiagnosis:
    """A class, and how many of its photos are recognised when they are left out."""

    id: str
    name: str
    photos: int
    recognised: Share  # of those that can be left out: the class keeps others that are not copies


class Confused(NamedTuple):
    """Photos of a class that are taken for another one."""

    class_name: str
    taken_for: str
    times: int
    of: int


@dataclass(frozen=True)
class Diagnosis:
    """One version of a gallery, examined."""

    gallery: str
    version: int
    fingerprint: str  # of the model
    photos: int
    classes: tuple[ClassDiagnosis, ...]
    accuracy: Share  # leave-one-out; of 0 photos where there is one class, or one photo of each
    accuracy_unsuspected: Share  # without photos that are reported as mislabelled, which count as mistakes above
    confused: tuple[Confused, ...]  # the most often first
    findings: tuple[Finding, ...]  # by kind, the surest first
    notes: tuple[str, ...]

    def of_kind(self, kind: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == kind]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "gallery": self.gallery,
            "gallery_version": self.version,
            "model": self.fingerprint,
            "photos": self.photos,
            "accuracy": self.accuracy.to_json(),
            "accuracy_unsuspected": self.accuracy_unsuspected.to_json(),
            "classes": [
                {"id": one.id, "name": one.name, "enrolled": one.photos, "recognised": one.recognised.to_json()}
                for one in self.classes
            ],
            "confused": [pair._asdict() for pair in self.confused],
            "findings": [asdict(finding) for finding in self.findings],
            "sure": KINDS,
            "notes": list(self.notes),
        }

    def lines(self) -> Iterator[str]:
        """For the terminal."""
        yield f"{self.gallery}, version {self.version}: {self.photos} photos of {len(self.classes)} classes"
        if self.accuracy.asked:
            right, asked = self.accuracy
            yield f"predicted accuracy {self.accuracy}: {right} of {asked} photos are recognised when left out"
        if self.accuracy_unsuspected != self.accuracy:
            yield f"  {self.accuracy_unsuspected} without those that may be mislabelled"
        yield from (f"  {note}" for note in self.notes)
        if self.confused:
            pairs = (f"{one.class_name} taken for {one.taken_for}, {one.times} of {one.of}" for one in self.confused)
            yield "most confused: " + "; ".join(pairs)
        for kind in KINDS:
            found = self.of_kind(kind)
            if found:
                yield f"{kind}: {len(found)}"
            yield from (f"  {finding}" for finding in found)
        if not self.findings:
            yield "nothing was found"
