"""The feature extractors, by name."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from parseshot.backbones.base import Backbone
from parseshot.backbones.conv4 import Conv4
from parseshot.backbones.efficientnet_lite import EfficientNetLite0
from parseshot.backbones.resnet12 import ResNet12
from parseshot.backbones.resnet18 import ResNet18
from parseshot.backbones.timm import TimmBackbone
from parseshot.errors import UsageError

__all__ = [
    "BACKBONES",
    "Backbone",
    "Conv4",
    "EfficientNetLite0",
    "ResNet12",
    "ResNet18",
    "TimmBackbone",
    "build_backbone",
]

BACKBONES: dict[str, Callable[..., Backbone]] = {
    "conv4": Conv4,
    "resnet12": ResNet12,
    "resnet18": ResNet18,
    "efficientnet_lite0": EfficientNetLite0,
    "timm": TimmBackbone,
}


def build_backbone(name: str, **options: Any) -> Backbone:
    """The backbone called `name`; the options are the keyword arguments of its constructor.

    >>> build_backbone("conv4", pools=3).grid(84)
    10
    """
    if name not in BACKBONES:
        close = difflib.get_close_matches(name, BACKBONES, n=3)
        hint = f" Did you mean {' or '.join(repr(other) for other in close)}?" if close else ""
        raise UsageError(f"Unknown backbone {name!r}.{hint} Known backbones: {', '.join(BACKBONES)}.")
    known = inspect.signature(BACKBONES[name]).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
        unknown = [option for option in options if option not in known]
        if unknown:
            raise UsageError(f"backbone {name} has no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
    return BACKBONES[name](**options)
