"""The picture, the page and the JSON of an explanation show what was matched, and their rows add up."""

import functools
import html
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageColor

from parseshot import explanation_figure
from parseshot.data.synthetic import draw, make_species
from parseshot.engine.model import Model
from parseshot.errors import UsageError
from parseshot.explanation_figure import LARGEST, MARGIN, QUERY, WIDTH, Tile, link_classes, query_view, row_of
from parseshot.explanation_report import draw_explained, render, write_explained
from parseshot.figures import part_colour
from parseshot.recognition.explained import Explained
from parseshot.recognition.ledger import CELLS, EXPRESSION, LedgerRow
from parseshot.recognition.recognizer import Item, Recognizer

HOSTILE = "<script>alert(1)</script>\"' onload=x &amp; {{ 7 * 7 }}"
HEBREW = "טוקן גדול"
TURNED = "<b>x\u202egnp.jpg"  # a file name that turns what comes after it round
SPECIES = make_species(6, seed=77)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_pretrained("birds-conv4")


def recogniser(model: Model, names: list[str], shots: int = 3) -> Recognizer:
    made = Recognizer(model, find=False)
    for number, name in enumerate(names):
        items = [Item(draw(SPECIES[number], 50 + 10 * number + shot).image, f"{shot}{TURNED}") for shot in range(shots)]
        made.enroll([(name, item) for item in items], strict=True)
    return made


@pytest.fixture(scope="module")
def enrolled(model: Model) -> Recognizer:
    return recogniser(model, [HOSTILE, HEBREW, "Grünfink", "owl"])


@pytest.fixture(scope="module")
def explained(enrolled: Recognizer) -> Explained:
    return enrolled.explain(Item(draw(SPECIES[0], 7).image, TURNED, (4.0, 6.0, 80.0, 70.0)))


@pytest.fixture(scope="module")
def only(model: Model) -> Explained:
    return recogniser(model, ["owl"], shots=1).explain(Item(draw(SPECIES[0], 7).image, "a.png"))


def rejected(explained: Explained) -> Explained:
    return replace(explained, answer=replace(explained.answer, known=0.3, threshold=0.6))


def likely(explained: Explained, *probabilities: float) -> Explained:
    changed = zip(explained.answer.candidates, probabilities, strict=False)
    candidates = tuple(one._replace(probability=probability) for one, probability in changed)
    return replace(explained, answer=replace(explained.answer, candidates=candidates))


def certain(explained: Explained) -> Explained:
    return likely(explained, 0.9, 0.05, 0.03, 0.02)


def undecided(explained: Explained) -> Explained:
    return likely(explained, 0.4, 0.35, 0.15, 0.1)


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", page[page.index("<body>") :])))


def cells(page: str, name: str) -> list[Decimal]:
    return [Decimal(value) for value in re.findall(rf'<td class="{name}">([-\d.]+)</td>', page)]


# the page


def check_sums(explained: Explained, page: str) -> None:
    tables = re.findall(r'<table class="ledger">.*?</table>', page, re.DOTALL)
    assert len(tables) == min(2, len(explained.classes))
    for table, one in zip(tables, explained.classes, strict=False):
        rows, (geometry,), (total,) = cells(table, "adds"), cells(table, "other of-geometry"), cells(table, "total")
        assert len(rows) + 1 == len(one.ledger.rows)
        assert sum(rows) + geometry == total == sum(cells(table, "part-sum")) + geometry
        assert float(total) == pytest.approx(one.ledger.distance, abs=5.1e-5)
        for part, body in enumerate(re.findall(r"<tbody>.*?</tbody>", table, re.DOTALL)[:-1]):
            (printed,) = cells(body, "part-sum")
            assert sum(cells(body, "adds")) == printed
            assert float(printed) == pytest.approx(one.ledger.of_part(part), abs=1.01e-4)


def test_what_is_printed_adds_up(explained: Explained) -> None:
    check_sums(explained, render(explained))


