"""Raw pictures → a packed directory, once: listed, decoded by worker processes, checked, described, put in place."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parseshot.data.catalog import LAYOUTS, Item, Listing, Problem, read_catalog
from parseshot.data.duplicates import exact_groups, near_pairs
from parseshot.data.packed import INDEX, Pack, refuse_existing, save_array, sha256, write_index, write_pack
from parseshot.data.photo import to_pixels
from parseshot.data.render import HEADER, Rendered, Rules, Task, close_files, render
from parseshot.data.source import is_table, open_source
from parseshot.data.split import Split, load_split, split_by_seed
from parseshot.data.staging import reserve, staging
from parseshot.data.synthetic import PART_NAMES, draw_many, make_species
from parseshot.data.workers import Crew, Lost
from parseshot.errors import DataError, UsageError

Progress = Callable[[int, int], None]  # (done, total)
VIEWS = {"paper": (1, 1), "frn": (92, 84)}  # side stored : side seen; FRN resizes to 92 and shows the middle 84
TIMEOUT = 10.0  # seconds for one photo


def prepare(
    name: str,
    source: Path | str,
    out: Path | str,
    *,
    size: int = 84,
    view: str = "paper",
    split: str | None = None,
    seed: int = 0,
    lenient: bool = False,
    keep_duplicates: bool = False,
    workers: int = 1,
    progress: Progress | None = None,
) -> Pack:
    """Pack a data set from a folder or archive; the same source and options give the same bytes.

    split: a shipped list or a JSON file; without it the data set's default, a CSV's own column, or `seed`.
    A finished pack that the same command made from the same archive is returned as it is; anything else in `out` is
    refused, also a pack of a folder or table, whose photos may have changed since.
    """
    check_name(name)
    if view not in VIEWS:
        raise UsageError(f"unknown view {view!r}; there are {', '.join(VIEWS)}")
    out, source = Path(out), Path(source)
    chosen = load_split(split) if split else None
    archive = source.is_file() and not is_table(source)
    request = {
        "data": name, "source": source.name, "bytes": source.stat().st_size if archive else None,
        "size": size, "view": view, "split": chosen.record() if chosen else None, "seed": seed, "lenient": lenient,
        "keep_duplicates": keep_duplicates,
    }  # fmt: skip
    finished = _finished(out, request) if archive else None
    if finished is not None:
        return finished
    refuse_existing(out)
    stored = round(size * VIEWS[view][0] / VIEWS[view][1])
    stored += (stored - size) % 2  # the same margin on both sides
    try:
        with staging(out) as folder:
            with Crew(render, workers=workers, timeout=TIMEOUT) as crew:
                opened = open_source(source, folder)
                listing = read_catalog(name, opened)
                chosen = chosen or _default_split(listing, name, seed)
                chosen.roles(listing.classes)  # fail before the work, not after
                file = str(folder / "images.npy")
                whole = view == "frn" and not listing.crop
                rules = Rules(file, stored, lenient, listing.upright, listing.crop, whole, listing.banner)
                done = _render(listing, rules, crew, progress)
            (folder / "inflated.tar").unlink(missing_ok=True)
            _report_duplicates(listing, done, keep_duplicates)
            _write(folder, listing, done, chosen, size, request, dict(opened.ignored))
    finally:
        close_files()
    return Pack(out)


def check_name(name: str) -> None:
    if name not in LAYOUTS:
        raise UsageError(f"unknown data set {name!r}; there are {', '.join(LAYOUTS)} and synthetic")


@dataclass
class Done:
    """The pictures that made it, in order: their places in the listing and what was found."""

    kept: list[int]
    rows: list[Rendered]
    images: np.ndarray  # [n, H, H, 3], memory-mapped


def _render(listing: Listing, rules: Rules, crew: Crew[Task, Any], progress: Progress | None) -> Done:
    total, file = len(listing.items), Path(rules.images)
    shape = (total, rules.stored, rules.stored, 3)
    with file.open("wb") as stream:
        header = np.lib.format.header_data_from_array_1_0(np.empty((0,), np.uint8)) | {"shape": shape}
        np.lib.format.write_array_header_1_0(stream, header)
        if stream.tell() != HEADER:
            raise DataError(f"{file}: unexpected header of {stream.tell()} bytes")
        stream.flush()
        reserve(stream.fileno(), HEADER + int(np.prod(shape)), str(file))
    tasks = [Task(rules, row, item.name, item.place, item.box) for row, item in enumerate(listing.items)]
    results: dict[int, Rendered] = {}
    for count, (row, result) in enumerate(crew.run(tasks), 1):
        item = listing.items[row]
        if isinstance(result, Rendered):
            results[row] = result
        elif isinstance(result, Lost):
            listing.problems.append(Problem(item.name, "E_DECODER", f"{item.name}: {result}"))
        elif result[0] == "E_OUTPUT":
            raise DataError(f"{result[1]}; nothing was kept")
        else:
            listing.problems.append(Problem(item.name, *result))
        if progress:
            progress(count, total)
    kept = sorted(results)
    if not kept:
        raise DataError(f"none of the {total} pictures can be used; the first: {listing.problems[0].message}")
    listing.problems.sort(key=lambda problem: (problem.file, problem.code, problem.message))
    if len(kept) < total:
        _close_gaps(file, shape, kept)
    return Done(kept, [results[row] for row in kept], np.load(file, mmap_mode="r", allow_pickle=False))


def _close_gaps(file: Path, shape: tuple[int, ...], kept: Sequence[int]) -> None:
    """Leave only the kept rows in the file of images."""
    images = np.load(file, mmap_mode="r", allow_pickle=False)
    whole = file.with_name("images.whole")
    with whole.open("wb") as stream:
        header = np.lib.format.header_data_from_array_1_0(images) | {"shape": (len(kept), *shape[1:])}
        np.lib.format.write_array_header_1_0(stream, header)
        for row in kept:
            stream.write(images[row].tobytes())
    whole.replace(file)


def _default_split(listing: Listing, name: str, seed: int) -> Split:
    if listing.split is not None:
        return listing.split
    default = LAYOUTS[name].split
    return load_split(default) if default else split_by_seed(listing.classes, seed)


def _report_duplicates(listing: Listing, done: Done, keep: bool) -> None:
    """The same file in two classes: an error for a user's own photos, a warning in a published data set."""
    items = [listing.items[row] for row in done.kept]
    groups = exact_groups([row.digest for row in done.rows])
    across = [group for group in groups if len({items[row].label for row in group}) > 1]
    named = [" = ".join(items[row].name for row in group) for group in across]
    if across and listing.strict_duplicates and not keep:
        shown = "; ".join(named[:5]) + (" …" if len(named) > 5 else "")
        raise DataError(f"{len(across)} photos lie in two classes: {shown}; remove one, or use --keep-duplicates")
    listing.warnings += [f"the same file in two classes: {one}" for one in named]
    within = [group for group in groups if len({items[row].label for row in group}) == 1]
    listing.warnings += ["the same file twice: " + " = ".join(items[row].name for row in group) for group in within]


