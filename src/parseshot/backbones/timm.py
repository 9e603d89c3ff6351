"""Any model of the timm library (Wightman, "PyTorch Image Models", 2019) as a backbone; needs the extra `timm`."""

import difflib
import importlib
import math
from types import ModuleType

import torch
from torch import Tensor, nn

from parseshot.backbones.base import Backbone
from parseshot.backbones.normalise import Normalise
from parseshot.errors import ModelError, UsageError

ANY_SIZE: tuple[dict[str, bool], ...] = (  # how a transformer is told to take any size; the first set it knows is used
    {"dynamic_img_size": True, "dynamic_img_pad": True},
    {"dynamic_img_size": True},
    {},  # convolutional networks need none
)


class TimmBackbone(Backbone):
    """The last feature map of a convolutional network, or the patch tokens of a transformer laid out as a map.

    `model` is timm's name: "resnet18", "vit_small_patch14_dinov2.lvd142m". Class and register tokens are dropped. Mean
    and deviation of the input are those that timm records for the model. The weights are random unless `pretrained`,
    which downloads them; their licence is the model's own. A transformer is built for `image_size`, or for the size it
    was trained at, and resamples its position table for other inputs; one that cannot takes this size only.
    """

    def __init__(self, *, model: str, pretrained: bool = False, image_size: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.network = create(model, pretrained=pretrained, image_size=image_size)
        config = self.network.pretrained_cfg
        assert isinstance(config, dict)
        self.normalise = Normalise(mean=tuple(config["mean"]), std=tuple(config["std"]))
        self._grids: dict[int, int] = {}  # size → G, as found by trial
        size = image_size or config["input_size"][-1]
        self.out_channels, self._grids[size] = self._trial(size)
        levels = getattr(self.network, "feature_info", None)
        self.stride = levels[-1]["reduction"] if isinstance(levels, list) else round(size / self._grids[size])

    def grid(self, size: int) -> int:
        """G for a square input of `size` pixels, found by trial the first time: models round differently."""
        if size not in self._grids:
            self._grids[size] = self._trial(size)[1]
        return self._grids[size]

    def forward(self, images: Tensor) -> Tensor:
        x = self.normalise(images)  # [B, 3, 224, 224]
        features = self.network.forward_features(x)  # type: ignore[operator]  # [B, C, 7, 7] or [B, 1 + 196, C], …
        return as_map(
            features,
            channels=int(self.network.num_features),  # type: ignore[arg-type]
            prefix=getattr(self.network, "num_prefix_tokens", 0),
        )  # [B, C, G, G]

    @torch.no_grad()
    def _trial(self, size: int) -> tuple[int, int]:
        """C and G for one grey image of `size` pixels."""
        weight = next(self.network.parameters())
        training = self.training
        self.eval()
        try:
            found = self(torch.full((1, 3, size, size), 0.5, device=weight.device, dtype=weight.dtype))
        except UsageError as error:
            raise UsageError(f"timm's {self.model} cannot be a backbone: {error}") from None
        except Exception as error:
            raise UsageError(f"timm's {self.model} does not take images of {size} px: {error}") from error
        finally:
            self.train(training)
        return found.shape[1], found.shape[2]


def as_map(features: Tensor, *, channels: int, prefix: int = 0) -> Tensor:
    """What timm's `forward_features` gives → [B, C, G, G].

    A map [B, C, G, G] stays; one with the channels last is turned; of tokens [B, prefix + G·G, C] the first `prefix`
    (class and registers) are dropped and the others read as rows from the upper left.

    >>> as_map(torch.tensor([[[9.0], [1.0], [2.0], [3.0], [4.0]]]), channels=1, prefix=1).tolist()
    [[[[1.0, 2.0], [3.0, 4.0]]]]
    """
    if not isinstance(features, Tensor):
        raise UsageError(f"it gives a {type(features).__name__}, not one feature map")
    if features.ndim == 3 and features.shape[-1] == channels:
        side = math.isqrt(features.shape[1] - prefix)
        if side * side == features.shape[1] - prefix:
            tokens = features[:, prefix:]  # [B, G·G, C]
            x = tokens.transpose(1, 2).unflatten(-1, (side, side))  # [B, C, G, G]
            return x.contiguous(memory_format=torch.channels_last)
    elif features.ndim == 4 and features.shape[1] == channels:
        return features
    elif features.ndim == 4 and features.shape[-1] == channels:
        return features.permute(0, 3, 1, 2)  # [B, C, G, G]
    raise UsageError(f"it gives {list(features.shape)}, which is no square map of {channels} channels")


def create(model: str, *, pretrained: bool, image_size: int | None) -> nn.Module:
    """timm's model without its classifier, for inputs of any size where it can."""
    timm = import_timm()
    if ":" not in model and not timm.is_model(model):  # with a colon it is a place, such as hf-hub:owner/name
        close = difflib.get_close_matches(model.split(".")[0], timm.list_models(), n=3)
        hint = f" Did you mean {' or '.join(repr(other) for other in close)}?" if close else ""
        raise UsageError(f"timm {timm.__version__} has no model {model!r}.{hint}")
    fixed = getattr(timm.models.get_pretrained_cfg(model), "fixed_input_size", False)
    sized = {"img_size": image_size} if fixed and image_size else {}
    for options in ANY_SIZE:
        try:
            network = timm.create_model(model, pretrained=pretrained, num_classes=0, **sized, **options)
        except Exception as error:  # no network, no client for the hub, no room on the disk, …
            if isinstance(error, TypeError) and "dynamic_img" in str(error):
                continue  # the model does not know one of the options
            raise ModelError(f"timm could not make {model!r}: {error}") from error
        assert isinstance(network, nn.Module)
        return network
    raise AssertionError("the last set of options is empty")


def import_timm() -> ModuleType:
    """The library itself, imported when it is first needed; or what is wrong with it, in one sentence."""
    try:
        return importlib.import_module("timm")
    except ModuleNotFoundError as error:
        if error.name == "timm":
            raise ModelError("timm is not installed: pip install 'parseshot[timm]'") from None
        raise ModelError(f"timm is installed but does not import: {error}") from error
    except Exception as error:  # a torchvision built for another torch raises RuntimeError
        raise ModelError(f"timm is installed but does not import: {error}") from error