def test_rows_have_weight_and_distance(explained: Explained) -> None:
    page = render(explained)
    shown = re.findall(r"<td>(\d) × \d</td><td>(\w)</td><td>([\d.]+)</td><td>([\d.]+)</td>", page)
    rows = [row for one in explained.classes[:2] for row in one.ledger.rows if row.kind == EXPRESSION]
    assert len(shown) == len(rows)
    first = [row for row in rows if row.part == 0][: len(explained.parts[0].by_scale)]
    for (scale, letter, weight, distance), row in zip(shown, first, strict=False):
        assert row.weight is not None
        assert row.matched is not None
        assert (int(scale), letter) == (row.scale, "ABCDEF"[row.matched])
        assert float(weight) * float(distance) == pytest.approx(row.adds, abs=2e-4)


def test_cells_have_rows(explained: Explained) -> None:
    """A model that compares cells has a row more a part, which counts."""
    first = explained.classes[0]
    extra = tuple(
        LedgerRow(CELLS, 0.0123456, part, None, 0.1, 0, (1.0, 1.0), (1.0, 1.0), 0.2)
        for part in range(len(explained.parts))
    )
    rows = (*first.ledger.rows[:-1], *extra, first.ledger.rows[-1])
    more = replace(first.ledger, rows=rows, distance=first.ledger.distance + 0.0123456 * len(extra))
    changed = replace(explained, classes=(replace(first, ledger=more), *explained.classes[1:]))
    page = render(changed)
    check_sums(changed, page)
    assert page.count("<td>cells</td>") == len(extra)


def test_differences_add_up(explained: Explained) -> None:
    page = render(explained)
    table = page[page.index('<table class="parts">') :]
    *gains, total = (Decimal(value) for value in re.findall(r'class="difference[^"]*">([-+][\d.]+)<', table))
    first, second = cells(page, "total")
    assert len(gains) == len(explained.parts) + 1
    assert sum(gains) == total == second - first
    lacked = explained.decided_by
    assert lacked is not None
    assert gains[lacked] == max(gains)
    assert f"Part {lacked + 1}: it is {gains[lacked]:f} nearer to {HOSTILE} than to" in text_of(page)


def test_the_geometry_may_have_decided(explained: Explained) -> None:
    first, second, *others = explained.classes
    *rows, geometry = second.ledger.rows
    far = replace(second.ledger, rows=(*rows, replace(geometry, adds=geometry.adds + 5)))
    page = render(replace(explained, classes=(first, replace(second, ledger=far), *others)))
    assert "Geometry: it is 5." in text_of(page)
    same = render(replace(explained, classes=(first, first, *others)))
    assert "Nothing: no part is nearer" in text_of(same)


@pytest.mark.parametrize("state", [certain, rejected, undecided])
def test_states(explained: Explained, state: Callable[[Explained], Explained]) -> None:
    shown = state(explained)
    page = render(shown)
    words = text_of(page)
    check_sums(shown, page)
    assert str(shown) in words
    assert (state is rejected) == ("probability of 30%, and below 60% the answer is none" in words)
    assert (state is rejected) == str(shown).startswith("none of these") == ("Likeliest" not in words)
    assert (state is undecided) == ("too close to call" in words) == (page.count(">they differ<") == 1)
    assert (state is undecided) == (f"they differ at part {shown.differ_at + 1}" in words)


def test_one_class(only: Explained) -> None:
    page = render(only)
    check_sums(only, page)
    assert "The only enrolled class, so nothing to decide." in text_of(page)
    assert "one class is enrolled: a probability needs two" in text_of(page)
    assert "lacked" not in text_of(page)
    assert "thin frame is what was looked at" not in page


