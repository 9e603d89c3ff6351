"""Each figure on made-up arrays: what is drawn holds the numbers it was given, and any class name is only a name."""

import io
import itertools
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

from parseshot import figure_style as style
from parseshot.errors import UsageError
from parseshot.figures import RING, label_directions, part_colour
from parseshot.inside import attention, confusions, expressions, photos, polygons, templates
from parseshot.inside.gather import ShownPhoto
from parseshot.parts.distance import part_weights
from parseshot.recognition.explain import FoundPart

SCALES, K, C, G, SIZE = (1, 3, 5), 3, 30, 6, 24
NAMES = ("$x_{", "a$b$c", "\\frac{1}{", "Ωмега 鳥", "<b>&\"'", "owl\udcff")


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def photo(seed: int = 0, name: str = "owl", entropies: tuple[float, ...] = (0.1, 0.9, 0.49)) -> ShownPhoto:
    pixels = random(seed).integers(0, 256, (SIZE, SIZE, 3)).astype(np.uint8)
    places = random(seed + 1).uniform(2, SIZE - 3, (K, 2))
    parts = tuple(FoundPart(x, y, h, ()) for (x, y), h in zip(places.tolist(), entropies, strict=True))
    return ShownPhoto(pixels, name, parts)


def images(figure: Any, gid: str) -> list[np.ndarray]:
    return [np.asarray(one.get_array()) for axes in figure.axes for one in axes.images if one.get_gid() == gid]


def texts(figure: Any) -> list[str]:
    return [one.get_text() for one in figure.findobj(matplotlib.text.Text)]


def heat_maps(name: str = "owl") -> list[photos.HeatMaps]:
    made = []
    for seed in range(2):
        nu = random(seed).dirichlet(np.full(G * G, 0.2), (3, K)).reshape(3, K, G, G)
        mu, entropy = random(seed).uniform(0, SIZE, (3, K, 2)), random(seed).uniform(size=(3, K))
        made.append(photos.HeatMaps("middle", photo(seed, name), nu, mu, entropy, SCALES))
    return made


def rows_of_parts(name: str = "owl") -> list[photos.PartsRow]:
    return [
        photos.PartsRow(name, tuple(("middle", photo(10 * row + seed, name)) for seed in range(row + 1)))
        for row in range(3)
    ]


def shapes(name: str = "owl") -> polygons.Polygons:
    made = tuple(polygons.Polygon(name, random(seed).uniform(0, G - 1, (4 + seed, K, 2))) for seed in range(3))
    return polygons.Polygons(5, G, made)


def dictionary() -> list[templates.TemplateScale]:
    made = []
    for side in SCALES:
        norms = random(side).uniform(size=(K, C))
        chosen = np.stack([random(side + part).permutation(C)[:14] for part in range(K)])
        theta = random(side).normal(size=(K, 14, side, side))
        made.append(templates.TemplateScale(side, norms, chosen[:, :9], chosen[:, 9:], theta))
    return made


def patches(name: str = "owl") -> list[templates.Patches]:
    made = []
    for part in range(K):
        for channel in range(2):
            shown = tuple(photo(100 * part + 10 * channel + rank).pixels[:9, :9] for rank in range(3))
            theta = random(part).normal(size=(3, 3))
            made.append(
                templates.Patches(
                    part, 7 + channel, 0.5, theta, shown, (name, name, "wren"), (0, 1, 2), 0.95 if part == 1 else 0.2
                )
            )
    return made


def expressed(name: str = "owl") -> expressions.Expressions:
    z = random().uniform(size=(4, K, C))
    z[3, 0] = 0  # a silent part
    channels = np.stack([random(part).permutation(C)[:5] for part in range(K)])
    made = (
        expressions.Expressed(role, photo(seed, name), None if seed < 2 else 0.1 * seed, z[seed])
        for seed, role in enumerate(expressions.ROLES)
    )
    return expressions.Expressions(5, tuple(made), channels, random().normal(size=(K, 5, 5, 5)))


def weighed(together: bool = False, slopes: tuple[float, float] | None = (-2.0, -1.0)) -> attention.Attention:
    entropy, theirs = random(1).uniform(size=(20, 3, K)), random(2).uniform(size=(20, 1 if together else 3, K))
    if slopes is None:
        alpha = np.full((20, 3, theirs.shape[1], K), 1 / K)
    else:
        pairs = [
            part_weights(torch.tensor(h[None]), torch.tensor(c[None]), torch.tensor(slopes))[0, 0]
            for h, c in zip(entropy, theirs, strict=True)
        ]
        alpha = torch.stack(pairs).numpy()
    adds = alpha * random(3).uniform(size=alpha.shape)
    return attention.Attention(SCALES, entropy, theirs, alpha, adds, slopes, True)


