"""The shipped recipes: each builds, its header can be typed in, a row of the paper's tables has the paper's values."""

import itertools
import shlex
from typing import Any, NamedTuple

import pytest
from typer.main import get_command

from parseshot.cli import app
from parseshot.engine.model import Model
from parseshot.engine.recipe import load_recipe, shipped_recipes
from parseshot.methods import DOP, method_config


class Printed(NamedTuple):
    """What the paper trains a data set with, §4 "Training Details"."""

    episodes: int
    lr: float
    decay_every: int
    eta: float


SCHEDULES = {
    "cub": Printed(10_000, 5e-4, 3_000, 1.0),
    "dogs": Printed(30_000, 1e-3, 9_000, 0.1),
    "cars": Printed(30_000, 1e-3, 9_000, 0.1),
    "aircraft": Printed(30_000, 1e-3, 9_000, 0.1),  # not in the paper: as Dogs and Cars
}
MAPS = {"resnet12": (84, 640, 5), "resnet18": (224, 512, 7)}  # pixels, C, G: §3.3
ACCURACIES = {
    ("cub", "resnet12"): "83.39 ± 0.82 / 93.01 ± 0.43 (Table 1,",
    ("cub", "resnet18"): "82.62 ± 0.65 / 92.61 ± 0.38 (Table 1,",
    ("aircraft", "resnet12"): "85.50 / 94.35 (Table 2,",
    ("aircraft", "resnet18"): "84.26 / 93.41 (Table 2,",
    ("cars", "resnet12"): "81.83 ± 0.78 / 93.84 ± 0.45 (Table 3,",
    ("cars", "resnet18"): "81.41 ± 0.71 / 93.48 ± 0.38 (Table 3,",
    ("dogs", "resnet12"): "70.10 ± 0.79 / 85.12 ± 0.55 (Table 3,",
    ("dogs", "resnet18"): "70.56 ± 0.75 / 84.75 ± 0.41 (Table 3,",
}
ROWS = list(itertools.product(SCHEDULES, MAPS, ("dop", "dop-paper")))
DATA_OF = {"birds": "synthetic"}  # the first word of a recipe's name → the data set; else they are the same
NAMES = list(shipped_recipes())
written = pytest.mark.parametrize("name", NAMES)
row = pytest.mark.parametrize(("data", "backbone", "method"), ROWS)


def header(name: str) -> list[str]:
    """The comment a recipe opens with, without its marks."""
    lines = shipped_recipes()[name].read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]


def figure(name: str, of: str) -> str:
    """What a header says after `time: `, `paper: ` or `ours: `."""
    (line,) = (line for line in header(name) if line.startswith(f"{of}: "))
    return line.removeprefix(f"{of}: ")


def typed(name: str) -> list[dict[str, Any]]:
    """The arguments of a header's commands, as the command line understands them."""
    found = []
    for line in header(name):
        if line.startswith("  parseshot "):
            command: Any = get_command(app)
            words = shlex.split(line)[1:]
            while hasattr(command, "commands"):
                verb = words.pop(0)
                command = command.commands[verb]
            found.append({"verb": verb, **command.make_context(verb, words).params})
    return found


def test_every_row_of_the_tables_is_shipped() -> None:
    assert len(ROWS) == 16
    assert {"-".join(one) for one in ROWS} <= set(NAMES)


@written
def test_it_builds(name: str) -> None:
    recipe = load_recipe(name)
    model = Model(recipe.model)
    assert model.grid == model.backbone.grid(recipe.model.image_size) >= 5
    assert "\n" not in recipe.title
    assert header(name)[0].startswith(recipe.title.split(";")[0])


@written
def test_its_header_can_be_typed_in(name: str) -> None:
    recipe = load_recipe(name)
    prepare, train = typed(name)
    assert (prepare["verb"], train["verb"]) == ("prepare", "train")
    word = name.split("-")[0]
    assert prepare["name"] == DATA_OF.get(word, word)
    assert prepare["size"] == recipe.model.image_size
    assert prepare["view"] == "paper"
    assert (prepare["source"] is None) == (prepare["name"] == "synthetic")
    assert train["recipe"] == name
    assert train["data"] == prepare["out"]
    assert str(train["out"]) == f"runs/{name}"
    assert not train["overrides"]


