"""The contract every method obeys: encode an image once, score queries against any labelled support set, one loss."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Encoding(Mapping[str, Tensor]):
    """What a method keeps of each image: named tensors that share their first dimension, one entry an image."""

    def __init__(self, **tensors: Tensor) -> None:
        lengths = {name: tensor.shape[0] for name, tensor in tensors.items()}  # len would fix the batch of an export
        first = next(iter(lengths.values()), None)
        if first is None or any(length != first for length in lengths.values()):
            raise ValueError(f"an encoding's tensors must share their first dimension, got {lengths}")
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        """Number of named tensors (a Mapping's length); `images` is the number of images."""
        return len(self._tensors)

    @property
    def images(self) -> int:
        return len(next(iter(self._tensors.values())))

    @property
    def loaded_bytes(self) -> int:
        """Of the tensors that were asked for, where this is a selection."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def take(self, index: Tensor | slice, device: torch.device | None = None) -> "Encoding":
        """The encoding of the selected images; a tensor is selected, and moved, when it is first asked for."""
        return _Selection(self, index, device)

    @staticmethod
    def cat(encodings: Sequence["Encoding"]) -> "Encoding":
        return Encoding(**{name: torch.cat([one[name] for one in encodings]) for name in encodings[0]})


class _Selection(Encoding):
    """Some images of an encoding. What a method does not look at is never copied."""

    def __init__(self, source: Encoding, index: Tensor | slice, device: torch.device | None) -> None:
        self._source, self._index, self._device = source, index, device
        self._tensors: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            found = self._source[name][self._index]
            self._tensors[name] = found if self._device is None else found.to(self._device)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)

    @property
    def images(self) -> int:
        return len(self[next(iter(self))])


class BasePhotos(NamedTuple):
    """What is known of the photos of a pack, for methods that learn from more than the episode at hand."""

    labels: Tensor  # [n] base class of each, 0 … B−1; −1 for photos of other classes
    parts: Tensor | None  # [n, P, 3] annotated parts (x, y, visible), x and y in shares of the image

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1


class Pairs(NamedTuple):
    """Maps of photos, and of the same photos moved by what is known (`parseshot.data.augment.draw_warps`)."""

    plain: Tensor  # [B, C, G, G]
    warped: Tensor  # [B, C, G, G]
    warps: Tensor  # [B, 2, 3] where a place of the moved photo comes from


class Method(nn.Module):
    """A few-shot method on a backbone's features. It holds weights only: what it knows of an episode is passed in.

    Built as `kind(channels, size, config)` for maps [B, channels, size, size]; a paired one gets the channels of the
    finer map beside: `kind(channels, size, config, fine=…)`, and unpacks what it encodes with `unpack_pair`.
    """

    vectorised = True  # `logits` runs under torch.func.vmap over episodes; False where its course depends on values
    many_steps = False  # fits something in many small steps, so that episodes are best scored many together
    paired = False  # takes maps of two strides, packed in one tensor
    finer_grid = False  # its paper drops poolings for a finer grid, so a recipe for it should; coarser ones do
    episodic = True  # False: trained by its companion alone, `loss` is empty
    separable = False  # a class's score depends on its own photos alone, so classes may be prepared and scored apart

    @classmethod
    def adapt(cls, backbone: nn.Module, config: Any) -> None:
        """Change the backbone in place, where a method's weights lie inside of it."""

    @classmethod
    def hold(cls, backbone: nn.Module, held: bool) -> None:
        """Hold still what `adapt` would keep as it is, in episodes; let it go, in the pre-training before them."""

    def companion(self, base: BasePhotos) -> "Companion | None":
        """What only training needs, a classifier of the base classes for example; never part of a saved model."""
        return None

    def encode(self, features: Tensor) -> Encoding:
        """Features [B, C, G, G] → what is kept of each image; depends on that image alone in evaluation mode."""
        raise NotImplementedError

    def logits(self, query: Encoding, support: Encoding, labels: Tensor) -> Tensor:
        """Scores [Q, N] of Q queries for N classes; labels [n] in 0 … N−1, any number of support images each.

        The only scoring path, in training, in evaluation and in use.
        """
        raise NotImplementedError

    def prepare(self, support: Encoding, labels: Tensor) -> Any:
        """What `score` takes of a support set, worked out once for many queries."""
        return support, labels

    def score(self, query: Encoding, prepared: Any) -> Tensor:
        """`logits` for a support set that was prepared. A method that overrides both makes `logits` of them."""
        support, labels = prepared
        return self.logits(query, support, labels)

    def loss(self, query: Encoding, support: Encoding, labels: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Named terms of the training loss; the sum of them and of the companion's is minimised."""
        return {"ce": F.cross_entropy(self.logits(query, support, labels), targets)}

    def initialise(self, features: Tensor) -> None:
        """Set what depends on the scale of the features, once before training, from one batch [B, C, G, G]."""

    @torch.no_grad()
    def monitor(self, query: Encoding, support: Encoding, labels: Tensor, targets: Tensor) -> dict[str, float]:
        """What one watches in training, beside the loss."""
        return {"accuracy": float((self.logits(query, support, labels).argmax(1) == targets).double().mean())}


class Companion(nn.Module):
    """What goes with a method in training: further terms of the loss, from the encodings of a step."""

    photos = 0  # of base classes, whose features it wants to `begin` with; the backbone must be frozen then
    pairs = 0  # of a step's photos with the same photos moved, for its `pair_terms`; from cached maps only

    def begin(self, features: Tensor, generator: torch.Generator) -> None:
        """Look at the features [n, C, G, G] of so many base photos, before the first step and when a run goes on.

        What is learned of them depends on them and the generator alone, so it is no part of a run's state.
        """

    def observe(self, features: Tensor) -> dict[str, Tensor]:
        """What it wants to know of the backbone's maps [B, C, G, G], as they were before cells went blank.

        It becomes part of the encoding: named tensors, an entry an image.
        """
        return {}

    def forward(self, encoding: Encoding, images: Tensor) -> dict[str, Tensor]:
        """Further named terms of the loss, from the encoding of images [B], given by their numbers."""
        raise NotImplementedError

    def pair_terms(self, pairs: Pairs) -> dict[str, Tensor]:
        """Further named terms of the loss, from maps as `encode` takes them, of photos and of the same photos moved."""
        return {}


class Companions(Companion):
    """Several at once."""

    def __init__(self, each: Sequence[Companion]) -> None:
        super().__init__()
        self.each = nn.ModuleList(each)
        self.photos = max(one.photos for one in each)
        self.pairs = max(one.pairs for one in each)

    def __iter__(self) -> Iterator[Companion]:
        return (cast(Companion, one) for one in self.each)

    def begin(self, features: Tensor, generator: torch.Generator) -> None:
        for one in self:
            one.begin(features, generator)

    def observe(self, features: Tensor) -> dict[str, Tensor]:
        return {name: tensor for one in self for name, tensor in one.observe(features).items()}

    def forward(self, encoding: Encoding, images: Tensor) -> dict[str, Tensor]:
        return {name: term for one in self for name, term in one(encoding, images).items()}

    def pair_terms(self, pairs: Pairs) -> dict[str, Tensor]:
        return {name: term for one in self for name, term in one.pair_terms(pairs).items()}


class BaseClassifier(Companion):
    """A companion: cross-entropy of a linear layer over the base classes, on an image's features or the mean cell's."""

    labels: Tensor

    def __init__(self, features: int, base: BasePhotos, *, weight: float = 1.0) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(features, base.classes), weight
        self.register_buffer("labels", base.labels, persistent=False)

    def forward(self, encoding: Encoding, images: Tensor) -> dict[str, Tensor]:
        features = encoding["f"]  # [B, D] or [B, r, D]
        scores = self.linear(features if features.dim() == 2 else features.mean(1))
        return {"base_ce": self.weight * F.cross_entropy(scores, self.labels[images])}
