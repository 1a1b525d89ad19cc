"""What the settings of the heap do, each in a process of its own: they are for the whole process and for good."""

import subprocess
import sys

import pytest

_COUNT_FAULTS = """
import resource, sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from warmstate.cluster.launch.process_heap import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        held = [np.ones(int(sys.argv[2]) << 17) for _ in range(6)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
with ThreadPoolExecutor(1) as engine:
    engine.submit(faults).result()
    print(engine.submit(faults).result())
"""

_COUNT_WALKED = """
import gc
import torch
from warmstate.cluster.launch.process_heap import freeze_heap

before = len(gc.get_objects())
freeze_heap()
print(len(gc.get_objects()) / before)
"""


def _printed(program: str, *arguments: str) -> float:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.parametrize("mebibytes", ["24", "50", "80"])
def test_large_temporaries_are_not_faulted_in_again_and_again(mebibytes: str) -> None:
    """glibc maps what is larger than 32 MiB, unless it is told to map nothing; more than 64 MiB never fit into the
    arena of a thread, and the engine is one."""
    assert _printed(_COUNT_FAULTS, "kept", mebibytes) < _printed(_COUNT_FAULTS, "given back", mebibytes) / 10


def test_what_was_there_at_the_start_is_no_longer_walked() -> None:
    assert _printed(_COUNT_WALKED) < 0.01