def test_data_of_different_sizes_go_to_different_places() -> None:
    made = {(str(one["out"]), one["name"], one["size"]) for one, _ in map(typed, NAMES)}
    assert len({place for place, _, _ in made}) == len(made)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("birds-")])
def test_its_header_has_the_time_and_both_accuracies(name: str) -> None:
    assert figure(name, "time")
    assert figure(name, "ours")
    if "conv4" in name:
        assert figure(name, "paper") == "no row with Conv-4"


@row
def test_a_row_is_trained_as_the_paper_says(data: str, backbone: str, method: str) -> None:
    recipe, paper = load_recipe(f"{data}-{backbone}-{method}"), SCHEDULES[data]
    training = recipe.training
    assert training.episodes == paper.episodes
    assert (training.way, training.shots, training.queries) == (10, 5, 10)
    assert (training.lr, training.decay_every, training.decay_factor) == (paper.lr, paper.decay_every, 0.1)
    for step, factor in ((0, 1), (paper.decay_every - 1, 1), (paper.decay_every, 0.1), (paper.episodes - 1, 1e-3)):
        assert training.rate(step) == pytest.approx(paper.lr * factor)
    assert training.augmentation.name == "paper"
    assert training.augmentation.flip
    assert training.augmentation.perspective > 0
    assert training.model_dump().get("pretraining") is None  # "from scratch"


@row
def test_a_row_writes_out_what_the_paper_leaves_open(data: str, backbone: str, method: str) -> None:
    """What is read beside the paper must not depend on a default that may change."""
    recipe = load_recipe(f"{data}-{backbone}-{method}")
    training = recipe.training
    schedule = {"episodes", "way", "shots", "queries", "lr", "weight_decay", "decay_every", "decay_factor"}
    assert schedule | {"validate_every", "validation_episodes", "seed", "augmentation"} <= training.model_fields_set
    assert {"flip", "perspective", "perspective_share"} <= training.augmentation.model_fields_set
    assert (training.weight_decay, training.validate_every, training.validation_episodes) == (0, 1_000, 200)
    assert (training.augmentation.perspective, training.augmentation.perspective_share) == (0.5, 0.5)
    expected = {"drop_rate": 0.1, "block_size": 5} if backbone == "resnet12" else {}
    assert recipe.model.backbone_options == expected
    if data == "aircraft":
        assert any(
            "The paper gives Aircraft no episodes, learning rate or η" in line
            for line in header(f"aircraft-{backbone}-{method}")
        )


@row
def test_a_row_is_the_papers_model(data: str, backbone: str, method: str) -> None:
    recipe = load_recipe(f"{data}-{backbone}-{method}")
    size, channels, grid = MAPS[backbone]
    model = Model(recipe.model)
    assert recipe.model.image_size == size
    assert (model.backbone.out_channels, model.grid) == (channels, grid)
    assert isinstance(model.method, DOP)
    config = model.method.config
    assert (config.parts, config.scales, config.eta) == (4, (1, 3, 5), SCHEDULES[data].eta)
    assert config.reweight
    assert config.geometry
    always, printed = {"parts", "scales", "eta"}, {"temperature", "zeta", "gamma", "lam"}
    if method == "dop":
        assert (config.preset, config.exact, config.normalised) == ("lasso", True, True)
        assert set(recipe.model.method_options) == always
    else:
        assert (config.preset, config.exact, config.normalised) == ("paper", False, False)
        assert (config.temperature, config.zeta, config.gamma, config.lam) == (0.01, 0.05, 0.01, 0.05)
        assert set(recipe.model.method_options) == always | printed


@row
def test_a_row_quotes_the_papers_accuracy(data: str, backbone: str, method: str) -> None:
    assert figure(f"{data}-{backbone}-{method}", "paper").startswith(ACCURACIES[data, backbone])


@pytest.mark.parametrize("method", ["dop", "protonet"])
def test_cars_is_trained_as_cub_with_conv4(method: str) -> None:
    """Only η differs, which the paper lowers on Cars."""
    cub, cars = load_recipe(f"cub-conv4-{method}"), load_recipe(f"cars-conv4-{method}")
    assert cars.training == cub.training
    assert cars.model.model_dump(exclude={"method_options"}) == cub.model.model_dump(exclude={"method_options"})
    options = [method_config(method, one.model.method_options).model_dump() for one in (cub, cars)]
    if method == "dop":
        assert [one.pop("eta") for one in options] == [1.0, 0.1]
    assert options[0] == options[1]
