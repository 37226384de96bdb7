"""`slipstream doctor`: check this machine with real processes and groups, and say how to mend what is wrong."""

from collections.abc import Callable
from importlib.util import find_spec

from cluster.cli.console import OUT, show_warnings
from cluster.doctor import CheckFailedError, DoctorOptions, Examination, ProbeProcesses
from protos.errors import ConfigError, PlacementError

DEVICES = ("auto", "cpu", "cuda")
RAY = (
    "is RAY_ADDRESS right, do Ray and Python have the same versions everywhere, and has the cluster that many "
    "devices? `ray status` shows what it has; worker_resources says what a worker may ask for"
)


def run(wanted: DoctorOptions, *, with_ray: bool) -> bool:
    """Return whether everything is as it should be."""
    if wanted.device not in DEVICES:
        raise ConfigError(f"device must be one of {', '.join(DEVICES)}, got {wanted.device!r}")
    show_warnings()
    ward = ProbeProcesses.open()
    examination = Examination(wanted, ward)
    try:
        num_wrong = _machine(examination)
    finally:
        ward.gang.close()
    num_wrong += _ray(wanted, has_draft=examination.has_draft or bool(num_wrong)) if with_ray else 0
    OUT.print("everything works" if not num_wrong else f"{num_wrong} check(s) failed", style="bold")
    return not num_wrong


def _machine(examination: Examination) -> int:
    """Return how many checks failed: at most one, for the others need it."""
    return int(not all(passed(name, check) for name, check in examination.checks()))


def _ray(wanted: DoctorOptions, *, has_draft: bool) -> int:
    if find_spec("ray") is None:
        _show("ok", "Ray", "not installed; engines on one device work without it")
        return 0
    from cluster.ray.diagnostics import examine  # noqa: PLC0415 - Ray is loaded only where it is used

    def check() -> str:
        try:
            device = "cpu" if wanted.may_share else wanted.device  # who shares devices asks Ray for parts, or none
            return examine(wanted.world or 1, has_draft=has_draft, device=device)
        except PlacementError as error:
            raise CheckFailedError(str(error), RAY) from None

    return 0 if passed("Ray", check) else 1


def passed(name: str, check: Callable[[], str]) -> bool:
    """Whether *check* finds nothing wrong; shows what it found, and how to mend it."""
    try:
        _show("ok", name, check())
    except CheckFailedError as error:
        _show("WRONG", name, str(error))
        _show("", "to mend it", error.remedy)
        return False
    return True


def _show(mark: str, name: str, text: str) -> None:
    OUT.print(f"{mark:5}  {name}: {text}", markup=False, highlight=False)
