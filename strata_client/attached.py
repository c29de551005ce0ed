"""A model that is attached at a daemon: what all sequences that run on it share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from strata_api.v1 import memory_pb2 as wire
from strata_api.v1 import pages

from strata_client import timings
from strata_client.cells import CellShape, KVRange, choose_slab_bytes
from strata_client.connection import Asked, NoDaemon, raise_descriptor_limit
from strata_client.devices import Peer, choose_device, choose_peers, is_gpu
from strata_client.model_memory import Shape
from strata_client.models.base import F32, I32
from strata_client.models.gguf_file import ModelFile
from strata_client.models.qwen3moe import Qwen3Moe
from strata_client.output import Signals
from strata_client.sequence import Say, TokenSequence
from strata_client.session import OpenedModel, Session
from strata_client.split import Split, lines, sizes_of
from strata_client.startup import Begun
from strata_client.transcript import Transcript
from vmmd.errors import InvalidRequest, VmmError
from vmmd.sizes import size_text

HOST_KV_TYPE = "f32"
"""What a K/V cell holds on the host driver."""

GPU_KV_TYPES = ("f16", "bf16", "q8_0")
"""What one may hold on a GPU, the default first."""


def load_decoder(device_uuid: str, kv_type: str, types: Sequence[str], owners: Sequence[str]) -> Any:
    """A GPU with the kernels that `strata_client.gpu.engine` needs, and owners with theirs."""
    from strata_client.gpu.engine import load  # loads CUDA, which clients on the host do without

    return load(device_uuid, kv_type, types, owners)


class Stage(NamedTuple):
    """A run of a model's layers on the device that computes them: all of the layers, unless the model is split.

    Attributes:
        model: the layers.
        device: where.
        cell: what a K/V cell of these layers consists of.
        opened: the layers' memory and steps.
        kernels: what `attach` was told to load for a GPU; None where the host computes.
    """

    model: Qwen3Moe
    device: wire.Device
    cell: CellShape
    opened: OpenedModel
    kernels: Begun[Any] | None


class Attached:
    """A model on leased memory, and what makes sequences of it. For one thread.

    Attributes:
        model: the model.
        stages: what it is computed in, in the order of its layers.
        context: most cells of a sequence.
        kv_type: what a K/V cell holds.
        peers: devices that hold experts for the computing one.
        signals: learns when a step runs.
    """

    def __init__(
        self,
        model: Qwen3Moe,
        session: Session,
        stages: Sequence[Stage],
        context: int,
        *,
        peers: Sequence[Peer],
        say: Say,
        say_verbose: Say,
        signals: Signals,
    ) -> None:
        """Takes what `attach` made."""
        self.model = model
        self.stages = stages
        self.context = context
        self.kv_type = stages[0].cell.type
        self.peers = peers
        self.signals = signals
        self._session = session
        self._say = say
        self._say_verbose = say_verbose
        self._sequences: list[TokenSequence] = []

    @property
    def stage(self) -> Stage:
        """The only one, of a model that is not split."""
        (stage,) = self.stages
        return stage

    @property
    def opened(self) -> OpenedModel:
        """Memory and steps of a model that is not split."""
        return self.stage.opened

    @property
    def kernels(self) -> Begun[Any] | None:
        """As `Stage`, of a model that is not split."""
        return self.stage.kernels

    @contextmanager
    def sequence(self, conversation: str | None = None) -> Iterator[TokenSequence]:
        """A sequence whose memory is given back at the end; the cells of a conversation stay with the daemon.

        Args:
            conversation: name of the one to go on with, or to begin; None for a sequence that is not kept, as all
                are of a model that is split.

        Errors: any `VmmError`.
        """
        sequence = self.open_sequence() if conversation is None else self._open_conversation(conversation)
        try:
            yield sequence
        finally:
            if self._session.is_private:
                pass  # its daemon leaves with all of it
            elif conversation is None:
                self.close_sequence(sequence)
            else:
                self._sequences.remove(sequence)
                try:
                    self._session.park(sequence.kv)
                except VmmError as error:
                    self._say(f"strata: conversation {conversation} could not be kept: {error.message}")

    def open_sequence(self) -> TokenSequence:
        """A sequence without memory as yet. Errors: any `VmmError`."""
        kvs = [self._session.create_kv(s.opened.model_id, s.device, s.cell, self.context) for s in self.stages]
        return self._sequence(kvs, Transcript.private(self.context))

    def close_sequence(self, sequence: TokenSequence) -> None:
        """Gives a sequence's memory back, if there still is a daemon to take it. No step may use it."""
        self._sequences.remove(sequence)
        for kv in sequence.kvs:
            with suppress(VmmError):
                self._session.give_back(kv)

    def _open_conversation(self, name: str) -> TokenSequence:
        _, device, cell, opened, _ = self.stage
        resumed = self._session.open_conversation(name, opened.model_id, device, cell, self.context)
        if resumed.began_anew:
            self._say(f"strata: conversation {name} begins anew: {resumed.began_anew}")
        if self._session.is_private:
            self._say(f"strata: conversation {name} ends with the private daemon")
        return self._sequence([resumed.kv], Transcript(resumed.tokens))

    def _sequence(self, kvs: Sequence[KVRange], transcript: Transcript) -> TokenSequence:
        sequence = TokenSequence(
            self._session, kvs, self.context, transcript, say=self._say, say_verbose=self._say_verbose
        )
        self._sequences.append(sequence)
        return sequence

    @property
    def cells(self) -> int:
        """Cells filled, of all sequences that are open."""
        return sum(sequence.position for sequence in self._sequences)

    def count(self, tokens: int, cells: int) -> None:
        """Shows `tokens` more evaluated tokens, and `cells` cells in use."""
        for stage in self.stages:
            stage.opened.steps.count(tokens, cells)

    def step_on_host(
        self,
        parts: Sequence[tuple[TokenSequence, Sequence[int]]],
        given: I32,
        evaluate: Callable[[int, I32 | F32], F32],
        *,
        prompt: bool,
    ) -> F32:
        """Runs a step on the host, stage by stage, that evaluates tokens at the end of sequences.

        Args:
            parts: sequences, each with its tokens.
            given: the tokens as the first stage takes them.
            evaluate: fills the cells of a stage, by its place in `stages`, within a published step. It takes what the
                stage before gave and gives what the next one takes, or logits. Signals may break it off.
            prompt: the tokens are a prompt's.

        Errors: `LeaseRevoked` if the daemon has taken cells back; what `evaluate` raises.
        """
        signals, passed = self.signals, cast("I32 | F32", given)
        signals.between_steps()
        n = sum(len(tokens) for _, tokens in parts)
        signals.hold()
        try:
            for at, stage in enumerate(self.stages):
                with stage.opened.steps.step():
                    for sequence, tokens in parts:
                        sequence.check_cells(sequence.position + len(tokens))
                    stage.opened.memory.count(n, prompt=prompt)
                    signals.release()
                    passed = evaluate(at, passed)
                    signals.hold()
        finally:
            signals.release()
        for sequence, tokens in parts:
            sequence.position += len(tokens)
            sequence.transcript.add(tokens)
        self.count(n, self.cells)
        return cast(F32, passed)

    def close(self) -> None:
        """Closes the sequences that are open still, unless their daemon leaves with all of them."""
        if not self._session.is_private:
            for sequence in list(self._sequences):
                self.close_sequence(sequence)

    def settle(self) -> None:
        """Begins what the first token did not wait for: mapping the experts' homes, in a thread of its own."""
        for stage in self.stages:
            stage.opened.homes.begin()

    def experts_on(self, peer: Peer) -> int:
        """Experts in slots of a peer now."""
        memory = self.opened.memory
        return len(memory.experts_on(memory.part_on(peer.device.uuid)))


