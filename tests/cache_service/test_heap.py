"""Freed bundles' memory stays in the process."""

import ctypes
import subprocess
import sys

import pytest

CHURN = """
import resource
from cache_service.heap import keep_freed
if {keep} and not keep_freed():
    print(-1)
else:
    for round_ in range(50):
        if round_ == 10:  # the heap has found its size
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        [bytearray(720 * 1024) for _ in range(8)]
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: bool) -> int:
    return int(subprocess.check_output([sys.executable, "-c", CHURN.format(keep=keep)], text=True))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_memory_is_not_faulted_in_anew_for_every_bundle() -> None:
    kept = faults(keep=True)
    assert kept >= 0, "the C library has mallopt and refused"
    assert kept < faults(keep=False) / 4
