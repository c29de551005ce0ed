"""A client that has a conversation, and looks at conversations as vmmctl does."""

from typing import Any

from strata_api.v1 import admin_pb2

from tests.helpers.peer import Client
from vmmd.ctl.admin import admin_stub


class Talker(Client):
    """Its cells say which tokens they hold: every value of a cell is its token."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self._directory = directory

    def compute(self, tokens: list[int]) -> None:
        """Fills the next cells."""
        kv, begin = self.kv[-1], self._transcript.complete
        self.session.grow([kv], begin + len(tokens))
        for i, token in enumerate(tokens, begin):
            slab = kv.segments(0, i + 1)[i // kv.cells_per_slab]
            for values in slab:
                values[i % kv.cells_per_slab] = token
        self._transcript.add(tokens)

    def said(self) -> list[int]:
        """The tokens of the cells, by their own word and by the page's, which must agree."""
        n = self._transcript.complete
        found = [int(value) for k, v in self.kv[-1].segments(0, n) for value in k[:, 0, 0]] if n else []
        assert self._transcript.common(found) == n
        return found

    def listed(self) -> dict[str, tuple[int, str, int]]:
        """Conversations by name: (user id, state, cells)."""
        with admin_stub(self._directory) as (stub, metadata):
            parts = list(stub.Conversations(admin_pb2.ConversationsRequest(), metadata=metadata))
        return {c.name: (c.uid, c.state, c.cells) for part in parts for c in part.conversations}

    def drop(self, name: str, **whose: Any) -> int:
        """Drops one; how many cells it had."""
        with admin_stub(self._directory) as (stub, metadata):
            reply = stub.DropConversation(admin_pb2.DropConversationRequest(name=name, **whose), metadata=metadata)
        return int(reply.cells)
