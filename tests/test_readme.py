"""What the README prints runs as printed, and library and command line say the same."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from parseshot.data.synthetic import draw_many, make_species

README = Path(__file__).parents[1] / "README.md"
NAMES = ("owl", "wren", "tit")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """photos/CLASS/*.jpg of three drawn species, and query.jpg of the second."""
    images, labels, *_ = draw_many(make_species(9, seed=911)[::3], 4, seed=4, size=160)
    for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        place = tmp_path / "photos" / NAMES[label]
        place.mkdir(parents=True, exist_ok=True)
        file = tmp_path / "query.jpg" if number == 7 else place / f"{number}.jpg"
        Image.fromarray(pixels).save(file, quality=95)
    return tmp_path


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
