"""Command-line options from the tables of engine and sampling arguments, and the YAML file of --config."""

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import typer
import yaml  # type: ignore[import-untyped]
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from typer.core import TyperGroup

from cluster.files import read_text
from protos.config import aliases, argument_names
from protos.config.arguments import PARTS
from protos.config.engine import EngineConfig
from protos.errors import ConfigError
from protos.sampling import SamplingParams
from protos.validation import did_you_mean, shown
from runtime.http.options import SafetyOptions

Command = Callable[..., None]
Decorator = Callable[[Command], Command]

# Accept option names with `_` for `-`, as in Python and YAML.
HYPHENS = {"token_normalize_func": lambda name: name.replace("_", "-")}
ENGINE_PANEL = "Engine"
SAMPLING_PANEL = "Sampling"
SAFETY_PANEL = "Safety"
SERVERS_PANEL = "Servers"
SAFETY_KINDS: dict[type, type] = {bool: bool, tuple: tuple}
API_KEY_VARIABLE = "SLIPSTREAM_API_KEY"
"""API keys, separated by spaces. Unlike options, they do not appear in the process list."""
SPECULATIVE_HELP = 'JSON, such as \'{"method": "ngram", "num_speculative_tokens": 5}\'; null turns speculation off'
# Short forms of vLLM and llama.cpp; -tp is one option, not -t and -p.
SHORT = {
    "tensor_parallel_size": ("-tp",),
    "speculative_config": ("-sc",),
    "pipeline_parallel_size": ("-pp",),
    "data_parallel_size": ("-dp",),
    "spec_draft_tp": ("-spec-draft-tp",),
    "model_draft": ("-md",),
}
LISTS = frozenset({"served_model_name"})
"""Engine arguments that may be repeated."""
NO_GRPC = -1
PORT_LIMITS: dict[str, Any] = {"min": 0, "max": 65535}
SERVER_OPTIONS: dict[str, tuple[object, object, str, dict[str, Any]]] = {
    "host": (str, "0.0.0.0", "address to listen on", {}),
    "port": (int, 8000, "port of HTTP; 0 lets the system choose", PORT_LIMITS),
    "ssl_certfile": (str | None, None, "PEM file: certificate chain of the HTTP server", {}),
    "ssl_keyfile": (str | None, None, "PEM file: private key of --ssl-certfile", {}),
    "grpc_port": (int, 9000, "port of gRPC; 0 lets the system choose, -1 is no gRPC", {**PORT_LIMITS, "min": NO_GRPC}),
    "grpc_tls_cert": (str | None, None, "PEM file: certificate chain of the gRPC server", {}),
    "grpc_tls_key": (str | None, None, "PEM file: private key of --grpc-tls-cert", {}),
    "grpc_tls_client_ca": (str | None, None, "PEM file: CA of the certificates that gRPC clients must present", {}),
}
"""Option name -> type, default, help, limits: where `slipstream serve` listens, with which certificates."""
SERVE_ONLY = frozenset({
    "chat_template", "tool_call_parser", "enable_auto_tool_choice", "per_request_spec_decode_metrics", "output_log",
    "shutdown_timeout",
})  # fmt: skip
"""Options of `slipstream serve` that are in no table."""
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTEGERS = ("max_tokens", "min_tokens", "top_k")
TEXTS = ("stop", "bad_words")
SWITCHES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


def spelling(name: str) -> str:
    """Return the flag of an argument: `max_model_len` -> `--max-model-len`."""
    return "--" + name.replace("_", "-")