def test_names_are_escaped(explained: Explained) -> None:
    page = render(explained)
    assert explained.answer.candidates[0].name == HOSTILE
    assert "<script" not in page
    assert "<b>x" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&#34;&#39; onload=x &amp;amp; {{ 7 * 7 }}" in page
    for tag in re.findall(r"<[^>]*>", re.sub(r'"[^"]*"', '""', page)):
        assert "onload" not in tag
    for name in (HEBREW, "&lt;b&gt;x\u202egnp.jpg"):  # nothing beside such a name is turned round
        told = re.sub(r'(aria-label|title)="[^"]*"', "", page[page.index("<body>") :])
        assert told.count(name) == len(re.findall(rf"<bdi *>\d?{re.escape(name)}</bdi>", told)) > 0


def test_the_page_is_complete_in_itself(explained: Explained, tmp_path: Path) -> None:
    write_explained(explained, tmp_path / "new" / "why.html")
    page = (tmp_path / "new" / "why.html").read_text(encoding="utf-8")
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert {link for link in links if link.startswith("#")} == {f"#{name}" for name in re.findall(r'id="(p\d+)"', page)}
    assert all(link.startswith(("#p", "data:image/webp;base64,")) for link in links)
    assert not re.search(r"https?:|url\(|@import", re.sub(r'href="data:[^"]*"', "", page))


def test_each_part_is_linked(explained: Explained) -> None:
    page = render(explained)
    paths = re.findall(r'<path class="link" d="[^"]*" stroke="([^"]*)"/>', page)
    assert paths == [part_colour(part) for _ in range(2) for part in range(len(explained.parts))]
    assert page.count('<rect class="frame dark"') == 3  # the photo, and again among the examples of either class


# links and the picture


def test_links_end_at_the_rings(explained: Explained) -> None:
    """What is linked is what is ringed: the surest place of the query, and that of the example it is nearest to."""
    for one in link_classes(explained):
        for part, example in enumerate(one.links):
            assert example is not None
            row = min(
                (row for row in one.ledger.ledger.rows if row.part == part and row.kind == EXPRESSION),
                key=lambda row: row.entropy or 0.0,
            )
            ringed = one.ledger.examples[example].parts[part]
            assert row.matched == example
            assert row.place == pytest.approx((explained.parts[part].x, explained.parts[part].y), abs=1e-3)
            assert row.matched_place == pytest.approx((ringed.x, ringed.y), abs=1e-3)


