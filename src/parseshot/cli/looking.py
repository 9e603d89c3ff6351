"""Verbs that look and change nothing: the parts of a model, and what there is to use."""

import json
from pathlib import Path
from typing import Annotated

import typer

from parseshot.cli.options import THREADS, Data, Features, Json, Split, Threads
from parseshot.cli.terminal import print_json, progress, use_threads

app = typer.Typer()


@app.command()
def parse(
    model: Annotated[
        Path,
        typer.Argument(help="A model directory, or the name of a model that ships (default, cub-conv4, birds-conv4)."),
    ],
    images: Annotated[list[Path], typer.Argument(help="Photos, or folders of photos.")],
    out: Annotated[Path, typer.Option(help="Where the drawings and parts.json go.")],
    threads: Threads = THREADS,
) -> None:
    """Draw the parts a model finds on pictures, and write them as JSON."""
    from parseshot.demo import parse_files
    from parseshot.engine.model import Model

    use_threads(threads)
    with progress("parsing") as update:
        found = parse_files(Model.from_pretrained(model), images, out, progress=update)
    for row in found:
        print(f"{row['image']}: " + (row["error"] if "error" in row else row["drawing"]))
    if any("error" in row for row in found):
        raise typer.Exit(1)


@app.command()
def report(
    model: Annotated[str, typer.Argument(help="A model directory, or the name of one that ships; it must have parts.")],
    data: Data,
    out: Annotated[Path, typer.Option(help="Where the figures and index.html go.")],
    features: Features = False,
    split: Split = "novel",
    pdf: Annotated[bool, typer.Option("--pdf", help="Write each figure as PDF too.")] = False,
    threads: Threads = THREADS,
) -> None:
    """Look inside a model: figures of its parts, templates, weights and confusions on a data set, and a page."""
    from parseshot.data.packed import Pack
    from parseshot.engine.features import cached
    from parseshot.engine.model import Model
    from parseshot.inside.collect import write_inside

    use_threads(threads)
    loaded = Model.from_pretrained(model)
    with progress("encoding") as update:
        pack = cached(loaded, Pack(data), data / "features", progress=update) if features else Pack(data)
        made = write_inside(loaded, pack, out, name=Path(model).name, split=split, pdf=pdf, progress=update)
    print(f"{out / 'index.html'}: {sum(one.figure is not None for one in made)} figures")


@app.command("part-quality")
def part_quality(
    model: Annotated[
        Path,
        typer.Argument(help="A model directory, or the name of a model that ships (default, cub-conv4, birds-conv4)."),
    ],
    data: Annotated[Path, typer.Option(help="A packed data set with annotated positions.")],
    split: Annotated[
        str, typer.Option(help="novel, val: base → these classes; official: train → test images.")
    ] = "novel",
    stability_images: Annotated[int, typer.Option(min=0, help="Images looked at again with noise; 0: none.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Which images, which noise, which random cells.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write part_quality.json, .svg and .png here.")] = None,
    features: Features = False,
    threads: Threads = THREADS,
    as_json: Json = False,
) -> None:
    """Compare the parts found with annotated ones: keypoint regression, NMI, ARI, purity, consistency; and floors."""
    from parseshot.data.packed import Pack
    from parseshot.engine.features import cached
    from parseshot.engine.model import Model
    from parseshot.figure_style import write_figure
    from parseshot.part_quality import draw_quality, quality_caption, quality_lines
    from parseshot.part_quality import part_quality as run

    use_threads(threads)
    loaded, pack = Model.from_pretrained(model), Pack(data)
    with progress("part quality") as update:
        pack = cached(loaded, pack, data / "features", progress=update) if features else pack
        result = run(loaded, pack, split=split, stability_images=stability_images, seed=seed, progress=update)
    text = json.dumps(result.record(), indent=1)
    print(text if as_json else "\n".join(quality_lines(result)), flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "part_quality.json").write_text(text + "\n", encoding="utf-8")
        figure = draw_quality(result, f"{model.name} on {pack.name}, split {split}")
        write_figure(figure, out / "part_quality", quality_caption(result))


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods: year, parameters beyond the backbone (640 channels, 5×5 cells), what is fitted at test time."""
    from parseshot.methods import METHODS, parameters

    rows = [
        {
            "name": name,
            "year": one.year,
            "parameters": parameters(name),
            "fitted": one.fitted,
            "summary": one.summary,
            "maps": 2 if one.kind.paired else 1,
            "finer_grid": one.kind.finer_grid,
        }
        for name, one in METHODS.items()
    ]
    if as_json:
        print_json(methods=rows)
        return
    for row in rows:
        print(f"{row['name']:18} {row['year']}  {row['parameters']:>10,}  {row['summary']}")
        if row["fitted"] != "nothing":
            print(f"{'':36}at test time: {row['fitted']}")


@app.command()
def recipes(as_json: Json = False) -> None:
    """List the shipped recipes."""
    from parseshot.engine.recipe import load_recipe, shipped_recipes

    titles = {name: load_recipe(name).title for name in shipped_recipes()}
    if as_json:
        print_json(recipes=[{"name": name, "title": title} for name, title in titles.items()])
        return
    for name, title in titles.items():
        print(f"{name:28} {title}")


@app.command()
def checks(as_json: Json = False) -> None:
    """Say what this installation has, and whether it works."""
    from parseshot.demo import run_checks

    found = run_checks()
    if as_json:
        print_json(checks=found)
    else:
        for name, value in found.items():
            print(f"{name:22} {value}")
    if found["self test"] != "ok":
        raise typer.Exit(5)
