"""The layouts data sets come in: which pictures, of which class, with which box and annotated parts.

A reader turns a `Source` into a `Listing`; nothing is decoded here. Boxes are (left, top, right, bottom) in edges of
the stored picture's pixels; part positions are (x, y, visible) in the same frame. What a list names and the source
lacks, and the other way round, is kept as a problem or a warning with its name.
"""

import csv
import io
import posixpath
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from parseshot.data.matfile import read_mat
from parseshot.data.names import class_name, printable
from parseshot.data.photo import PHOTO_SUFFIXES
from parseshot.data.render import Box
from parseshot.data.source import JUNK, Place, Source, read
from parseshot.data.split import ALIASES, Split, split_by_column
from parseshot.errors import DataError

BANNER = 20  # rows at the foot of an original Aircraft photo, with the photographer's name


@dataclass(frozen=True)
class Item:
    """One picture."""

    name: str  # as in the source
    place: Place
    label: int
    box: Box | None = None
    parts: np.ndarray | None = None  # [P, 3]
    official_train: bool | None = None  # its side in the data set's own division of images


@dataclass(frozen=True)
class Problem:
    """A file that is not in the result, or something to know about one that is."""

    file: str
    code: str
    message: str

    def record(self) -> dict[str, str]:
        return {"file": printable(self.file), "code": self.code, "message": printable(self.message)}


@dataclass
class Listing:
    """What a source holds."""

    name: str
    classes: list[str]
    items: list[Item]
    part_names: list[str] = field(default_factory=list)
    crop: bool = False  # show the box only; otherwise the box is carried along
    upright: bool = True  # turn by EXIF; annotations in stored pixels forbid it
    banner: int = 0  # rows to cut off at the foot of a photo at least BANNER_WIDTH wide
    split: Split | None = None  # where the source itself says
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    strict_duplicates: bool = False  # the same photo in two classes is an error, not a warning


@dataclass(frozen=True)
class Layout:
    """How a data set is read, and how many images and classes it has when complete."""

    read: Callable[[Source], Listing]
    summary: str
    split: str | None = None  # the default list
    images: int | None = None
    classes: int | None = None


def read_catalog(name: str, source: Source) -> Listing:
    """List a data set, and compare it with the counts it should have."""
    layout = LAYOUTS[name]
    listing = layout.read(source)
    listing.problems += [Problem(file, "E_ARCHIVE", f"{file} {why}") for file, why in source.refused]
    if not listing.items:
        named = f": {listing.problems[0].message}" if listing.problems else ""
        raise DataError(f"{source.path} holds no pictures in the layout of {name!r}{named}")
    used = {item.label for item in listing.items}
    empty = [one for number, one in enumerate(listing.classes) if number not in used]
    if empty:
        listing.problems += [Problem(one, "E_EMPTY_CLASS", f"class {one!r} has no pictures; left out") for one in empty]
        listing = _without_classes(listing, used)
    for count, expected, what in (
        (len(listing.items), layout.images, "images"),
        (len(listing.classes), layout.classes, "classes"),
    ):
        if expected is not None and count != expected:
            listing.warnings.append(f"{count} of the {expected} {what} of the complete {name}")
    return listing


def _without_classes(listing: Listing, used: set[int]) -> Listing:
    renumber = {old: new for new, old in enumerate(sorted(used))}
    listing.items = [Item(i.name, i.place, renumber[i.label], i.box, i.parts, i.official_train) for i in listing.items]
    listing.classes = [listing.classes[old] for old in sorted(used)]
    return listing


# CUB-200-2011 -------------------------------------------------------------------------------------------------------


