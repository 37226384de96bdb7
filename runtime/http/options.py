"""Safety options of a server, with the same names as CLI options, YAML keys and Ray Serve arguments."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from protos.errors import ConfigError
from protos.validation import one_line
from runtime.frontend.admission import QueueLimits
from runtime.frontend.keys import Keys
from runtime.frontend.pacing import UNPACED, Aggregate, Pacing
from runtime.frontend.stream_queue import ReadingLimits
from runtime.http.server.limits import ConnectionLimits, GuardOptions
from runtime.http.server.sites import Sites

StreamPacing = Literal["off", "aggregate"]


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
"""Several texts; a single one may stand for itself."""


class SafetyOptions(BaseModel):
    """API keys, limits and time-outs. `--help` shows the descriptions.

    The last two do not apply on Ray Serve, which has its own HTTP server.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    api_key: Texts = Field((), repr=False, description="a key clients must send, several may be given")
    max_waiting_requests: int = Field(1024, ge=1, description="requests that may wait; more are refused with 429")
    max_waiting_tokens: int = Field(1_048_576, ge=1, description="prompt tokens that may wait")
    request_timeout: float | None = Field(
        None, gt=0, le=86_400, description="seconds a request that sets no time-out may wait and run; default: no limit"
    )
    read_timeout: float = Field(60.0, gt=0, le=86_400, description="seconds a client may read nothing of its answer")
    body_timeout: float = Field(60.0, gt=0, le=86_400, description="seconds a request's body may take to arrive")
    stream_pacing: StreamPacing = Field(
        "off", description="aggregate: streams in equal packets at equal times, which reveal nothing of the text"
    )
    cache_salt_by_key: bool = Field(
        True, description="keep the caches of each API key apart, as if it were part of cache_salt"
    )
    allowed_origins: Texts = Field(
        (), description="another site whose pages may use the server, such as https://chat.example; several; * is any"
    )
    allowed_hosts: Texts = Field(
        (),
        description="a name clients may reach the server by, several may be given; default: any, or if it listens "
        "on the loopback localhost",
    )
    max_connections: int = Field(4096, ge=1, description="HTTP connections at a time")
    header_timeout: float = Field(20.0, gt=0, le=86_400, description="seconds a request's headers may take to arrive")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "SafetyOptions":
        """Validate the options *given*. Raises `ConfigError`, which never contains a key."""
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            text, name = one_line(error, cls.model_fields)
            raise ConfigError("api_key must be text, or a list of texts" if name == "api_key" else text) from None

    @property
    def keys(self) -> Keys:
        """The API keys. Raises `ConfigError`."""
        return Keys(self.api_key)

    @property
    def queue(self) -> QueueLimits:
        """Limits on waiting requests."""
        return QueueLimits(self.max_waiting_requests, self.max_waiting_tokens)

    @property
    def reading(self) -> ReadingLimits:
        """Limits on slow readers."""
        return ReadingLimits(stall_s=self.read_timeout)

    @property
    def guard(self) -> GuardOptions:
        """Options of the `Guard`. Raises `ConfigError`."""
        sites = Sites(self.allowed_origins, self.allowed_hosts)
        return GuardOptions(self.keys, self.body_timeout, salts_by_key=self.cache_salt_by_key, sites=sites)

    @property
    def pacing(self) -> Pacing:
        """How streams are divided into packets."""
        return Aggregate() if self.stream_pacing == "aggregate" else UNPACED

    @property
    def connections(self) -> ConnectionLimits:
        """Limits on connections."""
        return ConnectionLimits(self.max_connections, head_timeout_s=self.header_timeout, stall_s=self.read_timeout)
