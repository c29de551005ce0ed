"""vmmd: configuration, signals, readiness, composition."""

import asyncio
import mmap
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import click
import structlog
from strata_api.v1 import memory_pb2

from vmmd import config as configuration
from vmmd import limits, log, notify, runtime_dir
from vmmd.broker import Broker
from vmmd.core.ledger import DeviceRecord, UserRecord
from vmmd.driver import membarrier
from vmmd.driver.base import Driver
from vmmd.driver.host_memfd import HostDriver
from vmmd.errors import InvalidRequest, NoDevice, Unavailable, VmmError
from vmmd.manager import Manager, profiles
from vmmd.manager.manager import Options
from vmmd.server.server import Server
from vmmd.user_shares import UserShares

STOP_GRACE_S = 0.2
LEAVE_DEADLINE_S = 0.8
"""SIGTERM leaves within a second, interpreter included."""


SWITCH_INTERVAL_S = 0.0005
"""Threads that move bytes wait for the interpreter no longer than this (Python's default is 5 ms)."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="strata-vmm")
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="TOML file; vmmd/example.toml documents every key."
)
@click.option("--runtime-dir", "directory", type=click.Path(path_type=Path), help="Directory of the sockets.")
@click.option("--driver", type=click.Choice(["auto", "host", "cuda"]), help="Overrides driver of the configuration.")
@click.option("--slab-bytes", type=int, help="Overrides slab_bytes of the configuration.")
@click.option("--slab-bytes-min", type=int, default=0, help="Least slab_bytes where the driver chooses.")
@click.option(
    "--private", is_flag=True, help="Serve one client: say `ready` on standard output, leave when standard input ends."
)
def run(
    config_file: Path | None,
    directory: Path | None,
    driver: str | None,
    slab_bytes: int | None,
    slab_bytes_min: int,
    private: bool,
) -> None:
    """Owns the memory of this host's devices and leases it to inference processes."""
    config = configuration.load(config_file) if config_file else configuration.Config()
    if slab_bytes is not None:
        _check_slab_bytes("--slab-bytes", slab_bytes, mmap.PAGESIZE)
        config = replace(config, slab_bytes=slab_bytes)
    _check_slab_bytes("--slab-bytes-min", slab_bytes_min, 0)
    if driver is not None:
        config = replace(config, driver=driver)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    log.configure(config.log_level, config.log_format)
    limits.raise_descriptor_limit()
    asyncio.run(_serve(config, directory, slab_bytes_min, private))


def _check_slab_bytes(option: str, value: int, least: int) -> None:
    if value < least or value % mmap.PAGESIZE:
        raise InvalidRequest(f"{option} {value}: must be a multiple of {mmap.PAGESIZE} bytes, {least} at least")


def main() -> NoReturn:
    """Entry point: every error is one line, and the exit status above 0."""
    try:
        run.main(prog_name="vmmd", standalone_mode=False)
    except VmmError as error:
        _leave(error.message)
    except click.ClickException as error:
        _leave(error.format_message(), 2)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except OSError as error:
        _leave(str(error))
    os._exit(0)  # everything is closed; the interpreter's own end takes gRPC another 0.4 s


def _leave(message: str, status: int = 1) -> NoReturn:
    print(f"vmmd: {log.printable(message)}", file=sys.stderr)
    sys.exit(status)


def make_driver(config: configuration.Config, available_bytes: int) -> Driver:
    """The driver that the configuration asks for. Errors: `NoDevice`."""
    if config.driver != "host":
        from vmmd.driver import cuda_vmm  # half a second of imports that a host without a GPU does without

        lacking = cuda_vmm.available()
        if not lacking:
            ram_bytes = config.host_cap_bytes or config.host.sizes_bytes(available_bytes)[1]
            return cuda_vmm.CudaDriver(ram_bytes, peer_access="never" if config.peer_access == "never" else "auto")
        if config.driver == "cuda":
            raise NoDevice(f'driver = "cuda", but this host lacks: {"; ".join(lacking)}; see vmmctl doctor')
    device_bytes, ram_bytes = config.host.sizes_bytes(available_bytes)
    devices = [(uuid, "simulated on host memory", device_bytes) for uuid in config.host.device_uuids()]
    return HostDriver(devices, ram_bytes, peer_paths=config.peer_access != "never")


