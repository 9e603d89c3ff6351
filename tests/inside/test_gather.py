"""What the figures are made of, on drawn birds, against brute force; with shared channels and with own ones."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from parseshot.data.episodes import draw_episode
from parseshot.data.packed import INDEX, Pack
from parseshot.engine.model import Model, ModelConfig
from parseshot.errors import DataError, ModelError
from parseshot.inside import attention, collect, confusions, expressions, gather, photos, polygons, templates
from parseshot.inside.gather import Seen
from test_report import HOSTILE, Page


def span_model(method: str = "dop-span", **options: object) -> Model:
    torch.manual_seed(0)
    made = {"part_channels": 8, "cells": 4, **options}
    return Model(ModelConfig(method=method, method_options=made, backbone_options={"pools": 3})).eval()


@pytest.fixture(scope="module", params=["dop", "dop-span", "dop-whole"])
def seen(request: pytest.FixtureRequest, birds: Pack) -> Seen:
    model = Model.from_pretrained("birds-conv4") if request.param == "dop" else span_model(request.param)
    return gather.see(model, birds, "novel")


@pytest.fixture(scope="module")
def distances(seen: Seen) -> np.ndarray:
    return gather.own_distances(seen)


@pytest.fixture(scope="module")
def asked(seen: Seen) -> confusions.Asked:
    return confusions.ask(seen, episodes=3)


def test_rows_are_the_photos_of_the_split(seen: Seen, birds: Pack) -> None:
    assert (birds.labels[seen.images] == seen.labels).all()
    assert {birds.splits[number] for number in seen.rows} == {"novel"}
    row = int(seen.rows[max(seen.rows)][3])
    shown = seen.photo(row)
    assert (shown.pixels == birds.images[seen.images[row]]).all()
    assert shown.name == birds.classes[max(seen.rows)]


@torch.inference_mode()
def test_a_photo_is_compared_with_the_other_half_of_its_class(seen: Seen, distances: np.ndarray) -> None:
    number = sorted(seen.rows)[2]
    rows = seen.rows[number]
    for place in (0, 5):
        others = [row for at, row in enumerate(rows) if at % 2 != place % 2]
        labels = torch.zeros(len(others), dtype=torch.long)
        one = seen.method.distance(seen.take(rows[[place]]), seen.take(np.array(others)), labels)
        assert distances[rows[place]] == pytest.approx(float(one.total), rel=1e-4)


def test_photos_are_chosen_by_the_rule(seen: Seen, distances: np.ndarray) -> None:
    unsure = gather.unsureness(seen)
    rows = photos.gather_parts(seen, distances, unsure)
    numbers = sorted(seen.rows)
    assert [row.name for row in rows] == [seen.name(numbers[at]) for at in (0, 2, 4, 5, 7, 9)]
    for row in rows:
        mine = seen.rows[seen.pack.classes.index(row.name)]
        by_rank = sorted(mine, key=lambda one: distances[one])
        assert (row.photos[-2][1].pixels == seen.pixels(by_rank[-1])).all()
        faint = max(by_rank[:-1], key=lambda one: unsure[one])
        assert (row.photos[-1][1].pixels == seen.pixels(faint)).all()
        rest = [one for one in by_rank[:-1] if one != faint]  # 12 of 14: the three in the middle
        assert [why for why, _ in row.photos] == ["middle"] * 3 + ["farthest", "least sure"]
        for (_, shown), one in zip(row.photos, rest[4:7], strict=False):
            assert (shown.pixels == seen.pixels(one)).all()


def test_dashed_rings_are_counted(seen: Seen) -> None:
    found = [seen.photo(row).parts for row in range(len(seen.labels))]
    shares = [np.mean([parts[k].entropy >= 0.5 for parts in found]) for k in range(len(found[0]))]
    assert gather.unsure_shares(seen) == pytest.approx(shares)
    edge = gather.edge_shares(seen)
    caption = photos.parts_caption([], gather.unsure_shares(seen), edge, seen.model.grid, "novel")
    assert f"part 2 in {100 * shares[1]:.0f} %" in caption
    assert f"part 2 in {100 * edge[1]:.0f} %" in caption


def test_rings_at_the_edge_are_counted(seen: Seen) -> None:
    last, counts = seen.model.grid - 1, np.zeros(seen.method.config.parts)
    for nu, entropy in zip(seen.encoding["nu"].numpy(), seen.encoding["entropy"].numpy(), strict=True):
        for part, scale in enumerate(entropy.argmin(0)):
            row, column = np.unravel_index(nu[scale, part].argmax(), nu.shape[2:])
            counts[part] += row in (0, last) or column in (0, last)
    assert gather.edge_shares(seen) == pytest.approx(counts / len(seen.labels))
    assert 0 < counts.sum() < counts.size * len(seen.labels)


def test_heat_maps_are_of_the_middle_and_the_least_sure_photo(seen: Seen) -> None:
    unsure = gather.unsureness(seen)
    middle, worst = photos.gather_heat_maps(seen, unsure)
    row = int(np.argmax(unsure))
    assert (worst.photo.pixels == seen.pixels(row)).all()
    assert np.array_equal(worst.nu, seen.encoding["nu"][row].numpy())
    size = seen.model.config.image_size / seen.model.grid
    assert np.allclose(worst.mu, (seen.encoding["mu"][row].numpy() + 0.5) * size - 0.5)
    surest = middle.entropy.min(0).mean()
    assert (unsure < surest - 1e-6).sum() == (len(unsure) - 1) // 2


def test_polygons_are_those_of_the_surest_scale(seen: Seen) -> None:
    found = polygons.gather_polygons(seen)
    scale = int(np.argmin([seen.encoding["entropy"][:, s].mean() for s in range(3)]))
    assert found.side == seen.scales[scale]
    number = sorted(seen.rows)[0]
    mu = seen.encoding["mu"][seen.rows[number]][:, scale].numpy()
    same = np.isclose(found.classes[0].mu, mu).all((1, 2))
    mirrored = np.isclose(found.classes[0].mu, mu * (-1, 1) + (seen.model.grid - 1, 0), atol=1e-5).all((1, 2))
    assert same[0]
    assert (same | mirrored).all()


def test_templates_have_the_largest_norms_and_others(seen: Seen) -> None:
    for one, maps in zip(templates.gather_templates(seen.method), seen.method.templates.maps, strict=True):
        norms = np.linalg.norm(maps.detach().flatten(2).numpy(), axis=2)
        for part, (largest, others) in enumerate(zip(one.largest, one.random, strict=True)):
            ranked = sorted(range(norms.shape[1]), key=lambda channel: -norms[part, channel])
            assert norms[part, largest] == pytest.approx(norms[part, ranked[: len(largest)]])
            assert not set(largest) & set(others)
            theta = one.theta[part, 0]
            assert theta == pytest.approx(maps[part, largest[0]].detach().numpy() / norms[part, largest[0]], abs=1e-6)
    again = templates.gather_templates(seen.method)
    assert all(
        (a.random == b.random).all() for a, b in zip(again, templates.gather_templates(seen.method), strict=True)
    )


def test_templates_reach_beyond_the_picture_as_counted_by_hand(seen: Seen) -> None:
    found, size = templates.visible_shares(seen), seen.model.grid
    for scale, (side, maps) in enumerate(zip(seen.scales, seen.method.templates(), strict=True)):
        energy, half = maps.detach().square().sum(1).numpy(), side // 2  # [K, s, s]
        for part in range(len(energy)):
            shares = []
            for nu in seen.encoding["nu"][:, scale, part].numpy():
                row, column = np.unravel_index(nu.argmax(), nu.shape)
                inside = [
                    energy[part, y, x]
                    for y in range(side)
                    for x in range(side)
                    if 0 <= row + y - half < size and 0 <= column + x - half < size
                ]
                shares.append(sum(inside) / energy[part].sum())
            assert found[scale, part] == pytest.approx(np.mean(shares), rel=1e-3)
    caption = templates.templates_caption(templates.gather_templates(seen.method), found, None, "novel")
    assert f"5 × 5: part 1 {100 * found[2, 0]:.0f} %" in caption


def test_patches_are_the_largest_expressions_of_the_most_used_channels(seen: Seen) -> None:
    side, found = templates.gather_patches(seen)
    assert side == 3
    z = seen.encoding["z"][:, 1].numpy()  # [n, K, C]
    for part in range(z.shape[1]):
        mine = [one for one in found if one.part == part]
        use = z[:, part].mean(0)
        assert [one.use for one in mine] == pytest.approx(sorted(use.tolist(), reverse=True)[:4], rel=1e-5)
        for one in mine:
            values = z[:, part, one.channel]
            assert [values[row] for row in one.rows] == pytest.approx(sorted(values.tolist(), reverse=True)[:6])
            assert one.names == tuple(seen.name(int(seen.labels[row])) for row in one.rows)
            cells = round(3 * seen.model.config.image_size / seen.model.grid)
            assert {patch.shape for patch in one.patches} == {(cells, cells, 3)}


def test_a_patch_is_cut_around_the_peak() -> None:
    pixels = np.arange(3 * 20 * 30).reshape(20, 30, 3)
    assert (templates.cut(pixels, np.array([10.0, 7.0]), 5.0) == pixels[5:10, 8:13]).all()
    assert (templates.cut(pixels, np.array([29.0, 0.0]), 5.0) == pixels[:5, 25:]).all()


@torch.inference_mode()
def test_the_similar_class_is_the_nearest_by_the_models_distance(seen: Seen, distances: np.ndarray) -> None:
    found = expressions.gather_expressions(seen, distances)
    numbers = sorted(seen.rows)
    number, means = numbers[5], {}
    for other in numbers:
        rows = seen.rows[other][[0, 3, 6, 10, 13]]  # five of 14, evenly
        shown = seen.method.prepare(seen.take(rows), torch.zeros(5).long())
        each = [float(seen.method.terms(seen.take(np.array([row])), shown).total) for row in seen.rows[number]]
        means[other] = float(np.mean(each))
    del means[number]
    assert [one.photo.name for one in found.photos] == [
        seen.name(number),
        seen.name(number),
        seen.name(min(means, key=means.__getitem__)),
        seen.name(max(means, key=means.__getitem__)),
    ]
    assert found.photos[2].distance == pytest.approx(min(means.values()), rel=1e-3)
    assert found.photos[3].distance == pytest.approx(max(means.values()), rel=1e-3)
    assert not (found.photos[0].photo.pixels == found.photos[1].photo.pixels).all()
    z = np.stack([one.z for one in found.photos]).mean(0)
    ranked = [sorted(row.tolist(), reverse=True)[:10] for row in z]
    assert np.take_along_axis(z, found.channels, 1)[:, :8] == pytest.approx(np.array(ranked)[:, :8])


def test_weights_are_a_softmax_over_parts_of_entropies(seen: Seen) -> None:
    found = attention.gather_attention(seen)
    parts, theirs = seen.method.config.parts, 1 if seen.method.config.span else 3
    assert found.alpha.shape == (len(seen.labels), 3, theirs, parts)
    first, second = found.slopes or (np.nan, np.nan)
    row, scale, other = 17, 2, theirs - 1
    weights = np.exp(first * found.entropy[row, scale] + second * found.class_entropy[row, other])
    assert found.alpha[row, scale, other] == pytest.approx(weights / weights.sum(), rel=1e-4)
    order = np.concatenate([asked for rows in seen.rows.values() for asked, _ in gather.halves(rows)])
    assert np.array_equal(found.entropy, seen.encoding["entropy"][order].numpy())
    total = np.zeros(len(order))
    for rows in seen.rows.values():
        for asked, _, terms in gather.to_own_class(seen, rows):
            total[np.isin(order, asked)] = terms.expression[:, 0].sum((1, 2, 3))
    assert found.adds.sum((1, 2, 3)) == pytest.approx(total, rel=1e-4)


@torch.inference_mode()
def test_confusions_are_counted_as_by_hand(seen: Seen, asked: confusions.Asked) -> None:
    numbers = sorted(seen.rows)
    counts = {}
    for index in range(3):
        one = draw_episode(seen.rows, way=10, shots=5, queries=9, seed=0, index=index)
        logits = seen.method.logits(seen.take(one.query), seen.take(one.support), torch.from_numpy(one.support_labels))
        for label, answer in zip(one.query_labels, logits.argmax(1).tolist(), strict=True):
            pair = (int(one.classes[label]), int(one.classes[answer]))
            counts[pair] = counts.get(pair, 0) + 1
    found = confusions.confusion_counts(asked)
    assert {(numbers[a], numbers[b]): int(found[a, b]) for a, b in np.argwhere(found > 0).tolist()} == counts
    either = {(a, b): counts.get((a, b), 0) + counts.get((b, a), 0) for a in numbers for b in numbers if a < b}
    ranked = sorted((pair for pair in either if either[pair]), key=lambda pair: (-either[pair], pair))
    assert [(numbers[a], numbers[b]) for a, b in confusions.most_confused(asked)] == ranked[:4]
    assert ranked  # there is something to see


def test_contributions_add_up_to_the_difference_of_distances(
    seen: Seen, asked: confusions.Asked, distances: np.ndarray
) -> None:
    made = confusions.gather_confusions(seen, asked, distances)
    assert ("whole" in asked.names) == bool(seen.method.config.whole)
    total = asked.terms.sum(2)  # [E·Q, N]
    for pair, one in zip(confusions.most_confused(asked), made, strict=True):
        wrong, right = [], []
        for query, (own, answer) in enumerate(zip(asked.truth, asked.answer, strict=True)):
            if own in pair:
                other = pair[1] if own == pair[0] else pair[0]
                if answer in (own, other):
                    (right if answer == own else wrong).append(total[query, other] - total[query, own])
        assert one.taken == len(wrong)
        assert one.asked == 2 * 3 * 9
        assert max(wrong) <= 1e-6
        assert one.confused.sum() == pytest.approx(np.mean(wrong), abs=1e-5)
        if right:
            assert min(right) >= -1e-6
            assert one.told.sum() == pytest.approx(np.mean(right), abs=1e-5)
        worst = int(
            np.argmin(
                [
                    total[q, asked.answer[q]] - total[q, asked.truth[q]]
                    if asked.answer[q] != asked.truth[q] and {int(asked.answer[q]), int(asked.truth[q])} == set(pair)
                    else np.inf
                    for q in range(len(total))
                ]
            )
        )
        assert (one.photos[0].pixels == seen.pixels(int(asked.rows[worst]))).all()
        assert {one.photos[1].name, one.photos[2].name} == set(one.names)
        assert one.photos[0].name == one.photos[1].name


def test_every_chapter_is_drawn_for_either_method(seen: Seen) -> None:
    made = [make() for make in collect.chapters(seen, seen)]
    assert [one.name for one in made] == [
        "parts", "locations", "polygons", "templates", "patches", "expressions", "scales", "weights", "confusions",
    ]  # fmt: skip
    assert all(one.figure is not None and len(one.caption) > 100 for one in made)
    own = "8 channels of each part's own projection" if seen.method.config.part_channels else "64 channels that all"
    assert own in made[3].caption


def test_one_part_has_no_polygon_and_no_weights(birds: Pack) -> None:
    seen = gather.see(span_model(parts=1), birds, "val")
    makers = {make.__name__: make for make in collect.chapters(seen, seen)}
    made = {name: makers[name]() for name in ("parts", "outlines", "scales", "weights")}
    assert [name for name, one in made.items() if one.figure is None] == ["outlines", "weights"]
    assert made["outlines"].caption == "This model has one part, which makes no polygon."


def test_what_cannot_be_looked_into_is_refused(birds: Pack) -> None:
    with pytest.raises(ModelError, match="'protonet' has no parts"):
        gather.see(Model(ModelConfig(method="protonet")), birds, "novel")
    with pytest.raises(DataError, match="unknown split 'test'"):
        gather.see(span_model(), birds, "test")


@pytest.fixture(scope="module")
def hostile(birds: Pack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same birds, the novel classes with names that are none."""
    folder = tmp_path_factory.mktemp("hostile")
    for file in birds.path.iterdir():
        (folder / file.name).symlink_to(file)
    index = json.loads((birds.path / INDEX).read_text())
    novel = [number for number, split in enumerate(index["splits"]) if split == "novel"]
    for number in novel:
        index["classes"][number] = f"{HOSTILE} {number}"
    (folder / INDEX).unlink()
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "parseshot", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_verb_writes_files_and_one_page(hostile: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    result = run("report", "birds-conv4", "--data", hostile, "--out", out)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{out}/index.html: 9 figures\n"
    names = {"parts", "locations", "polygons", "templates", "patches", "expressions", "scales", "weights", "confusions"}
    assert {file.name for file in out.iterdir()} == {f"{n}.{kind}" for n in names for kind in ("svg", "png")} | {
        "index.html"
    }
    text = (out / "index.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.stack == []
    pictures = [attrs["src"] for tag, attrs, _ in page.found if tag == "img"]
    assert len(pictures) == 9
    assert all(one.startswith(("data:image/webp;base64,", "data:image/svg+xml;base64,")) for one in pictures)
    assert {attrs["href"] for tag, attrs, _ in page.found if tag == "a"} >= {f"{n}.svg" for n in names}
    captions = " ".join(said for _, said in page.all("figcaption"))
    assert "(<script>alert(1)</script>\"' onload=x &amp; {{ 7 * 7 }}" in captions  # shown, not run
    assert "<script" not in text
    for file in out.glob("*.png"):
        with Image.open(file) as picture:
            assert picture.width == 2112
            assert len(picture.text["Description"]) > 100  # the rule goes with the picture


def test_the_verb_refuses_a_model_without_parts(birds: Pack, tmp_path: Path) -> None:
    Model(ModelConfig(method="protonet")).save_pretrained(tmp_path / "model")
    result = run("report", tmp_path / "model", "--data", birds.path, "--out", tmp_path / "out")
    assert result.returncode == 4
    assert "has no parts" in result.stderr
    assert not (tmp_path / "out").exists()


def test_folders_are_parsed_photo_by_photo(birds: Pack, tmp_path: Path) -> None:
    from parseshot.demo import parse_files

    folder = tmp_path / "photos" / "deeper"
    folder.mkdir(parents=True)
    for number, name in enumerate(("b.png", "a.png")):
        Image.fromarray(np.asarray(birds.images[number])).save(folder / name)
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    (folder / "notes.txt").write_text("no photo")
    (folder / "link.png").symlink_to(folder / "a.png")
    rows = parse_files(Model.from_pretrained("birds-conv4"), [tmp_path / "photos", folder / "b.png"], tmp_path / "out")
    assert [Path(row["image"]).name for row in rows] == ["a.png", "b.png", "broken.jpg", "b.png"]
    assert ["error" in row for row in rows] == [False, False, True, False]
    assert len({row["drawing"] for row in rows if "drawing" in row}) == 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no photos"):
        parse_files(Model.from_pretrained("birds-conv4"), [tmp_path / "empty"], tmp_path / "out")
