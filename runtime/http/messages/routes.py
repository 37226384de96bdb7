"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

import uuid
from dataclasses import replace

from fastapi import FastAPI, Request, Response

from protos.sampling import SamplingParams
from runtime.http.bodies import described, json_response, read_body
from runtime.http.chat import prepare_chat
from runtime.http.context import RouteContext
from runtime.http.job import CompletionJob
from runtime.http.messages.answers import TokenCount
from runtime.http.messages.schemas import CountTokensRequest, MessagesRequest
from runtime.http.messages.translation import chat_request, conversation, named_as_here
from runtime.http.messages.writing import MessageChoice, MessageEnvelope, MessageEventWriter
from runtime.http.responding import respond
from runtime.http.schemas import ChatCompletionRequest
from runtime.http.tools.choice import ToolUse


def add_routes(app: FastAPI, context: RouteContext) -> None:
    """Add the routes to *app*."""

    @app.post("/v1/messages", openapi_extra=described(MessagesRequest))
    async def messages(http: Request) -> Response:
        """Answer a conversation, as in Anthropic's API."""
        return await _answer(context, http, await read_body(http, MessagesRequest))

    @app.post("/v1/messages/count_tokens", openapi_extra=described(CountTokensRequest))
    async def count_tokens(http: Request) -> Response:
        """The number of tokens of a conversation's prompt."""
        body = await read_body(http, CountTokensRequest)
        context.model_name(body.model)
        return json_response(TokenCount(await _num_tokens(context, conversation(body))))


async def _answer(context: RouteContext, http: Request, body: MessagesRequest) -> Response:
    def fit(params: SamplingParams, num_prompt: int) -> SamplingParams:
        """Limit the answer to the context: many clients send the largest limit of Anthropic's models."""
        room = context.engine.info.longest_sequence - num_prompt  # a prompt without any is refused
        return replace(params, max_tokens=min(body.max_tokens, max(1, room)))

    with named_as_here():
        body_of_chat = chat_request(body)
        chat = await prepare_chat(context, body_of_chat, f"msg_{uuid.uuid4().hex}", fit)
    choice = MessageChoice(body_of_chat, context.texts, chat.use, body.max_tokens)
    spec_metrics, origins = context.spec_metrics(body_of_chat), context.origins(body_of_chat)
    envelope = MessageEnvelope(chat.id, chat.model)
    job = CompletionJob([chat.requests], [choice], envelope, "last", spec_metrics, origins)
    return await respond(context, http, body_of_chat, job, lambda job: MessageEventWriter(job, choice))


async def _num_tokens(context: RouteContext, chat: ChatCompletionRequest) -> int:
    """Count the tokens of the prompt of *chat*, also where the server would not let the model choose its tools."""
    use = ToolUse(tuple(chat.tools or ()), "none" if chat.tool_choice == "none" or not chat.tools else "auto")
    template_options = chat.template_options | use.template_options
    prompt = await context.engine.render_chat(chat.messages, SamplingParams(), **template_options)
    return len(prompt.token_ids)
