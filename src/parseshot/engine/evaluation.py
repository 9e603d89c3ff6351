"""Few-shot evaluation: encode each image once, then score the same episodes for every method, many at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parseshot.data.episodes import Episodes, check_episode, draw_episodes
from parseshot.data.packed import Pack
from parseshot.engine.encoding import Encoded, Progress, encode_split
from parseshot.engine.features import FeaturePack
from parseshot.engine.model import Model
from parseshot.engine.protocol import PROTOCOLS, Protocol, Shots
from parseshot.engine.statistics import (
    Interval,
    Reliability,
    auroc,
    by_classes,
    false_positives,
    fit_temperature,
)
from parseshot.errors import DataError, ModelError
from parseshot.methods import Encoding, Method

CHUNK_BYTES = 4 << 20  # of the encodings of a chunk's queries; 2 to 8 MB were best for ProtoNet and DOP (docs/LOG.md)
SOLVED_BYTES = 256 << 20  # the same of methods that take many small steps an episode
CHUNK_EPISODES = 32
CPU = torch.device("cpu")
DRAWN = 256  # episodes drawn and added up at a time
UNSEEN = 5  # classes whose queries belong to none, in the open set
VALIDATION_EPISODES = 600  # of the val classes, for the temperature


@dataclass
class OpenSet:
    """Known queries against queries of classes that are not in the episode, by one score; a value an episode."""

    auroc: np.ndarray  # [E]
    false_positives: np.ndarray  # [E] at 95 % true positives


@dataclass
class Outcome:
    """What came out at one number of shots. Rows are those of `Evaluation.images`, classes those of its `classes`."""

    shots: Shots
    episodes: np.ndarray  # [E] accuracy of each, so that methods can be compared pair by pair
    taken: np.ndarray  # [n, C] how often each image was given to each class
    chances: np.ndarray  # [C, C] queries of the first class in episodes that also held the second
    raw: Reliability
    copies: int = 0  # queries left out because the very same file was in the support set
    near_copies: int = 0  # queries nearly the same as a support photo; they count
    temperature: float | None = None  # fitted on the val classes
    tempered: Reliability | None = None
    open_set: dict[str, OpenSet] = field(default_factory=dict)  # by logit, by probability

    @property
    def interval(self) -> Interval:
        return Interval.of(self.episodes)


@dataclass
class Evaluation:
    """A model on a protocol."""

    protocol: Protocol
    outcomes: list[Outcome]
    classes: np.ndarray  # [C] class numbers of the pack
    images: np.ndarray  # [n] image numbers of the pack
    labels: np.ndarray  # [n] place of each image's class in `classes`
    cache_bytes: int
    on_disk: bool
    unseen: int = 0  # classes of the open set
    notes: list[str] = field(default_factory=list)

    def confusion(self, outcome: Outcome) -> np.ndarray:
        """How often queries of one class were given to another, [C, C]."""
        counts = np.zeros((len(self.classes), len(self.classes)), dtype=np.int64)
        np.add.at(counts, self.labels, outcome.taken)
        return counts

    def per_class(self, outcome: Outcome) -> tuple[np.ndarray, np.ndarray]:
        """Right answers and queries of each class, [C] and [C]."""
        counts = self.confusion(outcome)
        return counts.diagonal().astype(float), counts.sum(1).astype(float)

    def interval_by_classes(self, outcome: Outcome) -> tuple[float, float]:
        return by_classes(*self.per_class(outcome))


def evaluate(
    model: Model,
    pack: Pack,
    protocol: Protocol = PROTOCOLS["paper"],
    *,
    calibrate: bool = False,
    open_set: bool = False,
    first: int = 0,
    memory: int | None = None,
    encoded: Encoded | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Accuracy over episodes for each number of shots, and what else the same logits say.

    calibrate: fit a temperature on the val classes. open_set: add queries of five further classes to every episode.
    first: number of the first episode, to go on where an evaluation of fewer has ended.
    memory: bytes of encodings above which they are kept on disk. encoded: those of the split, where they are at hand.
    """
    refuse_seen_classes(model, pack, protocol.split)
    members = pack.by_class(protocol.split)
    for shots in protocol.shots:  # fail before the work, not after
        counts = protocol.of_each_class(shots)
        check_episode(members, way=protocol.way, shots=counts, queries=protocol.queries, names=pack.classes)
    encoded = encoded or encode_split(model, pack, protocol.split, memory=memory, progress=progress)
    numbers = sorted(encoded.rows)
    found = Evaluation(
        protocol,
        [],
        np.array(numbers),
        encoded.images,
        np.searchsorted(numbers, pack.labels[encoded.images]),
        encoded.bytes,
        encoded.on_disk,
    )
    if isinstance(pack, FeaturePack):
        found.notes.append("from cached feature maps, stored as float16")
    unseen = found.unseen = min(UNSEEN, len(numbers) - protocol.way) if open_set else 0
    if open_set and not unseen:
        found.notes.append(f"no open set: all {len(numbers)} classes of {protocol.split} are in every episode")
    temperatures: dict[Shots, float] = {}
    if calibrate:
        try:
            temperatures = _temperatures(model, pack, protocol, memory, progress)
        except DataError as error:
            found.notes.append(f"no temperature: {error}")
    for done, shots in enumerate(protocol.shots):
        tally = Tally(found, shots, Twins(pack, encoded.images), temperatures.get(shots))
        for episodes in _drawn(encoded, pack, protocol, shots, unseen, first=first):
            tally.add(episodes, *score(model.method, encoded.encoding, episodes, model.device))
            if progress:
                total = protocol.episodes * len(protocol.shots)
                progress(done * protocol.episodes + tally.seen, total, "episodes")
        found.outcomes.append(tally.outcome())
    return found


