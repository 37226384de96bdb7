"""`slipstream doctor`: check this machine with real processes and groups, and print remedies."""

from collections.abc import Callable
from importlib.util import find_spec

from cluster.cli.console import OUT, show_warnings
from cluster.doctor import CheckFailedError, DoctorOptions, Examination, ProbeProcesses
from protos.errors import ConfigError, PlacementError

DEVICES = ("auto", "cpu", "cuda")
RAY = (
    "is RAY_ADDRESS right, do Ray and Python have the same versions everywhere, and has the cluster that many "
    "devices? `ray status` shows what it has; worker_resources sets what a worker requests"
)


def run(options: DoctorOptions, *, with_ray: bool) -> bool:
    """Return whether all checks passed."""
    if options.device not in DEVICES:
        raise ConfigError(f"device must be one of {', '.join(DEVICES)}, got {options.device!r}")
    show_warnings()
    probes = ProbeProcesses.open()
    examination = Examination(options, probes)
    try:
        num_failed = _check_machine(examination)
    finally:
        probes.group.close()
    num_failed += _check_ray(options, has_draft=examination.has_draft or bool(num_failed)) if with_ray else 0
    OUT.print("everything works" if not num_failed else f"{num_failed} check(s) failed", style="bold")
    return not num_failed


def _check_machine(examination: Examination) -> int:
    """Return how many checks failed: at most one, because each needs those before it."""
    return int(not all(passed(name, check) for name, check in examination.checks()))


def _check_ray(options: DoctorOptions, *, has_draft: bool) -> int:
    if find_spec("ray") is None:
        _show("ok", "Ray", "not installed; engines on one device work without it")
        return 0
    from cluster.ray.diagnostics import examine  # noqa: PLC0415 - Ray is loaded only where it is used

    def check() -> str:
        try:
            device = (
                "cpu" if options.may_share else options.device
            )  # with shared devices, a worker requests part of a GPU or none
            return examine(options.world or 1, has_draft=has_draft, device=device)
        except PlacementError as error:
            raise CheckFailedError(str(error), RAY) from None

    return 0 if passed("Ray", check) else 1


def passed(name: str, check: Callable[[], str]) -> bool:
    """Run *check* and print its result, or its error and remedy; return whether it passed."""
    try:
        _show("ok", name, check())
    except CheckFailedError as error:
        _show("WRONG", name, str(error))
        _show("", "to mend it", error.remedy)
        return False
    return True


def _show(mark: str, name: str, text: str) -> None:
    OUT.print(f"{mark:5}  {name}: {text}", markup=False, highlight=False)