def pairs(name: str = "owl") -> list[confusions.ConfusedPair]:
    made, terms = [], (*(f"part {part + 1}" for part in range(K)), "geometry")
    for seed in range(2):
        shown = (photo(seed, name), photo(seed + 1, name), photo(seed + 2, "wren"))
        told = random(seed).normal(size=K + 1) if seed else np.full(K + 1, np.nan)
        made.append(
            confusions.ConfusedPair((name, "wren"), 3, 40, terms, random(seed + 5).normal(size=K + 1), told, shown)
        )
    return made


def test_rings_are_where_the_parts_are_and_dashed_where_they_are_unsure() -> None:
    rows = rows_of_parts()
    figure = photos.draw_parts_sheet(rows)
    shown = [one for row in rows for _, one in row.photos]
    drawn = [axes for axes in figure.axes if axes.images]
    assert len(drawn) == len(shown) == 6
    for axes, one in zip(drawn, shown, strict=True):
        assert (np.asarray(axes.images[0].get_array()) == one.pixels).all()
        rings = [patch for patch in axes.patches if isinstance(patch, matplotlib.patches.Circle)]
        assert [ring.get_center() for ring in rings] == [(part.x, part.y) for part in one.parts]
        assert [ring.get_linestyle() == "solid" for ring in rings] == [True, False, True]
        colours = [matplotlib.colors.to_hex(ring.get_edgecolor()) for ring in rings]
        assert colours == [part_colour(part) for part in range(K)]
        assert axes.get_xlim() == (-0.5, SIZE - 0.5)
        assert axes.get_ylim() == (SIZE - 0.5, -0.5)  # downwards, as pixels go


@pytest.mark.parametrize("at", [(0.5, 0.5), (0.07, 0.07), (0.93, 0.5), (0.5, 0.07), (0.93, 0.93)])
def test_numbers_of_parts_in_one_place_or_side_by_side_can_be_read(at: tuple[float, float]) -> None:
    radius = RING * SIZE
    for apart in (0.0, 0.7, 1.4, 2.1):  # radii between two parts
        for first, second in itertools.permutations(range(4), 2):
            elsewhere = [FoundPart(SIZE / 2, SIZE * (0.3 + 0.15 * part), 0.1, ()) for part in range(4)]
            x, y = (SIZE - 1) * at[0], (SIZE - 1) * at[1]
            inwards = radius * apart * (1 if at[0] <= 0.5 else -1)
            parts = [replace(one, x=0.25 * SIZE) for one in elsewhere]
            parts[first], parts[second] = FoundPart(x, y, 0.1, ()), FoundPart(x + inwards, y, 0.1, ())
            ways = label_directions(parts, SIZE, SIZE)
            assert np.hypot(*np.array(ways).T) == pytest.approx(1)
            (a, b), (c, d) = (
                (parts[one].x + radius * ways[one][0], parts[one].y + radius * ways[one][1]) for one in (first, second)
            )
            assert np.hypot(a - c, b - d) >= 0.75 * radius, (apart, first, second)
            assert all(0 <= end <= SIZE - 1 for end in (a, b, c, d))


def test_heat_maps_are_nu_over_the_whole_photo_and_crosses_are_mu() -> None:
    maps = heat_maps()
    figure = photos.draw_heat_maps(maps)
    wanted = [nu for one in maps for nu in one.nu.reshape(-1, G, G)]
    found = images(figure, "nu")
    assert len(found) == len(wanted)
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
    over = [one for axes in figure.axes for one in axes.images if one.get_gid() == "nu"]
    assert {tuple(one.get_extent()) for one in over} == {(-0.5, SIZE - 0.5, SIZE - 0.5, -0.5)}
    assert len({id(one.norm) for one in over}) == 1  # one scale of colours, so that maps can be compared
    crosses = [line.get_xydata()[0] for axes in figure.axes for line in axes.lines if line.get_gid() == "mu"]
    assert np.allclose(crosses, np.concatenate([one.mu.reshape(-1, 2) for one in maps]))
    assert f"h {maps[1].entropy[2, 1]:.2f}" in texts(figure)


def test_polygons_have_their_corners_at_mu() -> None:
    made = shapes()
    for axes, one in zip(polygons.draw_polygons(made).axes, made.classes, strict=False):
        order = polygons.around(one.mu.mean(0))
        lines = [line.get_xydata() for line in axes.lines if line.get_gid() == "photo's"]
        assert np.allclose(lines, one.mu[:, [*order, order[0]]])
        (mean,) = (line.get_xydata() for line in axes.lines if line.get_gid() == "mean")
        assert np.allclose(mean, one.mu.mean(0)[[*order, order[0]]])
        assert f"spread {np.linalg.norm(one.mu - one.mu.mean(0), axis=2).mean():.2f} cells" in axes.get_title()


