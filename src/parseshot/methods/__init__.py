"""The few-shot methods, by name. A name is a class and the configuration it starts from."""

import difflib
from typing import Any, NamedTuple

from torch import nn

from parseshot.config import Config, read_config
from parseshot.errors import UsageError
from parseshot.methods.afhn import AFHN, AFHNConfig
from parseshot.methods.base import BasePhotos, Companion, Encoding, Method, Pairs
from parseshot.methods.baseline_pp import BaselinePP, BaselinePPConfig
from parseshot.methods.bi_frn import BiFRN, BiFRNConfig
from parseshot.methods.bsnet import BSNet, BSNetConfig
from parseshot.methods.c2net import C2Net, C2NetConfig
from parseshot.methods.constellation import Constellation, ConstellationConfig
from parseshot.methods.ctx import CTX, CTXConfig
from parseshot.methods.deepemd import DeepEMD, DeepEMDConfig
from parseshot.methods.delta_encoder import DeltaEncoder, DeltaEncoderConfig
from parseshot.methods.dn4 import DN4, DN4Config
from parseshot.methods.dop import DOP, PRESETS, DOPConfig
from parseshot.methods.dsn import DSN, DSNConfig
from parseshot.methods.fot import FOT, FOTConfig
from parseshot.methods.frn import FRN, FRNConfig
from parseshot.methods.lcr import LCR, LCRConfig
from parseshot.methods.metaoptnet import MetaOptNet, MetaOptNetConfig
from parseshot.methods.mtl import MTL, MTLConfig
from parseshot.methods.protonet import ProtoNet, ProtoNetConfig
from parseshot.methods.renet import RENet, RENetConfig
from parseshot.methods.saml import SAML, SAMLConfig
from parseshot.methods.simpleshot import SimpleShot, SimpleShotConfig
from parseshot.methods.srm import SRM, SRMConfig
from parseshot.methods.tdm import TDMFRN, TDMFRNConfig, TDMProtoNet, TDMProtoNetConfig
from parseshot.methods.tpms import TPMS, TPMSConfig
from parseshot.methods.vfd import VFD, VFDConfig

