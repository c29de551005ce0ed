"""The `Admin` service: vmmctl's."""

from collections.abc import AsyncIterator, Collection, Mapping

import structlog
from strata_api.v1 import admin_pb2, admin_pb2_grpc

from vmmd.errors import PermissionDenied
from vmmd.manager import Manager
from vmmd.server import status
from vmmd.server.rpc import Context, streaming, token_of, unary

log = structlog.get_logger("vmmd.admin")


class Admin(admin_pb2_grpc.AdminServicer):
    """Anyone who may connect may look; `admin_uids` may drain."""

    def __init__(self, manager: Manager, admins: Mapping[str, int], admin_uids: Collection[int]) -> None:
        self._manager = manager
        self._admins = admins
        self._admin_uids = admin_uids

    def _caller(self, context: Context) -> int:
        uid = self._admins.get(token_of(context))
        if uid is None:
            raise PermissionDenied("this token is no administrator connection's; connect to the broker again")
        return uid

    @streaming
    async def Status(self, request: admin_pb2.StatusRequest, context: Context) -> AsyncIterator[admin_pb2.StatusPart]:
        self._caller(context)
        self._manager.measure()
        for part in list(status.parts(self._manager)):
            yield part

    @unary
    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainReply:
        uid = self._caller(context)
        if uid not in self._admin_uids:
            raise PermissionDenied(
                f"user {uid} may not drain this vmmd; root, the daemon's own user and admin_users may"
            )
        log.info("daemon.draining", by_uid=uid)
        return admin_pb2.DrainReply(sessions=self._manager.drain())