def test_turning_polygons_alike_changes_no_side() -> None:
    one = random(4).uniform(0, G - 1, (1, K, 2))
    mirrored = one * (-1, 1) + (G - 1, 0)
    mixed = np.concatenate((one, mirrored, mirrored, one)) + random(5).normal(0, 0.01, (4, K, 2))
    turned = polygons.turned_alike(mixed, G)
    assert np.abs(turned - one).max() < 0.1 < np.abs(mixed - one).max()
    sides = [np.linalg.norm(x[:, :, None] - x[:, None], axis=-1) for x in (mixed, turned)]
    assert np.allclose(*sides)


def test_templates_are_drawn_on_scales_about_zero_and_all_norms_below() -> None:
    scales = dictionary()
    figure = templates.draw_templates(scales)
    wanted = [theta for one in scales if one.side > 1 for theta in one.theta.reshape(-1, one.side, one.side)]
    assert all(np.array_equal(a, b) for a, b in zip(images(figure, "template"), wanted, strict=True))
    shown = [one for axes in figure.axes for one in axes.images]
    assert all(one.norm.vmin == -one.norm.vmax and one.norm.vmax == np.abs(one.get_array()).max() for one in shown)
    labels = [label.get_text() for label in figure.axes[1].get_xticklabels()]
    assert labels == [str(channel) for channel in (*scales[1].largest[1], *scales[1].random[1])]
    assert [one.get_extent()[0] for one in figure.axes[1].images] == pytest.approx(np.arange(14) - 0.43)
    norms = [line.get_ydata() for axes in figure.axes for line in axes.lines]
    assert np.allclose(norms, [np.sort(row)[::-1] for one in scales for row in one.norms])


def test_a_dictionary_of_side_one_has_norms_only() -> None:
    figure = templates.draw_templates(dictionary()[:1])
    assert images(figure, "template") == []
    assert len(figure.axes) == 1


def test_patches_follow_their_template() -> None:
    made = patches()
    figure = templates.draw_patches(made)
    assert all(np.array_equal(a, one.theta) for a, one in zip(images(figure, "template"), made, strict=True))
    wanted = [patch for one in made for patch in one.patches]
    assert all(np.array_equal(a, b) for a, b in zip(images(figure, "photo"), wanted, strict=True))
    caption = templates.patches_caption(3, made, "base")
    assert "part 2: 7 (2 classes), 8 (2 classes)" in caption
    assert caption.count("is anywhere") == caption.count("Part 2 is anywhere (mean entropy 0.95)") == 1


def test_bars_are_the_expressions() -> None:
    made = expressed()
    figure = expressions.draw_expressions(made)
    bars = [[bar.get_height() for bar in axes.containers[0]] for axes in figure.axes if axes.containers]
    wanted = [one.z[part, made.channels[part]] for one in made.photos for part in range(K)]
    assert np.allclose(bars, wanted)
    assert all(
        np.array_equal(a, b) for a, b in zip(images(figure, "template"), made.theta.reshape(-1, 5, 5), strict=True)
    )
    first, second = made.photos[0].z[1], made.photos[1].z[1]
    alike = first @ second / np.sqrt((first @ first) * (second @ second))
    assert f"cosine {alike:.2f}" in texts(figure)
    assert "cosine 0.00" in texts(figure)  # the silent part, which has no direction


@pytest.mark.parametrize("together", [False, True])
def test_matrices_are_mean_weights_and_shares_of_the_distance(together: bool) -> None:
    made = weighed(together)
    figure = attention.draw_scales(made)
    *weights, shares = (np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images)
    assert np.allclose(np.stack(weights, -1), made.alpha.mean(0))
    assert np.allclose(shares, made.adds.sum((0, 3)) / made.adds.sum())
    medians = [line.get_ydata() for line in figure.axes[0].lines]
    assert np.allclose(medians, np.median(made.entropy, 0).T)
    assert ("one column" in attention.scales_caption(made, "novel")) == together
    assert f"{shares[2, 0]:.2f}" in texts(figure)


