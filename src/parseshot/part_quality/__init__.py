"""Are the parts parts? Protocols that compare found parts with annotated ones, each beside four floors.

P-A regression, P-B clustering, P-D purity and P-E consistency are a file each; `run` does all of them.
"""

from parseshot.part_quality.figure import draw_quality, quality_caption
from parseshot.part_quality.regression import regression_error
from parseshot.part_quality.run import part_quality
from parseshot.part_quality.scores import PartQuality, Score
from parseshot.part_quality.summary import quality_lines

__all__ = [
    "PartQuality",
    "Score",
    "draw_quality",
    "part_quality",
    "quality_caption",
    "quality_lines",
    "regression_error",
]
