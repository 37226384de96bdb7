"""Options of `slipstream serve` that say where it listens, and with which certificates."""

import inspect
from typing import Any

import typer

from cluster.cli.options import spelling

PANEL = "Servers"
PORT: dict[str, Any] = {"min": 0, "max": 65535}
NO_GRPC = -1
FACES: dict[str, tuple[object, object, str, dict[str, Any]]] = {
    "host": (str, "0.0.0.0", "address to listen on", {}),
    "port": (int, 8000, "port of HTTP; 0 lets the system choose", PORT),
    "ssl_certfile": (str | None, None, "PEM file: certificate chain of the HTTP server", {}),
    "ssl_keyfile": (str | None, None, "PEM file: the key to --ssl-certfile", {}),
    "grpc_port": (int, 9000, "port of gRPC; 0 lets the system choose, -1 is no gRPC", {**PORT, "min": NO_GRPC}),
    "grpc_tls_cert": (str | None, None, "PEM file: certificate chain of the gRPC server", {}),
    "grpc_tls_key": (str | None, None, "PEM file: the key to --grpc-tls-cert", {}),
    "grpc_tls_client_ca": (str | None, None, "PEM file: who signs the certificates that gRPC clients must show", {}),
}
"""name -> type, default, help, limits."""


def face_options() -> list[inspect.Parameter]:
    """Return the options, for `cluster.cli.options.with_options`."""
    return [_parameter(name, *rest) for name, rest in FACES.items()]


def _parameter(name: str, kind: object, default: Any, text: str, limits: dict[str, Any]) -> inspect.Parameter:
    option = typer.Option(default, spelling(name), help=text, rich_help_panel=PANEL, **limits)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)
