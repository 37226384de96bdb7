"""The garbage collector of processes that serve."""

import subprocess
import sys

FREEZE = """
import gc
from runtime.heap import freeze_heap

class Cycle:
    def __init__(self):
        self.itself = self

garbage, kept = [Cycle() for _ in range(1000)], [Cycle() for _ in range(1000)]
del garbage
freeze_heap()
left = [found for found in gc.get_objects() if isinstance(found, Cycle)]
print(len(left), gc.get_freeze_count() > 1000)
later = Cycle()
del later
print(gc.collect())
"""


def test_what_exists_is_left_out_of_later_collections() -> None:
    """Garbage is freed first, and garbage that is made later is found."""
    ran = subprocess.run([sys.executable, "-c", FREEZE], capture_output=True, text=True, check=True)
    left, frozen, collected = ran.stdout.split()
    assert (left, frozen) == ("0", "True")
    assert int(collected) >= 1
