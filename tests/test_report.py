"""The report is one complete, safe file whose rows add up; rings and crops hold at the edges of a picture."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from parseshot import report as module
from parseshot.data.synthetic import draw, make_species
from parseshot.errors import DataError
from parseshot.figures import PART_COLOURS, draw_parts, ink_on, label_direction, part_colour
from parseshot.recognition.answer import percent
from parseshot.recognition.explain import Explanation, FoundPart
from parseshot.report import Report, ReportQuery, rounded, write_report

PARTS = 6
HOSTILE = "<script>alert(1)</script>\"' onload=x &amp; {{ 7 * 7 }}"
VOID = {"meta", "circle", "use", "path", "image", "br", "img", "link"}


class Page(HTMLParser):
    """Every element as (tag, attributes, text inside it), and whether all that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str], list[str]]] = []
        self.stack: list[int] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}, []))
        if tag not in VOID:
            self.stack.append(len(self.found) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}, []))

    def handle_endtag(self, tag: str) -> None:
        assert self.found[self.stack.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for number in self.stack:
            self.found[number][2].append(data)

    def all(self, tag: str, name: str = "") -> list[tuple[dict[str, str], str]]:
        """(attributes, text) of the elements of a tag, and of a CSS class if given."""
        hits = [(attrs, "".join(text)) for found, attrs, text in self.found if found == tag]
        return [hit for hit in hits if not name or name in hit[0].get("class", "").split()]


def found_parts(rng: np.random.Generator, points: np.ndarray) -> tuple[FoundPart, ...]:
    return tuple(FoundPart(float(x), float(y), float(rng.random()), ()) for x, y in points)


def made_up(classes: int = 3, shots: int = 2, queries: int = 7) -> Report:
    """Drawn birds with parts where they are and distances out of the air; every third answer is wrong."""
    rng = np.random.default_rng(5)
    species = make_species(classes, seed=3)
    labels = [number for number in range(classes) for _ in range(shots)]
    support = [draw(species[label], 50 + row) for row, label in enumerate(labels)]
    asked = []
    for row in range(queries):
        truth = row % classes
        order = np.roll(np.arange(classes), -truth - (row % 3 == 2)).tolist()
        rows = np.sort(rng.gamma(2, 0.1, (2, PARTS + 1)), 0)  # the answer is nearer in every row
        distances = [*rows.sum(1), *(9.0 + np.arange(classes))][: max(classes, 1)]
        chances = np.exp(-np.array(distances))
        picture, matched = draw(species[truth], row), labels.index(order[0])
        why = Explanation(
            ranking=tuple(zip(order, map(float, distances), (chances / chances.sum()).tolist(), strict=True)),
            matched=matched,
            parts=found_parts(rng, picture.parts),
            matched_parts=found_parts(rng, support[matched].parts),
            part_distances=tuple(rows[0, :-1].tolist()),
            runner_up_part_distances=tuple(rows[min(1, classes - 1), :-1].tolist()),
            geometry=float(rows[0, -1]),
            runner_up_geometry=float(rows[min(1, classes - 1), -1]),
            degenerate_geometry=row == 0,
        )
        asked.append(ReportQuery(picture.image, species[truth].name, why))
    names = [one.name for one in species]
    return Report("Birds", {"Model": "made up"}, names, [one.image for one in support], labels, asked)


def written(report: Report, directory: Path) -> tuple[str, Page]:
    write_report(report, directory / "report.html")
    text = (directory / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.stack == []
    assert text.rstrip().endswith("</html>")
    return text, page


def test_one_card_a_query_with_its_answer(tmp_path: Path) -> None:
    report = made_up()
    _, page = written(report, tmp_path)
    cards = page.all("article", "card")
    assert [attrs["data-verdict"] for attrs, _ in cards] == ["right", "right", "wrong"] * 2 + ["right"]
    for (attrs, text), query in zip(cards, report.queries, strict=True):
        assert report.classes[query.explanation.ranking[0][0]] in text
        assert f"Runner-up: {report.classes[query.explanation.ranking[1][0]]}" in text
        assert ("Wrong" in text) == (f"True class: {query.truth}" in text) == (attrs["data-verdict"] == "wrong")
    assert "71.4%" in page.all("p", "score")[0][1]
    assert "5 of 7" in page.all("p", "score")[0][1]
    assert "All parts lie in one place" in cards[0][1]
    assert "All parts lie in one place" not in cards[1][1]


def test_a_ring_for_each_part_of_each_picture(tmp_path: Path) -> None:
    text, page = written(made_up(), tmp_path)
    photos = re.findall(r'<svg class="photo".*?</svg>', text, re.DOTALL)
    assert len(photos) == 2 * 7
    assert {photo.count('<circle class="line"') for photo in photos} == {PARTS}
    assert len(page.all("svg", "crop")) == 7 * 2 * (PARTS + 1)  # a pair a part, and the geometry
    certain = [part.entropy < 0.5 for query in made_up().queries for part in query.explanation.parts]
    shown = ["unsure" not in attrs["class"] for attrs, _ in page.all("g", "ring")]
    assert [shown[at + part] for at in range(0, len(shown), 2 * PARTS) for part in range(PARTS)] == certain
    assert all(re.fullmatch(r"Part \d, certainty \d+%", title) for _, title in page.all("title")[1:])


def test_printed_rows_add_up_to_the_distance(tmp_path: Path) -> None:
    report = made_up()
    _, page = written(report, tmp_path)
    adds = np.array([float(text) for _, text in page.all("b", "adds")]).reshape(len(report.queries), PARTS + 1)
    shares = np.array([int(text.rstrip("%")) for _, text in page.all("span", "share")]).reshape(adds.shape)
    totals = [float(text) for _, text in page.all("b", "total")]
    np.testing.assert_allclose(adds.sum(1), totals, atol=1e-9)
    np.testing.assert_allclose(totals, [query.explanation.ranking[0][1] for query in report.queries], atol=5.1e-4)
    assert shares.sum(1).tolist() == [100] * len(report.queries)


@pytest.mark.parametrize(
    ("runner_up", "geometry", "words"),
    [
        ((0.3, 0.5, 0.1), 0.1, "Part 2 decided: 0.300 nearer"),
        ((0.2, 0.2, 0.2), 0.9, "Geometry decided: 0.800 nearer"),
        ((0.2, 0.2, 0.2), 0.1, "Nothing decided"),
    ],
)
def test_the_part_that_decided(tmp_path: Path, runner_up: tuple[float, ...], geometry: float, words: str) -> None:
    report = made_up(queries=1)
    why = replace(
        report.queries[0].explanation,
        parts=report.queries[0].explanation.parts[:3],
        matched_parts=report.queries[0].explanation.matched_parts[:3],
        part_distances=(0.2, 0.2, 0.2),
        runner_up_part_distances=runner_up,
        geometry=0.1,
        runner_up_geometry=geometry,
    )
    _, page = written(replace(report, queries=[replace(report.queries[0], explanation=why)]), tmp_path)
    assert words in page.all("p", "decided")[0][1]
    assert len(page.all("span", "tag")) == ("Nothing" not in words)


def test_nothing_loads_from_outside(tmp_path: Path) -> None:
    text, page = written(made_up(), tmp_path)
    links = [attrs[name] for _, attrs, _ in page.found for name in ("src", "href", "action", "srcset") if name in attrs]
    assert links
    assert all(link.startswith(("#", "data:image/webp;base64,")) for link in links)
    assert not re.search(r"https?:|url\(|@import|//[a-z]", re.sub(r'href="data:[^"]*"', "", text))
    targets = {attrs["id"] for _, attrs, _ in page.found if "id" in attrs}
    assert {link[1:] for link in links if link.startswith("#")} <= targets
    policy = next(a["content"] for a, _ in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert not [name for _, attrs, _ in page.found for name in attrs if name.startswith("on")]


def test_each_picture_is_embedded_once(tmp_path: Path) -> None:
    report = made_up()
    again = replace(report, queries=[*report.queries, *report.queries])
    _, page = written(again, tmp_path)
    images = page.all("image")
    assert len(images) == len(report.support) + len(report.queries)
    assert len({attrs["href"] for attrs, _ in images}) == len(images)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    report = made_up()
    named = [replace(query, truth=HOSTILE) for query in report.queries]
    text, page = written(
        replace(report, title=HOSTILE, summary={HOSTILE: HOSTILE}, classes=[HOSTILE] * 3, queries=named), tmp_path
    )
    assert len(page.all("script")) == 1
    assert "alert" not in page.all("script")[0][1]
    assert "<script>alert" not in text
    assert page.all("h1")[0][1] == HOSTILE
    assert HOSTILE in page.all("h3")[0][1]
    assert not [name for _, attrs, _ in page.found for name in attrs if name == "onload"]


def test_lone_surrogate_of_a_folder_name_is_written(tmp_path: Path) -> None:
    _, page = written(replace(made_up(queries=0), classes=["a", "b", "dodo\udce9"]), tmp_path)
    assert "dodo?" in page.all("h3")[2][1]


@pytest.mark.parametrize(("classes", "queries"), [(1, 0), (1, 2), (3, 0), (2, 1)])
def test_complete_with_little_to_show(tmp_path: Path, classes: int, queries: int) -> None:
    _, page = written(made_up(classes=classes, shots=1, queries=queries), tmp_path)
    assert len(page.all("article", "card")) == queries
    assert len(page.all("ul", "classes")) == 1
    assert ("No pictures were recognised" in page.all("header")[0][1]) == (queries == 0)


def test_unknown_truth_and_a_class_that_is_not_enrolled(tmp_path: Path) -> None:
    report = made_up(queries=2)
    queries = [replace(report.queries[0], truth=None), replace(report.queries[1], truth="dodo")]
    _, page = written(replace(report, queries=queries), tmp_path)
    cards = [text for _, text in page.all("article", "card")]
    assert "True class not given" in cards[0]
    assert "True class: dodo (not enrolled)" in cards[1]
    assert "0 of 1 pictures" in page.all("p", "score")[0][1]
    _, page = written(replace(report, queries=queries[:1]), tmp_path)
    assert "1 picture recognised" in page.all("p", "score")[0][1]
    assert page.all("table", "confusion") == []


def test_only_the_first_pictures_of_a_large_class(tmp_path: Path) -> None:
    _, page = written(made_up(classes=1, shots=7, queries=0), tmp_path)
    assert len(page.all("image")) == module.THUMBNAILS
    assert "7 pictures, the first 5 shown" in page.all("ul", "classes")[0][1]


def test_buttons_say_whether_they_are_pressed_and_need_a_script(tmp_path: Path) -> None:
    text, page = written(made_up(), tmp_path)
    assert [attrs["aria-pressed"] for attrs, _ in page.all("button")].count("true") == 2
    assert "hidden" in page.all("div", "filters")[0][0]
    assert not [attrs for attrs, _ in page.all("article") if "hidden" in attrs]
    assert [a for a, _ in page.all("svg") if not a.get("aria-label") and a.get("aria-hidden") != "true"] == []
    assert '<html lang="en">' in text


def test_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "deep" / "report.html"
    write_report(made_up(queries=1), target)
    before = target.read_bytes()
    with pytest.raises(DataError, match="labels"):
        write_report(replace(made_up(queries=1), support_labels=[0]), target)
    with pytest.raises(DataError, match="uint8"):
        write_report(replace(made_up(queries=0), support=[np.zeros((4, 4))] * 6), target)

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_report(made_up(queries=2), target)
    assert target.read_bytes() == before
    assert [file.name for file in target.parent.iterdir()] == ["report.html"]


def test_same_report_same_bytes(tmp_path: Path) -> None:
    assert written(made_up(), tmp_path)[0] == written(made_up(), tmp_path)[0]


def test_rounded_rows_keep_their_sum() -> None:
    values = np.random.default_rng(0).random((50, 9))
    for row in values:
        steps = rounded(row.tolist(), 2)
        assert round(sum(steps), 2) == round(float(row.sum()), 2)
        assert np.abs(np.array(steps) - row).max() < 0.01 + 1e-9  # each is off by less than one last digit


def test_percent_never_claims_certainty() -> None:
    assert [percent(p) for p in (0.0, 0.004, 0.5, 0.974, 0.9999, 1.0)] == ["<1%", "<1%", "50%", "97%", ">99%", ">99%"]


# --- figures ---


def contrast(a: str, b: str) -> float:
    """WCAG 2 contrast ratio, as its definition is written."""

    def luminance(colour: str) -> float:
        levels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in levels]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    bright, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_the_page_is_readable_by_day_and_by_night() -> None:
    style = (module.TEMPLATES / module.TEMPLATE).read_text(encoding="utf-8")
    themes = [dict(re.findall(r"--(\w+):(#\w{6})", block)) for block in re.findall(r":root\{(.*?)\}", style)]
    assert len(themes) == 2
    for theme in themes:
        for text in ("ink", "muted", "accent", "right", "wrong"):
            assert min(contrast(theme[text], theme[ground]) for ground in ("page", "card")) >= 4.5, text


def test_colours_differ_cycle_and_carry_readable_numbers() -> None:
    assert len(set(PART_COLOURS)) >= 8
    assert part_colour(len(PART_COLOURS) + 2) == PART_COLOURS[2]
    assert min(contrast(colour, ink_on(colour)) for colour in PART_COLOURS) >= 4.5


@pytest.mark.parametrize(("x", "y"), [(0.0, 0.5), (1.0, 0.5), (0.5, 0.0), (0.5, 1.0), (0.0, 0.0), (1.0, 1.0)])
def test_numbers_turn_inwards_at_the_edges(x: float, y: float) -> None:
    for part in range(7):
        across, down = label_direction(part, 7, x, y)
        assert np.hypot(across, down) == pytest.approx(1.0)
        assert x == 0.5 or np.sign(across) == np.sign(0.5 - x)
        assert y == 0.5 or np.sign(down) == np.sign(0.5 - y)


def grey(height: int = 40, width: int = 60) -> np.ndarray:
    return np.full((height, width, 3), 128, dtype=np.uint8)


def test_ring_is_where_the_part_is() -> None:
    drawn = np.asarray(draw_parts(grey(), [FoundPart(20.0, 10.0, 0.1, ())], scale=4)).astype(int)
    assert drawn.shape == (160, 240, 3)
    colour = np.array([int(PART_COLOURS[0][at : at + 2], 16) for at in (1, 3, 5)])
    rows, columns = np.nonzero(np.abs(drawn - colour).max(2) < 12)
    # 20.5 × 4 = 82 and 10.5 × 4 = 42; the ring has a radius of 0.075 × 160 = 12, its number sticks out to the right
    assert columns.min() == pytest.approx(82 - 12, abs=1.5)
    assert rows.max() == pytest.approx(42 + 12, abs=1.5)
    assert (drawn[42, 82] == 128).all()  # the part itself stays visible
    assert ((drawn == 255).all(2)).any()  # halo


def test_uncertain_ring_is_fainter() -> None:
    certain, unsure = (
        np.asarray(draw_parts(grey(), [FoundPart(30.0, 20.0, entropy, ())])).astype(int) for entropy in (0.1, 0.9)
    )
    assert 0 < (unsure != 128).any(2).sum() < (certain != 128).any(2).sum()
    assert np.abs(unsure - 128).sum() < 0.9 * np.abs(certain - 128).sum()


@pytest.mark.parametrize("place", [(0.0, 0.0), (59.0, 39.0), (-3.0, 20.0), (500.0, -500.0)])
def test_rings_at_and_beyond_the_edge(place: tuple[float, float]) -> None:
    image = grey()
    drawn = np.asarray(draw_parts(image, [FoundPart(*place, 0.7, ())] * 11, scale=2))
    assert drawn.shape == (80, 120, 3)
    assert (drawn == 128).all() == (place[0] == 500.0)
    assert (image == 128).all()
