"""A backbone and a method, composed: images in, encodings out; saved as a directory of JSON and safetensors."""

import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from parseshot.backbones import build_backbone
from parseshot.backbones.base import digest, turned
from parseshot.config import Config, read_config
from parseshot.engine import checkpoint
from parseshot.engine.device import is_out_of_memory
from parseshot.errors import ModelError, UsageError
from parseshot.methods import Encoding, adapt_backbone, build_method, takes_pairs

BATCH = 8  # images a forward pass; always the same, so that the same command gives the same digits
TOGETHER = 64  # feature maps the method takes at once


def shipped_models() -> dict[str, Path]:
    """The models that come with the package, by name."""
    folder = Path(str(resources.files("parseshot") / "models"))
    return {one.name: one for one in sorted(folder.iterdir()) if (one / checkpoint.CONFIG).is_file()}


def to_tensor(images: np.ndarray) -> Tensor:
    """uint8 [n, H, W, 3] → float [n, 3, H, W] in [0, 1]."""
    return torch.tensor(images).permute(0, 3, 1, 2).float() / 255  # a copy: a decoded photo is read-only


class ModelConfig(Config):
    """All that is needed to build the model again; the weights are beside it."""

    backbone: str = "conv4"
    backbone_options: dict[str, Any] = Field(default_factory=dict)
    method: str = "dop"
    method_options: dict[str, Any] = Field(default_factory=dict)
    image_size: int = Field(84, ge=16, le=1024)
    mirrored: bool = False  # evaluation sees the mean of an image's map and its mirror image's, turned back
    projection: int | None = Field(None, ge=0, le=4096)  # channels of a trained 1×1 convolution before it; 0: none


class Projection(nn.Conv2d):
    """A 1×1 convolution of a map; the finer map of a packed pair goes past it."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size=1, bias=False)
        nn.init.orthogonal_(self.weight)

    def forward(self, features: Tensor) -> Tensor:
        if features.shape[1] == self.in_channels:
            return super().forward(features)
        coarse, fine = features[:, : self.in_channels], features[:, self.in_channels :]
        return torch.cat((super().forward(coarse), fine), 1)


class Model(nn.Module):
    """images → backbone → method. Stateless in use: what is known of an episode is passed in."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.provenance: dict[str, Any] = {}  # how it was trained: data, classes, seeds, versions, figures
        self.backbone = build_backbone(config.backbone, **config.backbone_options)
        adapt_backbone(config.method, self.backbone, config.method_options)
        self.grid = self.backbone.grid(config.image_size)
        channels, fine = config.projection or self.backbone.out_channels, self.backbone.fine_channels
        if takes_pairs(config.method) != bool(fine):
            wants, give = ("two strides", "true") if not fine else ("one stride", "false")
            raise UsageError(
                f"method {config.method} takes maps of {wants}: set model.backbone_options.paired = {give}"
            )
        self.projection: nn.Module = nn.Identity()
        if config.projection:
            self.projection = Projection(self.backbone.out_channels, channels)
        self.method = build_method(config.method, channels, self.grid, config.method_options, fine=fine)
        self.backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def device(self) -> torch.device:
        return next(self.backbone.parameters()).device

    def forward(self, images: Tensor) -> Encoding:
        """Images [B, 3, H, W] in [0, 1] → their encoding."""
        return self.from_features(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] → feature maps [B, C, G, G].

        With `mirrored`, evaluation pays for a second image each, to have maps, and so parses, that turn with the image;
        training, which draws mirror images as it goes, does not. Both go through the backbone together: in one thread
        PyTorch has a faster 1×1 convolution from 16 images on, which is what BATCH then comes to.
        """
        if self.training or not self.config.mirrored:
            plain: Tensor = self.backbone(images)
            return plain
        count = images.shape[0]  # not len: an exported model takes any number
        both = self.backbone(torch.cat((images, images.flip(-1))))
        return (both[:count] + turned(both[count:], self.backbone.out_channels)) / 2

    def from_features(self, features: Tensor) -> Encoding:
        """The backbone's feature maps [B, C, G, G] → the encoding of their images."""
        return self.method.encode(self.projection(features))

    @torch.inference_mode()
    def encode(self, images: Tensor, *, batch: int = BATCH, together: int = TOGETHER) -> Encoding:
        """`forward` in evaluation mode.

        The backbone runs in batches small enough for its activations to stay in cache, the method on `together` feature
        maps at once: what it derives from its weights alone is then worked out less often.
        """
        if images.is_floating_point() and not bool(images.isfinite().all()):
            raise ValueError("images: holds NaN or infinity; give pixels in [0, 1]")
        training = self.training
        self.eval()
        try:
            for halved in (1, 2):
                try:
                    return self._encode(images, max(1, batch // halved), max(1, together // halved))
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
        finally:
            self.train(training)
        raise ModelError(f"out of memory with {max(1, batch // 2)} images of {images.shape[-1]} px at once")

    def _encode(self, images: Tensor, batch: int, together: int) -> Encoding:
        pieces = []
        for group in images.split(together):
            parts = (part.to(self.device).contiguous(memory_format=torch.channels_last) for part in group.split(batch))
            pieces.append(self.from_features(torch.cat([self.features(part) for part in parts])))
        return Encoding.cat(pieces)

    @torch.inference_mode()
    def encode_features(self, features: Tensor) -> Encoding:
        """`encode` for feature maps that the backbone has made before."""
        training = self.training
        self.eval()
        try:
            return Encoding.cat([self.from_features(group.to(self.device)) for group in features.split(TOGETHER)])
        finally:
            self.train(training)

    def own_state(self) -> dict[str, Tensor]:
        """The weights that are this model's: all but those of a frozen backbone that are found again elsewhere."""
        elsewhere = tuple(f"backbone.{name}." for name in self.backbone.from_elsewhere())
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith(elsewhere)}

    def fingerprint(self) -> str:
        """Of the weights and of the configuration they belong to."""
        text = self.config.model_dump_json(exclude_defaults=True) + digest(self.state_dict())
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def save_pretrained(self, path: Path | str, *, half: bool = False) -> None:
        """Write config.json, model.safetensors and README.md (the card) into a directory, all or nothing.

        half: matrices and filters as float16, for half the size. Read again they are rounded: measure it then.
        """
        own = self.own_state()
        elsewhere = self.backbone.source if len(own) < len(self.state_dict()) else None
        checkpoint.save(path, own, self.config.model_dump(mode="json"), self.provenance, elsewhere, half=half)

    @classmethod
    def from_pretrained(cls, path: Path | str) -> "Model":
        """Read what `save_pretrained` wrote, or a model that ships, by its name ("default").

        Nothing is unpickled, every tensor's name and shape is checked.
        """
        shipped = shipped_models()
        if not Path(path).is_dir() and str(path) in shipped:
            path = shipped[str(path)]
        elif not Path(path).exists():
            raise ModelError(f"no model {path}: neither a directory nor one of {', '.join(shipped)}")
        weights, config, provenance, elsewhere = checkpoint.load(path)
        model = cls(read_config(ModelConfig, config, source=f"{Path(path) / checkpoint.CONFIG}: model"))
        if elsewhere is not None and elsewhere != model.backbone.source:
            raise ModelError(f"{path} belongs to the weights {elsewhere}; here are those of {model.backbone.source}")
        checkpoint.check_weights(path, weights, model.own_state() if elsewhere else model.state_dict())
        model.load_state_dict(weights, strict=False)  # each name was checked; what is not there came with the backbone
        model.provenance = provenance
        return model.eval()
