"""The pages of an evaluation and of a comparison hold the figures of their documents, whatever the names."""

import re
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parseshot import evaluation_report as module
from parseshot.data.packed import Pack, write_pack
from parseshot.engine.evaluation import Evaluation, OpenSet, Outcome
from parseshot.engine.model import Model
from parseshot.engine.protocol import Protocol, Shots
from parseshot.engine.results import (
    ComparedRow,
    ComparisonResult,
    Confusion,
    EvaluationResult,
    Group,
    ModelCard,
    Pair,
    Result,
    evaluation_result,
)
from parseshot.engine.statistics import BINS, Reliability
from parseshot.evaluation_report import cut, path_tails, write_comparison, write_evaluation
from test_report import HOSTILE, Page

MODEL = str(resources.files("parseshot") / "models" / "birds-conv4")
UNBALANCED = (1, 2, 3, 1, 2)
Evaluated = tuple[EvaluationResult, Evaluation, Pack]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """Six classes of eight noise pictures, and figures out of the air."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(6), 8)
    pack = write_pack(
        tmp_path_factory.mktemp("data") / "noise",
        name="noise",
        arrays={"images": rng.integers(0, 256, (48, 12, 12, 3), dtype=np.uint8), "labels": labels},
        classes=[f"bird {letter}" for letter in "fedcba"],
        splits=["novel"] * 6,
        split={"name": "all", "fingerprint": "5b117"},
        provenance={},
    )
    protocol = Protocol(shots=(1, UNBALANCED), queries=5, episodes=20)
    outcomes = [outcome(rng, labels, shots) for shots in protocol.shots]
    found = Evaluation(protocol, outcomes, np.arange(6), np.arange(48), labels, 4096, False, unseen=1)
    return evaluation_result(MODEL, Model.from_pretrained(MODEL), pack, found), found, pack


def outcome(rng: np.random.Generator, labels: np.ndarray, shots: Shots) -> Outcome:
    taken = rng.poisson(0.7, (len(labels), 6)) + 3 * (labels[:, None] == np.arange(6))
    chances = np.stack([taken[labels == label].sum() * rng.uniform(0.8, 1, 6) for label in range(6)]).astype(int)
    scores = {name: OpenSet(rng.random(20), rng.random(20)) for name in ("logit", "probability")}
    raw, tempered = reliability(rng), reliability(rng)
    return Outcome(shots, rng.random(20), taken, chances, raw, 3, 1, rng.uniform(0.5, 2), tempered, scores)


def reliability(rng: np.random.Generator) -> Reliability:
    found = Reliability()
    found.counts[:] = [0, 0, 0, 1, *rng.integers(50, 300, BINS - 4)]
    found.confidence[:] = found.counts * (np.arange(BINS) + rng.random(BINS)) / BINS
    found.right[:] = found.counts * rng.random(BINS)
    found.loss = 1234.5
    return found


def evaluation_page(evaluated: Evaluated, directory: Path) -> tuple[str, Page]:
    result, found, pack = evaluated
    write_evaluation(result, found, pack, directory / "page.html")
    return read(directory)


def read(directory: Path) -> tuple[str, Page]:
    text = (directory / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.stack == []
    assert text.rstrip().endswith("</html>")
    return text, page


def changed(result: EvaluationResult, **values: Any) -> EvaluationResult:
    """The document with other values at its first number of shots."""
    first, *others = result.results
    return result.model_copy(update={"results": [first.model_copy(update=values), *others]})


def renamed(evaluated: Evaluated, name: str) -> Evaluated:
    """Everything that has a name gets another one."""
    result, found, pack = evaluated
    old = {known: f"{name}{number}" for number, known in enumerate(pack.classes)}

    def rename(one: Result) -> Result:
        assert one.confusion is not None
        classes = [row.model_copy(update={"name": old[row.name]}) for row in one.per_class]
        pairs = [
            pair.model_copy(update={"truth": old[pair.truth], "taken_for": old[pair.taken_for]})
            for pair in one.most_confused
        ]
        matrix = one.confusion.model_copy(update={"classes": [old[known] for known in one.confusion.classes]})
        return one.model_copy(update={"per_class": classes, "most_confused": pairs, "confusion": matrix})

    again = Pack(pack.path)
    again.classes = [old[known] for known in pack.classes]
    again.files = [name for _ in pack.files]
    again.path = Path(name)
    card = result.model_card.model_copy(
        update={"path": name, "training": {name: name}, "options": {name: {name: name}}}
    )
    data = result.data.model_copy(update={"name": name})
    update = {"model": name, "method": name, "model_card": card, "data": data, "notes": [name]}
    update["results"] = [rename(one) for one in result.results]
    return result.model_copy(update=update), found, again


def texts(page: Page, tag: str, name: str = "") -> list[str]:
    return [text.replace("\xa0", " ") for _, text in page.all(tag, name)]


# --- evaluation ---


def test_the_page_holds_the_figures_of_the_document(evaluated: Evaluated, tmp_path: Path) -> None:
    result, _, pack = evaluated
    _, page = evaluation_page(evaluated, tmp_path)
    assert texts(page, "h1") == ["dop with conv4 on noise"]
    for one, tile in zip(result.results, texts(page, "section", "card"), strict=True):
        low, high = one.interval_95_by_classes
        assert f"{100 * one.accuracy:.2f} %" in tile
        assert f"± {100 * one.interval_95:.2f}" in tile
        assert f"other classes: {100 * low:.1f} to {100 * high:.1f} %" in tile
    whole = texts(page, "main")[0] + texts(page, "header")[0]
    for one in result.results:
        assert one.open_set is not None
        assert one.calibration.tempered is not None
        for record in (one.calibration.raw, one.calibration.tempered):
            assert f"{100 * record.ece:.1f} %{record.nll:.3f}" in whole
        for score in (one.open_set.by_logit, one.open_set.by_probability):
            assert f"{100 * score.auroc:.1f} % ± {100 * score.auroc_interval_95:.1f}" in whole
            assert f"{100 * score.fpr_at_95_tpr:.1f} % ± {100 * score.fpr_interval_95:.1f}" in whole
        assert f"fitted on the val classes, is {one.calibration.temperature:.3g}" in whole
        for pair in one.most_confused:
            assert f"{pair.truth} taken for {pair.taken_for}" in whole
            assert f"{100 * pair.rate:.0f} %: {pair.times} of {pair.of} queries" in whole
    for value in (pack.fingerprint, pack.split["fingerprint"], result.model_card.weights, result.versions.torch):
        assert value in whole
    assert [text.split(" shot")[0] for text in texts(page, "h2")[:2]] == ["1", "1+2+3+1+2"]


def test_classes_come_best_first(evaluated: Evaluated, tmp_path: Path) -> None:
    result, _, _ = evaluated
    never = result.results[0].per_class[3].model_copy(update={"accuracy": None, "queries": 0})
    classes = [never if at == 3 else row for at, row in enumerate(result.results[0].per_class)]
    _, page = evaluation_page((changed(result, per_class=classes), *evaluated[1:]), tmp_path)
    ranks = texts(page, "ol", "ranks")[0].split("\n")[1:-1]
    best_first = sorted((row for row in classes if row.accuracy is not None), key=lambda row: -(row.accuracy or 0))
    assert ranks == [f"{row.name}{100 * (row.accuracy or 0):.1f} %" for row in best_first] + [f"{never.name}not asked"]


def test_pictures_of_a_pair_are_those_most_often_confused(evaluated: Evaluated, tmp_path: Path) -> None:
    result, found, pack = evaluated
    text, page = evaluation_page(evaluated, tmp_path)
    pair = result.results[0].most_confused[0]
    names = [pack.classes[number] for number in found.classes]
    truth, answer = names.index(pair.truth), names.index(pair.taken_for)
    article = re.findall(r"<article.*?</article>", text, re.DOTALL)[0]
    for which, place, words in ((truth, answer, "taken for"), (answer, answer, "recognised")):
        rows = np.flatnonzero(found.labels == which)
        times = sorted(found.outcomes[0].taken[rows, place], reverse=True)
        expected = [str(count) for count in times[: module.THUMBNAILS] if count]
        assert re.findall(rf"<title>[^<]*: {words}[^<]* (\d+) times</title>", article) == expected
    pictures = [attrs["href"] for attrs, _ in page.all("image")]
    assert len(set(pictures)) == len(pictures) > 0
    assert {attrs["href"] for attrs, _ in page.all("use")} == {f"#{attrs['id']}" for attrs, _ in page.all("image")}


def test_matrix_has_a_cell_for_each_confusion(evaluated: Evaluated, tmp_path: Path) -> None:
    result, _, _ = evaluated
    taken, of = [[8, 3, 0], [0, 9, 0], [1, 0, 4]], [[11, 12, 0], [9, 9, 9], [50, 5, 5]]
    confusion = Confusion(classes=["a", "b", "c"], taken=taken, of=of)
    text, _ = evaluation_page((changed(result, confusion=confusion), *evaluated[1:]), tmp_path)
    matrix = re.findall(r'<svg class="matrix".*?</svg>', text, re.DOTALL)[0].replace("\xa0", " ")
    titles = re.findall(r'class="cell".*?<title>(.*?)</title>', matrix)
    assert titles == ["a taken for b: 25.0 % (3 of 12)", "c taken for a: 2.0 % (1 of 50)"]
    paths = {name: path.count("M") for name, path in re.findall(r'<path class="(\w+)" d="(.*?)"', matrix)}
    assert paths == {"unmet": 1, "diagonal": 3, "shade1": 1, "shade5": 1}  # up to 2 %, and 20 to 35 %
    assert re.findall(r'class="rate[^>]*>(\d+)<', matrix) == ["25", "2"]


@pytest.mark.parametrize("classes", [61, 200])
def test_a_large_matrix_is_numbered(evaluated: Evaluated, tmp_path: Path, classes: int) -> None:
    counts = np.random.default_rng(0).integers(0, 5, (classes, classes))
    names = [f"class {number}" for number in range(classes)]
    large = Confusion(classes=names, taken=counts.tolist(), of=(counts + 9).tolist())
    _, page = evaluation_page((changed(evaluated[0], confusion=large), *evaluated[1:]), tmp_path)
    assert [text.split("class")[0] for text in texts(page, "text", "rows")][:6] == ["10", "20", "30", "40", "50", "60"]
    assert len(texts(page, "ol", "numbered")) == 1
    assert "class 60" in texts(page, "ol", "numbered")[0]
    cells = [name for _, attrs, _ in page.found if (name := attrs.get("class")) == "cell"]
    assert len(cells) < classes * classes / 2  # the others are drawn, but say nothing


def test_little_to_show(evaluated: Evaluated, tmp_path: Path) -> None:
    result, found, pack = evaluated
    bare = result.results[0].calibration.model_copy(update={"temperature": None, "tempered": None})
    little = changed(result, calibration=bare, open_set=None, confusion=None, most_confused=[])
    little = little.model_copy(update={"results": little.results[:1], "notes": ["no temperature: no val classes"]})
    _, page = evaluation_page((little, replace(found, outcomes=found.outcomes[:1]), pack), tmp_path)
    [whole] = texts(page, "main")
    assert "No temperature was fitted." in whole
    assert "Not measured." in whole
    assert "drawn for up to 200 classes" in whole
    assert "No query was given to a wrong class." in whole
    assert "no temperature: no val classes" in whole
    assert len(page.all("svg", "diagram")) == 1
    assert page.all("svg", "matrix") == page.all("image") == []
    [command] = texts(page, "pre")
    assert not {"--calibrate", "--open-set"} & set(command.split())


def test_reliability_bars_are_as_high_as_the_accuracy(evaluated: Evaluated, tmp_path: Path) -> None:
    text, page = evaluation_page(evaluated, tmp_path)
    record = evaluated[0].results[0].calibration.raw
    diagram = re.findall(r'<svg class="diagram".*?</svg>', text, re.DOTALL)[0]
    heights = re.findall(r'<rect class="(?:right|few)"[^>]* height="([\d.]+)"', diagram)
    accuracies = [one.accuracy for one in record.bins if one.accuracy is not None]
    assert [float(height) for height in heights] == pytest.approx([190 * one for one in accuracies], abs=0.051)
    total = sum(one.queries for one in record.bins)
    heard = [one for one in record.bins if one.confidence is not None and one.queries >= 0.01 * total]
    said = min(heard, key=lambda one: abs((one.confidence or 0) - 0.8))
    assert (
        f"When it says {100 * (said.confidence or 0):.0f} %, it is right in {100 * (said.accuracy or 0):.0f} %."
        in (texts(page, "figcaption", "")[2 * len(evaluated[0].results[0].most_confused)])
    )


def test_the_command_asks_for_the_same_protocol(evaluated: Evaluated, tmp_path: Path) -> None:
    _, page = evaluation_page(evaluated, tmp_path)
    [command] = texts(page, "pre")
    assert command.startswith(f"parseshot evaluate {MODEL} --data {evaluated[2].path} --split novel --way 5 ")
    assert "--shots 1,1+2+3+1+2 --queries 5 --episodes 20 --seed 0 --threads" in command
    assert command.endswith("--calibrate --open-set")


@pytest.mark.parametrize("name", [HOSTILE, "dodo\udce9", "x" * 200])
def test_names_stay_text(evaluated: Evaluated, tmp_path: Path, name: str) -> None:
    text, page = evaluation_page(renamed(evaluated, name), tmp_path)
    assert page.all("script") == []
    assert "<script" not in text
    assert texts(page, "h1")[0].startswith(name.replace("\udce9", "?"))
    assert not [key for _, attrs, _ in page.found for key in attrs if key.startswith("on")]


# --- comparison ---


def compared(accuracies: list[float], groups: list[list[int]], paths: list[str] | None = None) -> ComparisonResult:
    """Models with made-up figures; two differ where no group holds both."""
    names = paths or [f"/runs/model-{number}/best" for number in range(len(accuracies))]
    data = {"name": "birds", "fingerprint": "da7a", "size": 84, "split": {"name": "cub", "fingerprint": "5b117"}}
    card: dict[str, Any] = dict.fromkeys(("trained_on", "base_classes", "episodes_seen", "val_accuracy"))
    card |= {"method": "dop", "backbone": "conv4", "image_size": 84, "grid": 10, "parameters": 1234, "weights": "abc"}
    rows, pairs = [], []
    for shots in (1, [1, 2]):
        for name, accuracy in zip(names, accuracies, strict=True):
            lead = {"lead_of_first": accuracies[0] - accuracy, "lead_interval_95": 0.01, "excludes_zero": True}
            figures = {"accuracy": accuracy, "interval_95": 0.0123, "interval_95_by_classes": (accuracy - 0.05, 0.9)}
            rows.append(ComparedRow(model=name, method="dop", shots=shots, **figures, **lead))
        for a, b in combinations(range(len(names)), 2):
            differ, difference = not any({a, b} <= set(group) for group in groups), accuracies[a] - accuracies[b]
            p = {"p_value": 0.0004 if differ else 0.0321, "p_holm": 0.004 if differ else 0.321, "differ": differ}
            interval = {"interval_95": 0.0077, "interval_95_by_classes": (difference - 0.02, difference + 0.02)}
            one = Pair(shots=shots, first=names[a], second=names[b], difference=difference, **interval, **p)
            pairs.append(one)
    return ComparisonResult(
        models=[ModelCard(path=name, options={}, training={"seed": at}, **card) for at, name in enumerate(names)],
        data=data,
        protocol=Protocol(shots=(1, (1, 2)), way=2),
        results=rows,
        pairs=pairs,
        indistinct=[
            Group(shots=shots, models=[names[at] for at in group]) for shots in (1, [1, 2]) for group in groups
        ],
        notes=["a note"],
        versions={"parseshot": "1", "torch": "2", "numpy": "3", "python": "4", "threads": 2},
    )


def comparison_page(result: ComparisonResult, directory: Path) -> tuple[str, Page]:
    write_comparison(result, directory / "page.html")
    return read(directory)


def test_two_models_that_differ(tmp_path: Path) -> None:
    result = compared([0.7, 0.6543], [])
    _, page = comparison_page(result, tmp_path)
    [means] = texts(page, "table", "means")
    assert "70.00 % ± 1.23" in means
    assert "65.43 % ± 1.23" in means
    assert "60.4 to 90.0 %" in means
    assert texts(page, "h2")[1:3] == ["1 shot", "1+2 shots"]
    for table in texts(page, "table", "pairs"):
        for figure in ("+4.57 ± 0.77", "+2.57 to +6.57", "< 0.001", "0.004", "told apart"):
            assert figure in table
        assert "not told apart" not in table
    assert page.all("g", "joined") == []
    assert texts(page, "main")[0].count("Every model was told apart from every other.") == 2
    assert "parseshot compare /runs/model-0/best /runs/model-1/best --data PACK" in texts(page, "pre")[0]


def test_the_bar_joins_exactly_the_group(tmp_path: Path) -> None:
    accuracies = [0.5, 0.9, 0.61, 0.6, 0.8, 0.59, 0.51, 0.7]
    groups = [[2, 3, 5], [3, 5, 6], [6, 0]]  # in the order of accuracy: 1 4 7 2 3 5 6 0
    text, page = comparison_page(compared(accuracies, groups), tmp_path)
    plot = re.findall(r'<svg class="plot".*?</svg>', text, re.DOTALL)[0]
    lines = re.findall(r'<circle class="mean" cx="([\d.]+)%" cy="(\d+)"', plot)
    height = {number: y for number, (_, y) in zip([1, 4, 7, 2, 3, 5, 6, 0], lines, strict=True)}
    assert [float(x) for x, _ in lines] == sorted((float(x) for x, _ in lines), reverse=True)
    bars = re.findall(r'<g class="joined">.*?</g>', plot, re.DOTALL)
    assert len(bars) == len(groups)
    lanes = []
    for bar, group in zip(bars, groups, strict=True):
        [(x, top, bottom)] = re.findall(r'<line class="join" x1="([\d.]+)%" x2="\1%" y1="(\d+)" y2="(\d+)"', bar)
        assert (top, bottom) == (height[group[0]], height[group[-1]])
        assert re.findall(r'class="member" cx="[\d.]+%" cy="(\d+)"', bar) == [height[number] for number in group]
        assert f"Not told apart: {', '.join(str(number + 1) for number in group)}</title>" in bar
        lanes.append(float(x))
    assert lanes[0] != lanes[1] != lanes[2]  # bars that share a line are side by side
    assert max(lanes) < 100
    [first, _] = texts(page, "table", "pairs")
    assert first.count("not told apart") == sum(len(group) * (len(group) - 1) // 2 for group in groups) - 1  # 3 and 5


@pytest.mark.parametrize("models", [2, 25])
def test_models_that_cannot_be_told_apart(tmp_path: Path, models: int) -> None:
    result = compared([0.6 - 0.001 * at for at in range(models)], [list(range(models))])
    _, page = comparison_page(result, tmp_path)
    assert len(page.all("g", "joined")) == 2
    assert len(page.all("circle", "member")) == 2 * models
    assert "No two models were told apart." in texts(page, "main")[0]
    assert ["open" in attrs for attrs, _ in page.all("details")] == [models == 2] * 2


@pytest.mark.parametrize("accuracies", [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
def test_any_accuracy_has_its_place(tmp_path: Path, accuracies: list[float]) -> None:
    result = compared(accuracies, [])
    exact = [row.model_copy(update={"interval_95": 0.0}) for row in result.results]
    text, page = comparison_page(result.model_copy(update={"results": exact}), tmp_path)
    assert all(0 <= float(x) <= 100 for x in re.findall(r'cx="([-\d.]+)%"', text))
    ticks = [float(text.rstrip("% ")) for text in texts(page, "text", "middle")]
    assert min(ticks) >= 0
    assert max(ticks) <= 100


def test_told_apart_on_these_classes_only(tmp_path: Path) -> None:
    result = compared([0.61, 0.6], [])  # the interval over classes is −1 to 3 points
    _, page = comparison_page(result, tmp_path)
    assert "told apart on these classes" in texts(page, "table", "pairs")[0]


def test_model_cards_side_by_side(tmp_path: Path) -> None:
    paths = ["/a/very/long/way/x/best", "/a/very/long/way/y/best", "best"]
    _, page = comparison_page(compared([0.7, 0.6, 0.5], [], paths), tmp_path)
    [cards] = texts(page, "table", "modelcards")
    assert "Field1 x/best2 y/best3 best" in cards
    assert f"Path{''.join(paths)}" in cards
    assert "Parameters1,2341,2341,234" in cards
    assert "Training: seed012" in cards


def test_hostile_paths_stay_text(tmp_path: Path) -> None:
    text, page = comparison_page(compared([0.7, 0.6], [[0, 1]], [HOSTILE, "dodo\udce9"]), tmp_path)
    assert page.all("script") == []
    assert "<script" not in text
    assert not [key for _, attrs, _ in page.found for key in attrs if key.startswith("on")]
    assert "dodo?" in texts(page, "table", "means")[0]


# --- both ---


@pytest.fixture(params=["evaluation", "comparison"])
def write(request: pytest.FixtureRequest, evaluated: Evaluated) -> Callable[[Path], None]:
    if request.param == "evaluation":
        return lambda path: write_evaluation(*evaluated, path)
    return lambda path: write_comparison(compared([0.7, 0.6], [[0, 1]]), path)


def test_same_bytes_twice_and_nothing_from_outside(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path / "deep" / "page.html")
    write(tmp_path / "again.html")
    text = (tmp_path / "again.html").read_text(encoding="utf-8")
    assert (tmp_path / "deep" / "page.html").read_text(encoding="utf-8") == text
    page = Page(text)
    links = [attrs[name] for _, attrs, _ in page.found for name in ("src", "href", "action", "srcset") if name in attrs]
    assert links
    assert all(link.startswith(("#", "data:image/webp;base64,")) for link in links)
    targets = {attrs["id"] for _, attrs, _ in page.found if "id" in attrs}
    assert {link[1:] for link in links if link.startswith("#")} <= targets
    assert not re.search(r"https?:|url\(|@import", re.sub(r'href="data:[^"]*"', "", text))
    policy = next(a["content"] for a, _ in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "script" not in policy


def test_figures_say_what_they_are(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path / "page.html")
    _, page = read(tmp_path)
    assert [a for a, _ in page.all("svg") if not a.get("aria-label") and a.get("aria-hidden") != "true"] == []
    assert [a for a, _ in page.all("th") if a.get("scope") not in ("row", "col")] == []
    assert all(attrs.get("aria-label") for attrs, _ in page.all("div") if "tabindex" in attrs)


def test_a_failed_write_leaves_the_old_page(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "folder")
    (tmp_path / "page.html").write_text("old")

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "page.html"]


# --- words ---


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["runs/a/best", "runs/b/best"], ["a/best", "b/best"]),
        (["/x1/runs/best", "/x2/runs/best"], ["x1/runs/best", "x2/runs/best"]),
        (["runs/a", "a"], ["runs/a", "a"]),
        (["dop", "protonet"], ["dop", "protonet"]),
        (["/m", "m"], ["/m", "m"]),
    ],
)
def test_shortest_tail_that_tells_paths_apart(paths: list[str], expected: list[str]) -> None:
    assert list(path_tails(paths).values()) == expected


def test_cut_keeps_both_ends() -> None:
    assert cut("abcdefgh", 8) == "abcdefgh"
    assert cut("abcdefghi", 8) == "abcd…ghi"
    assert {len(cut("x" * 50, length)) for length in (7, 8)} == {7, 8}
