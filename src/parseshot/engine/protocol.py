"""Protocols: how many classes, shots, queries and episodes; two by name, any other by numbers."""

from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field, field_validator

from parseshot.config import Config, read_config
from parseshot.data.packed import Pack
from parseshot.errors import UsageError

Shots = int | tuple[int, ...]  # of every class, or of each class in turn


class Protocol(Config):
    """Which episodes are drawn. The same protocol gives the same episodes to any model."""

    split: Literal["base", "val", "novel"] = "novel"
    way: int = Field(5, ge=2)
    shots: tuple[Shots, ...] = (1, 5)
    queries: int = Field(15, ge=1)  # of each class
    episodes: int = Field(600, ge=2)
    seed: int = Field(0, ge=0)

    @field_validator("shots")
    @classmethod
    def _positive(cls, shots: tuple[Shots, ...]) -> tuple[Shots, ...]:
        if not shots or any(count < 1 for one in shots for count in ((one,) if isinstance(one, int) else one)):
            raise ValueError("every class needs at least one support image")
        return shots

    def of_each_class(self, shots: Shots) -> tuple[int, ...]:
        """Support images of each of the `way` classes."""
        counts = (shots,) * self.way if isinstance(shots, int) else shots
        if len(counts) != self.way:
            raise UsageError(f"shots {shots_text(shots)} is for {len(counts)} classes, the episodes have {self.way}")
        return counts


PROTOCOLS = {"paper": Protocol(), "frn": Protocol(queries=16, episodes=10_000)}


def named_protocol(
    name: str,
    *,
    split: str,
    way: str | None = None,
    shots: str | None = None,
    queries: int | None = None,
    episodes: int | None = None,
    seed: int = 0,
) -> Callable[[Pack], Protocol]:
    """A protocol by name with what is given changed, as options write it; its way may depend on the data ("all")."""
    if name not in PROTOCOLS:
        raise UsageError(f"unknown protocol {name!r}; there are {', '.join(PROTOCOLS)}")
    if way is not None and way != "all" and not (way.isdecimal() and int(way) >= 2):
        raise UsageError(f"--way {way!r} is neither a number from 2 nor all")
    given = {
        "split": split,
        "way": int(way) if way is not None and way != "all" else None,
        "shots": parse_shots(shots) if shots is not None else None,
        "queries": queries,
        "episodes": episodes,
        "seed": seed,
    }
    values = PROTOCOLS[name].model_dump() | {key: value for key, value in given.items() if value is not None}

    def for_data(pack: Pack) -> Protocol:
        every = {"way": len(pack.by_class(split))} if way == "all" else {}
        return read_config(Protocol, values | every, source="protocol")

    return for_data


def parse_shots(text: str) -> tuple[Shots, ...]:
    """ "1,5" → (1, 5); "1+2+5" is a number for each class.

    >>> parse_shots("1,5,1+2+3")
    (1, 5, (1, 2, 3))
    """
    try:
        each = [tuple(int(count) for count in part.split("+")) for part in text.split(",")]
    except ValueError:
        each = [(0,)]
    if min(min(one) for one in each) < 1:
        raise UsageError(f"--shots {text!r} is not a list of positive numbers such as 1,5 or 1+2+5 (one a class)")
    return tuple(one[0] if len(one) == 1 else one for one in each)


def shots_text(shots: int | Sequence[int]) -> str:
    """As `parse_shots` reads it."""
    return str(shots) if isinstance(shots, int) else "+".join(map(str, shots))
