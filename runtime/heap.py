"""The garbage collector of processes that serve."""

import gc


def freeze_heap() -> None:
    """Leave what exists now out of every later collection: modules, and what was loaded.

    Over the modules of torch and transformers a full collection stops a process for some 0.2 s. Only for processes that
    end with what they loaded: cycles of the objects that exist now are never freed.
    """
    gc.collect()
    gc.freeze()
