"""What every call passes before its handler: a count by user, and bytes that must be one message.

A call counts from its first byte, not from its request, which may never come.
Callers without a token (of the health service, or nobody's) share the limit of one
user.
"""

import inspect
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from vmmd.errors import Exhausted, InvalidRequest, VmmError
from vmmd.server.rpc import Context, abort, log_call, token_in


class Calls(grpc.aio.ServerInterceptor):
    """Refuses a user's calls beyond so many in flight, and what is no message of the method's kind."""

    def __init__(self, user_of: Callable[[str], int | None], calls_per_user_max: int) -> None:
        """`user_of` gives the user id of a token, None where it is nobody's."""
        self._user_of = user_of
        self._most = calls_per_user_max
        self._in_flight: Counter[int | None] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # no such method
        user = self._user_of(token_in(handler_call_details.invocation_metadata))
        if handler.response_streaming:
            method, make = handler.stream_stream or handler.unary_stream, grpc.stream_stream_rpc_method_handler
        else:
            method, make = handler.stream_unary or handler.unary_unary, grpc.stream_unary_rpc_method_handler
        decode = handler.request_deserializer
        name = handler_call_details.method.rpartition("/")[2]

        async def request_of(received: AsyncIterator[bytes], context: Context) -> Any:
            if handler.request_streaming:
                return _decoded(received, decode, name)
            return _decode(await _only(context), decode, name)

        async def call(received: AsyncIterator[bytes], context: Context) -> Any:
            async with self._admitted(user, name, context):
                return await method(await request_of(received, context), context)

        async def stream(received: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            async with self._admitted(user, name, context):
                async for reply in method(await request_of(received, context), context):
                    yield reply

        return make(stream if inspect.isasyncgenfunction(method) else call, None, handler.response_serializer)

    @asynccontextmanager
    async def _admitted(self, user: int | None, method: str, context: Context) -> AsyncIterator[None]:
        """Counts a call of a user, or ends it with the reason why not."""
        began = time.perf_counter()
        try:
            with self._counted(user):
                yield
        except VmmError as error:  # the handlers' own are aborted by then
            log_call(method, error.reason, began)
            await abort(context, error)

    @contextmanager
    def _counted(self, user: int | None) -> Iterator[None]:
        if self._in_flight[user] >= self._most:
            who = "callers without a session have" if user is None else f"user {user} has"
            raise Exhausted(
                f"{who} {self._most} calls in flight, which is the limit (calls_per_user_max); wait for some to end"
            )
        self._in_flight[user] += 1
        try:
            yield
        finally:
            self._in_flight[user] -= 1
            if not self._in_flight[user]:
                del self._in_flight[user]


def _decode(data: bytes, decode: Callable[[bytes], Any], method: str) -> Any:
    """The message. Errors: `InvalidRequest`."""
    try:
        return decode(data)
    except DecodeError:
        raise InvalidRequest(
            f"a request of {method} is no message of its kind; is the client of another version?"
        ) from None


async def _decoded(received: AsyncIterator[bytes], decode: Callable[[bytes], Any], method: str) -> AsyncIterator[Any]:
    async for data in received:
        yield _decode(data, decode, method)


async def _only(context: Context) -> bytes:
    """The one request of a call. Errors: `InvalidRequest` where there is none."""
    data = await context.read()
    if data is grpc.aio.EOF:
        raise InvalidRequest("the call ended without a request")
    return bytes(data)
