"""`slipstream doctor --gpu`: check and measure engines on a GPU, without Ray."""

from pathlib import Path

from cluster.cli.console import OUT, show_progress, show_warnings
from cluster.files import check_outputs
from protos.errors import ConfigError

DEVICES = {"auto": "cuda", "cuda": "cuda", "cpu": "cpu"}


def run(device: str, output: Path | None, *, is_full: bool) -> bool:
    """Run all stages, print and write the results; return whether every check passed.

    Raises:
        ConfigError: there is no such device, or *output* cannot be written.
    """
    if device not in DEVICES:
        raise ConfigError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    check_outputs([output])
    from cluster.gpu_check.run import GpuCheckOptions, run_stages  # noqa: PLC0415 - loads torch and transformers

    show_warnings()
    found = run_stages(GpuCheckOptions(DEVICES[device], is_full), _show, show_progress)
    for line in (*found.table(), *found.goals()):
        _show(line)
    if output is not None:
        found.write(output)
        show_progress(f"the results are in {output}")
    failed = sum(not check.passed for check in found.checks)
    OUT.print("everything works" if not failed else f"{failed} check(s) failed", style="bold")
    return found.passed


def _show(line: str) -> None:
    OUT.print(line, markup=False, highlight=False)
