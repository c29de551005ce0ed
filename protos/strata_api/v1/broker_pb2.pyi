from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_CLIENT: _ClassVar[Role]
    ROLE_ADMIN: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_CLIENT: Role
ROLE_ADMIN: Role

class BrokerRequest(_message.Message):
    __slots__ = ("hello", "files", "fetch", "ack")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    files: Files
    fetch: Fetch
    ack: Ack
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., files: _Optional[_Union[Files, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "role", "nonce", "guarantee_bytes", "cap_bytes", "priority")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    GUARANTEE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    role: Role
    nonce: bytes
    guarantee_bytes: int
    cap_bytes: int
    priority: int
    def __init__(self, protocol_version: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., nonce: _Optional[bytes] = ..., guarantee_bytes: _Optional[int] = ..., cap_bytes: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...

class Files(_message.Message):
    __slots__ = ("files_id",)
    FILES_ID_FIELD_NUMBER: _ClassVar[int]
    files_id: int
    def __init__(self, files_id: _Optional[int] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("batch_id", "first", "count_max")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    first: int
    count_max: int
    def __init__(self, batch_id: _Optional[int] = ..., first: _Optional[int] = ..., count_max: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("batch_id",)
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    def __init__(self, batch_id: _Optional[int] = ...) -> None: ...

class BrokerReply(_message.Message):
    __slots__ = ("welcome", "challenge", "descriptors", "done", "refused")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    challenge: Challenge
    descriptors: Descriptors
    done: Done
    refused: Refused
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., challenge: _Optional[_Union[Challenge, _Mapping]] = ..., descriptors: _Optional[_Union[Descriptors, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("epoch", "session_id", "token")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    session_id: int
    token: str
    def __init__(self, epoch: _Optional[int] = ..., session_id: _Optional[int] = ..., token: _Optional[str] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class Descriptors(_message.Message):
    __slots__ = ("batch_id", "first", "total", "entries", "next")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    first: int
    total: int
    entries: _containers.RepeatedCompositeFieldContainer[BatchEntry]
    next: int
    def __init__(self, batch_id: _Optional[int] = ..., first: _Optional[int] = ..., total: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[BatchEntry, _Mapping]]] = ..., next: _Optional[int] = ...) -> None: ...

class BatchEntry(_message.Message):
    __slots__ = ("kind", "id", "slab_index", "writable")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[BatchEntry.Kind]
        KIND_SLAB: _ClassVar[BatchEntry.Kind]
        KIND_RESIDENCY: _ClassVar[BatchEntry.Kind]
        KIND_HEAT: _ClassVar[BatchEntry.Kind]
        KIND_TOKENS: _ClassVar[BatchEntry.Kind]
    KIND_UNSPECIFIED: BatchEntry.Kind
    KIND_SLAB: BatchEntry.Kind
    KIND_RESIDENCY: BatchEntry.Kind
    KIND_HEAT: BatchEntry.Kind
    KIND_TOKENS: BatchEntry.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    SLAB_INDEX_FIELD_NUMBER: _ClassVar[int]
    WRITABLE_FIELD_NUMBER: _ClassVar[int]
    kind: BatchEntry.Kind
    id: int
    slab_index: int
    writable: bool
    def __init__(self, kind: _Optional[_Union[BatchEntry.Kind, str]] = ..., id: _Optional[int] = ..., slab_index: _Optional[int] = ..., writable: bool = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
