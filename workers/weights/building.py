"""One model at a time: `transformers` changes its own classes while it makes one, and changes them back afterwards.

Two threads at it would leave the change of one behind for good: weights that are tied would be missing ever after.
"""

import threading

BUILDING = threading.RLock()
