"""What the README prints runs as printed, and library and command line say the same."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from parseshot.data.synthetic import draw_many, make_species

README = Path(__file__).parents[1] / "README.md"
NAMES = ("owl", "wren", "tit")


@pytest.fixture(params=["drawn birds", "novel cars"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """photos/CLASS/*.jpg of some classes, and query.jpg of one of them."""
    (tmp_path / "photos").mkdir()
    (draw_birds if request.param == "drawn birds" else take_cars)(tmp_path)
    return tmp_path


def draw_birds(folder: Path) -> None:
    images, labels, *_ = draw_many(make_species(9, seed=911)[::3], 4, seed=4, size=160)
    for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        place = folder / "photos" / NAMES[label]
        place.mkdir(exist_ok=True)
        file = folder / "query.jpg" if number == 7 else place / f"{number}.jpg"
        Image.fromarray(pixels).save(file, quality=95)


def take_cars(folder: Path) -> None:
    """Five photos of each of five models of cars that no training has seen, and one more of the first."""
    archive = Path(os.environ.get("PARSESHOT_DATA") or "nowhere") / "stanford_cars.tgz"
    if not archive.is_file():
        pytest.skip("no stanford_cars.tgz in PARSESHOT_DATA")
    spec = importlib.util.spec_from_file_location("first_answer", README.parent / "benchmarks" / "first_answer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.take_photos(archive, folder / "photos", 5, 1) == 30
    for place in sorted((folder / "photos").iterdir(), reverse=True):
        sorted(place.iterdir())[-1].rename(folder / "query.jpg")  # the first class's is what stays


def test_the_readmes_lines_of_python_and_its_three_commands(folder: Path) -> None:
    text = README.read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
    done = subprocess.run([sys.executable, "-c", block], cwd=folder, capture_output=True, text=True, check=True)
    said, sums = done.stdout.splitlines()
    rows, distance = map(float, sums.split())
    assert rows == pytest.approx(distance, abs=1e-6)
    (folder / "mine.gallery").unlink()
    commands = re.findall(r"^    parseshot ((?:enroll|predict|explain) mine\.gallery .*)$", text, re.MULTILINE)
    assert [line.split()[0] for line in commands] == ["enroll", "predict", "explain"]
    printed = []
    for line in commands:
        ran = subprocess.run(
            [sys.executable, "-m", "parseshot", *line.split()], cwd=folder, capture_output=True, text=True, check=True
        )
        printed.append(ran.stdout)
    assert printed[1] == f"query.jpg\t{said}\n"
    assert (folder / "why.html").stat().st_size > 10_000
    library = (
        "import json, torch; torch.set_num_threads(1); from parseshot import Recognizer; "
        "print(json.dumps(Recognizer(gallery='mine.gallery').recognise('query.jpg')[0].to_json()))"
    )
    asked = ["predict", "mine.gallery", "query.jpg", "--json", "--threads", "1"]  # as many threads, the same digits
    outputs = [
        json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout)
        for command in ([sys.executable, "-c", library], [sys.executable, "-m", "parseshot", *asked])
    ]
    assert outputs[1]["answers"] == [outputs[0]]