__all__ = [
    "DOP",
    "METHODS",
    "BasePhotos",
    "Companion",
    "DOPConfig",
    "Encoding",
    "Method",
    "MethodEntry",
    "Pairs",
    "ProtoNet",
    "ProtoNetConfig",
    "adapt_backbone",
    "build_method",
    "parameters",
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
    "dop-span": MethodEntry(
        DOP,
        PRESETS["span"],
        2026,
        "DOP, a class being what its photos span, part by part",
        "a ridge regression a class and part",
    ),
    "dop-whole": MethodEntry(
        DOP,
        PRESETS["whole"],
        2026,
        "DOP, a class being what its photos span, part by part and as a whole",
        "a ridge regression a class and part",
    ),
    "dop-paper": MethodEntry(DOP, PRESETS["paper"], 2022, "Deep Object Parsing, formulas as printed"),
    "protonet": MethodEntry(ProtoNet, ProtoNetConfig(), 2017, "nearest class mean of the flattened feature map"),
    "protonet-pooled": MethodEntry(
        ProtoNet, ProtoNetConfig(pooled=True), 2017, "nearest class mean of the pooled features"
    ),
    "delta-encoder": MethodEntry(
        DeltaEncoder,
        DeltaEncoderConfig(),
        2018,
        "examples synthesised with the differences of base-class pairs",
        "a ridge regression on photos and synthetic features",
    ),
    "baseline++": MethodEntry(
        BaselinePP,
        BaselinePPConfig(),
        2019,
        "cosine classifier of a plainly trained network",
        "a cosine head, 100 steps",
    ),
    "simpleshot": MethodEntry(
        SimpleShot, SimpleShotConfig(), 2019, "nearest class mean of centred unit features of a plain classifier"
    ),
    "dn4": MethodEntry(DN4, DN4Config(), 2019, "nearest cells of a class for each cell of the query"),
    "metaoptnet-ridge": MethodEntry(
        MetaOptNet, MetaOptNetConfig(), 2019, "ridge regression, trained through its solution", "a ridge regression"
    ),
    "metaoptnet-svm": MethodEntry(
        MetaOptNet, MetaOptNetConfig(solver="svm"), 2019, "SVM, trained through its solution", "a multi-class SVM"
    ),
    "mtl": MethodEntry(
        MTL,
        MTLConfig(),
        2019,
        "frozen convolutions, scaled and shifted filter by filter",
        "a softmax classifier from a learned start, 20 steps",
    ),
    "lcr": MethodEntry(
        LCR,
        LCRConfig(),
        2019,
        "features composed of annotated attributes or parts",
        "a softmax classifier, 50 steps",
    ),
    "saml": MethodEntry(SAML, SAMLConfig(), 2019, "a perceptron on the attended relations of all pairs of cells"),
    "dsn": MethodEntry(DSN, DSNConfig(), 2020, "nearest subspace through the photos of a class", "a subspace a class"),
    "ctx": MethodEntry(CTX, CTXConfig(), 2020, "cells of the query against the cells of a class they attend to"),
    "deepemd": MethodEntry(
        DeepEMD, DeepEMDConfig(), 2020, "cheapest flow between the cells of two images", "prototypes, 3 gradient steps"
    ),
    "afhn": MethodEntry(
        AFHN,
        AFHNConfig(),
        2020,
        "examples made by a conditional Wasserstein GAN",
        "a ridge regression on photos and synthetic features",
    ),
    "frn": MethodEntry(
        FRN,
        FRNConfig(),
        2021,
        "how well the support cells of a class reconstruct the query",
        "a ridge regression a class",
    ),
    "vfd": MethodEntry(
        VFD,
        VFDConfig(),
        2021,
        "examples varied by a Gaussian that all classes share",
        "a softmax classifier on photos and varied features, 50 steps",
    ),
    "renet": MethodEntry(RENet, RENetConfig(), 2021, "attention from self- and cross-correlation of cells"),
    "fot": MethodEntry(
        FOT,
        FOTConfig(),
        2021,
        "the foreground of each photo in postures of other photos",
        "a ridge regression on photos and synthetic features",
    ),
    "bsnet": MethodEntry(BSNet, BSNetConfig(), 2021, "a learned relation and a cosine, added up"),
    "tpms": MethodEntry(
        TPMS, TPMSConfig(), 2021, "parts found by filters that are made for the task", "part filters, by a network"
    ),
    "constellation": MethodEntry(Constellation, ConstellationConfig(), 2021, "clusters of cells, related by attention"),
    "tdm-protonet": MethodEntry(
        TDMProtoNet, TDMProtoNetConfig(), 2022, "ProtoNet with weights on the channels that tell the classes apart"
    ),
    "tdm-frn": MethodEntry(
        TDMFRN,
        TDMFRNConfig(),
        2022,
        "FRN with weights on the channels that tell the classes apart",
        "a ridge regression a class",
    ),
    "bi-frn": MethodEntry(BiFRN, BiFRNConfig(), 2023, "query and class made of each other by attention"),
    "srm": MethodEntry(
        SRM, SRMConfig(), 2024, "FRN that also compares with the query made from itself", "a ridge regression a class"
    ),
    "c2net": MethodEntry(
        C2Net, C2NetConfig(), 2024, "two layers refined by each other, each query turned towards each class"
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


def parameters(name: str, channels: int = 640, size: int = 5) -> int:
    """What a method trains beyond the backbone, on maps like ResNet-12's."""
    method = build_method(name, channels, size, fine=channels // 2 if takes_pairs(name) else 0)
    return sum(weight.numel() for weight in method.parameters() if weight.requires_grad)
