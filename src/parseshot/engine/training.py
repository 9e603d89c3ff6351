"""What a step of training is: an episode, or a batch of the classifier that a backbone may be pre-trained with."""

import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from parseshot import __version__
from parseshot.config import Config
from parseshot.data.augment import Augmentation, augment
from parseshot.data.episodes import Episode, draw_episode
from parseshot.data.packed import Pack
from parseshot.engine.device import autocast
from parseshot.engine.distributed import ALONE, Team
from parseshot.engine.features import FeaturePack, Progress, base_images, cached
from parseshot.engine.model import BATCH, Model, ModelConfig
from parseshot.errors import ModelError, UsageError
from parseshot.methods import BasePhotos, Companion, Encoding, Pairs

ADVICE = (
    "nothing was saved from this step; lower the learning rate or look at these images, then --resume or start again"
)


class Schedule(Config):
    """Adam with a learning rate that steps down."""

    lr: float = Field(5e-4, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    decay_every: int = Field(3_000, ge=1)  # steps between two changes of the learning rate …
    decay_factor: float = Field(0.1, gt=0, le=1)  # … and what it is multiplied by

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.lr * self.decay_factor ** (step // self.decay_every)


class PretrainingConfig(Schedule):
    """A first stage: the backbone under a linear classifier of the base classes. The paper has none."""

    steps: int = Field(ge=1)
    batch: int = Field(64, ge=2)  # images a step
    lr: float = Field(1e-3, gt=0)
    label_smoothing: float = Field(0.1, ge=0, lt=1)


class TrainingConfig(Schedule):
    """How a model is trained. Defaults are the paper's episode and optimiser."""

    episodes: int = Field(10_000, ge=1)
    way: int = Field(10, ge=2)
    shots: int = Field(5, ge=1)
    queries: int = Field(10, ge=1)  # of each class
    augmentation: Augmentation = Augmentation()
    pretraining: PretrainingConfig | None = None
    cached_views: int | None = Field(None, ge=0, le=64)  # train on a frozen backbone's maps: views beside the plain one
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # of the backbone; auto: bfloat16 where a GPU has it
    blank_cells: float = Field(0.0, ge=0, lt=1)  # share of the cells of each feature map that are set to 0
    average: float = Field(0.0, ge=0, lt=1)  # what is validated and kept is a mean of weights that keeps this a step
    watch_every: int = Field(1, ge=1)  # steps between two looks at the accuracy, which cost a second pass of the head
    validate_every: int = Field(1_000, ge=1)
    validation_episodes: int = Field(200, ge=2)
    seed: int = Field(0, ge=0)


class Stage:
    """A part of a run with an optimiser of its own."""

    name: str
    module: nn.Module  # what is trained, and saved with the state
    schedule: Schedule
    steps: int
    images: int  # of a step

    def begin(self) -> None:
        """Set what depends on data or chance, once, before the first step."""

    def step(self, optimiser: torch.optim.Optimizer, step: int) -> dict[str, float]:
        """One step of the optimiser, and its figures."""
        raise NotImplementedError


class EpisodeStage(Stage):
    """Training in episodes, Algorithm 2."""

    name = "episodes"

    def __init__(self, model: Model, pack: Pack, config: TrainingConfig, team: Team = ALONE) -> None:
        self.module = self.model = model
        self.pack, self.config, self.schedule, self.team = pack, config, config, team
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.companion = model.method.companion(base_photos(pack))
        if self.companion is not None:
            self.module = nn.ModuleDict({"model": model, "companion": self.companion.to(model.device)})
            if self.companion.pairs and (not isinstance(pack, FeaturePack) or pack.warped is None):
                raise UsageError("method_options.warps needs cached maps of moved photos: set training.cached_views")
            show_base(model, pack, self.companion, config.seed)
        self.steps, self.images = config.episodes, config.way * (config.shots + config.queries)
        self.members = pack.by_class("base")

    def begin(self) -> None:
        torch.manual_seed(self.config.seed)
        initialise(self.model, self.pack, draw(self.members, self.config, 0, self.pack.classes))

    def step(self, optimiser: torch.optim.Optimizer, step: int) -> dict[str, float]:
        self.model.method.hold(self.model.backbone, True)
        episode = draw(self.members, self.config, step, self.pack.classes)
        return train_step(self.model, optimiser, self.pack, episode, self.config, step, self.team, self.companion)


def base_photos(pack: Pack) -> BasePhotos:
    """The pack's photos as methods may know them in training."""
    labels = torch.full((len(pack),), -1)
    for number, images in enumerate(pack.by_class("base").values()):
        labels[torch.from_numpy(images)] = number
    if pack.parts is None:
        return BasePhotos(labels, None)
    parts = torch.from_numpy(np.array(pack.parts, dtype=np.float32))
    return BasePhotos(labels, torch.cat(((parts[..., :2] + 0.5) / pack.size, parts[..., 2:]), -1))


@torch.no_grad()
def show_base(model: Model, pack: Pack, companion: Companion, seed: int) -> None:
    """Let a companion look at the features of some base photos, if it wants to."""
    if not companion.photos:
        return
    if any(weight.requires_grad for weight in model.backbone.parameters()):
        raise UsageError(
            f"backbone {model.config.backbone} is trained; method_options.layout needs features that stay: a frozen one"
        )
    base = base_images(pack)
    chosen = np.sort(np.random.default_rng(seed).choice(base, min(companion.photos, len(base)), replace=False))
    if isinstance(pack, FeaturePack):
        features = pack.maps(chosen)
    else:
        model.eval()
        features = torch.cat(
            [
                model.features(pack.load(some).to(model.device))
                for some in np.split(chosen, range(BATCH, len(chosen), BATCH))
            ]
        )
    companion.begin(features.to(model.device), torch.Generator().manual_seed(seed))


class Classifier(nn.Module):
    """A backbone, the mean of its map, a linear layer: images → scores of the base classes."""

    def __init__(self, model: Model, classes: int) -> None:
        super().__init__()
        self.backbone = model.backbone
        self.linear = nn.Linear(model.backbone.out_channels, classes).to(model.device)

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.backbone(images).float().mean((2, 3))[:, : self.linear.in_features]  # less a packed finer map
        return self.linear(pooled)  # [B, classes]


class PretrainingStage(Stage):
    """Cross-entropy over all base classes at once, on batches of single images.

    Batches run through the base images in a new order each epoch; the order is a function of the seed and the epoch.
    """

    name = "pretraining"

    def __init__(self, model: Model, pack: Pack, config: TrainingConfig, team: Team = ALONE) -> None:
        assert config.pretraining is not None
        members = pack.by_class("base")
        self.numbers = np.concatenate(list(members.values()))  # [n] images of the pack
        self.targets = np.repeat(np.arange(len(members)), [len(images) for images in members.values()])  # [n]
        self.pack, self.config, self.schedule, self.team = pack, config, config.pretraining, team
        self.steps, self.images = config.pretraining.steps, min(config.pretraining.batch, len(self.numbers))
        torch.manual_seed(config.seed)
        self.device, self.smoothing = model.device, config.pretraining.label_smoothing
        self.model, self.module = model, Classifier(model, len(members))

    def batch(self, step: int) -> np.ndarray:
        """Which of the base images a step sees; what is left of an epoch after its whole batches is left out."""
        epoch, place = divmod(step, len(self.numbers) // self.images)
        order = np.random.default_rng((self.config.seed, epoch)).permutation(len(self.numbers))
        return order[place * self.images : (place + 1) * self.images]

    def step(self, optimiser: torch.optim.Optimizer, step: int) -> dict[str, float]:
        self.model.method.hold(self.model.backbone, False)
        self.module.train()
        rows = self.batch(step)
        share, numbers = self.team.share(len(rows)), self.numbers[rows]
        images = augmented(self.pack, numbers, self.config, step, self.team)[share].to(self.device)
        targets = torch.from_numpy(self.targets[rows])[share].to(self.device)
        with autocast(self.device, self.config.precision):
            scores = self.module(images)
        ce = F.cross_entropy(scores, targets, label_smoothing=self.smoothing)
        ce_of_all = self.team.mean(ce.detach())
        names = [self.pack.files[number] for number in numbers[share]]
        _refuse_nan({"ce": ce_of_all}, Encoding(scores=scores), step, names)
        _descend([self.module], optimiser, ce, step, self.team)
        right = (scores.detach().argmax(1) == targets).float().mean()
        return {"ce": float(ce_of_all), "accuracy": float(self.team.mean(right))}


def cached_for(
    model: ModelConfig,
    config: TrainingConfig,
    pack: Pack,
    folder: Path,
    device: torch.device,
    progress: Progress | None = None,
) -> FeaturePack:
    """The pack with the feature maps that a recipe trains on."""
    if config.pretraining:
        raise UsageError("training.pretraining trains the backbone, training.cached_views needs it frozen; drop one")
    torch.manual_seed(config.seed)  # as a run builds it: a backbone may be random and frozen
    whole = Model(model).to(device)
    companion = whole.method.companion(base_photos(pack))
    return cached(
        whole,
        pack,
        folder,
        views=config.cached_views or 0,
        augmentation=config.augmentation,
        warps=companion is not None and companion.pairs > 0,
        progress=progress,
    )


def draw(
    members: dict[int, np.ndarray], config: TrainingConfig, step: int, names: Sequence[str] | None = None
) -> Episode:
    """The episode of a training step."""
    return draw_episode(
        members, way=config.way, shots=config.shots, queries=config.queries, seed=config.seed, index=step, names=names
    )


@torch.no_grad()
def initialise(model: Model, pack: Pack, episode: Episode) -> None:
    """Let the method set what depends on the scale of the features, from one episode's support images."""
    model.train()
    if isinstance(pack, FeaturePack):
        features = pack.maps(episode.support).to(model.device)
    else:
        state = {name: value.clone() for name, value in model.backbone.state_dict().items()}
        features = model.features(pack.load(episode.support).to(model.device))
        model.backbone.load_state_dict(state)  # the look must not move the running statistics
    model.method.initialise(model.projection(features))


def train_step(
    model: Model,
    optimiser: torch.optim.Optimizer,
    pack: Pack,
    episode: Episode,
    config: TrainingConfig,
    step: int,
    team: Team = ALONE,
    companion: Companion | None = None,
) -> dict[str, float]:
    """One episode: support and query images in one forward pass, Algorithm 2, one step of the optimiser."""
    model.train()
    numbers = np.concatenate((episode.support, episode.query))
    features = step_features(model, pack, numbers, config, step, team)
    observed = {} if companion is None else companion.observe(features)
    if config.blank_cells:
        features = features * (torch.rand_like(features[:, :1]) >= config.blank_cells)  # [B, C, G, G]
    encoding = team.gather(Encoding(**model.from_features(features), **observed))
    support, query = encoding.take(slice(len(episode.support))), encoding.take(slice(len(episode.support), None))
    labels, targets = (
        torch.from_numpy(each).to(model.device) for each in (episode.support_labels, episode.query_labels)
    )
    terms = model.method.loss(query, support, labels, targets)
    if companion is not None:
        terms |= companion.train()(encoding, torch.from_numpy(numbers).to(model.device))
        if companion.pairs:
            terms |= companion.pair_terms(step_pairs(model, pack, numbers, config, step, companion.pairs))
    total = torch.stack(list(terms.values())).sum()
    _refuse_nan(terms, encoding, step, [pack.files[number] for number in numbers])
    _descend([model] if companion is None else [model, companion], optimiser, total, step, team)
    figures = {name: float(term.detach()) for name, term in terms.items()}
    return figures if step % config.watch_every else figures | model.method.monitor(query, support, labels, targets)


def step_features(
    model: Model, pack: Pack, numbers: np.ndarray, config: TrainingConfig, step: int, team: Team
) -> Tensor:
    """The feature maps of this process's share of a step's images: of a cache, or through the backbone."""
    share = team.share(len(numbers))
    if isinstance(pack, FeaturePack):
        seed_step(config, step, team)
        views = pack.draw_views(len(numbers), seed=config.seed, step=step)
        return pack.maps(numbers[share], views[share]).to(model.device)
    images = augmented(pack, numbers, config, step, team)[share].to(model.device)
    with autocast(model.device, config.precision):
        features = model.features(images)
    return features.float() if features.dtype == torch.bfloat16 else features


def step_pairs(model: Model, pack: Pack, numbers: np.ndarray, config: TrainingConfig, step: int, count: int) -> Pairs:
    """Some of a step's photos, in the views the step sees, and the same photos moved; every process takes them all."""
    assert isinstance(pack, FeaturePack)
    views = pack.draw_views(len(numbers), seed=config.seed, step=step)
    random = np.random.default_rng((config.seed, step, 99))
    rows = np.sort(random.choice(len(numbers), min(count, len(numbers)), replace=False))
    plain, warped, warps = (each.to(model.device) for each in pack.pairs(numbers[rows], views[rows]))
    plain, warped = model.projection(torch.cat((plain, warped))).chunk(2)
    return Pairs(plain, warped, warps)


def seed_step(config: TrainingConfig, step: int, team: Team) -> None:
    """All that is drawn in a step, by DropBlock for example, depends on (seed, step) alone."""
    torch.manual_seed((config.seed * 1_000_003 + step + (team.rank << 40)) % (1 << 63))


def augmented(pack: Pack, numbers: np.ndarray, config: TrainingConfig, step: int, team: Team) -> Tensor:
    """A step's images, augmented as (seed, step) draws."""
    seed_step(config, step, team)
    pixels = pack.pixels(numbers, margin=config.augmentation.margin)
    return augment(pixels, config.augmentation, size=pack.size, seed=config.seed, step=step)


def _descend(
    modules: Sequence[nn.Module], optimiser: torch.optim.Optimizer, loss: Tensor, step: int, team: Team
) -> None:
    optimiser.zero_grad(set_to_none=True)
    (loss / team.size).backward()
    for module in modules:
        team.sum_gradients(module)
        _refuse_nan_gradients(module, step)
    optimiser.step()


def provenance(
    pack: Pack, config: TrainingConfig, step: int, val: float, seconds: float, cpu_seconds: float
) -> dict[str, Any]:
    """How the weights came about: data, classes, settings, versions."""
    return {
        "data": pack.record() | pack.provenance,
        "base_classes": [name for name, split in zip(pack.classes, pack.splits, strict=True) if split == "base"],
        "training": config.model_dump(mode="json"),
        "episodes_seen": step,
        "val_accuracy": round(val, 6),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "threads": torch.get_num_threads(),
        "versions": {"parseshot": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def _refuse_nan(terms: dict[str, Tensor], encoding: Encoding, step: int, names: Sequence[str]) -> None:
    bad = [name for name, term in terms.items() if not torch.isfinite(term)]
    if not bad:
        return
    finite = torch.stack([tensor.detach().flatten(1).isfinite().all(1) for tensor in encoding.values()]).all(0)
    hit = [name for name, fine in zip(names, finite.tolist(), strict=True) if not fine] or list(names)
    raise ModelError(
        f"step {step + 1}: the loss term {' and '.join(bad)} is not finite, with the images {', '.join(hit[:5])}"
        f"{' …' if len(hit) > 5 else ''}; {ADVICE}"
    )


def _refuse_nan_gradients(module: nn.Module, step: int) -> None:
    bad = [
        name
        for name, weight in module.named_parameters()
        if weight.grad is not None and not bool(weight.grad.isfinite().all())
    ]
    if bad:
        raise ModelError(f"step {step + 1}: the gradient of {', '.join(bad[:3])} is not finite; {ADVICE}")
