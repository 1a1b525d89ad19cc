"""Owns how a serving process uses its heap: what Python's collector walks, and what the C library gives back."""

import ctypes
import gc

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8


def freeze_heap() -> None:
    """Takes what is there out of later collections: modules and models live as long as the process, and walking them
    all, again and again, would make a request wait."""
    gc.collect()
    gc.freeze()


def keep_freed_memory() -> bool:
    """Lets glibc keep the memory of a step's large temporaries for the next step, instead of giving it back and
    faulting it in again page by page. False where the C library has no such settings."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    # Without mappings of their own, large blocks lie in the heap too; an arena per thread holds 64 MiB at most.
    settings = {_M_MMAP_MAX: 0, _M_ARENA_MAX: 1, _M_TRIM_THRESHOLD: 1 << 30, _M_TOP_PAD: 64 << 20}
    taken = [mallopt(option, value) for option, value in settings.items()]
    return all(taken)
