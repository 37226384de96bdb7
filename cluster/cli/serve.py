"""`slipstream serve`: make the server's options from those of the command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from cluster.cli.env import version
from cluster.cli.options import NO_GRPC, check_key_variable
from cluster.serving.grpc_server import GrpcOptions
from cluster.serving.http_server import HttpOptions
from cluster.serving.service import ServiceOptions, serve
from cluster.serving.tls import check_for_grpc, tls_files
from cluster.settings import chat_template_text
from protos.config.engine import EngineConfig
from protos.errors import ConfigError
from protos.validation import shown
from runtime.http.options import SafetyOptions
from runtime.http.schemas import SpecMetrics
from runtime.http.tools.choice import ToolOptions


def run(
    config: EngineConfig,
    *,
    servers: Mapping[str, Any],
    chat_template: str | None,
    spec_metrics: str,
    grace_s: int,
    tools: ToolOptions,
    safety: Mapping[str, Any],
    output_log: Path | None = None,
) -> None:
    """Serve until stopped. Raises `ConfigError`, `ModelError`, `EngineDeadError`."""
    levels = get_args(SpecMetrics)
    level = next((level for level in levels if level == spec_metrics), None)
    if level is None:
        raise ConfigError(
            f"per_request_spec_decode_metrics must be one of {', '.join(levels)}, got {shown(spec_metrics)}"
        )
    check_key_variable()
    http, grpc = _listen_options(servers)
    serve(
        config,
        ServiceOptions(
            version(),
            http,
            grpc,
            grace_s,
            chat_template_text(chat_template),
            level,
            tools,
            SafetyOptions.of(safety),
            output_log,
        ),
    )


def _listen_options(given: Mapping[str, Any]) -> tuple[HttpOptions, GrpcOptions | None]:
    """Return the options of the HTTP and gRPC servers, with checked certificates; None for no gRPC."""
    host = given["host"]
    if given["port"] == given["grpc_port"] != 0:
        raise ConfigError(f"port and grpc_port are both {given['port']}: give two, or grpc_port -1 for no gRPC")
    tls = tls_files(("ssl_certfile", "ssl_keyfile"), given.get("ssl_certfile"), given.get("ssl_keyfile"))
    http = HttpOptions(host, given["port"], tls)
    names = ("grpc_tls_cert", "grpc_tls_key")
    tls = tls_files(names, given.get(names[0]), given.get(names[1]), given.get("grpc_tls_client_ca"))
    if tls is not None:
        check_for_grpc(tls)
    return http, None if given["grpc_port"] == NO_GRPC else GrpcOptions(host, given["grpc_port"], tls)
