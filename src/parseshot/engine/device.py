"""Where a model runs and in which numbers: chosen by what the machine has, unless told."""

import contextlib
import os
from contextlib import AbstractContextManager

import torch

from parseshot.errors import UsageError


def choose_device(wanted: str = "auto") -> torch.device:
    """`auto` is the first of cuda, mps and cpu that is there; under torchrun each process has a GPU of its own."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    name = next(kind for kind, found in there.items() if found) if wanted == "auto" else wanted
    kind, _, number = name.partition(":")
    if kind not in there or (number and not number.isdigit()):
        raise UsageError(f"--device {wanted!r}: use auto, cpu, cuda, cuda:1 or mps")
    if not there[kind]:
        raise UsageError(f"--device {wanted}: this machine or this torch has no {kind}")
    if kind == "cuda":
        index = int(number or os.environ.get("LOCAL_RANK", "0"))
        if index >= torch.cuda.device_count():
            raise UsageError(f"--device {wanted}: there are {torch.cuda.device_count()} GPUs, counted from 0")
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device(kind)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """The numbers a backbone computes in: bfloat16 where a GPU gains by it (`auto`) or where told, else its own."""
    gains = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "bfloat16" or (precision == "auto" and gains):
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: PyTorch says so on a GPU with a class of its own, on a CPU only in words."""
    words = ("can't allocate memory", "not enough memory", "bad_alloc")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )
