"""All figures of a model and a data set: files beside a page that holds them with their captions."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parseshot import __version__
from parseshot.data.packed import Pack
from parseshot.engine.encoding import Progress
from parseshot.engine.model import Model
from parseshot.figure_style import data_uri, has_photos, write_figure
from parseshot.inside import attention, confusions, expressions, photos, polygons, templates
from parseshot.inside.gather import Seen, edge_shares, own_distances, see, unsure_shares, unsureness
from parseshot.report import environment, write_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Chapter:
    """A figure, its heading and what one sees; without a figure, the caption says why there is none."""

    name: str  # of its files
    title: str
    caption: str
    figure: "Figure | None" = None


def chapters(seen: Seen, base: Seen) -> list[Callable[[], Chapter]]:
    """What makes each chapter, in order; `base` is where templates are looked up in."""
    distances, unsure, config, split = own_distances(seen), unsureness(seen), seen.method.config, seen.split

    def parts() -> Chapter:
        rows = photos.gather_parts(seen, distances, unsure)
        caption = photos.parts_caption(rows, unsure_shares(seen), edge_shares(seen), seen.model.grid, split)
        return Chapter("parts", "Where the parts are", caption, photos.draw_parts_sheet(rows))

    def heat_maps() -> Chapter:
        maps = photos.gather_heat_maps(seen, unsure)
        caption = photos.heat_maps_caption(maps, split)
        return Chapter("locations", "How sure each location is", caption, photos.draw_heat_maps(maps))

    def outlines() -> Chapter:
        title = "The polygon of parts"
        if config.parts < 2:
            return Chapter("polygons", title, "This model has one part, which makes no polygon.")
        found = polygons.gather_polygons(seen)
        caption = polygons.polygons_caption(found, split)
        return Chapter("polygons", title, caption, polygons.draw_polygons(found))

    def dictionary() -> Chapter:
        scales = templates.gather_templates(seen.method)
        caption = templates.templates_caption(scales, templates.visible_shares(seen), config.part_channels, split)
        return Chapter("templates", "The dictionary", caption, templates.draw_templates(scales))

    def patches() -> Chapter:
        side, found = templates.gather_patches(base)
        caption = templates.patches_caption(side, found, base.split)
        return Chapter("patches", "What a template stands for", caption, templates.draw_patches(found))

    def expressed() -> Chapter:
        found = expressions.gather_expressions(seen, distances)
        caption = expressions.expressions_caption(found, split)
        return Chapter("expressions", "What the parts express", caption, expressions.draw_expressions(found))

    @functools.cache
    def weighed() -> attention.Attention:
        return attention.gather_attention(seen)

    def scales() -> Chapter:
        found = weighed()
        caption = attention.scales_caption(found, split)
        return Chapter("scales", "Attention to scales", caption, attention.draw_scales(found))

    def weights() -> Chapter:
        title = "Weights against entropy"
        if config.parts < 2:
            return Chapter("weights", title, "This model has one part, which has all the weight.")
        found = weighed()
        caption = attention.weights_caption(found, split)
        return Chapter("weights", title, caption, attention.draw_weights(found))

    def confused() -> Chapter:
        title, asked = "Confused classes, and the parts that decide", confusions.ask(seen)
        pairs = confusions.gather_confusions(seen, asked, distances)
        if not pairs:
            return Chapter("confusions", title, f"None of {len(asked.truth):,} queries was taken for another class.")
        caption = confusions.confusions_caption(pairs, asked, split)
        return Chapter("confusions", title, caption, confusions.draw_confusions(pairs))

    return [parts, heat_maps, outlines, dictionary, patches, expressed, scales, weights, confused]


def write_inside(
    model: Model,
    pack: Pack,
    out: Path | str,
    *,
    name: str,
    split: str = "novel",
    pdf: bool = False,
    progress: Progress | None = None,
) -> list[Chapter]:
    """Draw every figure into `out` as SVG and PNG, and index.html, which is complete in itself.

    name: what to call the model. pdf: each figure as PDF as well.
    """
    out, kinds = Path(out), ("svg", "png", "pdf") if pdf else ("svg", "png")
    seen = see(model, pack, split, progress)
    base = see(model, pack, "base", progress) if split != "base" and "base" in pack.splits else seen
    made, makers, pages = [], chapters(seen, base), []
    out.mkdir(parents=True, exist_ok=True)
    for make in makers:
        chapter = make()
        uri = None
        if chapter.figure is not None:
            written = write_figure(chapter.figure, out / chapter.name, chapter.caption, kinds)
            uri = data_uri(written["svg"], written["png"] if has_photos(chapter.figure) else None)
        made.append(chapter)
        pages.append({"name": chapter.name, "title": chapter.title, "caption": chapter.caption, "uri": uri})
        if progress:
            progress(len(made), len(makers), "figures")
    page = environment().get_template("inside.html.j2")
    write_page(
        page.render(title=name, chapters=pages, summary=_summary(seen), kinds=kinds, pictures=[]), out / "index.html"
    )
    return made


def _summary(seen: Seen) -> dict[str, str]:
    config, model, pack = seen.method.config, seen.model.config, seen.pack
    sides = ", ".join(f"{side} × {side}" for side in config.scales)
    projected = (
        f"each part has {config.part_channels} channels of its own" if config.part_channels else "shared channels"
    )
    cells = f"{seen.model.grid} × {seen.model.grid} cells"
    return {
        "Model": f"{model.method} on {model.backbone}, {model.image_size} px, {cells}",
        "Parts": f"{config.parts} at scales {sides}; {projected}",
        "A class is": "what its photos span, part by part" if config.span else "the mean of its photos",
        "Data": f"{pack.name}, {pack.fingerprint}",
        "Seen": f"{len(seen.labels):,} photos of {len(seen.rows)} {seen.split} classes",
        "Weights": seen.model.fingerprint(),
        "Version": f"parseshot {__version__}",
    }
