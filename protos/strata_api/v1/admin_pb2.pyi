from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusPart(_message.Message):
    __slots__ = ("daemon", "devices", "models", "sessions", "quarantines")
    DAEMON_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINES_FIELD_NUMBER: _ClassVar[int]
    daemon: DaemonStatus
    devices: _containers.RepeatedCompositeFieldContainer[DeviceStatus]
    models: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    quarantines: _containers.RepeatedCompositeFieldContainer[QuarantineStatus]
    def __init__(self, daemon: _Optional[_Union[DaemonStatus, _Mapping]] = ..., devices: _Optional[_Iterable[_Union[DeviceStatus, _Mapping]]] = ..., models: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., quarantines: _Optional[_Iterable[_Union[QuarantineStatus, _Mapping]]] = ...) -> None: ...

class DaemonStatus(_message.Message):
    __slots__ = ("epoch", "pid", "version", "driver", "uptime_s", "draining", "growths")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    GROWTHS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    pid: int
    version: str
    driver: str
    uptime_s: float
    draining: bool
    growths: Growths
    def __init__(self, epoch: _Optional[int] = ..., pid: _Optional[int] = ..., version: _Optional[str] = ..., driver: _Optional[str] = ..., uptime_s: _Optional[float] = ..., draining: bool = ..., growths: _Optional[_Union[Growths, _Mapping]] = ...) -> None: ...

class Growths(_message.Message):
    __slots__ = ("granted", "refused", "seconds", "waiting", "slabs", "traded_slabs")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    TRADED_SLABS_FIELD_NUMBER: _ClassVar[int]
    granted: int
    refused: int
    seconds: float
    waiting: int
    slabs: int
    traded_slabs: int
    def __init__(self, granted: _Optional[int] = ..., refused: _Optional[int] = ..., seconds: _Optional[float] = ..., waiting: _Optional[int] = ..., slabs: _Optional[int] = ..., traded_slabs: _Optional[int] = ...) -> None: ...

class TierTraffic(_message.Message):
    __slots__ = ("tier", "decode_routings", "prompt_routings", "read_bytes", "read_bytes_per_s", "share")
    TIER_FIELD_NUMBER: _ClassVar[int]
    DECODE_ROUTINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ROUTINGS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    tier: str
    decode_routings: int
    prompt_routings: int
    read_bytes: int
    read_bytes_per_s: float
    share: float
    def __init__(self, tier: _Optional[str] = ..., decode_routings: _Optional[int] = ..., prompt_routings: _Optional[int] = ..., read_bytes: _Optional[int] = ..., read_bytes_per_s: _Optional[float] = ..., share: _Optional[float] = ...) -> None: ...