def _write(
    folder: Path,
    listing: Listing,
    done: Done,
    split: Split,
    size: int,
    request: dict[str, Any],
    ignored: dict[str, int],
) -> None:
    items = [listing.items[row] for row in done.kept]
    labels = np.array([item.label for item in items], dtype=np.int64)
    classes, labels = _drop_lost_classes(listing, labels)
    save_array(folder, "labels", labels)
    for name, array in _annotations(items, done.rows, done.images.shape[1], size).items():
        save_array(folder, name, array)
    with ThreadPoolExecutor(1) as beside:
        checksum = beside.submit(sha256, folder / "images.npy")
        twins = _twins(done)
    save_array(folder, "twins", twins)
    warnings = listing.warnings + [
        f"nearly the same photo in two classes: {items[a].name} and {items[b].name}"
        for a, b, same in twins.tolist()
        if labels[a] != labels[b] and not same
    ]
    warnings += [f"{classes[number]!r} has a single photo: nothing is left to test it on"
                 for number in np.flatnonzero(np.bincount(labels, minlength=len(classes)) == 1)]  # fmt: skip
    if len(classes) == 1:
        warnings.append("only one class: an episode needs at least two")
    notes = Counter(note for row in done.rows for note in row.notes)
    roles = split.roles(classes)
    provenance = {
        "source": request["source"],
        "request": request,
        "decoder": _decoder(),
        "ignored": dict(sorted(ignored.items())),
        "notes": dict(sorted(notes.items())),
    }
    write_index(
        folder,
        name=listing.name,
        size=size,
        classes=classes,
        splits=roles,
        split=split.record(),
        part_names=listing.part_names,
        files=[item.name for item in items],
        provenance=provenance,
        problems=[problem.record() for problem in listing.problems],
        warnings=warnings,
        checksums={"images": checksum.result()},
    )