def device_records(config: configuration.Config, driver: Driver, slab_bytes_min: int) -> list[DeviceRecord]:
    """The ledger's devices: what there is, within what the configuration allows."""
    infos = driver.devices()
    config.check_devices([i.uuid for i in infos])
    slab_bytes = config.slab_bytes_for(driver.name, slab_bytes_min)
    records = []
    for info in infos:
        limit = config.device_config(info.uuid)
        cap = info.total_bytes if limit.cap_bytes is None else limit.cap_bytes
        records.append(
            DeviceRecord(
                info.uuid, info.name, slab_bytes, info.total_bytes, cap, limit.reserve_bytes, is_host=info.is_host
            )
        )
    return records


def check_guarantees(records: Sequence[DeviceRecord], users: Mapping[int, UserRecord]) -> None:
    """Refuses guarantees that a device cannot hold together. Errors: `InvalidRequest`."""
    for record in records:
        slabs = sum(-(-user.share.guarantee_bytes // record.slab_bytes) for user in users.values())
        cap_bytes = min(record.cap_bytes, record.total_bytes - record.reserve_bytes)
        if not record.is_host and slabs > cap_bytes // record.slab_bytes:
            raise InvalidRequest(
                f"share: {len(users)} users are guaranteed {slabs * record.slab_bytes} bytes of {record.uuid}, which"
                f" has {cap_bytes} for vmmd; lower guarantee_bytes or raise cap_bytes"
            )


async def _serve(config: configuration.Config, explicit_dir: Path | None, slab_bytes_min: int, private: bool) -> None:
    logger = structlog.get_logger("vmmd")
    with ExitStack() as stack:
        passed = notify.passed_broker_socket()
        directory = runtime_dir.prepare(explicit_dir)
        stack.callback(runtime_dir.Lock(directory).close)
        host_limits = limits.HostLimits.read()
        driver = make_driver(config, host_limits.available_bytes)
        records = device_records(config, driver, slab_bytes_min)
        claimed = config.host.uuids if driver.name == "host" else [r.uuid for r in records if not r.is_host]
        for uuid in claimed:
            stack.callback(runtime_dir.DeviceClaim(uuid).close)
        caps = {r.uuid: min(r.cap_bytes, r.total_bytes) for r in records}
        in_ram = sum(caps.values()) if driver.name == "host" else caps[records[-1].uuid]
        for warning in limits.warnings(host_limits, caps, records[0].slab_bytes, in_ram):
            logger.warning("limits", problem=warning)

        if not membarrier.issue():
            raise Unavailable(
                "this kernel or sandbox has no membarrier(2), without which clients cannot read while experts move;"
                " allow it (Linux 4.16 or newer, seccomp filter)"
            )
        domains = config.domain_by_uid()

        def domain_of(uid: int) -> str:
            return domains.get(uid, f"user {uid}")

        shares = UserShares(config.share)
        users = {uid: UserRecord(domain_of(uid), share) for uid, share in shares.known().items()}
        check_guarantees(records, users)
        manager = Manager(driver, records, _options(config), users, shares.of)
        admin_uids = {0, os.geteuid(), *config.admin_uids()}
        if config.metrics_port:
            from vmmd.server.metrics import Metrics  # a tenth of a second of imports that few need

            metrics = Metrics(manager, config.metrics_port)
            await metrics.start()
            stack.callback(metrics.stop)
        listener = passed or runtime_dir.bind_broker(directory)
        broker = Broker(manager, listener, domain_of)
        runtime_dir.remove_socket(directory.grpc_socket)
        server = Server(manager, directory.grpc_socket, broker.admins, admin_uids)
        await server.start()
        runtime_dir.open_socket_to_group(directory.grpc_socket)
        broker.start()
        manager.upkeep.start()

        notifier = notify.Notifier()
        stack.callback(notifier.close)
        why = _end_requests(manager, private)
        notifier.ready(f"{driver.name} driver, {len(records) - 1} devices")
        watchdog = asyncio.create_task(_watchdog(notifier))
        logger.info(
            "daemon.ready",
            runtime_dir=str(directory.path),
            driver=driver.name,
            epoch=manager.epoch,
            devices=len(records) - 1,
        )
        if private:
            print("ready", flush=True)

        reason = await why
        remove = partial(_remove_files, directory, private=private, broker_too=passed is None)

        def leave_at_once() -> None:
            try:
                remove()
            finally:
                os._exit(0)

        overdue = threading.Timer(LEAVE_DEADLINE_S, leave_at_once)  # a read that hangs holds nobody up
        overdue.daemon = True
        overdue.start()
        logger.info("daemon.leaving", why=reason)
        notifier.stopping()
        manager.leaving = True
        watchdog.cancel()
        manager.notify(memory_pb2.Notice.CODE_STOPPING, "vmmd leaves; what is mapped stays, nothing grows any more")
        await asyncio.sleep(0)
        await server.stop(STOP_GRACE_S)
        broker.close()
        remove()
        await manager.close()


def _remove_files(directory: runtime_dir.RuntimeDir, *, private: bool, broker_too: bool) -> None:
    """Removes the sockets, systemd's own apart, or all of a private daemon's directory."""
    if private:
        shutil.rmtree(directory.path, ignore_errors=True)
        return
    if broker_too:
        runtime_dir.remove_socket(directory.broker_socket)
    runtime_dir.remove_socket(directory.grpc_socket)


def _options(config: configuration.Config) -> Options:
    return Options(
        floor_slots=config.floor_slots,
        give_back_delay_s=config.give_back_delay_s,
        quiesce_deadline_s=config.quiesce_deadline_ms / 1000,
        revoke_deadline_s=config.revoke_deadline_ms / 1000,
        heat_half_life_tokens=config.heat_half_life_tokens,
        placement_bytes_per_s=config.placement_bytes_per_s,
        state_dir=profiles.state_directory(config.state_dir),
        sessions_per_user_max=config.limits.sessions_per_user_max,
        ranges_per_session_max=config.limits.ranges_per_session_max,
        ranges_per_user_max=config.limits.ranges_per_user_max,
        calls_per_user_max=config.limits.calls_per_user_max,
        files_max=config.limits.files_max,
        conversations_per_user_max=config.limits.conversations_per_user_max,
        conversation_expiry_s=config.conversations.expiry_s,
        conversation_spill_bytes=config.conversations.spill_bytes,
        waiting_per_user_max=config.limits.waiting_per_user_max,
    )


def _end_requests(manager: Manager, private: bool) -> "asyncio.Future[str]":
    """Resolves with the reason to leave: a signal, a drained daemon, a private one's client gone."""
    loop = asyncio.get_running_loop()
    why: asyncio.Future[str] = loop.create_future()

    def leave(reason: str) -> Callable[[], None]:
        return lambda: None if why.done() else why.set_result(reason)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave(signal.Signals(number).name))
    manager.when_drained = leave("drained")
    if private:

        def readable() -> None:
            if not os.read(sys.stdin.fileno(), 4096):
                loop.remove_reader(sys.stdin.fileno())
                leave("the client has gone")()

        loop.add_reader(sys.stdin.fileno(), readable)
    return why


async def _watchdog(notifier: notify.Notifier) -> None:
    """From the loop itself: a loop that hangs is what the watchdog is for."""
    while notifier.watchdog_interval_s is not None:
        notifier.watchdog()
        await asyncio.sleep(notifier.watchdog_interval_s)


if __name__ == "__main__":
    main()
