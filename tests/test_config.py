"""Configuration: frozen, and an unknown key names its neighbours, at any depth."""

import pytest

from parseshot.config import Config, read_config
from parseshot.engine.recipe import Recipe, load_recipe
from parseshot.errors import UsageError


class Inner(Config):
    learning_rate: float = 0.1


class Outer(Config):
    inner: Inner = Inner()
    name: str = ""


def test_it_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Outer().name = "x"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nam": "x"}, "here: unknown key 'nam'; did you mean name"),
        ({"inner": {"learning_rat": 1}}, r"unknown key 'inner\.learning_rat'; did you mean learning_rate"),
        ({"inner": {"zzz": 1}}, "known keys: learning_rate"),
        ({"inner": {"learning_rate": "fast"}}, r"inner\.learning_rate: .*'fast'"),
        ({"inner": {"learning_rate": float("nan")}}, r"inner\.learning_rate"),
    ],
)
def test_errors_name_the_source_and_the_field(values: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_config(Outer, values, source="here")


def test_overrides_are_toml_values_or_words() -> None:
    overrides = ["training.lr=1e-3", "model.method=dop", "model.method_options.geometry=false"]
    recipe = load_recipe("birds-protonet", overrides)
    assert isinstance(recipe, Recipe)
    assert recipe.training.lr == 1e-3
    assert recipe.model.method == "dop"
    assert recipe.model.method_options == {"geometry": False}


def test_a_recipe_that_is_not_toml(tmp_path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("title = ")
    with pytest.raises(UsageError, match="not valid TOML"):
        load_recipe(str(file))
    with pytest.raises(UsageError, match="is a value, not a section"):
        load_recipe("birds-dop", ["title.x=1"])
