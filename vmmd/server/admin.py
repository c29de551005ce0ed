"""The `Admin` service: vmmctl's."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping

import structlog
from strata_api.v1 import admin_pb2, admin_pb2_grpc

from vmmd.errors import PermissionDenied
from vmmd.manager import Manager, verify
from vmmd.server import convert, status
from vmmd.server.rpc import Context, streaming, token_of, unary

log = structlog.get_logger("vmmd.admin")

PROGRESS_S = 0.2
DECISIONS_A_PART = 100


class Admin(admin_pb2_grpc.AdminServicer):
    """Anyone who may connect may look, conversations of others apart; `admin_uids` may see and do everything."""

    def __init__(self, manager: Manager, admins: Mapping[str, int], admin_uids: Collection[int]) -> None:
        self._manager = manager
        self._admins = admins
        self._admin_uids = admin_uids

    def _caller(self, context: Context) -> int:
        uid = self._admins.get(token_of(context))
        if uid is None:
            raise PermissionDenied("this token is no administrator connection's; connect to the broker again")
        return uid

    def _administrator(self, context: Context, what: str) -> int:
        uid = self._caller(context)
        if uid not in self._admin_uids:
            raise PermissionDenied(f"user {uid} may not {what}; root, the daemon's own user and admin_users may")
        return uid

    @streaming
    async def Status(self, request: admin_pb2.StatusRequest, context: Context) -> AsyncIterator[admin_pb2.StatusPart]:
        self._caller(context)
        for part in list(status.parts(self._manager)):
            yield part

    @unary
    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainReply:
        uid = self._administrator(context, "drain this vmmd")
        log.info("daemon.draining", by_uid=uid)
        return admin_pb2.DrainReply(sessions=self._manager.drain())

    @streaming
    async def Conversations(
        self, request: admin_pb2.ConversationsRequest, context: Context
    ) -> AsyncIterator[admin_pb2.ConversationsPart]:
        uid = self._caller(context)
        for part in list(status.conversations(self._manager, None if uid in self._admin_uids else uid)):
            yield part

    @unary
    async def DropConversation(
        self, request: admin_pb2.DropConversationRequest, context: Context
    ) -> admin_pb2.DropConversationReply:
        uid = self._caller(context)
        if request.HasField("uid") and request.uid != uid:
            self._administrator(context, f"drop conversations of user {request.uid}")
        whose = request.uid if request.HasField("uid") else uid
        cells, n_bytes = await self._manager.conversations.drop(whose, request.name)
        log.info("conversation.drop", by_uid=uid, uid=whose)
        return admin_pb2.DropConversationReply(cells=cells, bytes=n_bytes)

    async def Trades(self, request: admin_pb2.TradesRequest, context: Context) -> AsyncIterator[admin_pb2.TradesPart]:
        self._caller(context)
        now_s = time.monotonic()
        newest = list(self._manager.decisions)[::-1][: request.count_max or None]
        for i in range(0, len(newest), DECISIONS_A_PART):
            part = newest[i : i + DECISIONS_A_PART]
            yield admin_pb2.TradesPart(decisions=[convert.decision(d, now_s) for d in part])

    @unary
    async def Explain(self, request: admin_pb2.ExplainRequest, context: Context) -> admin_pb2.ExplainReply:
        self._caller(context)
        facts = self._manager.explain(request.id)
        return admin_pb2.ExplainReply(facts=[admin_pb2.Fact(topic=f.topic, text=f.text) for f in facts])

    @streaming
    async def Verify(self, request: admin_pb2.VerifyRequest, context: Context) -> AsyncIterator[admin_pb2.VerifyEvent]:
        self._administrator(context, "verify models of this vmmd")
        verification = verify.Verification(verify.find(self._manager.models, request.model))
        task = asyncio.create_task(verification.run())
        try:
            while not (await asyncio.wait([task], timeout=PROGRESS_S))[0]:
                yield admin_pb2.VerifyEvent(
                    progress=admin_pb2.VerifyProgress(
                        compared_bytes=verification.compared_bytes, total_bytes=verification.total_bytes
                    )
                )
            task.result()
            yield admin_pb2.VerifyEvent(summary=convert.verified(verification))
        finally:
            task.cancel()
