"""Recognise fine-grained things from a few photos of each, and see which parts decided."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "METHODS",
    "Encoding",
    "Method",
    "Model",
    "ModelConfig",
    "Pack",
    "Recognizer",
    "evaluate",
    "explain",
    "parse",
]

if TYPE_CHECKING:
    from parseshot.data.packed import Pack
    from parseshot.engine.evaluation import evaluate
    from parseshot.engine.model import Model, ModelConfig
    from parseshot.methods import METHODS, Encoding, Method
    from parseshot.parts.parsing import parse
    from parseshot.recognition.explain import explain
    from parseshot.recognition.recognizer import Recognizer

_HOMES = {
    "Pack": "parseshot.data.packed",
    "evaluate": "parseshot.engine.evaluation",
    "Model": "parseshot.engine.model",
    "ModelConfig": "parseshot.engine.model",
    "METHODS": "parseshot.methods",
    "Encoding": "parseshot.methods",
    "Method": "parseshot.methods",
    "parse": "parseshot.parts.parsing",
    "explain": "parseshot.recognition.explain",
    "Recognizer": "parseshot.recognition.recognizer",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when first used: `import parseshot` and `parseshot --help` stay quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'parseshot' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
