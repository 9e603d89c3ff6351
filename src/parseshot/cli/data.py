"""The verbs of `parseshot data`: prepare, info, splits."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from parseshot.cli.options import CORES, Json
from parseshot.cli.terminal import print_json, progress
from parseshot.errors import UsageError

app = typer.Typer(no_args_is_help=True, help="Prepare and look at data.")


@app.command("prepare")
def data_prepare(
    name: Annotated[str, typer.Argument(help="cub, cars, dogs, aircraft, folder, csv or synthetic (drawn birds).")],
    out: Annotated[Path, typer.Option(help="The directory to write; must not exist.")],
    source: Annotated[
        Path | None, typer.Option(help="A folder, a tar, tgz or zip archive, or a CSV file; synthetic needs none.")
    ] = None,
    size: Annotated[int, typer.Option(min=32, max=1024, help="Side of the images a model sees, in pixels.")] = 84,
    view: Annotated[
        str, typer.Option(help="paper: resize to --size. frn: resize to 92/84 of it, show the middle.")
    ] = "paper",
    split: Annotated[
        str | None, typer.Option(help="Which classes train and test: a shipped list (data splits) or a JSON file.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="folder, csv: the split; synthetic: the drawings.")] = 0,
    lenient: Annotated[bool, typer.Option(help="Use what is there of cut-off photos.")] = False,
    keep_duplicates: Annotated[bool, typer.Option(help="folder, csv: accept the same file in two classes.")] = False,
    base: Annotated[int, typer.Option(min=1, help="synthetic: species to train on.")] = 200,
    val: Annotated[int, typer.Option(min=1, help="synthetic: species to choose the model on.")] = 50,
    novel: Annotated[int, typer.Option(min=1, help="synthetic: species to evaluate on.")] = 50,
    per_class: Annotated[int, typer.Option(min=1, help="synthetic: pictures of each species.")] = 30,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = CORES,
    as_json: Json = False,
) -> None:
    """Turn raw pictures into a packed data set, once. Files that cannot be used are listed; exit code 1 says so."""
    from parseshot.data import prepare

    if name == "synthetic":
        if source is not None:
            raise UsageError("synthetic is drawn, it takes no --source")
        with progress("drawing") as update:
            pack = prepare.prepare_synthetic(
                out,
                size=size,
                base=base,
                val=val,
                novel=novel,
                per_species=per_class,
                seed=seed,
                workers=workers,
                progress=update,
            )
    else:
        prepare.check_name(name)
        if source is None:
            raise UsageError(f"{name} needs --source, a folder or archive")
        if (out / "pack.json").exists():
            print(f"{out} is there already; kept if the same command made it from this archive", file=sys.stderr)
        with progress("preparing") as update:
            pack = prepare.prepare(
                name,
                source,
                out,
                size=size,
                view=view,
                split=split,
                seed=seed,
                lenient=lenient,
                keep_duplicates=keep_duplicates,
                workers=workers,
                progress=update,
            )
    _print_pack(pack, as_json)
    if pack.problems:
        raise typer.Exit(1)


@app.command("info")
def data_info(
    data: Annotated[Path, typer.Argument(metavar="DIR")],
    sheet: Annotated[
        Path | None, typer.Option(help="Where the contact sheet goes; default DIR/contact-sheet.png.")
    ] = None,
    no_sheet: Annotated[bool, typer.Option("--no-sheet", help="Draw none.")] = False,
    table: Annotated[Path | None, typer.Option("--csv", help="Write a table of all images.")] = None,
    verify: Annotated[bool, typer.Option(help="Compare every array with its checksum.")] = False,
    as_json: Json = False,
) -> None:
    """Say what a packed data set holds, by split and class, and draw a contact sheet with boxes and parts."""
    from parseshot.data.packed import Pack

    pack = Pack(data)
    if verify:
        pack.verify()
    if table is not None:
        pack.write_table(table)
    if not no_sheet:
        from parseshot.figures import contact_sheet, twin_sheet

        target = sheet or data / "contact-sheet.png"
        contact_sheet(pack).save(target)
        print(f"contact sheet {target}", file=sys.stderr)
        twins = twin_sheet(pack)
        if twins is not None:
            pairs = target.with_name(f"{target.stem}-duplicates{target.suffix}")
            twins.save(pairs)
            print(f"the same photo twice, or nearly: {pairs}", file=sys.stderr)
    _print_pack(pack, as_json, classes=True)


@app.command("splits")
def data_splits(as_json: Json = False) -> None:
    """List the shipped splits with their fingerprints."""
    from parseshot.data.split import load_split, shipped_splits

    rows = []
    for name in shipped_splits():
        found = load_split(name)
        roles = list(found.classes.values())
        rows.append({**found.record(), **{role: roles.count(role) for role in ("base", "val", "novel")}})
    if as_json:
        print_json(splits=rows)
        return
    for row in rows:
        print(f"{row['name']:16} {row['fingerprint']}  {row['base']}/{row['val']}/{row['novel']} classes")


def _print_pack(pack: Any, as_json: bool, *, classes: bool = False) -> None:
    counts, by_class = pack.counts(), pack.class_counts()
    if as_json:
        print_json(
            path=str(pack.path),
            **pack.record(),
            splits=counts,
            classes=[
                {"name": name, "split": role, "images": by_class[name]}
                for name, role in zip(pack.classes, pack.splits, strict=True)
            ],
            problems=pack.problems,
            warnings=pack.warnings,
            provenance=pack.provenance,
        )
        return
    print(f"{pack.path}: {pack.name}, {len(pack)} images of {pack.size} px, fingerprint {pack.fingerprint}")
    print(f"split {pack.split['name']}, fingerprint {pack.split['fingerprint']}")
    for split, count in counts.items():
        print(f"  {split:6} {count['classes']:5} classes {count['images']:7} images")
        names = [name for name, role in zip(pack.classes, pack.splits, strict=True) if role == split]
        for name in names if classes else ():
            print(f"    {by_class[name]:5}  {name}")
    for kind, rows in (("warning", pack.warnings), ("left out", [problem["message"] for problem in pack.problems])):
        for row in rows:
            print(f"{kind}: {row}", file=sys.stderr)