def _parameter(name: str, kind: object, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def _engine_parameter(name: str, shown: str | None) -> inspect.Parameter:
    """Return the option of one engine argument; hidden from --help without *shown*, its text."""
    flags = [spelling(name), *SHORT.get(name, ())]
    if name in argument_names.FLAGS:
        flags[0] += "/--no-" + name.replace("_", "-")
    several = list[str] if name in LISTS else str
    kind = bool | None if name in argument_names.FLAGS else several | None
    option = typer.Option(
        None, *flags, help=shown, hidden=shown is None, show_default=False, rich_help_panel=ENGINE_PANEL
    )
    return _parameter(name, kind, option)


@functools.cache
def _defaults_of_fields() -> dict[tuple[str, str], object]:
    """Return the default of each field of the configuration, by its part and its name; `MISSING` without one."""
    parts: dict[str, Any] = {"engine": EngineConfig, **PARTS}
    found = {(name, field.name): field.default for name, part in parts.items() for field in fields(part)}
    # Some are fields of pydantic, the others the value itself.
    return {key: getattr(default, "default", default) for key, default in found.items()}


def _with_default(option: argument_names.Option) -> str:
    """Return the help of an engine argument, with its default if it has one."""
    default = _defaults_of_fields()[option.part, option.field]
    if default in (None, (), False, MISSING) or "default" in option.help:
        return option.help
    return f"{option.help} [default: {'on' if default is True else default}]"


def engine_options(*, but: tuple[str, ...] = ()) -> list[inspect.Parameter]:
    """Return an option for every engine argument except *but*; those that only redirect or warn are hidden."""
    shown = {option.name: _with_default(option) for option in argument_names.KEPT}
    shown[argument_names.SPECULATIVE] = SPECULATIVE_HELP
    shown |= {name: f"same as {spelling(key)[2:]}" for name, key in aliases.SHORTCUTS.items()}
    hidden = sorted(argument_names.NAMES - shown.keys())
    texts: dict[str, str | None] = {**shown, **dict.fromkeys(hidden)}
    return [_engine_parameter(name, text) for name, text in texts.items() if name not in but]


def sampling_options(**defaults: Any) -> list[inspect.Parameter]:
    """Return the sampling options; *defaults* override those of `SamplingParams`."""

    def one(name: str, kind: object) -> inspect.Parameter:
        default = defaults.get(name, getattr(SamplingParams(), name))
        flag = spelling(name) + ("/--no-" + name.replace("_", "-") if kind is bool else "")
        value = None if kind == list[str] | None else default
        return _parameter(name, kind, typer.Option(value, flag, rich_help_panel=SAMPLING_PANEL))

    return (
        [one(name, float) for name in FLOATS]
        + [one(name, int) for name in INTEGERS]
        + [one(name, list[str] | None) for name in TEXTS]
        + [one(name, bool) for name in SWITCHES]
    )


def server_options() -> list[inspect.Parameter]:
    """Return the options in `SERVER_OPTIONS`."""
    return [
        _parameter(
            name, kind, typer.Option(default, spelling(name), help=text, rich_help_panel=SERVERS_PANEL, **limits)
        )
        for name, (kind, default, text, limits) in SERVER_OPTIONS.items()
    ]


def safety_options() -> list[inspect.Parameter]:
    """Return an option for each field of `SafetyOptions`."""
    return [_safety_parameter(name, field) for name, field in SafetyOptions.model_fields.items()]


def _safety_parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    flag, kind = spelling(name), SAFETY_KINDS.get(type(field.default), str)
    if kind is bool:
        flag += "/--no-" + name.replace("_", "-")
    if kind is not bool and field.default not in (None, ()):
        text = f"{field.description} [default: {field.default}]"
    else:
        text = str(field.description)
    variable = API_KEY_VARIABLE if name == "api_key" else None
    option = typer.Option(None, flag, help=text, show_default=False, envvar=variable, rich_help_panel=SAFETY_PANEL)
    return _parameter(name, list[str] | None if kind is tuple else kind | None, option)


def check_key_variable() -> None:
    """Raise `ConfigError` if the variable of the API keys is set without one: an empty secret opens no server."""
    if not os.environ.get(API_KEY_VARIABLE, "unset").split():
        raise ConfigError(f"{API_KEY_VARIABLE} is set, but has no key: unset it to serve without keys")


def _config_parameter() -> inspect.Parameter:
    text = "YAML file of options; flags win"
    option = typer.Option(None, "--config", help=text, callback=_read_config, is_eager=True)
    return _parameter("config", Path | None, option)


class CommandGroup(TyperGroup):
    """A group of commands whose errors about options name the value, and the file that it is from."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises `typer.BadParameter` for bad values."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if isinstance(error.__cause__, ValidationError) and error.ctx is not None and error.param is not None:
                error.message += f", got {shown(error.__cause__.errors()[0]['input'])}"
                if error.param.name in (error.ctx.default_map or {}):
                    error.message += f"; see {error.ctx.params.get('config')}"
            raise


def with_options(**groups: list[inspect.Parameter]) -> Decorator:
    """Add `--config` and the options of *groups* to a command, which receives each group as a dict of those set."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapper(**given: Any) -> None:
            given.pop("config")
            taken = {group: _taken(given, options) for group, options in groups.items()}
            command(**given, **taken)

        own = [p for p in inspect.signature(command).parameters.values() if p.name not in groups]
        signature = inspect.Signature([*own, _config_parameter(), *(p for group in groups.values() for p in group)])
        wrapper.__signature__ = signature  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return wrapper

    return decorate


def _taken(given: dict[str, Any], options: list[inspect.Parameter]) -> dict[str, Any]:
    values = {option.name: given.pop(option.name) for option in options}
    for name in LISTS & values.keys():
        values[name] = _given_once(values[name])
    return {name: value for name, value in values.items() if value is not None}


def _given_once(values: list[str] | None) -> object:
    """Return the only value of an option that may be repeated, which may be JSON; several as they are."""
    return values if values is None or len(values) > 1 else next(iter(values), None)


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of the options. Other commands skip those of a server."""
    if path is not None:
        options = {option.name: option for option in context.command.params if option.name not in (None, "config")}
        context.default_map = {**(context.default_map or {}), **_defaults(path, options)}
    return path


def _defaults(path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    servers = {option.name for option in (*engine_options(), *server_options(), *safety_options())} | SERVE_ONLY
    visible = {name for name, option in options.items() if not getattr(option, "hidden", False)}
    given = _yaml(path)
    found = _spellings(path, given)
    for name, spelt in found.items():
        if name not in options and name not in servers:
            raise ConfigError(f"{path}: unknown option {str(spelt)!r}{did_you_mean(name, visible)}")
    return {name: _as_option(path, options[name], given[spelt]) for name, spelt in found.items() if name in options}


def _spellings(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return argument_names.spellings(given)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _as_option(path: Path, option: Any, value: object) -> object:
    """Return a value of the file as it would come from the command line."""
    if value is not None and getattr(option, "multiple", False):
        return value if isinstance(value, list) else [value]
    if not isinstance(value, Mapping | list):
        return value
    if option.name not in argument_names.NAMES:
        raise ConfigError(f"{path}: {option.name} must be a single value, got {shown(value)}")
    return json.dumps(value)  # as engine arguments have it on the command line


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads YAML as `yaml.safe_load`, which takes the last of equal keys; this one refuses them."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.constructor.ConstructorError(problem=f"{name} is given twice", problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def _yaml(path: Path) -> Mapping[str, Any]:
    try:
        loaded = _Loader(read_text(path)).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = path if mark is None else f"line {mark.line + 1} of {path}"
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where} is not YAML: {problem}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{path} must hold options as `name: value` lines")
    return loaded


def one_model(positional: str | None, option: str | None) -> str | None:
    """Return the model that is given as an argument or as an option. Raises `ConfigError` for both."""
    if positional is not None and option is not None:
        raise ConfigError(f"the model is given twice: {positional!r} and --model {option!r}")
    return positional or option