def test_dots_are_the_weights_and_the_line_is_eq_7() -> None:
    made = weighed()
    figure = attention.draw_weights(made)
    for scale, axes in enumerate(figure.axes):
        for part, dots in enumerate(axes.collections):
            wanted = np.stack((made.entropy[:, scale, part], made.alpha[:, scale, :, part].mean(1)), -1)
            assert np.allclose(dots.get_offsets(), wanted)
    assert all(axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > made.alpha.mean(2).max() for axes in figure.axes)
    entropy = np.linspace(0, 1, 7)
    query = np.tile(made.entropy[:, 1].mean(0), (7, 1, 1))  # [7, 1, K], all parts at their mean …
    query[:, 0, 2] = entropy  # … but one
    shown = torch.tensor(made.class_entropy.mean((0, 1)))[None, None]
    alpha = part_weights(torch.tensor(query), shown, torch.tensor(made.slopes))[:, 0, 0, 0, 2]
    assert np.allclose(attention.curve(made, 1, 2, entropy), alpha)
    assert "one of 20 novel photos" in attention.weights_caption(made, "novel")
    assert "-2.00 for the photo's entropy, -1.00 for the class's" in attention.weights_caption(made, "novel")


def test_parts_that_weigh_alike_are_said_to() -> None:
    made = weighed(slopes=None)
    assert attention.curve(made, 0, 0, np.array([0.0, 1.0])).tolist() == [1 / K, 1 / K]
    assert "all parts weigh alike" in attention.weights_caption(made, "novel")
    assert "alike: α is 1/3" in attention.scales_caption(made, "novel")


def test_bars_are_the_contributions() -> None:
    made = pairs()
    figure = confusions.draw_confusions(made)
    groups = [axes.containers for axes in figure.axes if axes.containers]
    for (told, confused), pair in zip(groups, made, strict=True):
        assert np.allclose([bar.get_height() for bar in confused], pair.confused)
        assert np.allclose([bar.get_height() for bar in told], np.nan_to_num(pair.told))
    assert any("3 of 40 taken for the other" in text for text in texts(figure))


FIGURES = {
    "parts": lambda name: photos.draw_parts_sheet(rows_of_parts(name)[:1]),
    "locations": lambda name: photos.draw_heat_maps(heat_maps(name)[:1]),
    "polygons": lambda name: polygons.draw_polygons(shapes(name)),
    "expressions": lambda name: expressions.draw_expressions(expressed(name)),
    "confusions": lambda name: confusions.draw_confusions(pairs(name)[:1]),
}


@pytest.mark.parametrize("drawn", FIGURES)
def test_a_name_is_shown_as_it_is(drawn: str) -> None:
    for name in NAMES:
        figure = FIGURES[drawn](name)
        mine = [one for one in figure.findobj(matplotlib.text.Text) if style.short(name) in one.get_text()]
        assert mine
        assert not any(one.get_parse_math() for one in mine)


@pytest.mark.parametrize("kind", style.FORMATS)
def test_hostile_names_can_be_written(kind: str) -> None:
    figure = polygons.draw_polygons(
        polygons.Polygons(3, G, tuple(polygons.Polygon(n, shapes().classes[0].mu) for n in NAMES))
    )
    data = style.to_bytes(figure, kind, " ".join(NAMES))
    if kind == "svg":
        tree = ET.fromstring(data)
        said = [node.text or "" for node in tree.iter() if node.tag.endswith("}description")]
        assert said == [" ".join(NAMES).replace("\udcff", "\\xff")]
    elif kind == "png":
        assert Image.open(io.BytesIO(data)).size[0] == style.WIDTH * style.DPI
    else:
        assert data.startswith(b"%PDF")


def test_the_same_figure_is_the_same_bytes_and_settings_stay() -> None:
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"font.size": 40, "text.parse_math": True, "axes.grid": True}):
        first = style.to_bytes(attention.draw_scales(weighed()), "svg", "a")
    second = style.to_bytes(attention.draw_scales(weighed()), "svg", "a")
    assert first == second
    assert dict(matplotlib.rcParams) == before


def test_a_figure_is_written_as_drawing_and_as_picture(tmp_path: Path) -> None:
    written = style.write_figure(attention.draw_scales(weighed()), tmp_path / "the.scales", "what one sees")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {
        "the.scales.svg": written["svg"],
        "the.scales.png": written["png"],
    }
    assert Image.open(io.BytesIO(written["png"])).text["Description"] == "what one sees"


def test_drawings_keep_all_pixels_of_a_photo() -> None:
    figure = templates.draw_patches(patches()[:1])
    tree = ET.fromstring(style.to_bytes(figure, "svg"))
    sizes = {(node.get("width"), node.get("height")) for node in tree.iter() if node.tag.endswith("}image")}
    assert ("9", "9") in sizes
    assert style.has_photos(figure)
    assert not style.has_photos(attention.draw_scales(weighed()))


def test_other_formats_are_refused() -> None:
    with pytest.raises(UsageError, match="svg, png, pdf, not as 'gif'"):
        style.to_bytes(attention.draw_scales(weighed()), "gif")
