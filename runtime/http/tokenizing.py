"""`POST /tokenize` and `POST /detokenize`, in vLLM's formats."""

from typing import Any

from fastapi import FastAPI, Request, Response

from protos.errors import InvalidRequestError
from protos.sampling import SamplingParams
from runtime.http.bodies import described, json_response, read_body
from runtime.http.context import RouteContext
from runtime.http.responses import Detokenized, Tokenized
from runtime.http.schemas import DetokenizeRequest, TokenizeRequest


def add_routes(app: FastAPI, context: RouteContext) -> None:
    """Add the routes to *app*."""

    @app.post("/tokenize", openapi_extra=described(TokenizeRequest))
    async def tokenize(http: Request) -> Response:
        """The tokens of a text or a conversation."""
        body = await read_body(http, TokenizeRequest)
        context.model_name(body.model)
        token_ids = await _token_ids(context, body)
        token_strs = context.texts.token_strs(token_ids) if body.return_token_strs else None
        return json_response(Tokenized(len(token_ids), context.engine.info.max_model_len, list(token_ids), token_strs))

    @app.post("/detokenize", openapi_extra=described(DetokenizeRequest))
    async def detokenize(http: Request) -> Response:
        """The text of tokens."""
        body = await read_body(http, DetokenizeRequest)
        context.model_name(body.model)
        return json_response(Detokenized(await context.engine.detokenize(body.tokens)))


async def _token_ids(context: RouteContext, body: TokenizeRequest) -> tuple[int, ...]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", "prompt")
    if body.prompt is not None:
        specials = body.add_special_tokens is not False
        return await context.engine.tokenize(body.prompt, add_special_tokens=specials)
    options: dict[str, Any] = body.template_options
    if body.tools:
        options["tools"] = [tool.for_template() for tool in body.tools]
    prompt = await context.engine.render_chat(body.messages, SamplingParams(), **options)
    if body.add_special_tokens:
        return await context.engine.tokenize(prompt.text, add_special_tokens=True)
    token_ids: tuple[int, ...] = prompt.token_ids
    return token_ids
