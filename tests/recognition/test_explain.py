"""An explanation is the distance, row by row."""

import pytest
import torch

from parseshot.data.packed import Pack
from parseshot.engine.model import Model, ModelConfig
from parseshot.errors import ModelError
from parseshot.recognition.explain import accuracy, cells_to_pixels, explain, find_parts


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model(ModelConfig()).eval()


def test_rows_add_up_and_the_answer_is_the_nearest_class(model: Model, birds: Pack) -> None:
    codes = model.encode(birds.load([0, 1, 14, 15, 28, 29, 2, 16, 30]))
    support, query = codes.take(slice(6)), codes.take(slice(6, 9))
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    answers = explain(model, query, support, labels)
    with torch.inference_mode():
        logits = model.method.logits(query, support, labels)
    for row, answer in enumerate(answers):
        best, distance, probability = answer.ranking[0]
        assert best == int(logits[row].argmax())
        assert probability == pytest.approx(float(logits[row].softmax(0)[best]), abs=1e-6)
        assert sum(answer.part_distances) + answer.geometry == pytest.approx(distance, abs=1e-6)
        second = sum(answer.runner_up_part_distances) + answer.runner_up_geometry
        assert second == pytest.approx(answer.ranking[1][1], abs=1e-6)
        assert int(labels[answer.matched]) == best
        assert [d for _, d, _ in answer.ranking] == sorted(d for _, d, _ in answer.ranking)
        assert len(answer.parts) == len(answer.matched_parts) == 4
        for part in answer.parts:
            assert (part.x, part.y, part.entropy) in [row[1:] for row in part.by_scale]
            assert part.entropy == min(row[3] for row in part.by_scale)
    assert 0 <= accuracy(answers, torch.tensor([0, 1, 2]).numpy()) <= 1


def test_a_query_that_is_a_support_photo_matches_that_photo(model: Model, birds: Pack) -> None:
    codes = model.encode(birds.load([0, 14, 28]))
    for row, answer in enumerate(explain(model, codes, codes, torch.arange(3))):
        assert answer.ranking[0][0] == row
        assert answer.matched == row
        assert answer.matched_parts == answer.parts


def test_cells_become_pixels(model: Model) -> None:
    corner = cells_to_pixels(torch.tensor([0.0, 4.0]), model)  # a 5×5 grid on 84 pixels: 16.8 a cell
    assert corner.tolist() == pytest.approx([7.9, 75.1])


def test_one_class_and_a_flat_picture(model: Model) -> None:
    codes = model.encode(torch.full((2, 3, 84, 84), 0.5))
    (answer,) = explain(model, codes.take(slice(1)), codes.take(slice(1, 2)), torch.tensor([0]))
    assert answer.ranking[0][2] == 1.0
    assert all(0 <= part.entropy <= 1 + 1e-6 for part in answer.parts)
    assert len(find_parts(model, codes, 0)) == 4


def test_a_method_without_parts_cannot_explain(birds: Pack) -> None:
    other = Model(ModelConfig(method="protonet"))
    codes = other.encode(birds.load([0]))
    with pytest.raises(ModelError, match="no parts"):
        explain(other, codes, codes, torch.tensor([0]))
