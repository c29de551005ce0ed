"""A stage of a model on its GPU: what is enqueued there for a step of one sequence, and what crosses to the next.

A model that is not split is one stage. Each has its own stream, and so the stages of a
split model run beside each other: only events order them, which `Crossing` records.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from strata_kernels.launch import Kernels
from strata_kernels.structs import Activation, Step

from strata_client import timings
from strata_client.attached import Stage
from strata_client.cells import KVRange
from strata_client.gpu.arguments import kv_cells
from strata_client.gpu.decoder import Decoder
from strata_client.gpu.device import Array, Device
from strata_client.gpu.owners import LoadedOwner, Owners
from strata_client.gpu.prompt import STAGING_BYTES, Prompt
from strata_client.gpu.steps import GpuSteps
from strata_client.gpu.streaming import ExpertStream
from strata_client.models.base import I32
from vmmd.driver.cuda_calls import call

_TOKEN_OFFSET = Step.token.offset


class Loaded(NamedTuple):
    """A GPU with its kernels, what makes those that read rows where they lie, and its owners by UUID."""

    device: Device
    kernels: Kernels
    in_place: Callable[[], Kernels]
    owners: Mapping[str, LoadedOwner]


class GpuStage:
    """A run of a model's layers on a GPU, for one sequence. Who enqueues something makes the GPU current before.

    Attributes:
        device: where.
        uuid, reached_by_uuids: of the device, and of those that have a path to it.
        decoder: the layers for one token.
        prompt: the layers for a chunk of a prompt.
        steps: its steps.
    """

    def __init__(self, stage: Stage, kv: KVRange, in_flight_max: int) -> None:
        """Takes the sequence's cells of these layers, and how many steps may have begun when another does.

        Errors: `ModelError` where the kernels cannot run the model; `DriverError`; what loading the kernels raised.
        """
        assert stage.kernels is not None
        model, memory = stage.model, stage.opened.memory
        params = model.params
        with timings.stage("wait for kernels"):
            loaded: Loaded = stage.kernels.result()
        self.device = device = loaded.device
        kernels = loaded.kernels
        device.make_current()
        self.uuid, self.reached_by_uuids = stage.device.uuid, stage.device.reached_by_uuids
        self._cells = kv_cells(kv, params, stage.cell.type)
        self.steps = GpuSteps(stage, device, in_flight_max)
        retired, (decoding, prompts) = self.steps.retired, self.steps.heat
        owners = [loaded.owners[memory.arena[part].device_uuid] for part in memory.owners]
        self.steps.owners = Owners(device, kernels, model, owners) if owners else None
        with timings.stage("graph"):
            self.decoder = Decoder(
                device, kernels, model, memory, self._cells, retired, decoding, loaded.in_place, self.steps.owners
            )
            self.decoder.capture()
            buffers = self.decoder.buffers
            self.steps.table_address = buffers["table"].value
            self.skip, self.end = (
                kernels.prepare(
                    "end_step", 1, 32, [buffers["step"], cells, ctypes.c_uint64(retired)], stream=device.stream
                )
                for cells in (0, 1)
            )
        with timings.stage("prompt kernels"):
            self.prompt = Prompt(
                device, kernels, model, memory, stage.cell.type, table=buffers["table"].value,
                heat=prompts, h=Activation.at(buffers["h"].value, params.d_model),
                stream=ExpertStream(device, model.expert_sizes(), STAGING_BYTES), owners=self.steps.owners,
            )  # fmt: skip
        self._tokens = device.pinned((in_flight_max + 1, 1), np.int32)

    @property
    def token(self) -> int:
        """Address of the token that the next step evaluates, int32: the one that `sample` has chosen."""
        return self.decoder.buffers["step"].value + _TOKEN_OFFSET

    def set_step(self, number: int, position: int) -> None:
        """Lets what is enqueued next run as that step, in that cell."""
        step = np.frombuffer(bytearray(Step(number, position, 0)), np.uint8)
        self.device.upload(self.decoder.buffers["step"].value, step)

    def set_token(self, token: int) -> None:
        """Lets the step that was published evaluate a token."""
        place = self.steps.number % len(self._tokens)
        self._tokens[place] = token
        self.device.upload(self.token, self._tokens[place])

    def enqueue_chunk(self, tokens: I32, position: int) -> None:
        """Enqueues a chunk of a prompt, but not what ends its step. Errors: as `Prompt.enqueue`."""
        self.prompt.enqueue(tokens, position, self._cells, self.steps.table)
        self.set_step(self.steps.number, position + len(tokens) - 1)

    def close(self) -> None:
        """Waits until nothing runs any more, and gives back what this has on the GPU."""
        self.device.make_current()
        self.device.close()
        self.prompt.close()
        self.decoder.buffers.close()
        if self.steps.owners is not None:
            self.steps.owners.close()


class Crossing:
    """Memory that goes from one GPU's stream to another's, in the order of both; no thread waits for it.

    Each piece is copied to the next of some places on the target, in turn, as soon as the target's stream is done
    with what was there. So the source runs ahead as far as there are places. Without a path a piece rests in pinned
    host memory between two copies: one between GPUs would keep this thread until its turn had come.
    """

    def __init__(self, source: GpuStage, target: GpuStage, places: Sequence[int], size_bytes: int) -> None:
        """Takes the places' addresses on the target, and the most bytes of a piece. Errors: `DriverError`."""
        self._source, self._target = source.device, target.device
        self._places = places
        self._sent = self._received = 0
        self._source.make_current()
        self._between: list[Array] = []  # for each place, where there is no path
        self._lengths = [0] * len(places)  # of what is there
        if source.uuid in target.reached_by_uuids:
            self._source.reach(self._target)
        else:
            self._between = [self._source.pinned(size_bytes, np.uint8) for _ in places]
        self._arrived = [self._source.event() for _ in places]
        self._target.make_current()
        self._free = [self._target.event() for _ in places]

    def send(self, address: int, size_bytes: int) -> None:
        """Enqueues a copy from the source's memory, behind all that its stream has. Errors: `DriverError`."""
        cu, stream, place = self._source.cu, self._source.stream, self._sent % len(self._places)
        self._sent += 1
        call(cu.cuStreamWaitEvent, stream, self._free[place], 0)
        if self._between:
            call(cu.cuMemcpyDtoHAsync, self._between[place].ctypes.data, address, size_bytes, stream)
            self._lengths[place] = size_bytes
        else:
            call(
                cu.cuMemcpyPeerAsync, self._places[place], self._target.context, address, self._source.context,
                size_bytes, stream,
            )  # fmt: skip
        call(cu.cuEventRecord, self._arrived[place], stream)

    def receive(self) -> int:
        """Lets the target's stream wait for what was sent next; its place. Errors: `DriverError`."""
        cu, stream, place = self._target.cu, self._target.stream, self._received % len(self._places)
        call(cu.cuStreamWaitEvent, stream, self._arrived[place], 0)
        if self._between:
            between = self._between[place].ctypes.data
            call(cu.cuMemcpyHtoDAsync, self._places[place], between, self._lengths[place], stream)
        return self._places[place]

    def release(self) -> None:
        """What was received is not needed behind all that the target's stream has. Errors: `DriverError`."""
        call(self._target.cu.cuEventRecord, self._free[self._received % len(self._places)], self._target.stream)
        self._received += 1

    def restart(self) -> None:
        """Forgets what was sent and not received; both streams are done."""
        self._sent = self._received = 0