def _cub(source: Source) -> Listing:
    root = _root(source, "images.txt", "cub")
    files = dict(_pairs(source, root + "images.txt"))
    classes = dict(_pairs(source, root + "classes.txt"))
    label_of = dict(_pairs(source, root + "image_class_labels.txt"))
    train = dict(_pairs(source, root + "train_test_split.txt"))
    boxes = {image: _numbers(source, root + "bounding_boxes.txt", rest, 4)
             for image, rest in _pairs(source, root + "bounding_boxes.txt")}  # fmt: skip
    part_names = dict(_pairs(source, root + "parts/parts.txt"))
    parts = _cub_parts(source, root + "parts/part_locs.txt", list(files), list(part_names))
    numbers = {number: row for row, number in enumerate(classes)}
    listing = Listing("cub", [class_name(c, "classes.txt") for c in classes.values()], [], crop=True, upright=False)
    listing.part_names = [name.replace(" ", "_") for name in part_names.values()]
    for image, file in files.items():
        tables: dict[str, Mapping[str, object]] = {
            "image_class_labels": label_of,
            "bounding_boxes": boxes,
            "train_test_split": train,
        }
        lacking = [table for table, known in tables.items() if image not in known]
        if lacking:
            raise DataError(f"{source.path}: {root}{lacking[0]}.txt has no line for image {image} ({file})")
        if label_of[image] not in numbers:
            raise DataError(f"{source.path}: image {image} has class {label_of[image]}, classes.txt has not")
        left, top, width, height = boxes[image]
        _add(listing, source, f"{root}images/{file}", numbers[label_of[image]],
             box=(left, top, left + width, top + height), parts=parts[image],
             official_train=train[image] == "1")  # fmt: skip
    _note_unlisted(listing, source, root + "images/")
    return listing


def _cub_parts(source: Source, name: str, images: list[str], parts: list[str]) -> dict[str, np.ndarray]:
    """Positions [P, 3] of each image from lines of (image, part, x, y, visible); 177,000 of them, so all at once."""
    if name not in source.files:
        raise DataError(f"{source.path} lacks {name}")
    text = source.text(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # NumPy only warns of what it cannot read
            table = np.fromstring(text, sep=" ").reshape(len(text.splitlines()), 5)
    except (ValueError, DeprecationWarning) as error:
        raise DataError(f"{source.path}: {name} does not hold five numbers a line ({error})") from None
    found = np.zeros((len(images), len(parts), 3))
    try:
        rows, columns = (_positions(keys, numbers) for keys, numbers in ((images, table[:, 0]), (parts, table[:, 1])))
    except ValueError as error:
        raise DataError(
            f"{source.path}: {name} has an image or part number that is in no other list: {error}"
        ) from None
    if not np.isfinite(table).all():
        raise DataError(f"{source.path}: {name} holds a position that is not a number")
    found[rows, columns] = table[:, 2:]
    return dict(zip(images, found, strict=True))


def _positions(keys: list[str], numbers: np.ndarray) -> np.ndarray:
    """Where each number stands in a list of keys that are whole numbers."""
    known = np.array([int(key) for key in keys])
    order = np.argsort(known)
    at = order[np.minimum(np.searchsorted(known, numbers, sorter=order), len(known) - 1)]
    unknown = known[at] != numbers
    if unknown.any():
        raise ValueError(f"{numbers[unknown][0]:g}")
    return at


# FGVC-Aircraft ------------------------------------------------------------------------------------------------------


def _aircraft(source: Source) -> Listing:
    root = _root(source, "data/variants.txt", "aircraft") + "data/"
    classes = [class_name(line, "variants.txt") for line in source.text(root + "variants.txt").splitlines() if line]
    numbers = {name: row for row, name in enumerate(classes)}
    boxes = {}
    for image, rest in _pairs(source, root + "images_box.txt"):
        left, top, right, bottom = _numbers(source, root + "images_box.txt", rest, 4)
        boxes[image] = (left - 1, top - 1, right, bottom)  # 1-based and inclusive → edges
    listing = Listing("aircraft", classes, [], crop=True, upright=False, banner=BANNER)
    sides: dict[str, tuple[str, bool]] = {}
    for part in ("train", "val", "trainval", "test"):
        table = f"{root}images_variant_{part}.txt"
        for image, variant in _pairs(source, table) if table in source.files else ():
            if variant not in numbers:
                raise DataError(f"{source.path}: {table} has variant {variant!r}, variants.txt has not")
            if sides.setdefault(image, (variant, part != "test")) != (variant, part != "test"):
                raise DataError(f"{source.path}: image {image} is listed twice, with different variants or sides")
    for image in sorted(sides):
        if image not in boxes:
            raise DataError(f"{source.path}: {root}images_box.txt has no line for image {image}")
        variant, train = sides[image]
        _add(listing, source, f"{root}images/{image}.jpg", numbers[variant], box=boxes[image], official_train=train)
    _note_unlisted(listing, source, root + "images/")
    return listing


# Stanford Cars ------------------------------------------------------------------------------------------------------


NUMBERS = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "test")
CAR_FIELDS = NUMBERS[:-1]  # that every annotation has