@contextmanager
def attach(
    model: Qwen3Moe,
    model_file: ModelFile,
    directories: Sequence[Path],
    *,
    context: int,
    sequences: int = 1,
    device: str | None,
    kv_type: str | None,
    asked: Asked = Asked(),  # noqa: B008  a tuple
    say: Say,
    say_verbose: Say,
    signals: Signals,
    progress: Callable[[int, int], None],
    peer_devices: Sequence[str] = (),
    split: Split | None = None,
    load: Callable[[str, str, Sequence[str], Sequence[str]], Any] = load_decoder,
) -> Iterator[Attached]:
    """Opens a model at the daemon in one of `directories`, or at a private one, and gives everything back at the end.

    Args:
        model: the model of `model_file`, whose descriptors are lent to the daemon.
        directories: runtime directories to look in.
        context: most cells of a sequence.
        sequences: most of them at once.
        device: what a user calls the device; None for the first.
        kv_type: what a K/V cell shall hold; None for what suits the device.
        asked: what the session asks of a daemon that it shares.
        say: takes lines for the user; `say_verbose` those for the curious.
        signals: learns what is to be abandoned, and when a step runs.
        progress: called with bytes filled and bytes to fill.
        peer_devices: what a user calls those that shall hold experts which the device has no room for.
        split: over which devices the layers shall be split, instead of `device` and `peer_devices`.
        load: loads a GPU's kernels, by its UUID, the type of K/V cells and those of tensors, and its owners', by their
            UUIDs, in a thread of its own while the model is opened and mapped.

    Errors: any `VmmError`.
    """
    raise_descriptor_limit()
    params = model.params
    cell = CellShape(params.n_layers, params.n_kv_heads, params.head_dim)
    weights = model.weight_extents()
    try:
        with timings.stage("connect"):
            session = Session.connect(directories, asked)
    except NoDaemon:
        slots = [
            pages.slot_layout(*model.expert_bytes(layer, expert))[3]
            for layer in range(params.n_layers)
            for expert in range(params.n_experts)
        ]
        other_bytes = sum(extent.length_bytes for extent in weights) + sequences * context * cell.size_bytes
        with timings.stage("start a daemon"):
            session = Session.private(choose_slab_bytes(slots, other_bytes, cell.size_bytes))
        say(f"strata: no daemon at {directories[0]}; started a private one")
    try:
        signals.abandon = session.abandon
        devices = session.devices()
        name = str(model_file.metadata.get("general.name") or Path(model_file.files[0].path).name)
        if split is None:
            chosen = choose_device(devices, device)
            peers = choose_peers(devices, chosen, peer_devices)
            owners = [peer.device.uuid for peer in peers if peer.is_owner]
            parts = [_Part(name, model, chosen, [chosen.uuid, *(peer.device.uuid for peer in peers)], owners)]
        else:
            peers = []
            cell = cell._replace(type=choose_kv_type(kv_type, devices[0].uuid))
            plans = split.plan(devices, sizes_of(model, cell.size_bytes, context))
            for line in lines(plans, split):
                say(line)
            parts = [
                _Part(
                    f"{name}, layers {plan.layers.start} to {plan.layers.stop - 1}",
                    model.stage(plan.layers),
                    plan.device,
                    [plan.device.uuid],
                    [],
                )
                for plan in plans
            ]
        kv_type = choose_kv_type(kv_type, parts[0].device.uuid)
        kernels = [part.begin_kernels(load, kv_type) for part in parts]
        fds = [file.fd for file in model_file.files]
        stages = []
        for part, loading in zip(parts, kernels, strict=True):
            opened = part.open(session, fds, progress)
            part_cell = CellShape(part.model.params.n_layers, params.n_kv_heads, params.head_dim, kv_type)
            stages.append(Stage(part.model, part.device, part_cell, opened, loading))
            say_verbose(
                f"strata: device {part.device.uuid}, {size_text(part.device.slab_bytes)} a slab, arena "
                f"{'shared' if opened.shared else 'filled'}: {size_text(opened.memory.arena_bytes(0))} of experts on it"
            )
        signals.is_idle = lambda: all(stage.opened.steps.idle for stage in stages)
        for line in peer_lines(peers, stages[0].opened, parts[0].shape):
            say(line)
        attached = Attached(
            model, session, stages, context, peers=peers, say=say, say_verbose=say_verbose, signals=signals
        )
        try:
            yield attached
        finally:
            attached.close()
    finally:
        for trouble in session.troubles:
            say_verbose(f"strata: {trouble}")
        session.close()


