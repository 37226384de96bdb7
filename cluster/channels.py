"""Chooses where the controller runs: in a child process of the frontend, or as a Ray actor."""

from typing import TYPE_CHECKING

from protos.config.engine import EngineConfig, to_json
from protos.errors import ConfigError
from runtime.frontend.process_channel import ProcessChannel
from runtime.subprocess import python_command

if TYPE_CHECKING:
    from cluster.ray.channel import RayChannel


def controller_channel(config: EngineConfig) -> "ProcessChannel | RayChannel":
    """Return the channel to a controller in a child process for the executor `uni`, else to one on Ray."""
    return process_channel(config) if config.parallel.executor == "uni" else ray_channel(config)


def process_channel(config: EngineConfig) -> ProcessChannel:
    """Return the channel to a controller in a child process."""
    return ProcessChannel(python_command("cluster.transport.engine_process"), to_json(config))


def ray_channel(config: EngineConfig) -> "RayChannel":
    """Return the channel to a controller on Ray.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        from cluster.ray.channel import RayChannel  # noqa: PLC0415 - engines in one process work without Ray
    except ImportError as error:
        raise ConfigError(
            f"several workers need Ray, which cannot be loaded ({error}): pip install 'ray[serve]>=2.56'"
            ", or use tensor_parallel_size 1 and placement colocated"
        ) from None
    return RayChannel(config)
