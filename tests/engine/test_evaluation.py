"""Evaluation on packs of one's own photos: copies do not flatter, seen classes are refused, results name their data."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
import torch
from PIL import Image

from parseshot.data.episodes import draw_episode, draw_episodes
from parseshot.data.packed import Pack, write_pack
from parseshot.data.prepare import prepare
from parseshot.engine.evaluation import Twins, evaluate, paired_difference, score
from parseshot.engine.model import Model, ModelConfig
from parseshot.engine.protocol import Protocol
from parseshot.engine.results import DOCUMENTS, comparison_result, evaluation_result, json_schema, model_card
from parseshot.engine.statistics import Interval
from parseshot.errors import DataError, ModelError, UsageError
from parseshot.methods import METHODS, Encoding, Method, build_method, takes_pairs
from parseshot.methods.protonet import ProtoNet, ProtoNetConfig
from parseshot.parts.distance import class_mean


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_pretrained(str(resources.files("parseshot") / "models" / "birds-conv4"))


def photos(root: Path, birds: Pack, suffixes: tuple[str, ...] = ("jpg", "png", "webp"), classes: int = 4) -> Path:
    """Drawn birds as files of several formats, a folder a class."""
    for number, (label, images) in enumerate(list(birds.by_class("novel").items())[:classes]):
        folder = root / f"n{number:08d}-{label}"
        folder.mkdir(parents=True)
        for at, image in enumerate(images[:8]):
            pixels = Image.fromarray(np.asarray(birds.images[image])).resize((120, 100))
            pixels.save(folder / f"{at}.{suffixes[at % len(suffixes)]}")
    return root


def command(*arguments: object) -> dict:
    result = subprocess.run(
        [sys.executable, "-m", "parseshot", *map(str, arguments), "--json"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("kind", ["dogs", "folder", "csv"])
def test_a_tree_of_ones_own_is_prepared_and_evaluated(birds: Pack, tmp_path: Path, kind: str) -> None:
    root = photos(tmp_path / "Images", birds, ("jpg",) if kind == "dogs" else ("jpg", "png", "webp", "gif", "tiff"))
    roles = {folder.name: "novel" for folder in sorted(root.iterdir())}
    (tmp_path / "split.json").write_text(json.dumps(roles))
    source = {"dogs": tmp_path, "folder": root, "csv": tmp_path / "table.csv"}[kind]
    rows = [f"{file.relative_to(tmp_path)},{file.parent.name}" for file in sorted(root.rglob("*.*"))]
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    out, split = tmp_path / "pack", tmp_path / "split.json"
    prepared = command("data", "prepare", kind, "--source", source, "--out", out, "--split", split, "--workers", 1)
    assert prepared["splits"]["novel"] == {"classes": 4, "images": 32}
    assert prepared["problems"] == []
    shipped = resources.files("parseshot") / "models" / "birds-conv4"
    asked = ("evaluate", shipped, "--data", out, "--way", 4, "--shots", "1,3", "--queries", 5, "--episodes", 30)
    told = command(*asked, "--threads", 1)
    assert told["data"]["split"] == prepared["split"]
    assert told["data"]["split"]["name"] == "split"
    assert [row["shots"] for row in told["results"]] == [1, 3]
    assert all(row["accuracy"] > 0.6 for row in told["results"])  # 0.25 is chance


def test_d4_a_query_that_is_in_the_support_set_does_not_count(birds: Pack, tmp_path: Path, model: Model) -> None:
    root = photos(tmp_path / "mine", birds, classes=2)
    first, second = sorted(root.iterdir())
    for at in range(8):
        shutil.copy(next(first.glob(f"{at}.*")), second / f"copy{at}.png")  # every photo of the first class, misfiled
    split = tmp_path / "s.json"
    split.write_text(json.dumps({folder.name: "novel" for folder in (first, second)}))
    pack = prepare("folder", root, tmp_path / "pack", split=str(split), keep_duplicates=True)
    assert int(pack.twins[:, 2].sum()) == 8
    [told] = evaluate(model, pack, Protocol(way=2, shots=(4,), queries=4, episodes=40)).outcomes
    assert told.copies > 40
    assert told.near_copies == 0
    twins = Twins(pack, np.concatenate(list(pack.by_class("novel").values())))
    assert len(set(twins.pairs[:, 0])) == 16


def test_d5_near_copies_count_and_are_reported(birds: Pack, tmp_path: Path, model: Model) -> None:
    root = photos(tmp_path / "mine", birds, ("png",), classes=2)
    for folder in root.iterdir():
        for at in range(8):
            Image.open(folder / f"{at}.png").save(folder / f"burst{at}.jpg", quality=80)
    split = tmp_path / "s.json"
    split.write_text(json.dumps({folder.name: "novel" for folder in root.iterdir()}))
    pack = prepare("folder", root, tmp_path / "pack", split=str(split))
    assert len(pack.twins) >= 16
    [told] = evaluate(model, pack, Protocol(way=2, shots=(4,), queries=4, episodes=40)).outcomes
    assert told.copies == 0
    assert told.near_copies > 20


def test_a_model_is_refused_on_classes_it_was_trained_on(birds: Pack, tmp_path: Path, model: Model) -> None:
    root = photos(tmp_path / "mine", birds)
    seen = model.provenance["base_classes"][:2]
    for folder, name in zip(sorted(root.iterdir()), seen, strict=False):
        folder.rename(root / name)
    split = tmp_path / "s.json"
    split.write_text(json.dumps({folder.name: "novel" for folder in root.iterdir()}))
    pack = prepare("folder", root, tmp_path / "pack", split=str(split))
    with pytest.raises(DataError, match=rf"trained on 2 of the 4 classes of split 'novel': .*{seen[0]}"):
        evaluate(model, pack)


# Encode once, score many at a time


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("shots", [1, 5, (1, 2, 5)])
def test_many_at_a_time_is_one_by_one(name: str, shots: int | tuple[int, ...]) -> None:
    torch.manual_seed(0)
    fine = 4 if takes_pairs(name) else 0
    method = build_method(name, 16, 5, fine=fine).eval()
    maps = torch.randn(90, 16 + 4 * fine, 5, 5).relu()
    method.initialise(maps)
    with torch.inference_mode():
        encoding = method.encode(maps)
    rows = {label: np.arange(15 * label, 15 * label + 15) for label in range(6)}
    drawn = draw_episodes(rows, range(40), way=3, shots=shots, queries=4, seed=3, unseen=2)
    known, strangers = score(method, encoding, drawn)
    assert known.shape == (40, 12, 3)
    assert strangers.shape == (40, 8, 3)
    for at in range(40):
        alone = draw_episode(rows, way=3, shots=shots, queries=4, seed=3, index=at)
        assert np.array_equal(alone.query, drawn.query[at])  # the unseen classes change nothing
        support, labels = maps[torch.from_numpy(alone.support)], torch.from_numpy(alone.support_labels)
        for images, logits in ((alone.query, known[at]), (drawn.strangers[at], strangers[at])):
            with torch.inference_mode():
                expected = method.logits(method.encode(maps[images]), method.encode(support), labels)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert not set(drawn.strangers[at] // 15) & set(alone.classes.tolist())


def test_a_method_that_cannot_be_vectorised_is_looped_over() -> None:
    class Careful(ProtoNet):
        vectorised = False

        def logits(self, query: Encoding, support: Encoding, labels: torch.Tensor) -> torch.Tensor:
            assert float(query["f"].abs().max()) > 0  # a value, which vmap forbids
            return super().logits(query, support, labels)

    maps = torch.rand(60, 8, 5, 5)
    rows = {label: np.arange(15 * label, 15 * label + 15) for label in range(4)}
    drawn = draw_episodes(rows, range(5), way=3, shots=2, queries=4, seed=0)
    careful, plain = Careful(8, 5, ProtoNetConfig()), ProtoNet(8, 5, ProtoNetConfig())
    with torch.inference_mode():
        encoding = plain.encode(maps)
    torch.testing.assert_close(score(careful, encoding, drawn)[0], score(plain, encoding, drawn)[0])


def test_what_logits_do_not_look_at_is_never_copied() -> None:
    encoding = Encoding(small=torch.arange(6.0).view(3, 2), large=torch.zeros(3, 1000))
    chosen = encoding.take(torch.tensor([2, 0]))
    assert chosen.loaded_bytes == 0
    assert chosen["small"].tolist() == [[4, 5], [0, 1]]
    assert chosen.loaded_bytes == 16
    assert (chosen.images, len(chosen), list(chosen)) == (2, 2, ["small", "large"])


def test_each_image_is_encoded_once_whatever_the_episodes(birds: Pack, model: Model, monkeypatch) -> None:
    seen: list[int] = []
    forward = model.backbone.forward
    monkeypatch.setattr(model.backbone, "forward", lambda images: (seen.append(len(images)), forward(images))[1])
    evaluate(model, birds, Protocol(queries=5, episodes=300, shots=(1, 2, 5)))
    assert sum(seen) == birds.counts()["novel"]["images"]


def test_a_cache_on_disk_gives_the_same_and_leaves_nothing(birds: Pack, model: Model, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    asked = Protocol(queries=5, episodes=20)
    there = evaluate(model, birds, asked, memory=1000)
    here = evaluate(model, birds, asked)
    assert (there.on_disk, here.on_disk) == (True, False)
    assert there.cache_bytes == here.cache_bytes > 1000
    for left, right in zip(there.outcomes, here.outcomes, strict=True):
        assert np.array_equal(left.episodes, right.episodes)
        assert left.raw.nll == right.raw.nll
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_sentence(birds: Pack, model: Model, monkeypatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(DataError, match=r"encodings needs .* are free: No space left"):
        evaluate(model, birds, Protocol(queries=5, episodes=2), memory=0)


def test_counts_agree_with_a_literal_tally(birds: Pack, model: Model) -> None:
    asked = Protocol(way=3, queries=4, episodes=60, shots=(2,), seed=5)
    found = evaluate(model, birds, asked)
    [outcome] = found.outcomes
    members = birds.by_class("novel")
    accuracies, right, times, taken, chances = [], Counter(), Counter(), Counter(), Counter()
    with torch.inference_mode():
        every = {int(image): model.encode(birds.load([image])) for images in members.values() for image in images}
        for index in range(60):
            episode = draw_episode(members, way=3, shots=2, queries=4, seed=5, index=index)
            query, support = (Encoding.cat([every[int(i)] for i in part]) for part in (episode.query, episode.support))
            logits = model.method.logits(query, support, torch.from_numpy(episode.support_labels))
            answers = episode.classes[logits.argmax(1).numpy()]
            truths = episode.classes[episode.query_labels]
            accuracies.append((answers == truths).mean())
            for truth, answer in zip(truths.tolist(), answers.tolist(), strict=True):
                times[truth] += 1
                right[truth] += truth == answer
                taken[truth, answer] += 1
                for other in episode.classes.tolist():
                    chances[truth, other] += 1
    assert np.allclose(outcome.episodes, accuracies)
    numbers = found.classes.tolist()
    good, counts = found.per_class(outcome)
    assert good.tolist() == [right[number] for number in numbers]
    assert counts.tolist() == [times[number] for number in numbers]
    assert found.confusion(outcome).tolist() == [[taken[a, b] for b in numbers] for a in numbers]
    assert outcome.chances.tolist() == [[chances[a, b] for b in numbers] for a in numbers]


class Coded:
    """A model on made-up pixels: a class is a colour under noise; `marked` images are answered wrong by one of two."""

    def __init__(self, stumbles: bool) -> None:
        self.config, self.provenance = SimpleNamespace(image_size=4), {}
        self.method, self.device = Stumbling(stumbles), torch.device("cpu")

    def encode(self, images: torch.Tensor) -> Encoding:
        pixels = images.float().flatten(1)
        return Encoding(f=pixels[:, 1:], marked=pixels[:, :1])


class Stumbling(Method):
    def __init__(self, stumbles: bool) -> None:
        super().__init__()
        self.stumbles = stumbles

    def logits(self, query: Encoding, support: Encoding, labels: torch.Tensor) -> torch.Tensor:
        prototypes = class_mean(support["f"], labels, int(labels.max()) + 1)
        scores = -torch.cdist(query["f"], prototypes)
        wrong = -scores  # the least likely class
        return torch.where((query["marked"] > 127) & self.stumbles, wrong, scores)


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    random = np.random.default_rng(0)
    colours = random.uniform(90, 160, (50, 1, 4, 4, 3))
    images = np.clip(colours + random.normal(0, 40, (50, 60, 4, 4, 3)), 0, 255).astype(np.uint8).reshape(-1, 4, 4, 3)
    images[:, 0, 0, 0] = 255 * (random.random(3000) < 0.0215)
    return write_pack(
        tmp_path_factory.mktemp("coded") / "pack",
        name="coded",
        arrays={"images": images, "labels": np.repeat(np.arange(50), 60)},
        classes=[f"class {number}" for number in range(50)],
        splits=["novel"] * 50,
        split={"name": "all", "fingerprint": "0"},
        provenance={},
    )


def test_one_point_is_seen_by_pairs_and_not_by_two_intervals(coded: Pack) -> None:
    """The second answers as the first but for marked images, which cost it one point of accuracy."""
    asked = Protocol(shots=(1,), queries=1, episodes=2_000)
    first, second = (evaluate(Coded(stumbles), coded, asked).outcomes[0] for stumbles in (False, True))
    everything = evaluate(Coded(False), coded, Protocol(shots=(1,), queries=16, episodes=4_000))
    marked = coded.images[everything.images, 0, 0, 0] > 127
    taken, whose = everything.outcomes[0].taken, everything.labels
    known = (taken[np.arange(3000), whose] * marked).sum() / taken.sum()  # what stumbling costs, from all answers
    assert known == pytest.approx(0.01, abs=0.001)
    lead = paired_difference(first, second)
    assert lead.mean == pytest.approx(known, abs=0.004)
    assert lead.p_value < 1e-6
    assert lead.excludes_zero()
    one, two = first.interval, second.interval
    assert one.mean - one.half_width < two.mean + two.half_width  # the intervals overlap …
    apart = Interval(one.mean - two.mean, float(np.hypot(one.half_width, two.half_width)), 2_000)
    assert not apart.excludes_zero()  # … and so does the interval of their difference with 0
    with pytest.raises(DataError, match="same episodes"):
        paired_difference(first, everything.outcomes[0])


def test_all_classes_at_once(coded: Pack) -> None:
    found = evaluate(Coded(False), coded, Protocol(way=50, shots=(1,), queries=5, episodes=4), open_set=True)
    [outcome] = found.outcomes
    assert (found.confusion(outcome).sum(1) == 20).all()
    assert 0.02 < outcome.interval.mean < 1
    assert outcome.open_set == {}
    assert found.notes == ["no open set: all 50 classes of novel are in every episode"]


def test_open_set_and_temperature(birds: Pack, model: Model) -> None:
    asked = Protocol(way=3, queries=5, episodes=80)
    plain = evaluate(model, birds, asked)
    full = evaluate(model, birds, asked, calibrate=True, open_set=True)
    assert full.unseen == 5
    for one, two in zip(plain.outcomes, full.outcomes, strict=True):
        assert np.array_equal(one.episodes, two.episodes)  # the same episodes
        assert two.temperature is not None
        assert two.tempered is not None
        assert two.tempered.nll < two.raw.nll + 0.02
        assert two.open_set["logit"].auroc.mean() > 0.6
        assert two.open_set["logit"].auroc.shape == (80,)
        assert (two.open_set["logit"].false_positives <= 1).all()


def test_no_val_classes_no_temperature(coded: Pack) -> None:
    found = evaluate(Coded(False), coded, Protocol(shots=(1,), episodes=5), calibrate=True)
    assert found.outcomes[0].temperature is None
    assert found.notes == [f"no temperature: {coded.path} has no classes in split 'val'"]


def test_unbalanced_shots_need_one_for_each_class(birds: Pack, model: Model) -> None:
    found = evaluate(model, birds, Protocol(way=3, shots=((1, 2, 5),), queries=5, episodes=10))
    assert found.outcomes[0].shots == (1, 2, 5)
    with pytest.raises(UsageError, match=r"shots 1\+2\+5 is for 3 classes, the episodes have 5"):
        evaluate(model, birds, Protocol(shots=((1, 2, 5),), queries=5, episodes=10))


def test_too_few_images_are_said_before_anything_is_encoded(birds: Pack, model: Model, monkeypatch) -> None:
    monkeypatch.setattr(model, "encode", lambda *_: pytest.fail("encoded"))
    with pytest.raises(DataError, match=r"has 14 images, an episode needs 5 support \+ 15 query = 20"):
        evaluate(model, birds, Protocol(shots=(5,)))


def test_scores_that_are_not_finite_are_refused(birds: Pack) -> None:
    broken = Model(ModelConfig(method="protonet"))
    with torch.no_grad():
        broken.method.log_scale.fill_(torch.inf)
    with pytest.raises(ModelError, match="ProtoNet gives scores that are not finite"):
        evaluate(broken, birds, Protocol(queries=5, episodes=2))


@pytest.mark.parametrize("damage", [{"data": {"split": 1}}, {"base_classes": 3}, {"val_accuracy": "high"}, {"data": 1}])
def test_a_damaged_account_of_the_training_is_a_message(damage: dict) -> None:
    model = Model(ModelConfig(method="protonet"))
    model.provenance = damage
    with pytest.raises(ModelError, match=r"mine: what its config\.json says about the training is damaged"):
        model_card("mine", model)


# The documents


@pytest.mark.parametrize("name", list(DOCUMENTS))
def test_the_committed_schema_is_that_of_the_code(name: str) -> None:
    committed = json.loads((resources.files("parseshot") / "schemas" / f"{name}.json").read_text(encoding="utf-8"))
    assert committed == json.loads(json.dumps(json_schema(name)))
    jsonschema.Draft202012Validator.check_schema(committed)


def test_json_is_valid_and_the_same_twice(birds: Pack, model: Model) -> None:
    schemas = {
        name: json.loads((resources.files("parseshot") / "schemas" / f"{name}.json").read_text()) for name in DOCUMENTS
    }
    asked = Protocol(way=3, shots=(1, (1, 2, 5)), queries=5, episodes=30)
    texts = []
    for _ in range(2):
        found = evaluate(model, birds, asked, calibrate=True, open_set=True)
        texts.append(evaluation_result("m", model, birds, found).model_dump_json())
    assert texts[0] == texts[1]
    document = json.loads(texts[0])
    jsonschema.validate(document, schemas["evaluation"])
    document["results"][0]["unknown_field"] = 1
    with pytest.raises(jsonschema.ValidationError, match="unknown_field"):
        jsonschema.validate(document, schemas["evaluation"])
    torch.manual_seed(0)
    others = [model, Model(ModelConfig(method="protonet")), Model(ModelConfig(method="protonet-pooled"))]
    runs = [evaluate(one, birds, asked) for one in others]
    told = comparison_result(["a", "b", "c"], others, birds, runs)
    jsonschema.validate(json.loads(told.model_dump_json()), schemas["comparison"])
    assert len(told.pairs) == 2 * 3
    lead = next(pair for pair in told.pairs if (pair.first, pair.second) == ("a", "b"))
    assert lead.difference == pytest.approx(runs[0].outcomes[0].interval.mean - runs[1].outcomes[0].interval.mean)
    assert lead.p_holm >= lead.p_value


def test_the_card_names_the_weights(birds: Pack, model: Model) -> None:
    card = model_card("m", model)
    assert (card.method, card.backbone, card.base_classes) == ("dop", "conv4", 200)
    assert card.weights == model.fingerprint()
    torch.manual_seed(0)
    fresh = Model(ModelConfig(method="protonet"))
    before = fresh.fingerprint()
    with torch.no_grad():
        fresh.method.log_scale += 1e-3
    assert fresh.fingerprint() != before
    assert model_card("m", fresh).trained_on is None
