"""What nobody honest sends: bytes, messages and shared pages drawn from a seed."""

import os
import random
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from strata_api.v1 import admin_pb2, broker_pb2, memory_pb2, pages

from strata_client import connection
from strata_client.session import OpenedModel
from tests.helpers.peer import Client, SmallModel, Wire

NUMBERS = (0, 1, 2, 15, 16, 17, 255, 4096, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1)
_BITS = {
    FieldDescriptor.TYPE_UINT32: 32,
    FieldDescriptor.TYPE_INT32: 31,
    FieldDescriptor.TYPE_ENUM: 31,
    FieldDescriptor.TYPE_UINT64: 64,
}
CALLS = {
    "/strata_api.v1.Memory/ListDevices": memory_pb2.ListDevicesRequest,
    "/strata_api.v1.Memory/OpenModel": memory_pb2.OpenModelRequest,
    "/strata_api.v1.Memory/CloseModel": memory_pb2.CloseModelRequest,
    "/strata_api.v1.Memory/CreateRange": memory_pb2.CreateRangeRequest,
    "/strata_api.v1.Memory/GrowRanges": memory_pb2.GrowRangesRequest,
    "/strata_api.v1.Memory/ShrinkRange": memory_pb2.ShrinkRangeRequest,
    "/strata_api.v1.Memory/CloseRange": memory_pb2.CloseRangeRequest,
    "/strata_api.v1.Memory/ParkRange": memory_pb2.ParkRangeRequest,
    "/strata_api.v1.Memory/Watch": memory_pb2.WatchRequest,
    "/strata_api.v1.Admin/Status": admin_pb2.StatusRequest,
    "/strata_api.v1.Admin/Verify": admin_pb2.VerifyRequest,
    "/strata_api.v1.Admin/Conversations": admin_pb2.ConversationsRequest,
    "/strata_api.v1.Admin/DropConversation": admin_pb2.DropConversationRequest,
    "/strata_api.v1.Nobody/Nothing": memory_pb2.ListDevicesRequest,
    "/grpc.health.v1.Health/Watch": memory_pb2.ListDevicesRequest,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": memory_pb2.ListDevicesRequest,
}
"""Requests by method. Drain is not among them: whoever may call it means it."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Fuzzer:
    """An evil client of a daemon; `attack` does one thing that no client should.

    Its ids are drawn from those of its own session, and from all over 64 bits.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._random = random.Random(0)
        self._client = Client(directory)
        self._model: SmallModel | None = None
        self._ids = [1]

    def prepare(self, model: SmallModel, seed: int) -> None:
        """Opens a model and makes a range, whose ids it then uses; everything after follows from the seed."""
        self._random.seed(seed)
        self._model = model
        self._client.open(model)
        self._client.create()
        self._ids = [self._client.opened[0].model_id, self._client.kv[0].range.range_id, *range(1, 12)]

    def attack_for(self, count: int) -> dict[str, int]:
        """So many attacks; returns how many there were of each kind."""
        kinds: Sequence[Callable[[], None]] = (self._packets, self._stream, self._call, self._call, self._pages)
        done: dict[str, int] = {}
        for _ in range(count):
            attack = self._random.choice(kinds)
            attack()
            done[attack.__name__] = done.get(attack.__name__, 0) + 1
        return done

    # The broker

    def _packets(self) -> None:
        """Packets of bytes or messages, with descriptors, read or not, before Hello and after it."""
        fds = [os.open(self._directory / "vmmd.toml", os.O_RDONLY), os.open("/dev/zero", os.O_RDONLY)]
        try:
            with suppress(OSError), Wire(self._directory, hello=self._random.random() < 0.7, timeout_s=1) as wire:
                wire.sock.settimeout(1)
                for _ in range(self._random.randrange(1, 12)):
                    lent = self._random.choices(fds, k=self._random.choice((0, 0, 0, 1, 3, 200)))
                    socket.send_fds(wire.sock, [self._packet()], lent)
                    if self._random.random() < 0.7 and not wire.receive().WhichOneof("kind"):
                        break
        finally:
            for fd in fds:
                os.close(fd)

    def _packet(self) -> bytes:
        request = broker_pb2.BrokerRequest()
        self._fill(request)
        return self._spoilt(request.SerializeToString()) or b"\0"

    # gRPC

    def _stream(self) -> None:
        """Bytes on the gRPC socket: noise, HTTP/2 frames of noise, or a connection that just stays a while."""
        with socket.socket(socket.AF_UNIX) as sock, suppress(OSError):
            sock.settimeout(0.5)
            sock.connect(os.fspath(self._directory / "vmmd.sock"))
            if self._random.random() < 0.3:
                sock.sendall(self._random.randbytes(self._random.randrange(1, 5000)))
            else:
                sock.sendall(_PREFACE + _frame(4, 0, 0, b""))
                for _ in range(self._random.randrange(1, 30)):
                    sock.sendall(self._frame())
            if self._random.random() < 0.5:
                sock.recv(1 << 16)

    def _frame(self) -> bytes:
        payload = self._random.randbytes(self._random.choice((0, 4, 5, 8, 40, 1000)))
        stream = self._random.choice((0, 1, 1, 3, 5, 2, (1 << 31) - 1))
        frame = _frame(self._random.randrange(12), self._random.randrange(256), stream, payload)
        return self._spoilt(frame) if self._random.random() < 0.2 else frame

    def _call(self) -> None:
        """A call with this session's token or another, of a method that there is or is not, with any payload."""
        method, kind = self._random.choice(list(CALLS.items()))
        parts = []
        for _ in range(self._random.choice((0, 1, 1, 1, 2, 9))):
            request = kind()
            self._fill(request)
            parts.append(self._spoilt(request.SerializeToString()))
        token = self._random.choice((self._client.token(),) * 6 + ("", "f" * 64, "z" * 3000))
        call = self._client.session._channel.stream_stream(method, None, None)(
            iter(parts), metadata=((connection.TOKEN_KEY, token),), timeout=self._random.choice((0.01, 0.3))
        )
        try:
            for _ in call:
                if self._random.random() < 0.2:
                    call.cancel()
        except grpc.RpcError:
            pass

    # What it shares with the daemon

    def _pages(self) -> None:
        """Numbers that make no sense in the session page and the heat page, a step that never ends among them."""
        opened: OpenedModel = self._client.opened[0]
        words = self._client.session._page[: pages.LINE_WORDS]
        heat = opened.memory.heat
        for page in (words, heat):
            at = np.array([self._random.randrange(len(page)) for _ in range(8)])
            page[at] = np.array([self._number(64) for _ in at], np.uint64)

    # Noise

    def _fill(self, message: Message) -> None:
        """Sets some fields, one of each oneof, to numbers at the edges, own ids, and texts."""
        fields: list[Any] = [f for f in message.DESCRIPTOR.fields if f.containing_oneof is None]
        fields += [self._random.choice(list(oneof.fields)) for oneof in message.DESCRIPTOR.oneofs]
        for field in fields:
            if self._random.random() < 0.15:
                continue
            if field.is_repeated:
                for _ in range(self._random.choice((0, 1, 2, 40))):
                    if field.message_type:
                        self._fill(getattr(message, field.name).add())
                    else:
                        getattr(message, field.name).append(self._value(field))
            elif field.message_type:
                getattr(message, field.name).SetInParent()
                self._fill(getattr(message, field.name))
            elif field.name == "protocol_version" and self._random.random() < 0.5:
                setattr(message, field.name, pages.PROTOCOL_VERSION)
            else:
                setattr(message, field.name, self._value(field))

    def _value(self, field: Any) -> Any:
        if field.type == FieldDescriptor.TYPE_STRING:
            return self._random.choice(("", "HOST-SIM-0", "x" * 3000, "\x1b[31m\n\0", "\u202e"))
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._random.randbytes(self._random.choice((0, 16, 300)))
        if field.type == FieldDescriptor.TYPE_BOOL:
            return self._random.random() < 0.5
        if field.type == FieldDescriptor.TYPE_SINT32:
            return self._number(31) * self._random.choice((1, -1))
        return self._number(_BITS[field.type])

    def _number(self, bits: int) -> int:
        kind = self._random.random()
        if kind < 0.5:
            return self._random.choice(self._ids)
        return (self._random.choice(NUMBERS) if kind < 0.8 else self._random.getrandbits(64)) & ((1 << bits) - 1)

    def _spoilt(self, data: bytes) -> bytes:
        """The same, or with a byte changed, cut off, or with noise behind."""
        kind = self._random.random()
        if kind < 0.6 or not data:
            return data
        at = self._random.randrange(len(data))
        if kind < 0.75:
            return data[:at] + self._random.randbytes(1) + data[at + 1 :]
        return data[:at] if kind < 0.9 else data + self._random.randbytes(self._random.randrange(1, 100))


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload
