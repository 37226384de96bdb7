"""Which Slipstream this is."""

from importlib import metadata

PACKAGE = "slipstream-serve"


def version() -> str:
    """Return the installed version, or that this is a plain checkout."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return "0+checkout"
