"""Frozen, validated configuration: an unknown key is an error that names the key and its nearest neighbours."""

import difflib
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from parseshot.errors import UsageError

C = TypeVar("C", bound="Config")


class Config(BaseModel):
    """Base of every configuration: immutable, no unknown keys, no silent conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


def read_config(kind: type[C], values: dict[str, Any], *, source: str) -> C:
    """Validate `values` as `kind`; the error names the source, each wrong field, what was given and what is allowed."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"{source}: " + "; ".join(_explain(kind, item) for item in error.errors())) from None


def _explain(kind: type[BaseModel], item: Any) -> str:
    path = [str(step) for step in item["loc"]]
    name = ".".join(path)
    if item["type"] != "extra_forbidden":
        return f"{name}: {item['msg']} (got {item['input']!r})"
    fields = _fields_at(kind, path[:-1])
    near = difflib.get_close_matches(path[-1], fields, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known keys: {', '.join(sorted(fields))}"
    return f"unknown key {name!r}; {hint}"


def _fields_at(kind: type[BaseModel], path: list[str]) -> list[str]:
    for step in path:
        field = kind.model_fields.get(step)
        choices = () if field is None else (field.annotation, *get_args(field.annotation))  # X, or X | None
        inner = next((one for one in choices if isinstance(one, type) and issubclass(one, BaseModel)), None)
        if inner is None:
            return []
        kind = inner
    return list(kind.model_fields)
