"""Metrics for Prometheus: the snapshot of `vmmctl status`, on a loopback port.

Off by default: every local user can read a loopback port, whoever may connect to
the daemon's sockets. The snapshot is taken once a second at most, whoever asks, and
who is slow to ask is cut off: a scrape costs no client anything.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from strata_api.v1 import admin_pb2

from vmmd.errors import Unavailable
from vmmd.manager import Manager
from vmmd.server import status

log = structlog.get_logger("vmmd.metrics")

ADDRESS = "127.0.0.1"
CONNECTIONS_MAX = 16
REQUEST_BYTES_MAX = 8192
REQUEST_DEADLINE_S = 5.0
FRESH_S = 1.0

_DEVICE_KINDS = ("kv", "experts", "weights", "free_slab", "revoking", "quarantined", "unmanaged")


class Metrics:
    """Serves ``GET /metrics``; everything else is refused."""

    def __init__(self, manager: Manager, port: int) -> None:
        self._manager = manager
        self._port = port
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Snapshot(manager))
        self._pages: dict[str, tuple[float, bytes, str]] = {}  # by what is accepted: when made, text, its type
        self._connections = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens. Errors: `Unavailable` where the port cannot be had."""
        try:
            self._server = await asyncio.start_server(self._serve, ADDRESS, self._port, limit=REQUEST_BYTES_MAX)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise Unavailable(
                f"cannot listen on {ADDRESS}:{self._port} for metrics: {reason}; see metrics_port"
            ) from None
        log.info("metrics.ready", address=ADDRESS, port=self._port)

    def stop(self) -> None:
        """Listens no more."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= CONNECTIONS_MAX:
                async with asyncio.timeout(REQUEST_DEADLINE_S):
                    writer.write(self._answer(await reader.readuntil(b"\r\n\r\n")))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()
        finally:
            self._connections -= 1
            with suppress(OSError):
                writer.close()

    def _answer(self, request: bytes) -> bytes:
        head, *lines = request.decode("latin-1").split("\r\n")
        method, _, target = head.partition(" ")
        path = target.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", "text/plain", b"only GET is served here\n")
        if path != "/metrics":
            return _response("404 Not Found", "text/plain", b"metrics are at /metrics\n")
        accepted = next((x.partition(":")[2].strip() for x in lines if x.lower().startswith("accept:")), "")
        text, content_type = self._page(accepted)
        return _response("200 OK", content_type, text, with_body=method == "GET")

    def _page(self, accepted: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accepted)
        made_s, text, _ = self._pages.get(content_type, (-FRESH_S, b"", ""))
        if time.monotonic() >= made_s + FRESH_S:
            text = encode(self._registry)
            self._pages[content_type] = time.monotonic(), text, content_type
        return text, content_type


def _response(state: str, content_type: str, body: bytes, *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {state}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")


class _Snapshot(Collector):
    """The snapshot as metric families."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        parts = list(status.parts(self._manager))
        daemon, sessions = parts[0].daemon, [s for part in parts for s in part.sessions]
        yield from _daemon(daemon)
        yield from _devices(parts[0].devices)
        yield from _models(parts[0].models)
        yield from _sessions(sessions)


def _family(kind: Any, name: str, text: str, labels: str, rows: Iterable[tuple[Any, ...]]) -> Metric:
    """A family of samples; a row is its labels' values, then the sample's."""
    family: Metric = kind(name, text, labels=labels.split())
    for *values, sample in rows:
        family.add_metric([str(value) for value in values], sample)  # type: ignore[attr-defined]
    return family


def _daemon(daemon: admin_pb2.DaemonStatus) -> Iterator[Metric]:
    growths = daemon.growths
    yield InfoMetricFamily("strata_daemon", "The daemon.", {"version": daemon.version, "driver": daemon.driver})
    yield GaugeMetricFamily("strata_uptime_seconds", "Since the daemon's start.", daemon.uptime_s)
    yield GaugeMetricFamily("strata_draining", "Whether no new sessions are taken.", float(daemon.draining))
    yield _family(
        CounterMetricFamily,
        "strata_growths",
        "Growths of elastic ranges that were answered.",
        "outcome",
        [("granted", growths.granted), ("refused", growths.refused)],
    )
    yield CounterMetricFamily("strata_growth_seconds", "From call to answer, of all growths.", growths.seconds)
    yield GaugeMetricFamily("strata_growths_waiting", "Growths that wait for their answer.", growths.waiting)
    yield _family(
        CounterMetricFamily,
        "strata_growth_slabs",
        "Slabs that growths got.",
        "source",
        [("free", growths.slabs - growths.traded_slabs), ("arena", growths.traded_slabs)],
    )


