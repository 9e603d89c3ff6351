"""Why a photo was recognised as what it was: the ledgers of its likeliest classes, in the photos' own pixels."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from PIL import Image

from parseshot.data.photo import open_photo, shown_region, to_photo
from parseshot.methods.base import Encoding
from parseshot.recognition.answer import Answer, Candidate
from parseshot.recognition.explain import FoundPart, find_parts
from parseshot.recognition.ledger import GEOMETRY, PHOTOS, WHOLE, Ledger, LedgerRow, make_ledger
from parseshot.recognition.records import EnrolledPhoto
from parseshot.recognition.snapshot import Snapshot

if TYPE_CHECKING:
    from parseshot.recognition.looking import Item
    from parseshot.recognition.recognizer import Recognizer

CLASSES = 3  # of the likeliest, of which there is a ledger
Place = tuple[float, float]  # (x, y)
Move = Callable[[Place], Place]  # from pixels of what the model sees to pixels of the photo


@dataclass(frozen=True)
class Example:
    """An enrolled photo that a part was matched with."""

    photo: EnrolledPhoto
    image: Image.Image
    parts: tuple[FoundPart, ...]  # in its pixels


@dataclass(frozen=True)
class ClassLedger:
    """What speaks for and against one class."""

    candidate: Candidate
    ledger: Ledger  # `matched` is the place among `examples`; places are pixels of the photos
    examples: tuple[Example, ...]  # those that a row names, the one that most rows name first


@dataclass(frozen=True)
class Explained:
    """An answer with its reasons."""

    answer: Answer
    image: Image.Image  # the photo, upright
    parts: tuple[FoundPart, ...]  # in its pixels
    classes: tuple[ClassLedger, ...]  # the likeliest first

    @property
    def decided_by(self) -> int | None:
        """The part that speaks most for the first class against the second; None where that is none of them."""
        if len(self.classes) < 2:
            return None
        first, second = (one.ledger for one in self.classes[:2])
        gains = [second.of_part(part) - first.of_part(part) for part in range(len(self.parts))]
        best = max(range(len(gains)), key=gains.__getitem__)
        others = [second.of_kind(kind) - first.of_kind(kind) for kind in (WHOLE, GEOMETRY, PHOTOS)]
        return best if gains[best] > 0 and gains[best] >= max(others) else None

    @property
    def differ_at(self) -> int:
        """The part at which the two likeliest classes differ most in their distance to the photo."""
        first, second = (one.ledger for one in (self.classes * 2)[:2])
        return max(range(len(self.parts)), key=lambda part: abs(second.of_part(part) - first.of_part(part)))

    def __str__(self) -> str:
        if self.answer.either:
            return f"{self.answer}: they differ at part {self.differ_at + 1}"
        return str(self.answer)

    def to_json(self) -> dict[str, Any]:
        """The answer, and the rows of each ledger; parts count from 1, places are pixels of the photos."""
        return self.answer.to_json() | {
            "says": str(self),
            "parts": [_part_json(number, part) for number, part in enumerate(self.parts)],
            "decided_by": None if self.decided_by is None else self.decided_by + 1,
            "ledgers": [_ledger_json(one) for one in self.classes],
        }


def explain_photo(recognizer: "Recognizer", item: "Item") -> Explained:
    """Recognise one photo, with reasons."""
    snapshot = recognizer.filled()
    given, box = recognizer.read(item)
    seen = recognizer.seen(given, box)
    encoding = recognizer.encode([seen])
    (answer,) = recognizer.answer_encoded([seen], encoding, snapshot)
    known = {photo.id: photo for photo in recognizer.opened.photos()}
    size, model = recognizer.loaded.config.image_size, recognizer.loaded
    ids = {one.id: label for label, one in enumerate(snapshot.classes)}

    def move(place: Place) -> Place:
        return seen.look.square.to_photo(*place)

    classes = []
    for candidate in answer.candidates[:CLASSES]:
        rows = (snapshot.labels == ids[candidate.id]).nonzero()[:, 0]
        assert snapshot.encoding is not None
        support = snapshot.encoding.take(rows)
        ledger = make_ledger(model, encoding, support, recognizer.calibration)
        named = [row.matched for row in ledger.rows if row.matched is not None]
        order = sorted(set(named), key=lambda row: (-named.count(row), row))
        examples = tuple(_example(recognizer, snapshot, known, int(rows[row]), support, row, size) for row in order)
        moved = tuple(_moved(row, move, order, examples, size) for row in ledger.rows)
        classes.append(ClassLedger(candidate, replace(ledger, rows=moved), examples))
    parts = tuple(_part_in_photo(part, move) for part in find_parts(model, encoding, 0))
    return Explained(answer, given.image, parts, tuple(classes))


def _example(
    recognizer: "Recognizer",
    snapshot: Snapshot,
    known: dict[int, EnrolledPhoto],
    row: int,
    support: Encoding,
    place: int,
    size: int,
) -> Example:
    photo = known[int(snapshot.photos[row])]
    image = open_photo(recognizer.opened.picture(photo.id), photo.source).image
    found = find_parts(recognizer.loaded, support, place)
    return Example(photo, image, tuple(_part_in_photo(part, _mapping(photo, size)) for part in found))


def _mapping(photo: EnrolledPhoto, size: int) -> Move:
    region = shown_region((photo.width, photo.height), photo.box)
    return lambda place: to_photo(*place, region, size)


def _part_in_photo(part: FoundPart, move: Move) -> FoundPart:
    x, y = move((part.x, part.y))
    scales = tuple((side, *move((across, down)), entropy) for side, across, down, entropy in part.by_scale)
    return replace(part, x=x, y=y, by_scale=scales)


def _moved(row: LedgerRow, move: Move, order: list[int], examples: tuple[Example, ...], size: int) -> LedgerRow:
    """The row with places in the photos' pixels, and the example that it names."""
    if row.matched is None:
        return row
    at = order.index(row.matched)
    if row.place is None or row.matched_place is None:
        return replace(row, matched=at)
    where = _mapping(examples[at].photo, size)(row.matched_place)
    return replace(row, matched=at, place=move(row.place), matched_place=where)


def _part_json(number: int, part: FoundPart) -> dict[str, Any]:
    scales = [{"side": side, "x": x, "y": y, "entropy": entropy} for side, x, y, entropy in part.by_scale]
    return {"part": number + 1, "x": part.x, "y": part.y, "entropy": part.entropy, "scales": scales}


def _ledger_json(one: ClassLedger) -> dict[str, Any]:
    photos = [example.photo for example in one.examples]
    rows = [
        {
            "kind": row.kind,
            "part": None if row.part is None else row.part + 1,
            "scale": row.scale,
            "weight": row.weight,
            "distance": row.distance,
            "adds": row.adds,
            "place": row.place,
            "entropy": row.entropy,
            "matched_photo": None if row.matched is None else photos[row.matched].id,
            "matched_place": row.matched_place,
        }
        for row in one.ledger.rows
    ]
    return {
        "class": one.candidate._asdict(),
        "distance": one.ledger.distance,
        "score": one.ledger.score,
        "rows": rows,
        "photos": [{"id": photo.id, "source": photo.source, "box": photo.box} for photo in photos],
    }
