"""What every RPC has in common: who calls, one log line, errors on the wire."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache, wraps
from typing import Any

import grpc
import structlog
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from vmmd.errors import (
    DriverError,
    Exhausted,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    Unavailable,
    VmmError,
)

log = structlog.get_logger("vmmd.rpc")

Context = grpc.aio.ServicerContext[Any, Any]

TOKEN_KEY = "strata-token"
ERROR_DOMAIN = "strata"

CODES: tuple[tuple[type[VmmError], int], ...] = (
    (InvalidRequest, code_pb2.INVALID_ARGUMENT),
    (NotFound, code_pb2.NOT_FOUND),
    (Exhausted, code_pb2.RESOURCE_EXHAUSTED),
    (PreconditionFailed, code_pb2.FAILED_PRECONDITION),
    (PermissionDenied, code_pb2.PERMISSION_DENIED),
    (Unavailable, code_pb2.UNAVAILABLE),
    (DriverError, code_pb2.INTERNAL),
    (VmmError, code_pb2.INTERNAL),
)
"""The one table from domain errors to gRPC codes; the first class that fits counts."""


def status_of(error: VmmError) -> status_pb2.Status:
    """The rich status of an error: code, message, reason and fields."""
    code = next(code for cls, code in CODES if isinstance(error, cls))
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=error.fields())
    detail = any_pb2.Any()
    detail.Pack(info)
    return status_pb2.Status(code=code, message=error.message, details=[detail])


def token_of(context: Context) -> str:
    """The caller's token, empty where none was sent."""
    return token_in(context.invocation_metadata())


def token_in(metadata: Any) -> str:
    """The token in a call's metadata, empty where there is none."""
    for key, value in metadata or ():
        if key == TOKEN_KEY:
            return str(value)
    return ""


async def abort(context: Context, error: VmmError) -> None:
    """Ends a call with an error."""
    status = rpc_status.to_status(status_of(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


def _known(error: Exception, method: str) -> VmmError:
    """Our own bugs become one line for the caller and a traceback in the log."""
    if isinstance(error, VmmError):
        return error
    log.exception("rpc.bug", method=method)
    return VmmError(f"vmmd failed at {method}: {type(error).__name__}; its log says more")


def unary(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Decorates a unary-reply RPC: log line, duration, errors to status."""

    @wraps(method)
    async def call(self: Any, request: Any, context: Context) -> Any:
        began, reason = time.perf_counter(), "ok"
        try:
            return await method(self, request, context)
        except Exception as error:
            known = _known(error, method.__name__)
            reason = known.reason
            await abort(context, known)
        finally:
            log_call(method.__name__, reason, began)

    return call


def streaming(method: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """The same for an RPC that streams its replies."""

    @wraps(method)
    async def call(self: Any, request: Any, context: Context) -> AsyncIterator[Any]:
        began, reason = time.perf_counter(), "ok"
        try:
            async for reply in method(self, request, context):
                yield reply
        except Exception as error:
            known = _known(error, method.__name__)
            reason = known.reason
            await abort(context, known)
        finally:
            log_call(method.__name__, reason, began)

    return call


@cache
def _bound() -> Any:
    """The logger as configured; resolving it anew costs each call as much as its answer."""
    return log.bind()


def log_call(method: str, code: str, began: float) -> None:
    """The one line of a call that began at `began` of `time.perf_counter`."""
    emit = _bound().debug if code == "ok" else log.info
    emit("rpc", method=method, code=code, duration_ms=round((time.perf_counter() - began) * 1e3, 3))
