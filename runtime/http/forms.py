"""How a body says what form the answer must have: OpenAI's way, vLLM's, and vLLM's older one."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from protos.errors import InvalidRequestError

STRICT = ConfigDict(extra="forbid", strict=True)
GUIDED = "guided_"
Name = Annotated[str, Field(min_length=1, max_length=64)]


class JsonSchemaFormat(BaseModel):
    """A JSON schema with a name. It is always followed to the letter, whatever `strict` says."""

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

    def form(self) -> dict[str, Any] | None:
        """Return it as fields of `StructuredOutputsParams`; None for plain text. Raises `InvalidRequestError`."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            have = "needs" if self.type == "json_schema" else "takes no"
            raise InvalidRequestError(f"response_format of type {self.type!r} {have} json_schema", "response_format")
        if self.json_schema is not None:
            schema = self.json_schema.json_schema
            return {"json": True if schema is None else schema}
        return {"json_object": True} if self.type == "json_object" else None


class FormFields(BaseModel):
    """The fields of a body that say it; at most one of them does."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    def form(self) -> dict[str, Any] | None:
        """Return what was asked as fields of `StructuredOutputsParams`; None where nothing was.

        Raises:
            InvalidRequestError: it was asked in two ways.
        """
        guided = {
            name.removeprefix(GUIDED): value
            for name in FormFields.model_fields
            if name.startswith(GUIDED) and (value := getattr(self, name)) is not None
        }
        formatted = None if self.response_format is None else self.response_format.form()
        asked = [form for form in (formatted, self.structured_outputs, guided or None) if form is not None]
        if len(asked) > 1:
            raise InvalidRequestError(
                "response_format, structured_outputs and the guided_ fields say the same: give one of them",
                "response_format" if formatted is not None else "structured_outputs",
            )
        return asked[0] if asked else None
