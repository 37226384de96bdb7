"""The request bodies of the Messages API."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from protos.errors import InvalidRequestError
from runtime.http.errors import ApiError
from runtime.http.fields.unsupported import Neutral
from runtime.http.messages.errors import NO_THREADS
from runtime.http.messages.tools import STRICT, ClientTool, InputToolChoice
from runtime.http.schemas import RequestBody, SamplingFields

# Fields of Anthropic's client that have no effect here. `metadata` and `service_tier` are ignored at all endpoints.
IGNORED = frozenset({"cache_control", "thinking", "inference_geo", "diagnostics"})
EDITS = "context_management"
CLEAR_THINKING = "clear_thinking"
"""Edits whose type begins so remove reasoning, which is never in a prompt here."""


class JsonOutput(BaseModel):
    """A JSON schema that the answer follows."""

    model_config = STRICT

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """Anthropic's `output_config`. `effort` has no effect."""

    model_config = STRICT

    effort: str | None = None
    format: JsonOutput | None = None


class CountTokensRequest(RequestBody):
    """The body of `POST /v1/messages/count_tokens`: a conversation."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: InputToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = None

    neutral: ClassVar[Neutral] = {
        "container": (None,),
        "mcp_servers": (None, []),
        "speed": (None, "standard"),
        EDITS: (None, {}, {"edits": []}),
    }

    @classmethod
    def screened(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `RequestBody`. Fields that are null are left out: the client sends some that are unknown here."""
        wanted = {name: value for name, value in fields.items() if name not in IGNORED and value is not None}
        if "thread" in wanted:
            raise ApiError(
                400, "thread is not supported: send the whole conversation as messages", "thread", NO_THREADS
            )
        if _only_removes_thinking(wanted.get(EDITS)):
            del wanted[EDITS]
        return super().screened(wanted)

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The schema of the answer, from `output_config` or from the older `output_format`.

        Raises:
            InvalidRequestError: both are given.
        """
        config = None if self.output_config is None else self.output_config.format
        if config is not None and self.output_format is not None:
            raise InvalidRequestError("output_format and output_config.format exclude each other", "output_format")
        chosen = config or self.output_format
        return None if chosen is None else chosen.json_schema


def _only_removes_thinking(edits: object) -> bool:
    """Whether *edits*, a `context_management`, only remove thinking."""
    if not isinstance(edits, dict) or edits.keys() != {"edits"} or not isinstance(edits["edits"], list):
        return False
    kinds = [edit.get("type") if isinstance(edit, dict) else None for edit in edits["edits"]]
    return all(isinstance(kind, str) and kind.startswith(CLEAR_THINKING) for kind in kinds)


class MessagesRequest(CountTokensRequest, SamplingFields):
    """The body of `POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
