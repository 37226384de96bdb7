"""Builds engines, places them on machines, and serves them: the command line, the servers, and (lazily) Ray.

Every process of an engine imports this package before torch, which loads OpenMP.
"""

import os

SPIN_ITERATIONS = "50000"
"""OpenMP's threads that wait for others spin for about a millisecond, then sleep. That covers the pauses between the
operators of a step. By default they spin for several times as long, also while the thread they wait for does not run.
"""

if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = SPIN_ITERATIONS
