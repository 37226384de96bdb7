"""Joins the Ray cluster at RAY_ADDRESS, or starts one on this machine, and leaves it again.

Ray ties the processes it starts to the *thread* that started them, so a thread of its own runs `ray.init` and
`ray.shutdown`, and lives in between.
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
"""Only the arguments of actors go through Ray's object store."""

CONNECT_TIMEOUT_S = 10.0
"""For the first connection to RAY_ADDRESS."""

# Defaults for Ray, unless set: no usage reports, no environment rebuilt by `uv`, devices visible to the controller, no
# escape codes in the lines of other processes.
# RAY_AUTH_MODE is not among them: Ray reads it on import, and a cluster whose processes disagree does not start. If it
# is unset, a cluster started here uses a token.
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_COLOR_PREFIX": "0",
}
FORWARDED_PREFIXES = ("HF_", "GOMP_", "NCCL_", "GLOO_", "TORCH_NCCL_", "TOKENIZERS_")
"""Variables with these prefixes are set for workers too, unless set on their node."""


class _RayThread(threading.Thread):
    """Runs `ray.init`, waits, and runs `ray.shutdown`."""

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

    def connect(self) -> None:
        """Start; return when Ray can be used, or `error` is set."""
        self.start()
        self._settled.wait()

    def disconnect(self) -> None:
        """Shut Ray down in this process, with a cluster that was started here; return when it is done."""
        self._leaving.set()
        self.join()


def _failure_of(options: dict[str, Any]) -> PlacementError | None:
    """Join or start Ray; return the error after cleaning up, or None."""
    try:
        ray.init(**options)
        return None
    except Exception as error:
        failed = error
    failure = PlacementError(f"{type(failed).__name__}: {failed}")
    with warnings.catch_warnings():
        # Ray kills the processes of a failed start without waiting for them, and Python would warn about each.
        warnings.simplefilter("ignore", ResourceWarning)
        ray.shutdown()
        del failed  # its traceback references them
        gc.collect()
    return failure


class _Shared:
    """The connection that all users in this process share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread: _RayThread | None = None
        self.num_users = 0


_shared = _Shared()


class Membership:
    """One use of the cluster, until `leave`. A Ray that the caller initialised is not shut down.

    Args:
        num_cpus: the least CPU count of a cluster started here; may exceed that of the machine.

    Raises:
        PlacementError: Ray could be neither joined nor started.
    """

    def __init__(self, num_cpus: float) -> None:
        self._is_over = False
        self.is_local = False
        """Whether the cluster was started here, so that no node will join it."""
        with _shared.lock:
            if _shared.thread is None and not ray.is_initialized():
                _shared.thread = _connect(num_cpus)
            self._is_ours = _shared.thread is not None
            if self._is_ours:
                _shared.num_users += 1
                self.is_local = address() is None

    def leave(self) -> None:
        """Leave; the last user shuts down a cluster that was started here. May be called twice."""
        with _shared.lock:
            if self._is_over:
                return
            self._is_over = True
            if not self._is_ours:
                return
            _shared.num_users -= 1
            thread = _shared.thread
            if _shared.num_users == 0 and thread is not None:
                _shared.thread = None
                thread.disconnect()


def describe_connection() -> str:
    """Return how `Membership` will connect to Ray, for messages."""
    if ray.is_initialized():
        return "using the Ray that this process has joined"
    return "starting Ray on this machine" if address() is None else f"joining the Ray cluster at {address()}"


def _check_reachable() -> None:
    """Check that RAY_ADDRESS accepts connections: Ray itself would retry for minutes, with warnings.

    Raises:
        PlacementError: it does not, or the address is of an unsupported kind.
    """
    target = address()
    if target is not None and "://" in target:
        raise PlacementError(
            f"RAY_ADDRESS is {target}: workers must reach this process, so run it on a node of the "
            "cluster, with RAY_ADDRESS=auto or the head's HOST:PORT"
        )
    host, _, port = (target or "").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", or a name that Ray resolves
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise PlacementError(f"{describe_connection()} failed: no answer there ({error}){_hint()}") from None


def _connect(num_cpus: float) -> _RayThread:
    _check_reachable()
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    thread = _RayThread(_options(num_cpus))
    thread.connect()
    if thread.error is not None:
        raise PlacementError(f"{describe_connection()} failed: {thread.error}{_hint()}")
    return thread


def _hint() -> str:
    return "" if address() is None else "; is RAY_ADDRESS right, and are Ray and Python of the same versions there?"


def address() -> str | None:
    """Return RAY_ADDRESS; None if it is unset or empty."""
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


def forwarded_variables() -> dict[str, str]:
    """Return the environment variables of this process that workers should have too."""
    return {name: value for name, value in os.environ.items() if name.startswith(FORWARDED_PREFIXES)}


def set_missing_variables(variables: dict[str, str]) -> None:
    """Set environment *variables* that are unset in this process."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


# Ray does not type these functions.
_ray: Any = ray


def nodes() -> list[dict[str, Any]]:
    """Return Ray's description of the living nodes."""
    return [node for node in _ray.nodes() if node["Alive"]]


def cluster_resources() -> dict[str, float]:
    """Return the cluster's total resources."""
    return dict(_ray.cluster_resources())


def available_resources() -> dict[str, float]:
    """Return the cluster's free resources."""
    return dict(_ray.available_resources())


def node_address() -> str:
    """Return the address at which other nodes reach this one."""
    return str(_ray.util.get_node_ip_address())


def node_id() -> str:
    """Return the Ray id of this node."""
    return str(_ray.get_runtime_context().get_node_id())
