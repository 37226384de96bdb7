"""The engine on Ray: actors, placement groups and the channel to the controller."""

import os

# Otherwise Ray prints a C++ stack for each SIGTERM and, three seconds later, aborts the process that is still stopping.
# Ray reads the variable when it is imported, and this file runs before any module of this package imports Ray. The
# processes of a cluster that is started here inherit it.
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