def _devices(devices: Iterable[admin_pb2.DeviceStatus]) -> Iterator[Metric]:
    devices = list(devices)
    yield _family(
        GaugeMetricFamily,
        "strata_device_used_bytes",
        "Memory of a device by what it is used for.",
        "device kind",
        [(d.uuid, kind, getattr(d, f"{kind}_bytes")) for d in devices for kind in _DEVICE_KINDS],
    )
    for kind, name, text, attribute in (
        (GaugeMetricFamily, "strata_device_total_bytes", "What a device has.", "total_bytes"),
        (GaugeMetricFamily, "strata_device_cap_bytes", "What vmmd may take of a device.", "cap_bytes"),
        (GaugeMetricFamily, "strata_device_free_bytes", "What of the cap nobody uses.", "free_bytes"),
        (CounterMetricFamily, "strata_trades", "Trades by which arenas gave slabs.", "trades"),
        (CounterMetricFamily, "strata_traded_slabs", "Slabs that arenas gave.", "traded_slabs"),
        (CounterMetricFamily, "strata_returned_slabs", "Slabs that arenas got later on.", "returned_slabs"),
    ):
        yield _family(kind, name, text, "device", [(d.uuid, getattr(d, attribute)) for d in devices])
    failed = [(d.uuid, float(d.state != "ok")) for d in devices]
    yield _family(GaugeMetricFamily, "strata_device_failed", "Whether a device has failed.", "device", failed)


def _models(models: Iterable[admin_pb2.ModelStatus]) -> Iterator[Metric]:
    of = {(m.model_id, m.name, m.domain): m for m in models}
    for kind, name, text, attribute in (
        (GaugeMetricFamily, "strata_experts", "Experts of a model.", "experts"),
        (GaugeMetricFamily, "strata_resident_experts", "Experts in a device slot.", "resident"),
        (GaugeMetricFamily, "strata_heat_covered_ratio", "Share of heat that resident experts carry.", "heat_covered"),
        (GaugeMetricFamily, "strata_model_sessions", "Sessions that have a model open.", "sessions"),
        (CounterMetricFamily, "strata_filled_bytes", "Copied into slots, homes and weights.", "filled_bytes"),
    ):
        yield _family(kind, name, text, "id model domain", [(*key, getattr(m, attribute)) for key, m in of.items()])
    tokens = [
        (*key, phase, count)
        for key, m in of.items()
        for phase, count in (("decode", m.decoded_tokens), ("prompt", m.prompt_tokens))
    ]
    yield _family(CounterMetricFamily, "strata_tokens", "Tokens evaluated.", "id model domain phase", tokens)
    routings = [
        (*key, tier.tier, phase, count)
        for key, m in of.items()
        for tier in m.tiers
        for phase, count in (("decode", tier.decode_routings), ("prompt", tier.prompt_routings))
    ]
    yield _family(
        CounterMetricFamily,
        "strata_routings",
        "Routings to experts by the tier that they were read from.",
        "id model domain tier phase",
        routings,
    )
    yield _family(
        CounterMetricFamily,
        "strata_read_bytes",
        "Read of experts while decoding.",
        "id model domain tier",
        [(*key, tier.tier, tier.read_bytes) for key, m in of.items() for tier in m.tiers],
    )


def _sessions(sessions: Iterable[admin_pb2.SessionStatus]) -> Iterator[Metric]:
    count, kv_bytes = Counter[tuple[str, str]](), Counter[str]()
    for session in sessions:
        count[session.user, session.state] += 1
        kv_bytes[session.user] += session.kv_bytes
    yield _family(
        GaugeMetricFamily, "strata_sessions", "Sessions.", "user state", [(*key, n) for key, n in count.items()]
    )
    yield _family(GaugeMetricFamily, "strata_kv_bytes", "K/V that sessions hold.", "user", list(kv_bytes.items()))
