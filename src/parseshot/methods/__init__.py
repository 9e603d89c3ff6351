"""The few-shot methods, by name. A name is a class and the configuration it starts from."""

import difflib
from typing import Any, NamedTuple

from torch import nn

from parseshot.config import Config, read_config
from parseshot.errors import UsageError
from parseshot.methods.base import BasePhotos, Encoding, Method
from parseshot.methods.dop import DOP, PRESETS, DOPConfig
from parseshot.methods.protonet import ProtoNet, ProtoNetConfig

__all__ = [
    "DOP",
    "METHODS",
    "BasePhotos",
    "DOPConfig",
    "Encoding",
    "Method",
    "MethodEntry",
    "ProtoNet",
    "ProtoNetConfig",
    "adapt_backbone",
    "build_method",
    "takes_pairs",
]


class MethodEntry(NamedTuple):
    """A line of `parseshot methods`."""

    kind: Any  # constructor(channels, size, config)
    config: Config
    year: int
    summary: str
    fitted: str = "nothing"  # what is solved or trained on the support photos, at test time


METHODS: dict[str, MethodEntry] = {
    "dop": MethodEntry(DOP, PRESETS["lasso"], 2022, "Deep Object Parsing, exact LASSO form (the default)"),
    "dop-paper": MethodEntry(DOP, PRESETS["paper"], 2022, "Deep Object Parsing, formulas as printed"),
    "protonet": MethodEntry(ProtoNet, ProtoNetConfig(), 2017, "nearest class mean of the flattened feature map"),
    "protonet-pooled": MethodEntry(
        ProtoNet, ProtoNetConfig(pooled=True), 2017, "nearest class mean of the pooled features"
    ),
}


def method_config(name: str, options: dict[str, Any]) -> Config:
    """The configuration of a named method with some fields overridden."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(f"unknown method {name!r}; {hint}known methods: {', '.join(METHODS)}")
    start = METHODS[name].config
    return read_config(type(start), {**start.model_dump(), **options}, source=f"method {name}")


def takes_pairs(name: str) -> bool:
    """Whether a method wants maps of two strides."""
    return name in METHODS and METHODS[name].kind.paired


def adapt_backbone(name: str, backbone: nn.Module, options: dict[str, Any]) -> None:
    """Let the method called `name` change the backbone it will sit on."""
    config = method_config(name, options)
    METHODS[name].kind.adapt(backbone, config)


def build_method(
    name: str, channels: int, size: int, options: dict[str, Any] | None = None, *, fine: int = 0
) -> Method:
    """The method called `name` on feature maps [B, channels, size, size], with `fine` channels of a finer map."""
    config = method_config(name, options or {})
    kind = METHODS[name].kind
    return kind(channels, size, config, fine=fine) if kind.paired else kind(channels, size, config)