class DeviceStatus(_message.Message):
    __slots__ = ("uuid", "name", "is_host", "slab_bytes", "total_bytes", "cap_bytes", "free_bytes", "kv_bytes", "experts_bytes", "weights_bytes", "revoking_bytes", "quarantined_bytes", "unmanaged_bytes", "free_slab_bytes", "state", "numa_node", "trades", "traded_slabs", "returned_slabs", "trades_last_min")
    UUID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    IS_HOST_FIELD_NUMBER: _ClassVar[int]
    SLAB_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    REVOKING_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNMANAGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_SLAB_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    TRADES_FIELD_NUMBER: _ClassVar[int]
    TRADED_SLABS_FIELD_NUMBER: _ClassVar[int]
    RETURNED_SLABS_FIELD_NUMBER: _ClassVar[int]
    TRADES_LAST_MIN_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    name: str
    is_host: bool
    slab_bytes: int
    total_bytes: int
    cap_bytes: int
    free_bytes: int
    kv_bytes: int
    experts_bytes: int
    weights_bytes: int
    revoking_bytes: int
    quarantined_bytes: int
    unmanaged_bytes: int
    free_slab_bytes: int
    state: str
    numa_node: int
    trades: int
    traded_slabs: int
    returned_slabs: int
    trades_last_min: int
    def __init__(self, uuid: _Optional[str] = ..., name: _Optional[str] = ..., is_host: bool = ..., slab_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., cap_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., experts_bytes: _Optional[int] = ..., weights_bytes: _Optional[int] = ..., revoking_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., unmanaged_bytes: _Optional[int] = ..., free_slab_bytes: _Optional[int] = ..., state: _Optional[str] = ..., numa_node: _Optional[int] = ..., trades: _Optional[int] = ..., traded_slabs: _Optional[int] = ..., returned_slabs: _Optional[int] = ..., trades_last_min: _Optional[int] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("model_id", "name", "uid", "domain", "experts", "resident", "homes", "slots", "heat_covered", "weights_bytes", "experts_bytes", "sessions", "generation", "stale", "stuck_pids", "decoded_tokens", "prompt_tokens", "decoded_tokens_per_s", "prompt_tokens_per_s", "tiers", "filled_bytes", "filled_bytes_per_s")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    HOMES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    HEAT_COVERED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    STUCK_PIDS_FIELD_NUMBER: _ClassVar[int]
    DECODED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    FILLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILLED_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    model_id: int
    name: str
    uid: int
    domain: str
    experts: int
    resident: int
    homes: int
    slots: int
    heat_covered: float
    weights_bytes: int
    experts_bytes: int
    sessions: int
    generation: int
    stale: bool
    stuck_pids: _containers.RepeatedScalarFieldContainer[int]
    decoded_tokens: int
    prompt_tokens: int
    decoded_tokens_per_s: float
    prompt_tokens_per_s: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierTraffic]
    filled_bytes: int
    filled_bytes_per_s: float
    def __init__(self, model_id: _Optional[int] = ..., name: _Optional[str] = ..., uid: _Optional[int] = ..., domain: _Optional[str] = ..., experts: _Optional[int] = ..., resident: _Optional[int] = ..., homes: _Optional[int] = ..., slots: _Optional[int] = ..., heat_covered: _Optional[float] = ..., weights_bytes: _Optional[int] = ..., experts_bytes: _Optional[int] = ..., sessions: _Optional[int] = ..., generation: _Optional[int] = ..., stale: bool = ..., stuck_pids: _Optional[_Iterable[int]] = ..., decoded_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., decoded_tokens_per_s: _Optional[float] = ..., prompt_tokens_per_s: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierTraffic, _Mapping]]] = ..., filled_bytes: _Optional[int] = ..., filled_bytes_per_s: _Optional[float] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("session_id", "pid", "uid", "user", "executable", "kv_cells", "kv_bytes", "age_s", "state", "quarantined_bytes", "model_ids", "kv_cells_used", "decoded_tokens", "prompt_tokens", "decoded_tokens_per_s", "prompt_tokens_per_s", "growths")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    EXECUTABLE_FIELD_NUMBER: _ClassVar[int]
    KV_CELLS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODEL_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_CELLS_USED_FIELD_NUMBER: _ClassVar[int]
    DECODED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    GROWTHS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    pid: int
    uid: int
    user: str
    executable: str
    kv_cells: int
    kv_bytes: int
    age_s: float
    state: str
    quarantined_bytes: int
    model_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_cells_used: int
    decoded_tokens: int
    prompt_tokens: int
    decoded_tokens_per_s: float
    prompt_tokens_per_s: float
    growths: Growths
    def __init__(self, session_id: _Optional[int] = ..., pid: _Optional[int] = ..., uid: _Optional[int] = ..., user: _Optional[str] = ..., executable: _Optional[str] = ..., kv_cells: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., age_s: _Optional[float] = ..., state: _Optional[str] = ..., quarantined_bytes: _Optional[int] = ..., model_ids: _Optional[_Iterable[int]] = ..., kv_cells_used: _Optional[int] = ..., decoded_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., decoded_tokens_per_s: _Optional[float] = ..., prompt_tokens_per_s: _Optional[float] = ..., growths: _Optional[_Union[Growths, _Mapping]] = ...) -> None: ...

