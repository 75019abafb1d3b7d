"""Server interceptors: map errors to statuses, and note the caller's deadline."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from grpc.aio import ServerInterceptor, ServicerContext

from services.common import deadline
from services.common.status import CODES, error_to_trailers, known_error

logger = logging.getLogger(__name__)

Handler = Any  # grpc.RpcMethodHandler: its behaviour attributes are untyped


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
        coding = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(_unary(handler.unary_unary), *coding)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(_unary(handler.stream_unary), *coding)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(_stream(handler.unary_stream), *coding)
        return grpc.stream_stream_rpc_method_handler(_stream(handler.stream_stream), *coding)


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


def _stream(behaviour: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    async def handle(request: Any, context: ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        deadline.set_remaining(context.time_remaining())
        try:
            async for response in behaviour(request, context):
                yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error)

    return handle


async def _abort(context: ServicerContext[Any, Any], error: Exception) -> NoReturn:
    known = known_error(error)
    # abort, not abort_with_status: the telemetry interceptor sees only the former.
    await context.abort(CODES[known.reason], known.message, error_to_trailers(known))
