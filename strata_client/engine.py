"""A model on leased memory with one sequence: steps and growth."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from strata_api.v1 import memory_pb2 as wire
from strata_api.v1 import pages

from strata_client import timings
from strata_client.connection import Asked, NoDaemon, raise_descriptor_limit
from strata_client.devices import Peer, choose_device, choose_peers, is_gpu
from strata_client.mapping import CellShape, KVRange, Shape, choose_slab_bytes
from strata_client.models.base import F32
from strata_client.models.gguf_file import ModelFile
from strata_client.models.qwen3moe import Qwen3Moe
from strata_client.output import Signals
from strata_client.sampler import Sampler, SamplerOptions
from strata_client.session import OpenedModel, Session
from strata_client.startup import Begun
from strata_client.transcript import Transcript
from vmmd.errors import Exhausted, InvalidRequest, LeaseRevoked, Unavailable, VmmError

CHUNK_TOKENS = 64
"""Tokens of a prompt in one step."""

CELLS_AHEAD = 256
"""Cells beyond the prompt that are asked for at its start."""

CELLS_LOW = 64
"""With fewer cells left, decoding asks for more."""

HOST_KV_TYPE = "f32"
"""What a K/V cell holds on the host driver."""

GPU_KV_TYPES = ("f16", "bf16", "q8_0")
"""What one may hold on a GPU, the default first."""

_RETRY_CELLS = 16

Say = Callable[[str], None]


class Engine:
    """A model, its memory and one sequence's K/V. For one thread.

    Attributes:
        model: the model.
        context: most cells the sequence may have.
        position: cells filled.
        kept: tokens of the prompt whose cells were there when it began.
        refusal: why the last growth was refused; empty if it was not.
        peers: devices that hold experts for the computing one, which reads them where they are.
    """

    def __init__(
        self,
        model: Qwen3Moe,
        session: Session,
        opened: OpenedModel,
        kv: KVRange,
        context: int,
        transcript: Transcript,
        *,
        peers: Sequence[Peer] = (),
        say: Say,
        say_verbose: Say,
        signals: Signals,
    ) -> None:
        """Takes what `open_engine` made."""
        self.model = model
        self.context = context
        self.position = 0
        self.kept = 0
        self.refusal = ""
        self._transcript = transcript  # says of which tokens the cells are
        self.peers = peers
        self._session = session
        self._opened = opened
        self._kv = kv
        self._say = say
        self._say_verbose = say_verbose
        self._signals = signals
        self._ask_again_at = 0
        self._sampler = Sampler(SamplerOptions())
        self._seen: set[int] = set()
        self._last: int | None = None  # chosen, but not evaluated
        self._logits: F32

    def restart(self) -> None:
        """Begins a new sequence in the same memory."""
        self._transcript.cut(0)
        self.position = 0

    def prepare(self, prompt_tokens: int) -> None:
        """Makes room for a prompt and, if there is any, for what follows it.

        Errors: `Exhausted` or `Unavailable` if there is no room for the prompt.
        """
        wanted = min(self.context, prompt_tokens + CELLS_AHEAD)
        if self._grow(wanted) or self._kv.cells >= prompt_tokens:
            return
        if not self._grow(prompt_tokens, wait=True):
            raise Exhausted(f"no room for the K/V of a prompt of {prompt_tokens} tokens: {self.refusal}")

    def has_room(self) -> bool:
        """Whether one more token fits; asks for more memory well before none does.

        A refusal is in `refusal`; the sequence goes on with what it has.
        """
        left = self._kv.cells - self.position
        if left < CELLS_LOW and self._kv.cells < self.context and (left <= 0 or self.position >= self._ask_again_at):
            self._ask_again_at = self.position + _RETRY_CELLS
            self._grow(min(self.context, self._kv.cells + max(self._kv.cells_per_slab, CELLS_LOW)), wait=left <= 0)
        return self.position < min(self._kv.cells, self.context)

    def step(self, tokens: Sequence[int], *, prompt: bool, all_logits: bool = False) -> F32:
        """Evaluates tokens at the end of the sequence.

        Returns:
            Logits float32 `[n_vocab]` of the last token, or `[n, n_vocab]` of all.

        Errors: `LeaseRevoked` if the daemon has taken cells back.
        """
        self._signals.between_steps()
        n = len(tokens)
        self._signals.hold()
        try:
            with self._opened.steps.step():
                if self._kv.cells < self.position + n:
                    raise LeaseRevoked(f"the daemon took K/V back: {self._kv.cells} cells are left")
                self._opened.memory.count(n, prompt=prompt)
                self._signals.release()
                logits = self.model.forward(
                    np.asarray(tokens, np.int32),
                    self.position,
                    self._opened.memory,
                    self._kv,
                    prompt=prompt,
                    all_logits=all_logits,
                )
                self._signals.hold()
        finally:
            self._signals.release()
        self.position += n
        self._transcript.add(tokens)
        self._opened.steps.count(n, self.position)
        return logits

    def prefill(self, tokens: Sequence[int]) -> F32:
        """Evaluates a prompt in chunks; logits float32 `[n_vocab]` of its last token."""
        for at in range(0, len(tokens), CHUNK_TOKENS):
            logits = self.step(tokens[at : at + CHUNK_TOKENS], prompt=True)
        return logits

    def begin(self, prompt: Sequence[int], options: SamplerOptions) -> None:
        """Evaluates a prompt, at least one token, and takes how to choose those that follow it.

        Cells that hold its beginning already are kept. Errors: as `step`.
        """
        self._keep(prompt)
        self._sampler, self._seen, self._last = Sampler(options), set(prompt), None
        self._logits = self.prefill(prompt[self.kept :])

    def next_token(self) -> int:
        """The next token of the text. For each but the first, `has_room` is asked before.

        Errors: as `step`; `ModelError` if the logits are not finite.
        """
        if self._last is not None:
            self._seen.add(self._last)
            self._logits = self.step([self._last], prompt=False)
        self._last = self._sampler.sample(self._logits, self._seen)
        return self._last

    def settle(self) -> None:
        """Begins what the first token did not wait for: mapping the experts' homes, in a thread of its own."""
        self._opened.homes.begin()

    def experts_on(self, peer: Peer) -> int:
        """Experts in slots of a peer now."""
        memory = self._opened.memory
        return len(memory.experts_on(memory.part_on(peer.device.uuid)))

    def close(self) -> None:
        """Waits until no step runs any more."""

    def _keep(self, prompt: Sequence[int]) -> None:
        """The sequence goes on after the cells that hold a prompt's beginning; the last token has to be evaluated."""
        self.kept = self.position = self._transcript.common(prompt[:-1])
        self._transcript.cut(self.kept)

    def _grow(self, cells: int, *, wait: bool = False) -> bool:
        if self._kv.cells >= cells:
            return True
        try:
            reply = self._session.grow(self._kv, cells, wait=wait)
        except (Exhausted, Unavailable, LeaseRevoked) as error:
            self.refusal = error.message
            self._say_verbose(f"strata: K/V stays at {self._kv.cells} cells: {error.message}")
            return False
        self.refusal = ""
        line = growth_line(self._kv.cells, self._kv.size_bytes, reply.trades)
        if line:
            self._say(line)
        else:
            size = size_text(self._kv.size_bytes)
            self._say_verbose(
                f"strata: K/V grown to {self._kv.cells} cells ({size}) from {reply.free_slabs} free slabs"
            )
        return True