class QuarantineStatus(_message.Message):
    __slots__ = ("device_uuid", "bytes", "session_id", "pid", "age_s")
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    device_uuid: str
    bytes: int
    session_id: int
    pid: int
    age_s: float
    def __init__(self, device_uuid: _Optional[str] = ..., bytes: _Optional[int] = ..., session_id: _Optional[int] = ..., pid: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    def __init__(self, sessions: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class VerifyEvent(_message.Message):
    __slots__ = ("progress", "summary")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    progress: VerifyProgress
    summary: VerifySummary
    def __init__(self, progress: _Optional[_Union[VerifyProgress, _Mapping]] = ..., summary: _Optional[_Union[VerifySummary, _Mapping]] = ...) -> None: ...

class VerifyProgress(_message.Message):
    __slots__ = ("compared_bytes", "total_bytes")
    COMPARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    compared_bytes: int
    total_bytes: int
    def __init__(self, compared_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class VerifySummary(_message.Message):
    __slots__ = ("model_id", "name", "file_changed", "slots", "homes", "weights_bytes", "slots_skipped", "compared_bytes", "mismatched", "mismatches")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FILE_CHANGED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    HOMES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    COMPARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MISMATCHED_FIELD_NUMBER: _ClassVar[int]
    MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    model_id: int
    name: str
    file_changed: bool
    slots: int
    homes: int
    weights_bytes: int
    slots_skipped: int
    compared_bytes: int
    mismatched: int
    mismatches: _containers.RepeatedCompositeFieldContainer[Mismatch]
    def __init__(self, model_id: _Optional[int] = ..., name: _Optional[str] = ..., file_changed: bool = ..., slots: _Optional[int] = ..., homes: _Optional[int] = ..., weights_bytes: _Optional[int] = ..., slots_skipped: _Optional[int] = ..., compared_bytes: _Optional[int] = ..., mismatched: _Optional[int] = ..., mismatches: _Optional[_Iterable[_Union[Mismatch, _Mapping]]] = ...) -> None: ...

class Mismatch(_message.Message):
    __slots__ = ("place", "layer", "expert", "matrix", "device_uuid", "range_id", "slab_index", "offset_bytes", "differing_bytes")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    MATRIX_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    SLAB_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_BYTES_FIELD_NUMBER: _ClassVar[int]
    place: str
    layer: int
    expert: int
    matrix: str
    device_uuid: str
    range_id: int
    slab_index: int
    offset_bytes: int
    differing_bytes: int
    def __init__(self, place: _Optional[str] = ..., layer: _Optional[int] = ..., expert: _Optional[int] = ..., matrix: _Optional[str] = ..., device_uuid: _Optional[str] = ..., range_id: _Optional[int] = ..., slab_index: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., differing_bytes: _Optional[int] = ...) -> None: ...

class ConversationsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConversationsPart(_message.Message):
    __slots__ = ("conversations",)
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    conversations: _containers.RepeatedCompositeFieldContainer[ConversationStatus]
    def __init__(self, conversations: _Optional[_Iterable[_Union[ConversationStatus, _Mapping]]] = ...) -> None: ...

class ConversationStatus(_message.Message):
    __slots__ = ("name", "uid", "user", "model", "device_uuid", "state", "cells", "bytes", "pid", "parked_s", "expires_in_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PARKED_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    uid: int
    user: str
    model: str
    device_uuid: str
    state: str
    cells: int
    bytes: int
    pid: int
    parked_s: float
    expires_in_s: float
    def __init__(self, name: _Optional[str] = ..., uid: _Optional[int] = ..., user: _Optional[str] = ..., model: _Optional[str] = ..., device_uuid: _Optional[str] = ..., state: _Optional[str] = ..., cells: _Optional[int] = ..., bytes: _Optional[int] = ..., pid: _Optional[int] = ..., parked_s: _Optional[float] = ..., expires_in_s: _Optional[float] = ...) -> None: ...

class DropConversationRequest(_message.Message):
    __slots__ = ("name", "uid")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    name: str
    uid: int
    def __init__(self, name: _Optional[str] = ..., uid: _Optional[int] = ...) -> None: ...

class DropConversationReply(_message.Message):
    __slots__ = ("cells", "bytes")
    CELLS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    cells: int
    bytes: int
    def __init__(self, cells: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class TradesRequest(_message.Message):
    __slots__ = ("count_max",)
    COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    count_max: int
    def __init__(self, count_max: _Optional[int] = ...) -> None: ...

class TradesPart(_message.Message):
    __slots__ = ("decisions",)
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    def __init__(self, decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("kind", "age_s", "device_uuid", "from_range_id", "to_range_id", "giver", "taker", "slabs", "experts_moved", "experts_evicted", "times", "reason")
    KIND_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    FROM_RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    TO_RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    GIVER_FIELD_NUMBER: _ClassVar[int]
    TAKER_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_MOVED_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: str
    age_s: float
    device_uuid: str
    from_range_id: int
    to_range_id: int
    giver: str
    taker: str
    slabs: int
    experts_moved: int
    experts_evicted: int
    times: int
    reason: str
    def __init__(self, kind: _Optional[str] = ..., age_s: _Optional[float] = ..., device_uuid: _Optional[str] = ..., from_range_id: _Optional[int] = ..., to_range_id: _Optional[int] = ..., giver: _Optional[str] = ..., taker: _Optional[str] = ..., slabs: _Optional[int] = ..., experts_moved: _Optional[int] = ..., experts_evicted: _Optional[int] = ..., times: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("facts",)
    FACTS_FIELD_NUMBER: _ClassVar[int]
    facts: _containers.RepeatedCompositeFieldContainer[Fact]
    def __init__(self, facts: _Optional[_Iterable[_Union[Fact, _Mapping]]] = ...) -> None: ...

class Fact(_message.Message):
    __slots__ = ("topic", "text")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    text: str
    def __init__(self, topic: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...
