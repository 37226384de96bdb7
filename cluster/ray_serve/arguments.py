"""The `args:` of a Ray Serve config: options of the engine and the server, by their usual names."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cluster.cli.options import API_KEY_VARIABLE
from cluster.settings import chat_template_text, remote_engine_config, with_serving_defaults
from protos.config import argument_names
from protos.config.engine import EngineConfig
from protos.validation import did_you_mean
from runtime.http.options import SafetyOptions
from runtime.http.schemas import SpecMetrics
from runtime.http.tools.choice import ToolOptions

STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)
LISTENING = "Ray Serve's proxies listen, as `http_options` and `grpc_options` of the configuration say"
HTTP_TLS = "Ray Serve's proxies have the certificates: give `http_options` an ssl_certfile and an ssl_keyfile"
GRPC_TLS = "Ray Serve's gRPC proxies have no TLS: terminate it in front of them"
ELSEWHERE = {
    **dict.fromkeys(("host", "port", "grpc_port"), LISTENING),
    **dict.fromkeys(("ssl_certfile", "ssl_keyfile"), HTTP_TLS),
    **dict.fromkeys(("grpc_tls_cert", "grpc_tls_key", "grpc_tls_client_ca"), GRPC_TLS),
    "shutdown_timeout": "drain_timeout_s is the time in which a stopping replica finishes its answers",
    "api_key": f"Ray logs arguments: put keys in {API_KEY_VARIABLE}, in the environment of Ray's processes",
    "max_connections": "the connections are those of Ray Serve's proxies",
    "header_timeout": "the connections are those of Ray Serve's proxies",
    "output_log": "each replica would write a file of its own, on its own machine: log answers with `slipstream serve`",
}
"""Options of `slipstream serve` that are rejected here, and the reason."""
MAX_ANSWER_S = 600.0
LEEWAY_S = 10.0


class ServerArguments(SafetyOptions):
    """The options of the server.

    Attributes:
        chat_template: a template that replaces the model's, or its file on the machine that builds the application.
        heartbeat_timeout_s: a replica is replaced if its controller has been silent for longer.
        drain_timeout_s: time for a stopping replica to finish its answers; default: slightly more than the request
            timeout.
    """

    model_config = STRICT

    chat_template: str | None = None
    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    per_request_spec_decode_metrics: SpecMetrics = "none"
    heartbeat_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    drain_timeout_s: float | None = Field(default=None, gt=0)

    @field_validator("chat_template")
    @classmethod
    def _read(cls, given: str | None) -> str | None:
        return chat_template_text(given)

    def model_post_init(self, context: Any, /) -> None:
        """Validate the derived options. Raises `ConfigError`."""
        super().model_post_init(context)
        _ = self.tools, self.guard

    @cached_property
    def tools(self) -> ToolOptions:
        """Options of tool calls. Raises `ConfigError`."""
        return ToolOptions(self.tool_call_parser, self.enable_auto_tool_choice)

    @property
    def drain_s(self) -> float:
        """Seconds for a stopping replica to finish its answers."""
        if self.drain_timeout_s is not None:
            return self.drain_timeout_s
        return MAX_ANSWER_S if self.request_timeout is None else self.request_timeout + LEEWAY_S


class ServeArguments(BaseModel):
    """An application's arguments, checked when it is built. Users write both parts as one mapping.

    Attributes:
        engine: see `protos.config.arguments`.
        server: see `ServerArguments`.
    """

    model_config = STRICT

    engine: dict[str, Any]
    server: ServerArguments

    @model_validator(mode="before")
    @classmethod
    def _split(cls, given: Any) -> Any:
        """Split the arguments by part, and reject unknown names."""
        if not isinstance(given, Mapping):
            raise ValueError("args must hold `name: value` lines")
        parts: dict[str, dict[str, Any]] = {"engine": {}, "server": {}}
        for name, spelt in argument_names.spellings(given).items():
            if name in ELSEWHERE:
                raise ValueError(f"{name} is not taken here: {ELSEWHERE[name]}")
            if name not in SERVER and name not in argument_names.NAMES:
                raise ValueError(f"unknown argument {str(spelt)!r}{did_you_mean(name, SERVER | argument_names.NAMES)}")
            parts["server" if name in SERVER else "engine"][name] = given[spelt]
        return parts

    @model_validator(mode="after")
    def _is_served(self) -> "ServeArguments":
        if self.config.model.skip_tokenizer_init:
            raise ValueError("serving needs a tokenizer: leave out skip_tokenizer_init")
        return self

    @cached_property
    def config(self) -> EngineConfig:
        """The engine's configuration. Raises `ConfigError`."""
        return remote_engine_config(with_serving_defaults(self.engine))


SERVER = frozenset(ServerArguments.model_fields) - ELSEWHERE.keys()
"""Names of the server's arguments."""
