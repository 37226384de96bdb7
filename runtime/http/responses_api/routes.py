"""The route of the Responses API."""

from fastapi import FastAPI, Request, Response

from runtime.http.bodies import described, read_body
from runtime.http.context import RouteContext
from runtime.http.responding import respond
from runtime.http.responses_api.answer import ResponseEvents, response_job
from runtime.http.responses_api.request import ResponsesRequest


def add_routes(app: FastAPI, context: RouteContext) -> None:
    """Add the route to *app*."""

    @app.post("/v1/responses", openapi_extra=described(ResponsesRequest))
    async def responses(http: Request) -> Response:
        """Answer a conversation with output items; nothing is stored."""
        body = await read_body(http, ResponsesRequest)
        chat = body.chat()
        return await respond(context, http, chat, await response_job(context, body, chat), ResponseEvents)