def _annotations(items: Sequence[Item], rows: Sequence[Rendered], stored: int, size: int) -> dict[str, np.ndarray]:
    """Parts and boxes in the pixels a model sees, and the official division; each where all pictures have it."""
    found: dict[str, np.ndarray] = {}
    region = np.array([row.region for row in rows])[:, None]  # [n, 1, 4]

    def seen(points: np.ndarray) -> np.ndarray:  # [n, P, 2], edges of the photo → centres in the middle of the square
        return to_pixels(points - 0.5, region, stored) - (stored - size) / 2

    if all(item.parts is not None for item in items):
        parts = np.array([item.parts for item in items])  # [n, P, 3]
        parts[..., :2] = seen(parts[..., :2])
        found["parts"] = parts.astype(np.float32)
    if all(row.box is not None for row in rows):
        corners = np.array([row.box for row in rows]).reshape(-1, 2, 2)
        found["boxes"] = seen(corners).reshape(-1, 4).astype(np.float32)
    if all(item.official_train is not None for item in items):
        found["official_train"] = np.array([item.official_train for item in items], dtype=np.uint8)
    return found


def _twins(done: Done) -> np.ndarray:
    """Pairs of the same or nearly the same photo with a mark for the same file, [m, 3]."""
    near = near_pairs(done.images)
    same = {
        pair for group in exact_groups([row.digest for row in done.rows]) for pair in itertools.combinations(group, 2)
    }
    pairs = sorted(same | {(a, b) for a, b in near.tolist()})
    return np.array([(a, b, (a, b) in same) for a, b in pairs], dtype=np.int64).reshape(-1, 3)


def _drop_lost_classes(listing: Listing, labels: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Classes none of whose pictures could be used are not created."""
    used = np.unique(labels)
    for number in sorted(set(range(len(listing.classes))) - set(used.tolist())):
        name = listing.classes[number]
        listing.problems.append(Problem(name, "E_EMPTY_CLASS", f"class {name!r} has no usable picture; left out"))
    return [listing.classes[number] for number in used], np.searchsorted(used, labels)


def _finished(out: Path, request: dict[str, Any]) -> Pack | None:
    """The pack in `out`, if the same command has made it before."""
    if not (out / INDEX).is_file():
        return None
    pack = Pack(out)
    if pack.provenance.get("request") != request:
        return None
    pack.verify()
    return pack


def _decoder() -> str:
    from PIL import __version__, features

    return f"Pillow {__version__}, libjpeg {features.version('jpg')}"


def prepare_synthetic(
    out: Path | str,
    *,
    size: int = 84,
    base: int = 200,
    val: int = 50,
    novel: int = 50,
    per_species: int = 30,
    seed: int = 0,
    workers: int = 1,
    progress: Progress | None = None,
) -> Pack:
    """Draw a field guide of base, val and novel species (whole families each, as families hold five) and pack it."""
    refuse_existing(Path(out))
    species = make_species(base + val + novel, seed=seed)
    total = len(species) * per_species
    images, labels, parts, visible, boxes = draw_many(
        species,
        per_species,
        seed=seed,
        size=size,
        workers=workers,
        progress=(lambda done: progress(done, total)) if progress else None,
    )
    classes, roles = [one.name for one in species], ["base"] * base + ["val"] * val + ["novel"] * novel
    split = Split("by-family", dict(zip(classes, roles, strict=True)))
    return write_pack(
        out,
        name="synthetic",
        arrays={
            "images": images,
            "labels": labels,
            "parts": np.concatenate((parts, visible[..., None].astype(np.float32)), -1),
            "boxes": boxes,
        },
        classes=classes,
        splits=roles,
        split=split.record(),
        part_names=PART_NAMES,
        provenance={"source": "drawn", "species": len(species), "seed": seed, "per_species": per_species},
    )
