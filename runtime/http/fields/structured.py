"""The fields that request structured output: OpenAI's, vLLM's, and vLLM's deprecated ones."""

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from protos.errors import InvalidRequestError

STRICT = ConfigDict(extra="forbid", strict=True)
GUIDED, PARAM = "guided_", "structured_outputs"
Name = Annotated[str, Field(min_length=1, max_length=64)]


class JsonSchemaFormat(BaseModel):
    """A named JSON schema. It is always enforced, also without `strict`."""

    model_config = STRICT

    name: Name | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`."""

    model_config = STRICT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def structured_outputs_fields(self) -> dict[str, Any] | None:
        """Return the fields of `StructuredOutputsParams`; None for text. Raises `InvalidRequestError`."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            have = "needs" if self.type == "json_schema" else "takes no"
            raise InvalidRequestError(f"response_format of type {self.type!r} {have} json_schema", "response_format")
        if self.json_schema is not None:
            schema = self.json_schema.json_schema
            return {"json": True if schema is None else schema}
        return {"json_object": True} if self.type == "json_object" else None


class StructuredFields(BaseModel):
    """The fields of a body that request structured output; at most one may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    def structured_outputs_fields(self) -> dict[str, Any] | None:
        """Return the fields of `StructuredOutputsParams`; None if none are given.

        Raises:
            InvalidRequestError: more than one way is used.
        """
        guided = {
            name.removeprefix(GUIDED): value
            for name in StructuredFields.model_fields
            if name.startswith(GUIDED) and (value := getattr(self, name)) is not None
        }
        formatted = None if self.response_format is None else self.response_format.structured_outputs_fields()
        given = [fields for fields in (formatted, self.structured_outputs, guided or None) if fields is not None]
        if len(given) > 1:
            raise InvalidRequestError(
                "response_format, structured_outputs and the guided_ fields exclude each other: give one of them",
                "response_format" if formatted is not None else "structured_outputs",
            )
        return given[0] if given else None

    @contextlib.contextmanager
    def structured_as_sent(self) -> Iterator[None]:
        """Name the field that the request has in errors about its structured output."""
        try:
            yield
        except InvalidRequestError as error:
            name = self._name_sent()
            if error.param != PARAM or name == PARAM:
                raise
            raise InvalidRequestError(str(error).replace(PARAM, name, 1), name) from None

    def _name_sent(self) -> str:
        """Return the name of the field that requests structured output; plain text is none."""
        if self.response_format is not None and self.response_format.structured_outputs_fields() is not None:
            return "response_format"
        names = [name for name in StructuredFields.model_fields if name != "response_format"]
        return next((name for name in names if getattr(self, name) is not None), PARAM)
