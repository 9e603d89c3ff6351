"""The demo: unseen drawn species enrolled from five pictures each, others recognised, and the reasons written down."""

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parseshot import __version__
from parseshot.data.names import printable
from parseshot.data.photo import open_photo, to_square
from parseshot.data.synthetic import Species, draw_many, make_species
from parseshot.engine.model import Model, shipped_models, to_tensor
from parseshot.errors import DataError
from parseshot.figures import draw_parts
from parseshot.recognition.batch import photo_files
from parseshot.recognition.explain import accuracy, explain, find_parts
from parseshot.report import Report, ReportQuery, write_report

CLASSES, SHOTS, QUERIES = 5, 5, 15  # species, enrolled and asked pictures of each
MODEL = "birds-conv4"  # ships with the package
GUIDE = 1_000_003  # the seed of the demo's field guides starts here, far from those used for training

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class DemoResult:
    accuracy: float
    right: int
    queries: int
    classes: int
    seconds: float  # drawing, recognition and report
    seconds_a_picture: float  # recognition alone
    report: Path


def run_demo(out: Path | str, *, seed: int = 1, progress: Progress | None = None) -> DemoResult:
    """Enrol five unseen species from five drawings each, recognise 75 others, write report.html into `out`."""
    started = time.perf_counter()
    model = Model.from_pretrained(MODEL)
    species = unseen_species(model, seed)
    total = CLASSES * (SHOTS + QUERIES)
    images, labels, *_ = draw_many(
        species,
        SHOTS + QUERIES,
        seed=seed,
        size=model.config.image_size,
        progress=(lambda done: progress(done, total)) if progress else None,
    )
    enrolled = np.tile(np.arange(SHOTS + QUERIES) < SHOTS, CLASSES)
    recognising = time.perf_counter()
    encoding = model.encode(to_tensor(images))
    rows = torch.from_numpy(enrolled)
    support, query = encoding.take(rows), encoding.take(~rows)
    answers = explain(model, query, support, torch.from_numpy(labels[enrolled]))
    seconds_a_picture = (time.perf_counter() - recognising) / len(images)
    truth = labels[~enrolled]
    share = accuracy(answers, truth)
    right = round(share * len(answers))
    names = [one.name for one in species]
    path = Path(out) / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_report(
        Report(
            title="Five drawn species, five pictures of each",
            summary={
                "Accuracy": f"{100 * share:.1f} % ({right} of {len(answers)})",
                "Recognition": f"{1000 * seconds_a_picture:.0f} ms a picture, {torch.get_num_threads()} CPU threads",
                "Model": f"{model.config.method} on {model.config.backbone}, {model.config.image_size} px, trained on "
                f"{len(model.provenance.get('base_classes', []))} other drawn species",
                "Versions": f"parseshot {__version__}, torch {torch.__version__}",
            },
            classes=names,
            support=list(images[enrolled]),
            support_labels=labels[enrolled].tolist(),
            queries=[
                ReportQuery(image, names[int(label)], answer)
                for image, label, answer in zip(images[~enrolled], truth, answers, strict=True)
            ],
        ),
        path,
    )
    return DemoResult(share, right, len(answers), CLASSES, time.perf_counter() - started, seconds_a_picture, path)


def unseen_species(model: Model, seed: int) -> list[Species]:
    """Five of three families of another guide, so that some differ in a part or two; none is in the training guide."""
    trained_on = model.provenance["data"]
    seen = {one.looks for one in make_species(trained_on["species"], seed=trained_on["seed"])}
    fresh = [one for one in make_species(3 * CLASSES, seed=GUIDE + seed) if one.looks not in seen]
    order = np.random.default_rng(seed).permutation(len(fresh))[:CLASSES]
    return [fresh[int(number)] for number in sorted(order)]


def parse_files(
    model: Model, files: Sequence[Path], out: Path | str, *, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Parse pictures, and those in folders; write a drawing of each and parts.json.

    A file that cannot be read is an error row.
    """
    out, listed = Path(out), list(photo_files(map(Path, files)))
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for number, file in enumerate(listed):
        try:
            rows.append(_parse_file(model, file, out, number))
        except DataError as error:
            rows.append({"image": printable(str(file)), "error": str(error), "code": error.code})
        if progress:
            progress(number + 1, len(listed))
    document = {"schema_version": 1, "model": model.config.model_dump(mode="json"), "images": rows}
    (out / "parts.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return rows


def _parse_file(model: Model, file: Path, out: Path, number: int) -> dict[str, Any]:
    opened = open_photo(file)
    photo = opened.image
    square = to_square(photo, model.config.image_size)
    encoding = model.encode(to_tensor(square.pixels[None]))
    parts = []
    for part in find_parts(model, encoding, 0):
        x, y = square.to_photo(part.x, part.y)
        scales = tuple((side, *square.to_photo(sx, sy), entropy) for side, sx, sy, entropy in part.by_scale)
        parts.append(replace(part, x=x, y=y, by_scale=scales))
    drawing = out / f"{number:04d}_{file.stem}.png"
    zoom = max(1, round(336 / max(photo.size)))
    draw_parts(np.asarray(photo), parts, scale=zoom).save(drawing)
    return {
        "image": printable(str(file)),
        "notes": list(opened.notes),
        "drawing": str(drawing),
        "size": [photo.width, photo.height],
        "parts": [
            {
                "part": index + 1,
                "x": round(part.x, 3),
                "y": round(part.y, 3),
                "entropy": round(part.entropy, 4),
                "scales": [
                    {"side": side, "x": round(x, 3), "y": round(y, 3), "entropy": round(entropy, 4)}
                    for side, x, y, entropy in part.by_scale
                ],
            }
            for index, part in enumerate(parts)
        ],
    }


def run_checks() -> dict[str, str]:
    """Versions, threads and a self test: the shipped model parses a drawn bird the same way twice."""
    found = {
        "parseshot": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "threads": str(torch.get_num_threads()),
        "accelerator": "cuda" if torch.cuda.is_available() else "none (not needed)",
        "shipped models": ", ".join(shipped_models()),
    }
    try:
        model = Model.from_pretrained(MODEL)
        picture = draw_many(make_species(1), 1, size=model.config.image_size)[0]
        first, second = (model.encode(to_tensor(picture)) for _ in range(2))
        same = all(torch.equal(first[name], second[name]) and first[name].isfinite().all() for name in first)
        found["self test"] = "ok" if same else "the same picture gave two parses"
    except Exception as error:  # a check reports, whatever went wrong
        found["self test"] = f"failed: {error}"
    return found
