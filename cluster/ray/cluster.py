"""Joins the Ray cluster that RAY_ADDRESS names, or starts one on this machine; leaves it in the same way.

Ray ties the processes it starts to the *thread* that started them, so ours is started, kept and stopped by a thread
that lives as long as it is used.
"""

import gc
import logging
import os
import socket
import threading
import warnings
from typing import Any

import ray

from protos.errors import PlacementError

OBJECT_STORE_BYTES = 128 * 2**20
"""Nothing of ours goes through Ray's object store but the arguments of actors."""

KNOCK_S = 10.0
"""Whoever listens at RAY_ADDRESS takes a connection within this."""

# Ray's own defaults would report usage to its makers, ask `uv` for another environment, and hide devices from the
# controller. Whoever sets these themselves is left alone. RAY_AUTH_MODE is not among them: Ray has read it when it was
# imported, and a cluster whose parts read it differently does not start; unset, a cluster started here uses a token.
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
PASSED_ON = ("HF_", "NCCL_", "GLOO_", "TORCH_NCCL_", "TOKENIZERS_")
"""Variables that begin so are set for workers too, where their node does not say otherwise."""


class _Keeper(threading.Thread):
    """One stay in a cluster, from `ray.init` to `ray.shutdown`."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(name="slipstream-ray", daemon=True)
        self._options = options
        self._settled, self._leaving = threading.Event(), threading.Event()
        self.error: PlacementError | None = None

    def run(self) -> None:
        self.error = _failure_of(self._options)
        self._settled.set()
        if self.error is None:
            self._leaving.wait()
            ray.shutdown()

    def arrive(self) -> None:
        """Return when Ray can be used, or `error` says why not."""
        self.start()
        self._settled.wait()

    def leave(self) -> None:
        """Return when nothing of Ray is left in this process, nor of a cluster that was started here."""
        self._leaving.set()
        self.join()


def _failure_of(options: dict[str, Any]) -> PlacementError | None:
    """Join or start Ray; return why it cannot be done, once nothing of the attempt is left."""
    try:
        ray.init(**options)
        return None
    except Exception as error:
        failed = error
    failure = PlacementError(f"{type(failed).__name__}: {failed}")
    with warnings.catch_warnings():
        # Ray ends the processes of a failed start without waiting for them, and Python would remark on each.
        warnings.simplefilter("ignore", ResourceWarning)
        ray.shutdown()
        del failed  # its traceback holds them
        gc.collect()
    return failure


class _Shared:
    """The stay that everything of ours in this process shares."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.keeper: _Keeper | None = None
        self.num_users = 0


_shared = _Shared()


class Membership:
    """One use of the cluster; `leave` ends it. A Ray that somebody else has initialised is left as it is.

    Args:
        num_cpus: how many CPUs a cluster that is started here must count at least; they may be more than there are.

    Raises:
        PlacementError: Ray could be neither joined nor started.
    """

    def __init__(self, num_cpus: float) -> None:
        self._is_over = False
        self.is_local = False
        """Whether the cluster was started here, so that nothing will ever join it."""
        with _shared.lock:
            if _shared.keeper is None and not ray.is_initialized():
                _shared.keeper = _arrived(num_cpus)
            self._is_ours = _shared.keeper is not None
            if self._is_ours:
                _shared.num_users += 1
                self.is_local = address() is None

    def leave(self) -> None:
        """Leave; the last one to do so ends a cluster that was started here. May be called twice."""
        with _shared.lock:
            if self._is_over:
                return
            self._is_over = True
            if not self._is_ours:
                return
            _shared.num_users -= 1
            keeper = _shared.keeper
            if _shared.num_users == 0 and keeper is not None:
                _shared.keeper = None
                keeper.leave()


def way_in() -> str:
    """Say how `Membership` will come to Ray."""
    if ray.is_initialized():
        return "using the Ray that this process has joined"
    return "starting Ray on this machine" if address() is None else f"joining the Ray cluster at {address()}"


def _knock() -> None:
    """See whether anybody is where RAY_ADDRESS points: Ray itself would try for minutes, aloud.

    Raises:
        PlacementError: nobody is, or we could not work with them.
    """
    where = address()
    if where is not None and "://" in where:
        raise PlacementError(
            f"RAY_ADDRESS is {where}: workers must reach this process, so run it on a node of the "
            "cluster, with RAY_ADDRESS=auto or the head's HOST:PORT"
        )
    host, _, port = (where or "").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", or a name for Ray to judge
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()
    except OSError as error:
        raise PlacementError(f"{way_in()} failed: nobody answers there ({error}){_hint()}") from None


def _arrived(num_cpus: float) -> _Keeper:
    _knock()
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    keeper = _Keeper(_options(num_cpus))
    keeper.arrive()
    if keeper.error is not None:
        raise PlacementError(f"{way_in()} failed: {keeper.error}{_hint()}")
    return keeper


def _hint() -> str:
    return "" if address() is None else "; is RAY_ADDRESS right, and are Ray and Python of the same versions there?"


def address() -> str | None:
    """Return what RAY_ADDRESS names, if anything."""
    return os.environ.get("RAY_ADDRESS") or None


def _options(num_cpus: float) -> dict[str, Any]:
    common: dict[str, Any] = {"configure_logging": True, "logging_level": logging.ERROR}
    if address() is not None:
        return {**common, "address": address()}
    counted = max(os.cpu_count() or 1, round(num_cpus))
    return {
        **common,
        "address": "local",
        "num_cpus": counted,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
    }


def passed_on() -> dict[str, str]:
    """Return the variables of this process that workers elsewhere should have too."""
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}


def adopt(variables: dict[str, str]) -> None:
    """Set what `passed_on` gave elsewhere, where this process has nothing of that name."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


# Ray leaves these functions without types.
_ray: Any = ray


def nodes() -> list[dict[str, Any]]:
    """Return Ray's description of the nodes that live."""
    return [node for node in _ray.nodes() if node["Alive"]]


def cluster_resources() -> dict[str, float]:
    """Return what the cluster has, by resource."""
    return dict(_ray.cluster_resources())


def available_resources() -> dict[str, float]:
    """Return what of it is free."""
    return dict(_ray.available_resources())


def node_address() -> str:
    """Return the address by which other nodes reach this one."""
    return str(_ray.util.get_node_ip_address())


def node_id() -> str:
    """Return the id of the node this process is on."""
    return str(_ray.get_runtime_context().get_node_id())
