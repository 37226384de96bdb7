"""Runs all stages: the device, identity, faults, speed, and other engines."""

import platform
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from cluster.gpu_check import bandwidth, faults, identity, peers, speed
from cluster.gpu_check.answers import attempted
from cluster.gpu_check.decoding import DecodingSpeed
from cluster.gpu_check.report import CheckResult, GpuReport
from cluster.gpu_check.speed import SpeedModels
from protos.errors import ConfigError, SlipstreamError
from protos.progress import ProgressCallback

PACKAGES = ("torch", "transformers", "triton")
SMALL_GPU_BYTES = 40 << 30
"""8B and its draft need some 20 GiB, and their cache; on smaller devices they are left out."""
FEW, MANY = [1, 8], [1, 8, 32, 64]


@dataclass(frozen=True)
class GpuCheckOptions:
    """What to run.

    Attributes:
        device: "cuda", or "cpu" to try the check itself without a GPU, with tiny models.
        is_full: also 8B with a 1B draft, more batch sizes, and other engines.
    """

    device: str = "cuda"
    is_full: bool = False


def run_stages(options: GpuCheckOptions, say: ProgressCallback, report: ProgressCallback) -> GpuReport:
    """Run all stages. *say* is called with each result, *report* with progress.

    Raises:
        ConfigError: there is no such device.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no GPU that torch can use; --device cpu tries the check itself, with tiny models")
    found = GpuReport(_environment(options.device), bandwidth.measured(options.device))
    say(f"{found.environment['device']}: copies at {found.bytes_per_s / 1e9:.0f} GB/s")
    with tempfile.TemporaryDirectory(prefix="slipstream-gpu-") as name:
        folder = Path(name)
        for stage in (identity, faults):
            for what, check in stage.checks(options.device, folder, report):
                result = CheckResult(*attempted(what, check))
                found.checks.append(result)
                say(f"{'ok' if result.passed else 'WRONG':5}  {what}: {result.text}")
        for row in _speeds(options, found.bytes_per_s, folder, report):
            if isinstance(row, str):
                found.notes.append(row)
                say(f"note   {row}")
            else:
                found.speed.append(row)
                say(f"speed  {row.model}, {row.method}, batch {row.batch}: {row.tokens_per_s:.0f} tokens/s")
    return found


def _environment(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    versions = {package: version(package) for package in PACKAGES if find_spec(package)}
    return {"device": name, "count": torch.cuda.device_count(), "python": platform.python_version(), **versions}


def _speeds(
    options: GpuCheckOptions, bytes_per_s: float, folder: Path, report: ProgressCallback
) -> Iterator[DecodingSpeed | str]:
    measured, batches = _models(options)
    for models in measured:
        if models.target == "8B" and torch.cuda.get_device_properties(0).total_memory < SMALL_GPU_BYTES:
            yield f"8B was not measured: the device has less than {SMALL_GPU_BYTES >> 30} GiB"
            continue
        try:
            yield from speed.rows(
                models, options.device, batches, bytes_per_s=bytes_per_s, folder=folder, report=report
            )
            if options.is_full:
                yield from peers.rows(models.target, folder / "target", options.device, batches)
        except (SlipstreamError, RuntimeError) as error:
            yield f"{models.target}: {type(error).__name__}: {error}".splitlines()[0]


def _models(options: GpuCheckOptions) -> tuple[Sequence[SpeedModels], list[int]]:
    """Return what is measured, at which batch sizes."""
    if options.device == "cpu":
        return [SpeedModels("tiny", "tiny-draft", k=3)], [1, 4]
    if options.is_full:
        return [SpeedModels("0.6B"), SpeedModels("8B", "1B")], MANY
    return [SpeedModels("0.6B")], FEW