def _cars(source: Source) -> Listing:
    root = source.find("cars_annos.mat")
    if root is not None:
        return _cars_whole(source, root)
    root = source.find("devkit/cars_meta.mat")
    if root is not None:
        return _cars_devkit(source, root)
    listing = _folder(source)
    listing.name, listing.strict_duplicates = "cars", False
    listing.classes = [_car(name) for name in listing.classes]
    return listing


def _cars_whole(source: Source, root: str) -> Listing:
    content = _mat(
        source, root + "cars_annos.mat", annotations=("relative_im_path", "test", *CAR_FIELDS), class_names=()
    )
    listing = Listing("cars", [_car(name) for name in content["class_names"]], [], upright=False)
    for row in content["annotations"]:
        _add_car(listing, source, root + str(row["relative_im_path"]), row, test=bool(np.ravel(row["test"])[0]))
    _note_unlisted(listing, source, root + "car_ims/")
    return listing


def _cars_devkit(source: Source, root: str) -> Listing:
    names = _mat(source, root + "devkit/cars_meta.mat", class_names=())["class_names"]
    listing = Listing("cars", [_car(name) for name in names], [], upright=False)
    tables = (
        ("cars_train", ("devkit/cars_train_annos.mat",)),
        ("cars_test", ("devkit/cars_test_annos_withlabels.mat", "cars_test_annos_withlabels.mat")),
    )
    for folder, places in tables:
        table = next((root + place for place in places if root + place in source.files), None)
        if table is None:
            raise DataError(
                f"{source.path} lacks {root}{places[0]}: without it the pictures in {folder}/ have no class "
                "(cars_test_annos.mat has boxes only)"
            )
        for row in _mat(source, table, annotations=("fname", *CAR_FIELDS))["annotations"]:
            _add_car(listing, source, f"{root}{folder}/{row['fname']}", row, test=folder == "cars_test")
        _note_unlisted(listing, source, f"{root}{folder}/")
    return listing


def _add_car(listing: Listing, source: Source, name: str, row: Mapping[str, np.ndarray], *, test: bool) -> None:
    number = int(np.ravel(row["class"])[0])
    if not 1 <= number <= len(listing.classes):
        raise DataError(f"{source.path}: {name} has class {number}, there are {len(listing.classes)}")
    x1, y1, x2, y2 = (float(np.ravel(row[f"bbox_{side}"])[0]) for side in ("x1", "y1", "x2", "y2"))
    _add(listing, source, name, number - 1, box=(x1 - 1, y1 - 1, x2, y2), official_train=not test)


def _car(name: str) -> str:
    """The one class with a slash is a folder name elsewhere."""
    return class_name(re.sub(r"\bC[/_-]V\b", "C_V", name), "cars")


def _mat(source: Source, name: str, **wanted: tuple[str, ...]) -> dict[str, list]:
    """The variables of a file: a list of text, or of rows that each have these fields with a value."""
    content = read_mat(read(source.files[name]), f"{source.path}: {name}")
    for variable, fields in wanted.items():
        rows = content.get(variable)
        if not isinstance(rows, list) or not all(isinstance(row, dict if fields else str) for row in rows):
            raise DataError(f"{source.path}: {name} has no list {variable!r} as Stanford Cars has it")
        for number, row in enumerate(rows if fields else (), 1):
            lacking = [field for field in fields if field not in row or (field in NUMBERS and not np.size(row[field]))]
            if lacking:
                raise DataError(f"{source.path}: {name}, {variable} {number} has no {', '.join(lacking)}")
    return content


# Stanford Dogs ------------------------------------------------------------------------------------------------------