class _Part(NamedTuple):
    """A stage before it is opened: the name that `vmmctl` shows, the devices that its experts may be on, and owners."""

    name: str
    model: Qwen3Moe
    device: wire.Device
    device_uuids: Sequence[str]
    owners: Sequence[str]

    @property
    def shape(self) -> Shape:
        params = self.model.params
        return Shape(params.n_layers, params.n_experts, self.model.weight_extents(), self.model.expert_bytes)

    def begin_kernels(
        self, load: Callable[[str, str, Sequence[str], Sequence[str]], Any], kv_type: str
    ) -> Begun[Any] | None:
        """Loads what a GPU needs from here on."""
        uuid = self.device.uuid
        if not is_gpu(uuid):
            return None
        return Begun("kernels", lambda: load(uuid, kv_type, self.model.type_names(), self.owners))

    def open(self, session: Session, fds: Sequence[int], progress: Callable[[int, int], None]) -> OpenedModel:
        """Opens it at the daemon. Errors: any `VmmError`."""
        params = self.model.params
        begin = wire.Begin(
            name=self.name,
            device_uuids=self.device_uuids,
            n_layers=params.n_layers,
            n_experts=params.n_experts,
            top_k=params.top_k,
        )
        return session.open_model(begin, fds, self.model.stacks(), self.shape, progress, self.owners)


def choose_kv_type(asked: str | None, device_uuid: str) -> str:
    """What K/V cells hold on a device. Errors: `InvalidRequest` if it cannot be what was asked for."""
    choices = GPU_KV_TYPES if is_gpu(device_uuid) else (HOST_KV_TYPE,)
    if asked not in (None, *choices):
        where = "on a GPU" if is_gpu(device_uuid) else "in the host's memory, and others need a GPU"
        raise InvalidRequest(f"--kv-type {asked}: device {device_uuid} has {', '.join(choices)} {where}")
    return asked or choices[0]


def peer_lines(peers: Sequence[Peer], opened: OpenedModel, shape: Shape) -> Iterator[str]:
    """What each peer holds, and together with the computing device and the peers before it."""
    total, n_experts = shape.n_layers * shape.n_experts, shape.n_experts
    primary = len(opened.memory.experts_on(0))
    others = 0
    for peer in peers:
        part = opened.memory.part_on(peer.device.uuid)
        experts = opened.memory.experts_on(part)
        size_bytes = sum(pages.slot_layout(*shape.expert_bytes(*divmod(e, n_experts)))[3] for e in experts)
        filled_s = opened.filled_s[part]
        yield (
            f"strata: peer GPU {peer.number}: {len(experts)} experts, {size_text(size_bytes)} "
            f"({f'filled in {filled_s:.1f} s' if filled_s else 'resident already'}); with the primary's {primary} "
            f"{f'and {others} on other peers ' if others else ''}that is {primary + others + len(experts)} of {total} "
            "on the GPUs"
        )
        others += len(experts)
