"""The page of a training run draws its metrics where they are, however many, broken or hostile they are."""

import json
import math
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

from parseshot.training_report import POINTS, tick_texts, ticks, write_training
from test_report import HOSTILE, Page

METRICS = Path(__file__).parents[1] / "docs" / "metrics"
TRAINING = {
    "episodes": 90,
    "way": 5,
    "lr": 0.001,
    "decay_every": 40,
    "decay_factor": 0.5,
    "augmentation": {"flip": True},
}
RECIPE = {"title": "A run", "model": {"method": "dop"}, "training": TRAINING, "data": {"name": "birds"}}
Series = list[tuple[float, float]]  # (step, value)


def written(run: Path, rows: list[Any], recipe: dict[str, Any] = RECIPE) -> tuple[str, Page]:
    """The page of a run whose metrics are these rows; texts are written as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page_of(run, recipe)


def page_of(run: Path, recipe: dict[str, Any] = RECIPE) -> tuple[str, Page]:
    write_training(run, recipe=recipe, path=run / "report.html")
    text = (run / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.stack == []
    assert text.rstrip().endswith("</html>")
    return text, page


def made_up(count: int = 90, **more: Any) -> list[dict[str, Any]]:
    """Rows as training writes them, with a validation every 30 steps."""
    rng = random.Random(1)
    rows = []
    for step in range(1, count + 1):
        figures = {"ce": 2 * 0.98**step + rng.random(), "diversity": -0.5 - 0.4 * rng.random()}
        figures |= {
            "accuracy": rng.randrange(51) / 50,
            "entropy": rng.random(),
            "step": step,
            "seconds": 10.0 + 2 * step,
        }
        rows.append(figures | more | ({"val": 0.4 + 0.1 * math.sin(step)} if step % 30 == 0 else {}))
    return rows


def texts(page: Page, tag: str, name: str = "") -> list[str]:
    return [text.replace("\xa0", " ") for _, text in page.all(tag, name)]


class Chart:
    """A chart read back: coordinates become steps and values by the labels of its own axes."""

    def __init__(self, text: str, key: str, stage: int = 0) -> None:
        charts = re.findall(r'<svg class="chart".*?</svg>', text, re.DOTALL)
        self.svg = [svg for svg in charts if re.search(rf'y="8">{key}[< ]', svg)][stage]
        level = re.findall(r'y2="([\d.]+)"/><text class="faint end"[^>]*>([^<]*)<', self.svg)
        step = re.findall(r'<text class="faint middle" x="([\d.]+)"[^>]*>([\d,]+)<', self.svg)
        self.levels = [(float(at), float(label.replace("−", "-").replace(",", ""))) for at, label in level]
        self.steps = [(float(at), float(label.replace(",", ""))) for at, label in step]

    def read(self, x: str, y: str) -> tuple[float, float]:
        return along(self.steps, float(x)), along(self.levels, float(y))

    @property
    def near(self) -> dict[str, float]:
        """What rounding to a tenth of a pixel hides."""
        return {"rel": 0, "abs": 0.11 * abs(along(self.levels, 1) - along(self.levels, 0))}

    def dots(self) -> Series:
        return [self.read(x, y) for x, y in re.findall(r'<circle class="dot" cx="([\d.]+)" cy="([\d.]+)"', self.svg)]

    def pieces(self, name: str = "line") -> list[Series]:
        found = re.search(rf'<path class="{name}[^"]*" d="([^"]*)"', self.svg)
        pieces = [piece for piece in (found[1] if found else "").split("M") if piece]
        return [[self.read(*at.split()) for at in re.sub("z|h0", "", piece).split("L")] for piece in pieces]

    def falls(self) -> list[tuple[float, str]]:
        found = re.findall(r'<line class="fall" x1="([\d.]+)".*?<title>(.*?)</title>', self.svg)
        return [(along(self.steps, float(x)), words) for x, words in found]


def along(axis: list[tuple[float, float]], at: float) -> float:
    (a, first), *_, (b, last) = axis
    return first + (last - first) * (at - a) / (b - a)


def middle_mean(values: list[float]) -> tuple[float, float, float]:
    """The lowest, the mean and the highest of the values, a tenth left out on either side."""
    kept = sorted(values)[len(values) // 10 : len(values) - len(values) // 10]
    return kept[0], sum(kept) / len(kept), kept[-1]


# --- what is drawn ---


def test_a_short_curve_is_every_value_as_it_was(tmp_path: Path) -> None:
    rows = made_up()
    text, page = written(tmp_path, rows)
    for key, scale in {"ce": 1, "diversity": 1, "accuracy": 100, "entropy": 1}.items():
        chart = Chart(text, key)
        [line] = chart.pieces()
        assert [step for step, _ in line] == pytest.approx([row["step"] for row in rows], abs=0.05)
        assert [value for _, value in line] == pytest.approx([scale * row[key] for row in rows], **chart.near)
        assert chart.pieces("band") == []
        assert chart.dots() == []
    assert "every step as it was" in texts(page, "ul", "legend")[0]
    assert texts(page, "h3") == [
        f"Validation accuracy {100 * rows[-1]['val']:.1f} %",
        f"Training accuracy {100 * rows[-1]['accuracy']:.1f} %",
        f"Cross-entropy loss term {rows[-1]['ce']:.3g}",
        f"Diversity loss term −{-rows[-1]['diversity']:.3g}",
        f"Part entropy {rows[-1]['entropy']:.3g}",
    ]


def test_dots_are_where_the_validations_are(tmp_path: Path) -> None:
    text, _ = written(tmp_path, made_up())
    chart = Chart(text, "val")
    expected = [(step, 40 + 10 * math.sin(step)) for step in (30, 60, 90)]
    assert [step for step, _ in chart.dots()] == pytest.approx([30, 60, 90], abs=0.05)
    assert [value for _, value in chart.dots()] == pytest.approx([value for _, value in expected], **chart.near)
    assert chart.pieces() == [chart.dots()]
    frame = re.search(r'<line class="axis" x1="(\d+)" x2="(\d+)" y1="(\d+)" y2="\3"', chart.svg)
    assert frame is not None
    left, right, bottom = map(float, frame.groups())
    assert along(chart.steps, left) == pytest.approx(0, abs=0.05)
    assert along(chart.steps, right) == pytest.approx(90, abs=0.05)
    assert (chart.levels[0][0], chart.levels[-1][0]) == (bottom, 24)
    for step, value in expected:
        assert f"<title>step {step}: {value:.1f}\xa0%</title>" in chart.svg


def test_a_long_curve_is_the_middle_of_the_steps_around(tmp_path: Path) -> None:
    rows = made_up(3000)
    for at in range(17, 3000, 100):
        rows[at]["ce"] = 1e9  # a rare outlier moves neither the line nor the axis
    text, page = written(tmp_path, rows)
    assert "middle 80 % of the 61 steps around" in texts(page, "ul", "legend")[0]
    chart = Chart(text, "ce")
    [line], [band] = chart.pieces(), chart.pieces("band")
    assert len(line) == POINTS
    assert len(band) == 2 * POINTS
    for (step, mean), (above, high), (below, low) in zip(line, band, reversed(band), strict=False):
        assert step == above == below
        at = round(step) - 1
        expected = [middle_mean([row["ce"] for row in rows[max(0, at + by - 30) : at + by + 31]]) for by in (-1, 0, 1)]
        assert any((low, mean, high) == pytest.approx(one, **chart.near) for one in expected)
    assert (line[0][0], line[-1][0]) == pytest.approx((5, 2995), abs=1)


def test_what_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    rows = made_up(50)
    for at, value in {0: math.nan, 10: math.inf, 11: -math.inf, 13: None, 30: 10**400, 31: 1e300, 49: math.nan}.items():
        rows[at]["ce"] = value
    text, page = written(tmp_path, rows)
    assert "NaN" in (tmp_path / "metrics.jsonl").read_text()
    chart = Chart(text, "ce")
    assert re.findall(r"M([^ML]*h0)", chart.svg)  # a lone point would not be seen without
    pieces = [(round(piece[0][0]), round(piece[-1][0])) for piece in chart.pieces()]
    assert pieces == [(2, 10), (13, 13), (15, 30), (33, 49)]
    assert [round(step) for step, _ in Chart(text, "diversity").pieces()[0]] == list(range(1, 51))
    assert "7 of 50 values are not finite." in " ".join(texts(page, "figcaption"))
    assert not re.search(r"\bnan\b", text, re.IGNORECASE)


def test_a_window_looks_past_what_is_missing(tmp_path: Path) -> None:
    rows = made_up(3000)
    for at in (*range(5, 3000, 10), *range(1000, 1200)):
        rows[at]["ce"] = math.nan
    text, _ = written(tmp_path, rows)
    first, second = Chart(text, "ce").pieces()
    assert (first[-1][0], second[0][0]) == pytest.approx((995, 1205), abs=1)
    assert len(first) + len(second) == POINTS - 20


def test_nothing_finite_has_no_chart(tmp_path: Path) -> None:
    _, page = written(tmp_path, made_up(10, ce=math.nan))
    assert len(page.all("svg", "chart")) == 3
    assert "10 of 10 values are not finite." in texts(page, "figure")[1]


@pytest.mark.parametrize("value", [0, 1, -3.5, 5e-324, 5e-22, 1e99, -1e99])
def test_a_constant_has_its_place(tmp_path: Path, value: float) -> None:
    for count in (1, 7):
        text, _ = written(tmp_path, [{"ce": value, "accuracy": 1.0, "step": step} for step in range(1, count + 1)])
        for key in ("ce", "accuracy"):
            heights = re.findall(r"\d (-?[\d.]+)", re.findall(r' d="(.*?)"', Chart(text, key).svg)[0])
            assert len(heights) == count
            assert all(24 <= float(y) <= 164 for y in heights)
        assert Chart(text, "accuracy").levels[-1][1] == 100
        assert [step for _, step in Chart(text, "ce").steps] == list(range(0, count + 1, 1 if count < 5 else 2))


def test_the_learning_rate_falls_where_it_fell(tmp_path: Path) -> None:
    text, page = written(tmp_path, made_up())
    for key in ("val", "accuracy", "ce"):
        falls = Chart(text, key).falls()
        assert [step for step, _ in falls] == pytest.approx([40, 80], abs=0.2)
        assert [words for _, words in falls] == [
            "learning rate 0.0005 from step 41",
            "learning rate 0.00025 from step 81",
        ]
    assert "learning rate × 0.5, every 40 steps, from 0.001" in texts(page, "ul", "legend")[0]


@pytest.mark.parametrize("change", [{"decay_every": 90}, {"decay_factor": 1.0}, {"decay_every": 1}, {"lr": "fast"}])
def test_no_marks_without_falls_or_with_too_many(tmp_path: Path, change: dict[str, Any]) -> None:
    text, page = written(tmp_path, made_up(), RECIPE | {"training": TRAINING | change})
    assert Chart(text, "ce").falls() == []
    assert "learning rate" not in texts(page, "ul", "legend")[0]


def test_figures_of_any_method(tmp_path: Path) -> None:
    rows = made_up()
    for row in rows:
        row |= {"spread": float(row["step"]), "note": "x", "ok": True, "list": [1]}
    rows[9]["seldom"], rows[69]["seldom"] = 3, 5
    text, page = written(tmp_path, [{"before": -row["step"], **row} for row in rows])
    assert [title.split(" ")[0] for title in texts(page, "h3")[-3:]] == ["Part", "spread", "seldom"]
    assert "before loss term −90" in texts(page, "h3")
    assert [value for _, value in Chart(text, "spread").pieces()[0]] == pytest.approx(range(1, 91), abs=0.2)
    assert Chart(text, "spread").dots() == []
    for found, expected in zip(Chart(text, "seldom").dots(), [(10, 3), (70, 5)], strict=True):
        assert found == pytest.approx(expected, abs=0.2)


def test_pretraining_has_charts_of_its_own(tmp_path: Path) -> None:
    first = [
        {"stage": "pretraining", "ce": 9.0 - at / 40, "accuracy": 0.5, "step": at, "seconds": at} for at in range(1, 81)
    ]
    settings = {"steps": 80, "lr": 0.01, "decay_every": 50, "decay_factor": 0.1}
    text, page = written(tmp_path, first + made_up(), RECIPE | {"training": TRAINING | {"pretraining": settings}})
    assert texts(page, "h2")[:2] == ["Pretraining", "Episodes"]
    assert len(page.all("svg", "chart")) == 2 + 5
    assert [value for _, value in Chart(text, "ce", 0).pieces()[0]] == pytest.approx(
        [row["ce"] for row in first], abs=0.01
    )
    assert Chart(text, "ce", 0).falls() == [(pytest.approx(50, abs=0.2), "learning rate 0.001 from step 51")]
    assert len(Chart(text, "ce", 1).pieces()[0]) == 90
    one, other = texts(page, "dl", "summary")
    assert one.split("\n")[1:-1] == [
        "Steps of pretraining80 of 80",
        "Time since the start, hours:minutes0:01",
        "Seconds a step1",
    ]
    assert "Episodes90 of 90" in other
    _, page = written(tmp_path, first[:3])
    assert "Not validated yet." in texts(page, "header")[0]
    assert texts(page, "h2") == ["Pretraining", "Recipe"]


# --- words ---


def test_how_far_it_came(tmp_path: Path) -> None:
    rows = made_up(3000)[:2000]
    for row in rows:
        row["seconds"] = 4.2 * row["step"]
    rows[1319]["val"] = rows[1499]["val"] = 0.87654
    _, page = written(tmp_path, rows, RECIPE | {"training": TRAINING | {"episodes": 3000}})
    [header] = texts(page, "header")
    assert "A run\n87.65 % best on the val classes, at step 1,320\n" in header
    assert "Episodes2,000 of 3,000" in header
    assert "hours:minutes2:20" in header
    assert "validations included4.2" in header


def test_table_of_validations(tmp_path: Path) -> None:
    lines = (METRICS / "cub-conv4-dop.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "val" in row]
    _, page = written(tmp_path, lines)
    table = texts(page, "table", "figures")[0].split("\n")[3:-1]
    minutes = [int(row["seconds"] // 60) for row in rows]
    expected = [
        f"{row['step']:,}{100 * row['val']:.2f} %{'' if row is not rows[-1] else ' best'}{at // 60}:{at % 60:02d}"
        for row, at in zip(rows, minutes, strict=True)
    ]
    assert [line for line in table if line[:1].isdigit()] == expected
    assert len(expected) == 8


def test_very_many_validations(tmp_path: Path) -> None:
    rows = [{"step": step, "val": 0.9 if step == 778 else 0.5, "accuracy": 0.5} for step in range(1, 2001)]
    text, page = written(tmp_path, rows)
    [table] = texts(page, "table", "figures")
    assert "301 of 2,000 are listed" in table
    assert "77890.00 % best–" in table
    assert table.rstrip().endswith("2,00050.00 %–")
    assert len(Chart(text, "val").pieces()[0]) == POINTS
    assert ["open" in attrs for attrs, _ in page.all("details")] == [False, False]


def test_charts_say_what_they_show(tmp_path: Path) -> None:
    rows = made_up()
    _, page = written(tmp_path, rows)
    ids = [attrs["id"] for _, attrs, _ in page.found if "id" in attrs]
    assert len(ids) == len(set(ids))
    words = {
        attrs["id"]: text.replace("\xa0", " ") for tag in ("title", "desc") for attrs, text in page.all(tag) if attrs
    }
    said = []
    for attrs, _ in page.all("svg"):
        assert attrs.get("role") == "img" or attrs["aria-hidden"] == "true"
        said += [[words[name] for name in attrs["aria-labelledby"].split()]] if "role" in attrs else []
    losses = [row["ce"] for row in rows]
    assert said[2] == [
        "Cross-entropy",
        f"A line from step 1 to 90: starts at {losses[0]:.3g}, ends at {losses[-1]:.3g}; "
        f"lowest {min(losses):.3g}, highest {max(losses):.3g}.",
    ]
    assert said[0][1].startswith(f"Dots from step 30 to 90: starts at {100 * rows[29]['val']:.1f} %, ends at ")
    assert len(said) == 5
    assert all(attrs.get("scope") in ("row", "col") for attrs, _ in page.all("th"))


def test_the_recipe_is_there_to_read(tmp_path: Path) -> None:
    _, page = written(tmp_path, made_up())
    [recipe] = texts(page, "pre")
    assert recipe.strip().split("\n") == [
        "title: A run",
        "model.method: dop",
        "training.episodes: 90",
        "training.way: 5",
        "training.lr: 0.001",
        "training.decay_every: 40",
        "training.decay_factor: 0.5",
        "training.augmentation.flip: yes",
        "data.name: birds",
    ]


# --- whatever the file holds ---


def test_lines_that_are_no_rows_are_left_out(tmp_path: Path) -> None:
    rows = made_up()
    odd = [
        "",
        "null",
        "[]",
        "7",
        "\x00",
        "[" * 100_000,
        '{"ce": 1}',
        '{"step": "4"}',
        '{"step": NaN}',
        '{"step": true}',
    ]
    clean, _ = written(tmp_path, rows)
    cut_off = json.dumps(rows[0])[:40]
    twice = {"ce": 1e6, "accuracy": 0.0, "step": 60, "seconds": 1.0}
    assert written(tmp_path, [*rows[:40], *odd, twice, *rows[40:], cut_off])[0] == clean
    assert written(tmp_path, rows[::-1])[0] == clean


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    clean, _ = written(tmp_path, made_up())
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"ce": \xff\xfe')
    assert page_of(tmp_path)[0] == clean


@pytest.mark.parametrize("content", [None, "", '{"ce": 1.2, "acc'])
def test_nothing_trained_yet(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    for recipe in (RECIPE, {}):
        _, page = page_of(tmp_path, recipe)
        assert "Nothing was trained yet" in texts(page, "header")[0]
        assert page.all("svg", "chart") == page.all("table") == []


@pytest.mark.parametrize(
    "rows", [[{"step": 1}], [{"step": 0, "ce": 1}], [{"step": 1.5, "val": 1}], [{"step": 5, "stage": "lr", "ce": 1}]]
)
def test_hardly_anything(tmp_path: Path, rows: list[Any]) -> None:
    for recipe in (RECIPE, {}, {"training": None, "title": 3}):
        text, _ = written(tmp_path, rows, recipe)
        assert not re.search(r"\bnan\b", text, re.IGNORECASE)


@pytest.mark.parametrize("name", [HOSTILE, "dodo\udce9", "x" * 300])
def test_names_stay_text(tmp_path: Path, name: str) -> None:
    rows = [row | {name: 1.0 + row["step"], "stage": name} for row in made_up()]
    recipe = {"title": name, "training": {name: name, "episodes": name, "lr": name}, name: {name: [name]}}
    text, page = written(tmp_path, rows, recipe)
    shown = name.replace("\udce9", "?")
    assert "<script" not in text
    assert not [key for _, attrs, _ in page.found for key in attrs if key.startswith("on")]
    assert texts(page, "h1") == [shown]
    assert f"{shown} 91" in texts(page, "h3")
    assert texts(page, "h2")[0] == shown.capitalize()
    assert f"training.{shown}: {shown}" in texts(page, "pre")[0]


def test_thirty_thousand_steps(tmp_path: Path) -> None:
    rows = made_up(30_000, sparsity=0.3, geometry_share=0.04)
    first = [row | {"stage": "pretraining"} for row in made_up(5000)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, first + rows)))
    started = time.process_time()
    text, _ = page_of(tmp_path)
    assert time.process_time() - started < 3
    assert len(text.encode()) < 300_000
    assert max(path.count("L") for path in re.findall(r'class="line[^>]* d="(.*?)"', text)) == POINTS - 1


def test_same_bytes_twice_and_nothing_from_outside(tmp_path: Path) -> None:
    text, page = written(tmp_path, made_up(400))
    write_training(tmp_path, recipe=RECIPE, path=tmp_path / "deep" / "again.html")
    assert (tmp_path / "deep" / "again.html").read_bytes() == (tmp_path / "report.html").read_bytes()
    assert not [attrs for _, attrs, _ in page.found if {"src", "href", "action", "srcset"} & set(attrs)]
    assert not re.search(r"https?:|url\(|@import", text)
    assert "script" not in next(a["content"] for a, _ in page.all("meta") if "http-equiv" in a)


# --- axes ---


LOWS, WIDTHS = (0, 0.1, -3, 97.3, 1e-7, -1e12, 0.9751), (1e-5, 0.004, 0.7, 1, 25, 99.9, 3e8)


@pytest.mark.parametrize(("low", "width"), [(a, b) for a in LOWS for b in WIDTHS if b > 1e-6 * abs(a)])
def test_ticks_are_round_and_around(low: float, width: float) -> None:
    found = ticks(low, low + width)
    step = found[1] - found[0]
    assert 3 <= len(found) <= 8
    assert found[0] <= low + 1e-5 * step
    assert found[-1] >= low + width - 1e-5 * step
    assert found[1] > low
    assert found[-2] < low + width
    assert f"{step:.0e}"[0] in "125"
    assert step == pytest.approx(float(f"{step:.0e}"), rel=1e-3)
    labels = [float(label.replace("−", "-").replace(",", "")) for label in tick_texts(found)]
    assert labels == pytest.approx(found, abs=1e-3 * step)