def _dogs(source: Source) -> Listing:
    pattern = re.compile(r"^(.*?)Images/(n\d{8}-[^/]+)/([^/]+)$")
    found = [match for name in sorted(source.files) if (match := pattern.match(name)) and _is_photo(name)]
    classes = sorted({match[2] for match in found})
    numbers = {name: row for row, name in enumerate(classes)}
    listing = Listing("dogs", [class_name(name, name) for name in classes], [], upright=False)
    for match in found:
        root, breed, file = match.groups()
        note = f"{root}Annotation/{breed}/{posixpath.splitext(file)[0]}"
        box = _dog_box(source, note) if note in source.files else None
        _add(listing, source, match[0], numbers[breed], box=box)
    return listing


def _dog_box(source: Source, name: str) -> Box | None:
    """The largest box of an annotation; read by pattern, because an XML parser would also expand entities."""
    boxes: list[Box] = []
    for block in re.findall(r"<bndbox>(.*?)</bndbox>", source.text(name), re.DOTALL):
        sides = [re.search(rf"<{side}>\s*(\d+)\s*</{side}>", block) for side in ("xmin", "ymin", "xmax", "ymax")]
        if all(sides):
            left, top, right, bottom = (float(side[1]) for side in sides if side)
            boxes.append((left, top, right, bottom))
    return max(boxes, key=lambda box: (box[2] - box[0]) * (box[3] - box[1]), default=None)


# Your own -----------------------------------------------------------------------------------------------------------


def _folder(source: Source) -> Listing:
    """root/class/…/picture; a single folder around everything is passed over."""
    names = sorted(source.files)
    depth = 0
    while names and len({name.split("/")[0] for name in names}) == 1 and all(name.count("/") > 1 for name in names):
        names, depth = [name.split("/", 1)[1] for name in names], depth + 1
    label_of: dict[str, int] = {}
    listing = Listing("folder", [], [], strict_duplicates=True)
    for full in sorted(source.files):
        parts = full.split("/")[depth:]
        if not _is_photo(full):
            source.ignored["other files"] += 1
        elif len(parts) < 2:
            listing.problems.append(Problem(full, "E_NO_CLASS", f"{full} lies in no class folder"))
        else:
            try:
                name = class_name(parts[0], full)
            except DataError as error:
                listing.problems.append(Problem(full, "E_CLASS_NAME", str(error)))
                continue
            _add(listing, source, full, label_of.setdefault(name, len(label_of)))
    listing.classes = list(label_of)
    for empty in _empty_folders(source):
        listing.problems.append(Problem(empty, "E_EMPTY_CLASS", f"class folder {empty!r} has no pictures; left out"))
    return listing


def _empty_folders(source: Source) -> list[str]:
    """Class folders without any regular file: they are not in the list of files."""
    if not source.path.is_dir():
        return []
    filled = {name.split("/")[0] for name in source.files}
    folders = (entry for entry in sorted(source.path.iterdir()) if entry.is_dir() and not entry.is_symlink())
    names = (entry.name for entry in folders if entry.name not in filled)
    return [name for name in names if not name.startswith(".") and not JUNK.search(name + "/")]


def _csv(source: Source) -> Listing:
    """A table path,label[,split]; paths are relative to the folder it lies in."""
    tables = [name for name in source.files if name.lower().endswith((".csv", ".tsv"))]
    if len(tables) != 1:
        raise DataError(f"{source.path} holds {len(tables)} CSV files; give the one to use as --source")
    table, text = tables[0], source.text(tables[0])
    root = table.rpartition("/")[0]
    dialect = min((",", ";", "\t"), key=lambda mark: -text.split("\n", 1)[0].count(mark))
    rows = csv.DictReader(_csv_lines(text, table), delimiter=dialect)
    columns = {(name or "").strip().lower(): name for name in rows.fieldnames or ()}
    for wanted in ("path", "label"):
        if wanted not in columns:
            raise DataError(f"{table} has the columns {', '.join(columns) or '(none)'}; it needs path and label")
    label_of: dict[str, int] = {}
    role_of: dict[str, str] = {}
    listing = Listing("csv", [], [], strict_duplicates=True)
    seen: set[str] = set()
    for row in rows:
        where = f"{table} line {rows.line_num}"
        path, label = (row[columns["path"]] or "").strip(), row[columns["label"]] or ""
        if not path:
            raise DataError(f"{where}: the path is empty")
        name = class_name(label, where)
        if path in seen:
            listing.problems.append(Problem(path, "E_DUPLICATE", f"{where}: {path} is listed a second time"))
            continue
        seen.add(path)
        if "split" in columns:
            role = ALIASES.get((row[columns["split"]] or "").strip().lower())
            if role is None:
                raise DataError(f"{where}: split {row[columns['split']]!r} is not one of {', '.join(ALIASES)}")
            if role_of.setdefault(name, role) != role:
                raise DataError(f"{where}: class {name!r} is {role} here and {role_of[name]} above; split by class")
        label_number = label_of.setdefault(name, len(label_of))
        full = f"{root}/{path}" if root else path
        on_disk = source.path.parent / path
        if source.path.name == table and on_disk.is_file():  # the table itself is the source: files are where it says
            source.files[full] = Place(str(on_disk))
        _add(listing, source, full, label_number)
    listing.classes = list(label_of)
    listing.split = split_by_column(role_of) if role_of else None
    return listing