def test_a_line_has_the_colour_of_its_part(explained: Explained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the rows there is nothing but lines: each part has one there, above the query and below."""
    paint, painted = explanation_figure._paint, []

    def remember(size: Any, tiles: Sequence[Tile], lines: Any, words: Any) -> Image.Image:
        painted.extend(tiles)
        return paint(size, tiles, lines, words)

    monkeypatch.setattr(explanation_figure, "_paint", remember)
    drawn, query = np.asarray(draw_explained(explained)).astype(int), painted[0]
    assert query.view == query_view(explained)
    for height in (query.top - 20, query.top + query.height + 20):
        row = drawn[round(height) + MARGIN]
        for part in range(len(explained.parts)):
            colour = np.array(ImageColor.getrgb(part_colour(part)))
            assert (np.abs(row - colour).max(1) < 40).any(), (height, part)
        assert (row == 255).all(1).mean() > 0.8


def test_the_picture_has_a_sensible_size(explained: Explained, only: Explained) -> None:
    for one in (explained, only):
        width, height = draw_explained(one).size
        assert 600 <= width <= WIDTH + 2 * MARGIN
        assert QUERY < height < 1800
    assert draw_explained(explained).height > draw_explained(only).height + 200


@pytest.mark.parametrize("size", [(16, 16), (3000, 400), (40, 900)])
def test_photos_of_any_size_fit(enrolled: Recognizer, size: tuple[int, int]) -> None:
    photo = Image.fromarray(draw(SPECIES[0], 7).image).resize(size)
    explained = enrolled.explain(Item(photo, "long.png"))
    view = query_view(explained)
    assert max(view.image.size) == min(LARGEST, max(size))
    assert view.image.width / view.image.height == pytest.approx(size[0] / size[1], rel=0.03)
    (tile,) = row_of([view], 0, 1000, QUERY, 6)
    assert max(tile.width, tile.height) == pytest.approx(QUERY)
    for part in range(len(view.parts)):  # a line ends in the photo, also where a part is on the grey beside it
        x, y = tile.at(part)
        assert tile.left <= x <= tile.left + tile.width
        assert tile.top <= y <= tile.top + tile.height
    assert 600 <= draw_explained(explained).width <= WIDTH + 2 * MARGIN
    check_sums(explained, render(explained))


def test_many_examples_fit_side_by_side(explained: Explained) -> None:
    view = query_view(explained)
    tiles = row_of([view] * 9, 5, 1200, 300, 6)
    assert tiles[0].left == pytest.approx(0, abs=1e-9)
    assert tiles[-1].left + tiles[-1].width == pytest.approx(1200)
    assert all(a.left + a.width < b.left for a, b in pairwise(tiles))


@pytest.mark.parametrize("fonts", [explanation_figure.FONTS, ()], ids=["the machine's font", "Pillow's own"])
def test_text_is_beside_the_photos(
    explained: Explained, monkeypatch: pytest.MonkeyPatch, fonts: tuple[str, ...]
) -> None:
    """Where text is written there was white before."""
    monkeypatch.setattr(explanation_figure, "FONTS", fonts)
    monkeypatch.setattr("parseshot.figures._number", lambda *_: Image.new("RGBA", (1, 1), (0, 0, 0, 0)))
    monkeypatch.setattr(explanation_figure, "_font", functools.cache(explanation_figure._font.__wrapped__))
    full = np.asarray(draw_explained(explained))
    monkeypatch.setattr("PIL.ImageDraw.ImageDraw.text", lambda *_, **__: None)
    bare = np.asarray(draw_explained(explained))
    written = (full != bare).any(2)
    assert written.sum() > 1000
    assert (bare[written] == 255).all()
    assert not written[:, : MARGIN // 2].any()
    assert not written[:, -MARGIN // 2 :].any()
    assert not written[-MARGIN // 2 :].any()


# files


def test_the_rows_of_the_json_add_up(explained: Explained, tmp_path: Path) -> None:
    write_explained(explained, tmp_path / "why.JSON")
    told = json.loads((tmp_path / "why.JSON").read_text(encoding="utf-8"))
    assert told["schema_version"] == 1
    assert told["says"] == str(explained)
    assert len(told["ledgers"]) == 3
    for ledger in told["ledgers"]:
        assert sum(row["adds"] for row in ledger["rows"]) == pytest.approx(ledger["distance"], abs=1e-6)
        for row in ledger["rows"][:-1]:
            assert row["weight"] * row["distance"] == pytest.approx(row["adds"], abs=1e-6)
    scores = [candidate["score"] for candidate in told["candidates"][:3]]
    assert [ledger["score"] for ledger in told["ledgers"]] == pytest.approx(scores, rel=1e-4)


def test_the_picture_is_written(explained: Explained, tmp_path: Path) -> None:
    write_explained(explained, tmp_path / "new" / "why.png")
    with Image.open(tmp_path / "new" / "why.png") as written:
        assert written.format == "PNG"
        np.testing.assert_array_equal(np.asarray(written), np.asarray(draw_explained(explained)))


@pytest.mark.parametrize("name", ["why.gif", "why", "why.png.txt", ".json"])
def test_other_suffixes_are_refused(explained: Explained, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"\.png, \.html or \.json"):
        write_explained(explained, tmp_path / "new" / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".png", ".html", ".json"])
def test_a_file_is_replaced_whole_or_not_at_all(
    only: Explained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    target = tmp_path / f"why{suffix}"
    target.write_bytes(b"before")

    def full(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="disk full"):
            write_explained(only, target)
    assert target.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [target]
    write_explained(only, target)
    assert len(target.read_bytes()) > 1000
