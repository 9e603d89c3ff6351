"""Options that several verbs share, and how many threads they use unless they are told."""

import os
from pathlib import Path
from typing import Annotated

import typer

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
ASKED = os.environ.get("OMP_NUM_THREADS", "")
THREADS = int(ASKED) if ASKED.isdigit() and int(ASKED) > 0 else CORES

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Threads = Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")]

Data = Annotated[Path, typer.Option(help="A packed data set.")]
Features = Annotated[
    bool, typer.Option("--features", help="Use a frozen backbone's maps in DATA/features; they are made there once.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
Split = Annotated[str, typer.Option(help="base, val or novel.")]
ProtocolName = Annotated[
    str, typer.Option(help="paper: 5-way, 1 and 5 shots, 15 queries, 600 episodes. frn: 16 queries, 10,000 episodes.")
]
Way = Annotated[str | None, typer.Option(help="Classes of an episode, or all. (default: of the protocol)")]
Shots = Annotated[
    str | None,
    typer.Option(help="Support images of each class, e.g. 1,5; 1+2+5 is a number for each class. (default: 1,5)"),
]
Queries = Annotated[int | None, typer.Option(min=1, help="Query images of each class. (default: of the protocol)")]
Episodes = Annotated[int | None, typer.Option(min=2, help="Number of episodes. (default: of the protocol)")]
Memory = Annotated[
    float | None,
    typer.Option(min=0, help="GB of encodings above which they go to disk. (default: half of what is free)"),
]
Seed = Annotated[int, typer.Option(min=0, help="Which episodes are drawn.")]

GalleryName = Annotated[str, typer.Argument(metavar="GALLERY", help="A file, or a postgresql:// URL.")]
ModelName = Annotated[
    str, typer.Option("--model", help="A model directory, or the name of one that ships (default, cub-conv4, …).")
]
Find = Annotated[
    bool | None,
    typer.Option(
        "--find/--whole", help="Look for the object in photos, or take them whole. (default: as the model learned)"
    ),
]