def _csv_lines(text: str, table: str) -> Iterator[str]:
    """The lines of a table, for the csv module, which cannot read all that a file may hold."""
    for number, line in enumerate(io.StringIO(text, newline=""), 1):
        if "\0" in line or len(line) > csv.field_size_limit():
            raise DataError(f"{table} line {number} is not text: it holds a NUL, or is longer than any path and label")
        yield line


# Shared -------------------------------------------------------------------------------------------------------------


def _is_photo(name: str) -> bool:
    return posixpath.splitext(name)[1].lower() in PHOTO_SUFFIXES


def _add(
    listing: Listing,
    source: Source,
    name: str,
    label: int,
    *,
    box: Box | None = None,
    parts: np.ndarray | None = None,
    official_train: bool | None = None,
) -> None:
    place = source.files.get(name)
    if place is None:
        listing.problems.append(Problem(name, "E_MISSING", f"{name} is listed but not there"))
        return
    listing.items.append(Item(name, place, label, box, parts, official_train))


def _note_unlisted(listing: Listing, source: Source, folder: str) -> None:
    known = {item.name for item in listing.items}
    extra = [name for name in source.files if name.startswith(folder) and _is_photo(name) and name not in known]
    listing.problems += [Problem(name, "E_UNLISTED", f"{name} is there but in no list; left out") for name in extra]


def _root(source: Source, marker: str, name: str) -> str:
    root = source.find(marker)
    if root is None:
        raise DataError(f"{source.path} has no {marker}: it is not {name} in its official layout")
    return root


def _pairs(source: Source, name: str) -> Iterable[tuple[str, str]]:
    """Lines of "key rest"."""
    if name not in source.files:
        raise DataError(f"{source.path} lacks {name}")
    for number, line in enumerate(source.text(name).splitlines(), 1):
        if line.strip():
            key, _, rest = line.strip().partition(" ")
            if not rest:
                raise DataError(f"{source.path}: {name} line {number} has one column: {line!r}")
            yield key, rest.strip()


def _numbers(source: Source, name: str, text: str, count: int) -> tuple[float, ...]:
    try:
        values = tuple(float(value) for value in text.split())
    except ValueError:
        values = ()
    if len(values) != count or not np.isfinite(values).all():
        raise DataError(f"{source.path}: {name} has {text!r} where {count} numbers belong")
    return values


LAYOUTS: dict[str, Layout] = {
    "cub": Layout(_cub, "CUB-200-2011, cropped to the box, with 15 annotated parts", "cub", 11_788, 200),
    "cars": Layout(_cars, "Stanford Cars, whole images; any of its three layouts", "cars", 16_185, 196),
    "dogs": Layout(_dogs, "Stanford Dogs, whole images", "dogs", 20_580, 120),
    "aircraft": Layout(_aircraft, "FGVC-Aircraft by variant, cropped to the box", "aircraft", 10_000, 100),
    "folder": Layout(_folder, "your own: root/class/*.jpg"),
    "csv": Layout(_csv, "your own: a table path,label[,split]"),
}
