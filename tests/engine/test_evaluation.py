"""Evaluation on packs of one's own photos: copies do not flatter, seen classes are refused, results name their data."""

import json
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from parseshot.data.packed import Pack
from parseshot.data.prepare import prepare
from parseshot.engine.evaluation import Twins, evaluate
from parseshot.engine.model import Model
from parseshot.errors import DataError


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_pretrained(str(resources.files("parseshot") / "models" / "birds-conv4"))


def photos(root: Path, birds: Pack, suffixes: tuple[str, ...] = ("jpg", "png", "webp"), classes: int = 4) -> Path:
    """Drawn birds as files of several formats, a folder a class."""
    for number, (label, images) in enumerate(list(birds.by_class("novel").items())[:classes]):
        folder = root / f"n{number:08d}-{label}"
        folder.mkdir(parents=True)
        for at, image in enumerate(images[:8]):
            pixels = Image.fromarray(np.asarray(birds.images[image])).resize((120, 100))
            pixels.save(folder / f"{at}.{suffixes[at % len(suffixes)]}")
    return root


def command(*arguments: object) -> dict:
    result = subprocess.run(
        [sys.executable, "-m", "parseshot", *map(str, arguments), "--json"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("kind", ["dogs", "folder", "csv"])
def test_a_tree_of_ones_own_is_prepared_and_evaluated(birds: Pack, tmp_path: Path, kind: str) -> None:
    root = photos(tmp_path / "Images", birds, ("jpg",) if kind == "dogs" else ("jpg", "png", "webp", "gif", "tiff"))
    roles = {folder.name: "novel" for folder in sorted(root.iterdir())}
    (tmp_path / "split.json").write_text(json.dumps(roles))
    source = {"dogs": tmp_path, "folder": root, "csv": tmp_path / "table.csv"}[kind]
    rows = [f"{file.relative_to(tmp_path)},{file.parent.name}" for file in sorted(root.rglob("*.*"))]
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    out, split = tmp_path / "pack", tmp_path / "split.json"
    prepared = command("data", "prepare", kind, "--source", source, "--out", out, "--split", split, "--workers", 1)
    assert prepared["splits"]["novel"] == {"classes": 4, "images": 32}
    assert prepared["problems"] == []
    shipped = resources.files("parseshot") / "models" / "birds-conv4"
    asked = ("evaluate", shipped, "--data", out, "--way", 4, "--shots", "1,3", "--queries", 5, "--episodes", 30)
    told = command(*asked, "--threads", 1)
    assert told["data"]["split"] == prepared["split"]
    assert told["data"]["split"]["name"] == "split"
    assert [row["shots"] for row in told["results"]] == [1, 3]
    assert all(row["accuracy"] > 0.6 for row in told["results"])  # 0.25 is chance


def test_d4_a_query_that_is_in_the_support_set_does_not_count(birds: Pack, tmp_path: Path, model: Model) -> None:
    root = photos(tmp_path / "mine", birds, classes=2)
    first, second = sorted(root.iterdir())
    for at in range(8):
        shutil.copy(next(first.glob(f"{at}.*")), second / f"copy{at}.png")  # every photo of the first class, misfiled
    split = tmp_path / "s.json"
    split.write_text(json.dumps({folder.name: "novel" for folder in (first, second)}))
    pack = prepare("folder", root, tmp_path / "pack", split=str(split), keep_duplicates=True)
    assert int(pack.twins[:, 2].sum()) == 8
    [told] = evaluate(model, pack, way=2, shots=(4,), queries=4, episodes=40)
    assert told.copies > 40
    assert told.near_copies == 0
    members = pack.by_class("novel")
    twins = Twins(pack, members)
    assert len(twins.rows) == 16


def test_d5_near_copies_count_and_are_reported(birds: Pack, tmp_path: Path, model: Model) -> None:
    root = photos(tmp_path / "mine", birds, ("png",), classes=2)
    for folder in root.iterdir():
        for at in range(8):
            Image.open(folder / f"{at}.png").save(folder / f"burst{at}.jpg", quality=80)
    split = tmp_path / "s.json"
    split.write_text(json.dumps({folder.name: "novel" for folder in root.iterdir()}))
    pack = prepare("folder", root, tmp_path / "pack", split=str(split))
    assert len(pack.twins) >= 16
    [told] = evaluate(model, pack, way=2, shots=(4,), queries=4, episodes=40)
    assert told.copies == 0
    assert told.near_copies > 20


def test_a_model_is_refused_on_classes_it_was_trained_on(birds: Pack, tmp_path: Path, model: Model) -> None:
    root = photos(tmp_path / "mine", birds)
    seen = model.provenance["base_classes"][:2]
    for folder, name in zip(sorted(root.iterdir()), seen, strict=False):
        folder.rename(root / name)
    split = tmp_path / "s.json"
    split.write_text(json.dumps({folder.name: "novel" for folder in root.iterdir()}))
    pack = prepare("folder", root, tmp_path / "pack", split=str(split))
    with pytest.raises(DataError, match=rf"trained on 2 of the 4 classes of split 'novel': .*{seen[0]}"):
        evaluate(model, pack)
