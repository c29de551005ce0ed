from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Matrix(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MATRIX_GATE: _ClassVar[Matrix]
    MATRIX_UP: _ClassVar[Matrix]
    MATRIX_DOWN: _ClassVar[Matrix]
MATRIX_GATE: Matrix
MATRIX_UP: Matrix
MATRIX_DOWN: Matrix

class ListDevicesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Device(_message.Message):
    __slots__ = ("uuid", "name", "slab_bytes", "cap_bytes", "is_host", "reached_by_uuids", "limit_bytes", "bandwidth_bytes_per_s")
    UUID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SLAB_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_HOST_FIELD_NUMBER: _ClassVar[int]
    REACHED_BY_UUIDS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    name: str
    slab_bytes: int
    cap_bytes: int
    is_host: bool
    reached_by_uuids: _containers.RepeatedScalarFieldContainer[str]
    limit_bytes: int
    bandwidth_bytes_per_s: int
    def __init__(self, uuid: _Optional[str] = ..., name: _Optional[str] = ..., slab_bytes: _Optional[int] = ..., cap_bytes: _Optional[int] = ..., is_host: bool = ..., reached_by_uuids: _Optional[_Iterable[str]] = ..., limit_bytes: _Optional[int] = ..., bandwidth_bytes_per_s: _Optional[int] = ...) -> None: ...

class ListDevicesReply(_message.Message):
    __slots__ = ("epoch", "devices")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    def __init__(self, epoch: _Optional[int] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ...) -> None: ...

class OpenModelRequest(_message.Message):
    __slots__ = ("begin", "stacks", "weights")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    begin: Begin
    stacks: Stacks
    weights: Extents
    def __init__(self, begin: _Optional[_Union[Begin, _Mapping]] = ..., stacks: _Optional[_Union[Stacks, _Mapping]] = ..., weights: _Optional[_Union[Extents, _Mapping]] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("files_id", "name", "device_uuids", "n_layers", "n_experts", "top_k", "wait_ms")
    FILES_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUIDS_FIELD_NUMBER: _ClassVar[int]
    N_LAYERS_FIELD_NUMBER: _ClassVar[int]
    N_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    files_id: int
    name: str
    device_uuids: _containers.RepeatedScalarFieldContainer[str]
    n_layers: int
    n_experts: int
    top_k: int
    wait_ms: int
    def __init__(self, files_id: _Optional[int] = ..., name: _Optional[str] = ..., device_uuids: _Optional[_Iterable[str]] = ..., n_layers: _Optional[int] = ..., n_experts: _Optional[int] = ..., top_k: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class Stack(_message.Message):
    __slots__ = ("layer", "matrix", "first_expert", "count", "file", "offset_bytes", "stride_bytes", "expert_bytes")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    MATRIX_FIELD_NUMBER: _ClassVar[int]
    FIRST_EXPERT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    layer: int
    matrix: Matrix
    first_expert: int
    count: int
    file: int
    offset_bytes: int
    stride_bytes: int
    expert_bytes: int
    def __init__(self, layer: _Optional[int] = ..., matrix: _Optional[_Union[Matrix, str]] = ..., first_expert: _Optional[int] = ..., count: _Optional[int] = ..., file: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., stride_bytes: _Optional[int] = ..., expert_bytes: _Optional[int] = ...) -> None: ...

class Stacks(_message.Message):
    __slots__ = ("stacks",)
    STACKS_FIELD_NUMBER: _ClassVar[int]
    stacks: _containers.RepeatedCompositeFieldContainer[Stack]
    def __init__(self, stacks: _Optional[_Iterable[_Union[Stack, _Mapping]]] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("file", "offset_bytes", "length_bytes")
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    file: int
    offset_bytes: int
    length_bytes: int
    def __init__(self, file: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., length_bytes: _Optional[int] = ...) -> None: ...

class Extents(_message.Message):
    __slots__ = ("extents",)
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    def __init__(self, extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ...) -> None: ...

class OpenModelEvent(_message.Message):
    __slots__ = ("progress", "opened")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    progress: Progress
    opened: Opened
    def __init__(self, progress: _Optional[_Union[Progress, _Mapping]] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("filled_bytes", "total_bytes")
    FILLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    filled_bytes: int
    total_bytes: int
    def __init__(self, filled_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("range_id", "device_uuid", "slab_bytes", "slabs_max")
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    SLAB_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLABS_MAX_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    device_uuid: str
    slab_bytes: int
    slabs_max: int
    def __init__(self, range_id: _Optional[int] = ..., device_uuid: _Optional[str] = ..., slab_bytes: _Optional[int] = ..., slabs_max: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("epoch", "model_id", "attachment", "weights", "arena", "homes", "batch_id", "shared", "homes_batch_id", "filled_s")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    HOMES_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    HOMES_BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    FILLED_S_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    model_id: int
    attachment: int
    weights: Range
    arena: _containers.RepeatedCompositeFieldContainer[Range]
    homes: Range
    batch_id: int
    shared: bool
    homes_batch_id: int
    filled_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, epoch: _Optional[int] = ..., model_id: _Optional[int] = ..., attachment: _Optional[int] = ..., weights: _Optional[_Union[Range, _Mapping]] = ..., arena: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., homes: _Optional[_Union[Range, _Mapping]] = ..., batch_id: _Optional[int] = ..., shared: bool = ..., homes_batch_id: _Optional[int] = ..., filled_s: _Optional[_Iterable[float]] = ...) -> None: ...

class CloseModelRequest(_message.Message):
    __slots__ = ("model_id",)
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: int
    def __init__(self, model_id: _Optional[int] = ...) -> None: ...

class CloseModelReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class CreateRangeRequest(_message.Message):
    __slots__ = ("device_uuid", "model_id", "cells_per_slab", "cells_max", "shrinkable", "conversation")
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    CELLS_PER_SLAB_FIELD_NUMBER: _ClassVar[int]
    CELLS_MAX_FIELD_NUMBER: _ClassVar[int]
    SHRINKABLE_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    device_uuid: str
    model_id: int
    cells_per_slab: int
    cells_max: int
    shrinkable: bool
    conversation: Conversation
    def __init__(self, device_uuid: _Optional[str] = ..., model_id: _Optional[int] = ..., cells_per_slab: _Optional[int] = ..., cells_max: _Optional[int] = ..., shrinkable: bool = ..., conversation: _Optional[_Union[Conversation, _Mapping]] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("name", "layout")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    layout: str
    def __init__(self, name: _Optional[str] = ..., layout: _Optional[str] = ...) -> None: ...

class CreateRangeReply(_message.Message):
    __slots__ = ("epoch", "range", "batch_id", "began_anew")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    BEGAN_ANEW_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    range: Range
    batch_id: int
    began_anew: str
    def __init__(self, epoch: _Optional[int] = ..., range: _Optional[_Union[Range, _Mapping]] = ..., batch_id: _Optional[int] = ..., began_anew: _Optional[str] = ...) -> None: ...

class Growth(_message.Message):
    __slots__ = ("range_id", "cells")
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    cells: int
    def __init__(self, range_id: _Optional[int] = ..., cells: _Optional[int] = ...) -> None: ...

class GrowRangesRequest(_message.Message):
    __slots__ = ("growths", "wait_ms")
    GROWTHS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    growths: _containers.RepeatedCompositeFieldContainer[Growth]
    wait_ms: int
    def __init__(self, growths: _Optional[_Iterable[_Union[Growth, _Mapping]]] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class Trade(_message.Message):
    __slots__ = ("model_id", "slabs", "slots", "experts_moved", "slots_occupied", "slots_total", "device_uuid")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_MOVED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_OCCUPIED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    model_id: int
    slabs: int
    slots: int
    experts_moved: int
    slots_occupied: int
    slots_total: int
    device_uuid: str
    def __init__(self, model_id: _Optional[int] = ..., slabs: _Optional[int] = ..., slots: _Optional[int] = ..., experts_moved: _Optional[int] = ..., slots_occupied: _Optional[int] = ..., slots_total: _Optional[int] = ..., device_uuid: _Optional[str] = ...) -> None: ...

class GrownRange(_message.Message):
    __slots__ = ("range_id", "cells", "size_bytes")
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    cells: int
    size_bytes: int
    def __init__(self, range_id: _Optional[int] = ..., cells: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class GrowRangesReply(_message.Message):
    __slots__ = ("epoch", "batch_id", "ranges", "free_slabs", "trades")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    FREE_SLABS_FIELD_NUMBER: _ClassVar[int]
    TRADES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    batch_id: int
    ranges: _containers.RepeatedCompositeFieldContainer[GrownRange]
    free_slabs: int
    trades: _containers.RepeatedCompositeFieldContainer[Trade]
    def __init__(self, epoch: _Optional[int] = ..., batch_id: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[GrownRange, _Mapping]]] = ..., free_slabs: _Optional[int] = ..., trades: _Optional[_Iterable[_Union[Trade, _Mapping]]] = ...) -> None: ...

class ShrinkRangeRequest(_message.Message):
    __slots__ = ("range_id", "cells")
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    cells: int
    def __init__(self, range_id: _Optional[int] = ..., cells: _Optional[int] = ...) -> None: ...

class ShrinkRangeReply(_message.Message):
    __slots__ = ("epoch", "cells")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    cells: int
    def __init__(self, epoch: _Optional[int] = ..., cells: _Optional[int] = ...) -> None: ...

class CloseRangeRequest(_message.Message):
    __slots__ = ("range_id",)
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    def __init__(self, range_id: _Optional[int] = ...) -> None: ...

class CloseRangeReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class ParkRangeRequest(_message.Message):
    __slots__ = ("range_id",)
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    def __init__(self, range_id: _Optional[int] = ...) -> None: ...

class ParkRangeReply(_message.Message):
    __slots__ = ("epoch", "cells")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    cells: int
    def __init__(self, epoch: _Optional[int] = ..., cells: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("released_revocation_id",)
    RELEASED_REVOCATION_ID_FIELD_NUMBER: _ClassVar[int]
    released_revocation_id: int
    def __init__(self, released_revocation_id: _Optional[int] = ...) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("epoch", "slabs_added", "slabs_removed", "notice", "shrink_request")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLABS_ADDED_FIELD_NUMBER: _ClassVar[int]
    SLABS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    SHRINK_REQUEST_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    slabs_added: SlabsAdded
    slabs_removed: SlabsRemoved
    notice: Notice
    shrink_request: ShrinkRequest
    def __init__(self, epoch: _Optional[int] = ..., slabs_added: _Optional[_Union[SlabsAdded, _Mapping]] = ..., slabs_removed: _Optional[_Union[SlabsRemoved, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., shrink_request: _Optional[_Union[ShrinkRequest, _Mapping]] = ...) -> None: ...

class SlabsAdded(_message.Message):
    __slots__ = ("range_id", "batch_id")
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    batch_id: int
    def __init__(self, range_id: _Optional[int] = ..., batch_id: _Optional[int] = ...) -> None: ...

class SlabsRemoved(_message.Message):
    __slots__ = ("range_id", "slab_indexes", "revocation_id", "deadline_ms")
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    SLAB_INDEXES_FIELD_NUMBER: _ClassVar[int]
    REVOCATION_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    slab_indexes: _containers.RepeatedScalarFieldContainer[int]
    revocation_id: int
    deadline_ms: int
    def __init__(self, range_id: _Optional[int] = ..., slab_indexes: _Optional[_Iterable[int]] = ..., revocation_id: _Optional[int] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class ShrinkRequest(_message.Message):
    __slots__ = ("range_id", "slabs", "deadline_ms")
    RANGE_ID_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    range_id: int
    slabs: int
    deadline_ms: int
    def __init__(self, range_id: _Optional[int] = ..., slabs: _Optional[int] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("code", "message")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CODE_UNSPECIFIED: _ClassVar[Notice.Code]
        CODE_STOPPING: _ClassVar[Notice.Code]
        CODE_DRAINING: _ClassVar[Notice.Code]
        CODE_STALE: _ClassVar[Notice.Code]
        CODE_DEVICE_FAILED: _ClassVar[Notice.Code]
    CODE_UNSPECIFIED: Notice.Code
    CODE_STOPPING: Notice.Code
    CODE_DRAINING: Notice.Code
    CODE_STALE: Notice.Code
    CODE_DEVICE_FAILED: Notice.Code
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: Notice.Code
    message: str
    def __init__(self, code: _Optional[_Union[Notice.Code, str]] = ..., message: _Optional[str] = ...) -> None: ...