@contextmanager
def open_engine(
    model: Qwen3Moe,
    model_file: ModelFile,
    directories: Sequence[Path],
    *,
    context: int,
    device: str | None,
    kv_type: str | None,
    conversation: str | None = None,
    asked: Asked = Asked(),  # noqa: B008  a tuple
    say: Say,
    say_verbose: Say,
    signals: Signals,
    progress: Callable[[int, int], None],
    peer_devices: Sequence[str] = (),
) -> Iterator[Engine]:
    """Opens a model at the daemon in one of `directories`, or at a private one, and gives everything back at the end.

    The cells of a conversation stay with the daemon.

    Args:
        model: the model of `model_file`, whose descriptors are lent to the daemon.
        directories: runtime directories to look in.
        context: most cells of the sequence.
        device: what a user calls the device; None for the first.
        kv_type: what a K/V cell shall hold; None for what suits the device.
        conversation: name of the one to go on with, or to begin; None for a sequence that is not kept.
        asked: what the session asks of a daemon that it shares.
        say: takes lines for the user; `say_verbose` those for the curious.
        signals: learns what is to be abandoned, and when a step runs.
        progress: called with bytes filled and bytes to fill.
        peer_devices: what a user calls those that shall hold experts which the device has no room for.

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
        other_bytes = sum(extent.length_bytes for extent in weights) + context * cell.size_bytes
        with timings.stage("start a daemon"):
            session = Session.private(choose_slab_bytes(slots, other_bytes, cell.size_bytes))
        lost = f"; conversation {conversation} ends with it" if conversation is not None else ""
        say(f"strata: no daemon at {directories[0]}; started a private one{lost}")
    try:
        signals.abandon = session.abandon
        devices = session.devices()
        chosen = choose_device(devices, device)
        peers = choose_peers(devices, chosen, peer_devices)
        cell = cell._replace(type=choose_kv_type(kv_type, chosen.uuid))
        make_engine = _on_gpu(model, chosen.uuid, cell.type) if is_gpu(chosen.uuid) else Engine
        begin = wire.Begin(
            name=str(model_file.metadata.get("general.name") or Path(model_file.files[0].path).name),
            device_uuids=[chosen.uuid, *(peer.device.uuid for peer in peers)],
            n_layers=params.n_layers,
            n_experts=params.n_experts,
            top_k=params.top_k,
        )
        shape = Shape(params.n_layers, params.n_experts, weights, model.expert_bytes)
        fds = [part.fd for part in model_file.files]
        opened = session.open_model(begin, fds, model.stacks(), shape, progress)
        signals.is_idle = lambda: opened.steps.idle
        if conversation is None:
            kv, transcript = session.create_kv(opened.model_id, chosen, cell, context), Transcript.private(context)
        else:
            resumed = session.open_conversation(conversation, opened.model_id, chosen, cell, context)
            kv, transcript = resumed.kv, Transcript(resumed.tokens)
            if resumed.began_anew:
                say(f"strata: conversation {conversation} begins anew: {resumed.began_anew}")
        say_verbose(
            f"strata: device {chosen.uuid}, {size_text(chosen.slab_bytes)} a slab, arena "
            f"{'shared' if opened.shared else 'filled'}: {size_text(opened.memory.arena_bytes(0))} of experts on it"
        )
        for line in peer_lines(peers, opened, shape):
            say(line)
        engine = make_engine(
            model,
            session,
            opened,
            kv,
            context,
            transcript,
            peers=peers,
            say=say,
            say_verbose=say_verbose,
            signals=signals,
        )
        try:
            yield engine
        finally:
            with suppress(VmmError):
                engine.close()
            if session.is_private:
                pass  # its daemon leaves with all of it
            elif conversation is None:
                with suppress(VmmError):
                    session.give_back(kv)
            else:
                try:
                    session.park(kv)
                except VmmError as error:
                    say(f"strata: conversation {conversation} could not be kept: {error.message}")
    finally:
        for trouble in session.troubles:
            say_verbose(f"strata: {trouble}")
        session.close()


def choose_kv_type(asked: str | None, device_uuid: str) -> str:
    """What K/V cells hold on a device. Errors: `InvalidRequest` if it cannot be what was asked for."""
    choices = GPU_KV_TYPES if is_gpu(device_uuid) else (HOST_KV_TYPE,)
    if asked not in (None, *choices):
        where = "on a GPU" if is_gpu(device_uuid) else "in the host's memory, and others need a GPU"
        raise InvalidRequest(f"--kv-type {asked}: device {device_uuid} has {', '.join(choices)} {where}")
    return asked or choices[0]


def _on_gpu(model: Qwen3Moe, device_uuid: str, kv_type: str) -> Callable[..., Engine]:
    """What makes the engine on a GPU, whose kernels are loaded from now on, while the model is opened and mapped."""

    def load() -> tuple[Any, Any]:
        from strata_client.gpu.engine import load  # loads CUDA, which clients on the host do without

        return load(device_uuid, kv_type, model.type_names())

    loaded = Begun("kernels", load)

    def make(*args: Any, **kwargs: Any) -> Engine:
        from strata_client.gpu.engine import GpuEngine

        return GpuEngine(*args, kv_type=kv_type, loaded=loaded, **kwargs)

    return make


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


def growth_line(cells: int, size_bytes: int, trades: Sequence[wire.Trade]) -> str:
    """The log line of a growth to which experts' slots were given; empty if none were."""
    slots = sum(trade.slots for trade in trades)
    if not slots:
        return ""
    moved = sum(trade.experts_moved for trade in trades)
    occupied = sum(trade.slots_occupied for trade in trades)
    total = sum(trade.slots_total for trade in trades)
    return (
        f"strata: K/V grown to {cells} cells ({size_text(size_bytes)}); the expert cache gave {slots} slots for it, "
        f"{moved} hotter experts moved to colder ones' slots ({occupied} of {total} slots hold experts)"
    )


def size_text(size_bytes: int) -> str:
    """A size in GiB, below 0.01 GiB in MiB."""
    gib = size_bytes / (1 << 30)
    return f"{gib:.2f} GiB" if gib >= 0.01 else f"{size_bytes / (1 << 20):.2f} MiB"