def _drawn(
    encoded: Encoded, pack: Pack, protocol: Protocol, shots: Shots, unseen: int = 0, *, first: int = 0
) -> Iterator[Episodes]:
    end = first + protocol.episodes
    for start in range(first, end, DRAWN):
        yield draw_episodes(
            encoded.rows,
            range(start, min(start + DRAWN, end)),
            way=protocol.way,
            shots=protocol.of_each_class(shots),
            queries=protocol.queries,
            seed=protocol.seed,
            unseen=unseen,
            names=pack.classes,
        )


@torch.inference_mode()
def score(method: Method, encoding: Encoding, episodes: Episodes, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
    """Logits of the queries [E, Q, N] and of the strangers [E, U, N]; image numbers are rows of the encoding.

    One call of the method's own `logits` scores many episodes: they are its vmap dimension.
    """
    method.eval()
    labels = torch.from_numpy(episodes.support_labels).to(device)
    queries = torch.from_numpy(np.concatenate((episodes.query, episodes.strangers), 1))  # [E, Q + U]
    support = torch.from_numpy(episodes.support)

    def one(query: Tensor, shown: Tensor) -> Tensor:
        return method.logits(encoding.take(query, device), encoding.take(shown, device), labels)

    if method.vectorised:
        probe = encoding.take(queries[0], device)
        method.logits(probe, encoding.take(support[0], device), labels)
        room = SOLVED_BYTES if method.many_steps else CHUNK_BYTES
        chunk = min(CHUNK_EPISODES, max(1, room // probe.loaded_bytes))
        logits = torch.func.vmap(one, chunk_size=chunk)(queries, support)
    else:
        logits = torch.stack([one(query, shown) for query, shown in zip(queries, support, strict=True)])
    if not bool(logits.isfinite().all()):
        raise ModelError(f"the model's {type(method).__name__} gives scores that are not finite; train it again")
    logits, known = logits.cpu(), episodes.query.shape[1]
    return logits[:, :known], logits[:, known:]


class Twins:
    """Which rows of an encoding show the same photo, to keep queries out that are in the support set already."""

    def __init__(self, pack: Pack, images: np.ndarray) -> None:
        row_of = np.full(len(pack), -1)
        row_of[images] = np.arange(len(images))
        pairs = np.column_stack((row_of[pack.twins[:, 0]], row_of[pack.twins[:, 1]], pack.twins[:, 2]))
        pairs = pairs[(pairs[:, :2] >= 0).all(1)]
        self.pairs = np.concatenate((pairs, pairs[:, [1, 0, 2]]))  # [m, 3] row, its twin, is it the same file?

    def among(self, episodes: Episodes) -> tuple[np.ndarray, np.ndarray]:
        """Which queries have their own file in the support set, and which nearly so: [E, Q] and [E, Q]."""
        copies, near = (np.zeros(episodes.query.shape, dtype=bool) for _ in range(2))
        candidates = np.isin(episodes.query, self.pairs[:, 0])
        for at, position in np.argwhere(candidates):
            mine = self.pairs[self.pairs[:, 0] == episodes.query[at, position]]
            shown = np.isin(mine[:, 1], episodes.support[at])
            copies[at, position] = (mine[shown, 2] == 1).any()
            near[at, position] = shown.any() and not copies[at, position]
        return copies, near


class Tally:
    """Adds up chunks of episodes, so that no logits are kept."""

    def __init__(self, evaluation: Evaluation, shots: Shots, twins: Twins, temperature: float | None) -> None:
        classes = len(evaluation.classes)
        self.evaluation, self.shots, self.twins, self.temperature = evaluation, shots, twins, temperature
        self.taken = np.zeros((len(evaluation.images), classes), dtype=np.int32)
        self.chances = np.zeros((classes, classes), dtype=np.int64)
        self.raw, self.tempered = Reliability(), Reliability()
        self.accuracies: list[np.ndarray] = []
        self.open: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"logit": [], "probability": []}
        self.copies = self.near_copies = self.seen = 0

    def add(self, episodes: Episodes, logits: Tensor, strangers: Tensor) -> None:
        count, way = episodes.classes.shape
        targets = torch.from_numpy(episodes.query_labels)
        copies, near = self.twins.among(episodes)
        counted = ~copies
        counted[~counted.any(1)] = True  # an episode of nothing but copies says what it can
        answers = logits.argmax(-1).numpy()  # [E, Q]
        right = answers == episodes.query_labels
        self.accuracies.append((right & counted).sum(1) / counted.sum(1))
        places = np.searchsorted(self.evaluation.classes, episodes.classes)  # [E, N]
        given = np.take_along_axis(places, answers, 1)
        np.add.at(self.taken, (episodes.query[counted], given[counted]), 1)
        per_class = counted.reshape(count, way, -1).sum(2)  # [E, N]
        np.add.at(self.chances, (places[:, :, None], places[:, None, :]), per_class[:, :, None])
        mask = torch.from_numpy(counted)
        self.raw.add(torch.log_softmax(logits, -1), targets, mask)
        if self.temperature is not None:
            self.tempered.add(torch.log_softmax(logits / self.temperature, -1), targets, mask)
        if strangers.shape[1]:
            for name, known, unknown in (
                ("logit", logits, strangers),
                ("probability", torch.softmax(logits, -1), torch.softmax(strangers, -1)),
            ):
                pair = known.amax(-1), unknown.amax(-1)
                self.open[name].append((auroc(*pair).numpy(), false_positives(*pair).numpy()))
        self.copies, self.near_copies = self.copies + int(copies.sum()), self.near_copies + int(near.sum())
        self.seen += count

    def outcome(self) -> Outcome:
        return Outcome(
            self.shots,
            np.concatenate(self.accuracies),
            self.taken,
            self.chances,
            self.raw,
            self.copies,
            self.near_copies,
            self.temperature,
            self.tempered if self.temperature is not None else None,
            {
                name: OpenSet(*(np.concatenate(side) for side in zip(*pairs, strict=True)))
                for name, pairs in self.open.items()
                if pairs
            },
        )


def _temperatures(
    model: Model, pack: Pack, protocol: Protocol, memory: int | None, progress: Progress | None
) -> dict[Shots, float]:
    """T for each number of shots, fitted on episodes of the val classes like those of the protocol."""
    chosen = protocol.model_copy(update={"split": "val", "episodes": min(VALIDATION_EPISODES, protocol.episodes)})
    encoded = encode_split(model, pack, "val", memory=memory, progress=progress)
    found: dict[Shots, float] = {}
    for shots in protocol.shots:
        logits, targets = [], []
        for episodes in _drawn(encoded, pack, chosen, shots):
            scores, _ = score(model.method, encoded.encoding, episodes, model.device)
            logits.append(scores.flatten(0, 1))
            targets.append(torch.from_numpy(episodes.query_labels).repeat(len(episodes)))
        found[shots] = fit_temperature(torch.cat(logits), torch.cat(targets))
    return found


def paired_difference(first: Outcome, second: Outcome) -> Interval:
    """Mean of first − second over the same episodes: far narrower than two intervals side by side."""
    if first.shots != second.shots or len(first.episodes) != len(second.episodes):
        raise DataError("a paired difference needs the same episodes on both sides")
    return Interval.of(first.episodes - second.episodes)


def refuse_seen_classes(model: Model, pack: Pack, split: str) -> None:
    """A class the model was trained on is not unseen: refuse, with the names."""
    if split == "base":
        return
    asked = {name for name, where in zip(pack.classes, pack.splits, strict=True) if where == split}
    seen = sorted(asked & set(model.provenance.get("base_classes", [])))
    if seen:
        raise DataError(
            f"the model was trained on {len(seen)} of the {len(asked)} classes of split {split!r}: "
            f"{', '.join(seen[:5])}{' …' if len(seen) > 5 else ''}; its figures there would mean nothing"
        )


def validation_accuracy(model: Model, pack: Pack, episodes: int) -> Interval:
    """5-way 5-shot accuracy on fixed episodes of the val classes (fewer where they are short of images)."""
    encoded = encode_split(model, pack, "val")
    smallest = min(len(images) for images in encoded.rows.values())
    if smallest < 2 or len(encoded.rows) < 2:
        raise DataError(f"{pack.path}: to choose the model, split val needs two classes with two images each")
    shots = min(5, smallest - 1)
    protocol: dict[str, Any] = {"way": min(5, len(encoded.rows)), "queries": min(15, smallest - shots)}
    asked = Protocol(split="val", shots=(shots,), episodes=episodes, **protocol)
    right = [
        (score(model.method, encoded.encoding, drawn, model.device)[0].argmax(-1).numpy() == drawn.query_labels).mean(1)
        for drawn in _drawn(encoded, pack, asked, shots)
    ]
    return Interval.of(np.concatenate(right))
