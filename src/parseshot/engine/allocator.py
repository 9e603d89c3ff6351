"""Keep freed memory in the process: on Linux, handing it back and asking again costs as much as the convolutions.

glibc gets every block above 32 MB from the kernel and returns it when it is freed, and returns the top of its heap
whenever that grows. A training step frees and asks for the same blocks again, and the kernel zeroes every page of them
each time: half of the time of a Conv-4 step (benchmarks/allocator.py). Threads other than the first allocate from
heaps of their own, which give back what is free whatever was asked; so all are made to share the first one.
"""

import ctypes
import sys
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of <malloc.h>


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, for its own next use; False where the C library has no such switch.

    It holds for the whole process, so programs call it, not the library by itself. Peak memory grows by about a third.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl
        return False
    switches = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1))
    return all(bool(mallopt(name, value)) for name, value in switches)


def peak_memory() -> float | None:
    """GB this process has held at most; None where the system does not say.

    Not getrusage: that counts what the parent held when it started this process.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1e6
