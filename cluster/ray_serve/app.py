"""Slipstream on Ray Serve: `serve run cluster.serve:build_app`, or `serve deploy cluster/deploy/serve/config.yaml`.

Serve's proxies forward each gRPC call to the method of its name. Errors become gRPC statuses here, because Serve sends
any other exception to the client as a traceback.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import FastAPI
from google.protobuf.message import Message
from grpc import StatusCode
from grpc_health.v1 import health_pb2
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext

from cluster.ray_serve import router
from cluster.ray_serve.arguments import ServeArguments, ServerArguments
from cluster.ray_serve.deployment import deployed, planned
from cluster.ray_serve.refusals import leave_out_refusals
from cluster.ray_serve.replica import Replica
from protos import slipstream_v1_pb2 as pb
from protos.config.engine import from_json, to_json
from runtime.frontend.keys import TENANT
from runtime.grpc.errors import StatusError, as_status
from runtime.grpc.health import ALIVE, NOT_SERVING, SERVICE, SERVING
from runtime.heap import freeze_heap
from runtime.http.server.limits import GuardOptions

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)
Context = RayServegRPCContext

NO_KEY = "the API key is missing or wrong: send metadata authorization: Bearer KEY"


@serve.ingress()
class Ingress:
    """The Serve ingress of a replica: the HTTP application, and a method for each gRPC method.

    Args:
        config: the `EngineConfig`, as JSON.
        settings: the `ServerArguments`, as JSON.
    """

    async def __init__(self, config: str, settings: str) -> None:  # type: ignore[misc]  # as Serve takes it
        leave_out_refusals()
        self._replica = Replica(from_json(config), ServerArguments.model_validate_json(settings))
        await self._replica.start()
        freeze_heap()
        self._answering = self._replica.answering()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the HTTP application."""
        return self._replica.app()

    async def check_health(self) -> None:
        """Raise if the replica is unhealthy; Serve replaces a replica that raises several times in a row."""
        self._replica.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what Serve gives to `cluster.ray_serve.autoscaling.LoadPolicy`."""
        return self._replica.load()

    def record_routing_stats(self) -> dict[str, Any]:
        """Return what Serve gives to `cluster.ray_serve.router.PrefixRouter`."""
        return router.reported(self._replica.is_ready)

    async def __del__(self) -> None:
        """Close the engine; Serve awaits this after the running requests."""
        await self._replica.close()

    # gRPC: methods of protos/slipstream_v1.proto and grpc.health.v1.

    async def Generate(self, message: pb.GenerateRequest, grpc_context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Stream an answer. When the client disconnects, the generator is closed and the request aborted."""
        try:
            admit(self._replica.guard, grpc_context)
            async with aclosing(self._answering.generate(message, _metadata(grpc_context, "request_id"))) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            raise refused(grpc_context, as_status(error)) from None

    async def Tokenize(self, message: pb.TokenizeRequest, grpc_context: Context) -> pb.TokenizeResponse:
        """Text -> token ids."""
        return await self._answered(self._answering.tokenize, message, grpc_context)

    async def Detokenize(self, message: pb.DetokenizeRequest, grpc_context: Context) -> pb.DetokenizeResponse:
        """Token ids -> text."""
        return await self._answered(self._answering.detokenize, message, grpc_context)

    async def GetModelInfo(self, message: pb.GetModelInfoRequest, grpc_context: Context) -> pb.GetModelInfoResponse:
        """Return the model's name and limits."""
        return await self._answered(self._answering.model_info, message, grpc_context)

    async def GetServerInfo(self, message: pb.GetServerInfoRequest, grpc_context: Context) -> pb.GetServerInfoResponse:
        """Return this replica's state."""
        return await self._answered(self._answering.server_info, message, grpc_context)

    async def Check(
        self, message: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Report whether the replica is alive, or for our service whether it accepts requests. Needs no key."""
        if message.service not in (ALIVE, SERVICE):
            raise refused(grpc_context, StatusError("NOT_FOUND", f"the only service is {SERVICE}"))
        serves = self._replica.is_alive if message.service == ALIVE else self._replica.is_ready
        return health_pb2.HealthCheckResponse(status=SERVING if serves else NOT_SERVING)

    async def _answered(
        self, method: Callable[[RequestT], Awaitable[ReplyT]], message: RequestT, context: Context
    ) -> ReplyT:
        try:
            admit(self._replica.guard, context)
            return await method(message)
        except Exception as error:
            raise refused(context, as_status(error)) from None


def admit(guard: GuardOptions, context: Context) -> None:
    """Check a call's API key, and set its tenant if caches are separated by key.

    Raises:
        StatusError: the key is missing or wrong.
    """
    given = _metadata(context, "authorization")
    if not guard.keys.accepts(given):
        raise StatusError("UNAUTHENTICATED", NO_KEY)
    if guard.salts_by_key:
        TENANT.set(guard.keys.tenant(given))


def _metadata(context: Context, name: str) -> str | None:
    """Return the call's metadata value of *name*; None if absent."""
    return next((str(value) for key, value in context.invocation_metadata() if key == name), None)


def refused(context: Context, status: StatusError) -> RuntimeError:
    """Set *status* for the client and return the exception to raise: Serve offers no other way to end a call."""
    context.set_code(StatusCode[status.code_name])
    context.set_details(status.details)
    return RuntimeError(status.details)


def build_app(args: ServeArguments) -> serve.Application:
    """Return the application of *args*; Serve calls this with the `args:` of its config.

    Raises:
        ConfigError, ModelError: names the argument and the remedy.
        PlacementError: the device is cuda, and the cluster has no GPU.
    """
    plan, config = planned(args.config)
    app: serve.Application = deployed(Ingress, plan, config, args.server).bind(
        to_json(config), args.server.model_dump_json()
    )
    return app
