"""Results in lines of text, for a terminal: what was found goes to stdout, remarks to stderr."""

from collections.abc import Iterator

from parseshot.engine.protocol import shots_text
from parseshot.engine.results import ComparisonResult, EvaluationResult, Result

HARDEST, CONFUSED = 3, 2  # classes and pairs that are named


def evaluation_lines(result: EvaluationResult) -> Iterator[str]:
    """Accuracy at each number of shots, and what else is worth a line."""
    asked = result.protocol
    for one in result.results:
        yield (
            f"{result.method} {asked.way}-way {shots_text(one.shots)}-shot on {result.data.name}/{asked.split}: "
            f"{100 * one.accuracy:.2f} ± {100 * one.interval_95:.2f} % "
            f"(by classes {_range(one.interval_95_by_classes)})"
        )
        yield from _details(one)


def _details(one: Result) -> Iterator[str]:
    calibration = one.calibration
    text = f"  calibration error {100 * calibration.raw.ece:.2f} %"
    if calibration.tempered is not None:
        text += f", {100 * calibration.tempered.ece:.2f} % at temperature {calibration.temperature:.3g}"
    yield text
    if one.open_set is not None:
        known = one.open_set.by_logit
        yield (
            f"  unseen classes: AUROC {100 * known.auroc:.2f} ± {100 * known.auroc_interval_95:.2f} %, taken for "
            f"known at 95 % TPR {100 * known.fpr_at_95_tpr:.2f} ± {100 * known.fpr_interval_95:.2f} %"
        )
    asked = [(row.accuracy, row.name) for row in one.per_class if row.accuracy is not None]
    yield "  hardest: " + ", ".join(f"{name} {100 * share:.1f} %" for share, name in sorted(asked)[:HARDEST])
    if one.most_confused:
        pairs = one.most_confused[:CONFUSED]
        yield "  confused: " + "; ".join(f"{it.truth} taken for {it.taken_for} {100 * it.rate:.0f} %" for it in pairs)


def evaluation_remarks(result: EvaluationResult) -> Iterator[str]:
    """Copies, notes, which data, and what the encodings took."""
    for one in result.results:
        if one.copies_left_out or one.near_copies:
            yield (
                f"{shots_text(one.shots)}-shot: {one.copies_left_out} queries left out because the same file was in "
                f"the support set, {one.near_copies} nearly the same as a support photo"
            )
    yield from (f"note: {note}" for note in result.notes)
    split, cache = result.data.split, result.cache
    yield f"split {split.name} {split.fingerprint}, data {result.data.fingerprint}"
    where = "on disk" if cache.on_disk else "in memory"
    yield f"{cache.images} images encoded once, {cache.bytes / 1e6:.0f} MB {where}"


def comparison_lines(result: ComparisonResult) -> Iterator[str]:
    """A line a model and a line a pair."""
    asked = result.protocol
    yield (
        f"{result.data.name}/{asked.split}, {asked.way}-way, {asked.queries} queries, "
        f"the same {asked.episodes} episodes for all, in %"
    )
    width = max(len(row.model) for row in result.results)
    for row in result.results:
        yield (
            f"{shots_text(row.shots)}-shot {row.model:{width}} {100 * row.accuracy:6.2f} ± {100 * row.interval_95:.2f}"
            f"   by classes {_range(row.interval_95_by_classes)}"
        )
    yield "paired differences; p corrected for the number of pairs (Holm)"
    for pair in result.pairs:
        yield (
            f"{shots_text(pair.shots)}-shot {pair.first} − {pair.second}: {100 * pair.difference:+.2f} ± "
            f"{100 * pair.interval_95:.2f}, {'p < 1e-16' if pair.p_holm < 1e-16 else f'p {pair.p_holm:.2g}'}, "
            f"{'told apart' if pair.differ else 'not told apart'}; "
            f"by classes {_range(pair.interval_95_by_classes, '+')}"
        )


def _range(bounds: tuple[float, float], sign: str = "") -> str:
    low, high = bounds
    return f"{100 * low:{sign}.2f} to {100 * high:{sign}.2f}"
