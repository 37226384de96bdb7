"""The lock under which models are built.

`transformers` patches its own classes while it builds a model and restores them afterwards. With two threads the patch
of one could stay, and tied weights would be missing in every later model.
"""

import threading

BUILDING = threading.RLock()
