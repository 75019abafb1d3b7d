"""Server interceptors: map errors to statuses, and note the caller's deadline."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from grpc.aio import ServerInterceptor, ServicerContext

from services.common import deadline
from services.common.status import CODES, error_message, error_to_trailers, known_error

logger = logging.getLogger(__name__)

Handler = Any  # grpc.RpcMethodHandler: its behaviour attributes are untyped
# Yields its responses, or writes them to the context, as gRPC's own health service does.
Stream = Callable[..., AsyncGenerator[Any, None] | Awaitable[None]]


def wrapped(handler: Handler, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Handler:
    """Return a handler of the same kind and coding whose behaviour is `wrap(behaviour)`."""
    kind = (
        f"{'stream' if handler.request_streaming else 'unary'}_"
        f"{'stream' if handler.response_streaming else 'unary'}"
    )
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    behaviour = getattr(handler, kind)
    return make(wrap(behaviour), handler.request_deserializer, handler.response_serializer)


class StreamInterceptor(ServerInterceptor):
    """Ends each stream at once when its caller leaves, and in the context that began it.

    gRPC drops a generator that it no longer needs; whoever collects it closes it some time later,
    in another context, where the telemetry interceptor cannot end its span. So gRPC is given none.
    Stands outside all others.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the handler of a method that answers with a stream."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler.response_streaming:
            return handler
        return wrapped(handler, _written)


def _written(behaviour: Stream) -> Callable[..., Awaitable[None]]:
    async def handle(request: Any, context: ServicerContext[Any, Any]) -> None:
        responses = behaviour(request, context)
        if isinstance(responses, Awaitable):
            return await responses
        async with aclosing(responses):
            async for response in responses:
                try:
                    await context.write(response)
                except grpc.aio.InternalError as error:
                    # The call is over; that this task is cancelled for it comes a moment later.
                    raise asyncio.CancelledError from error
        return None

    return handle


class ErrorInterceptor(ServerInterceptor):
    """Turns whatever a servicer raises into a status with a documented reason.

    Stands inside the telemetry interceptor, so that spans show the mapped code.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the method's handler."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return wrapped(handler, _stream if handler.response_streaming else _unary)


def _unary(behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def handle(request: Any, context: ServicerContext[Any, Any]) -> Any:
        deadline.set_remaining(context.time_remaining())
        try:
            return await behaviour(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error)

    return handle


def _stream(behaviour: Stream) -> Callable[..., AsyncIterator[Any]]:
    async def handle(request: Any, context: ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        deadline.set_remaining(context.time_remaining())
        try:
            responses = behaviour(request, context)
            if isinstance(responses, Awaitable):
                await responses
                return
            async with aclosing(responses):
                async for response in responses:
                    yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error)

    return handle


async def _abort(context: ServicerContext[Any, Any], error: Exception) -> NoReturn:
    known = known_error(error)
    # abort, not abort_with_status: the telemetry interceptor sees only the former.
    await context.abort(CODES[known.reason], error_message(known), error_to_trailers(known))
