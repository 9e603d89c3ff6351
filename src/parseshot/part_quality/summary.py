"""Part quality as lines of text: the error and its ratio to the best floor first, then the other protocols."""

from parseshot.part_quality.scores import PartQuality, Score

COLUMNS = (  # of the table after the error; a title and a field
    ("active", "error_active"),
    ("NMI", "nmi"),
    ("ARI", "ari"),
    ("NMI ν", "nmi_nu"),
    ("ARI ν", "ari_nu"),
    ("purity", "purity"),
    ("active", "purity_active"),
    ("consist.", "consistency"),
    ("stable", "stability"),
)
SIDES = {  # what is fitted on and what is scored
    "novel": ("images of base classes", "of novel classes"),
    "val": ("images of base classes", "of val classes"),
    "official": ("official train images", "official test images"),
}


def quality_lines(result: PartQuality) -> list[str]:
    """What was measured, a table with a line for each set of parts and each floor, and what to know about it."""
    first, *others = quality_notes(result)
    titles = "".join(f"{title:>9}" for title, _ in COLUMNS)
    table = [_line(result, score) for score in result.scores]
    return [first, f"{'':24} places   error  of best floor  of the four{titles}", *table, *others]


def quality_notes(result: PartQuality) -> list[str]:
    """On what it was measured, and what to know about it."""
    fit, scored = SIDES[result.split]
    cropped = "cropped input: " if result.data["name"] == "cub" else ""  # its layout shows the box and a margin
    notes = [
        f"mean error in % of the box, linear map fitted on {result.fitted_on} {fit}, "
        f"measured on {result.scored_on} {scored}",
        f"{cropped}the box is {100 * result.box_share:.0f} % of the picture; P-A and P-B are published on whole photos",
    ]
    if result.stability_images:
        notes.append(f"stability is of {result.stability_images} of these images, drawn by seed {result.seed}")
    if result.seen_before:
        notes.append(f"{result.seen_before} of the images measured on are of classes the model was trained on")
    return notes


def _line(result: PartQuality, score: Score) -> str:
    values = (getattr(score, field) for _, field in COLUMNS)
    shown = "".join(f"{'–' if value is None else f'{value:.1f}':>9}" for value in values)
    return (
        f"{score.name:24} {score.locations:6} {score.error:7.2f} {result.of_best_floor(score):14.2f}"
        f"{result.of_usual_floor(score):13.2f}{shown}"
    )
