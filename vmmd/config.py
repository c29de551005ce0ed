"""The daemon's configuration: frozen dataclasses, read from a TOML file.

Every key is optional and documented in ``vmmd/example.toml``. A key that does
not exist, a value of another type and a value that cannot be are refused with one
line: the key, what is there, and what is allowed.

A parser, kept beside its key, takes the value and its full key, and returns
the checked value or raises `InvalidRequest`.
"""

import difflib
import pwd
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from vmmd.driver.host_memfd import HOST_UUID
from vmmd.errors import InvalidRequest

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

HOST_SHARE = 0.4
"""Of the memory that can be had: for simulated devices together, and again for the host tier."""

_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_SIZE = re.compile(r"(\d+) ?(B|KiB|MiB|GiB|TiB)")
_SIZE_BYTES_MAX = (1 << 63) - 1
_SLAB_STEP_BYTES = 4 * KIB

Parser = Callable[[Any, str], Any]
T = TypeVar("T")


def _refuse(key: str, value: object, allowed: str) -> InvalidRequest:
    shown = "a table" if isinstance(value, dict) else repr(value)
    if len(shown) > 80:
        shown = f"{shown[:77]}..."
    return InvalidRequest(f"{key} = {shown}: must be {allowed}")


def _choice(*names: str) -> Parser:
    def parse(value: Any, key: str) -> str:
        if not isinstance(value, str) or value not in names:
            raise _refuse(key, value, f"one of {', '.join(map(repr, names))}")
        return value

    return parse


def _integer(least: int, most: int) -> Parser:
    def parse(value: Any, key: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise _refuse(key, value, f"an integer from {least} to {most}")
        return value

    return parse


def _number(least: float, most: float) -> Parser:
    def parse(value: Any, key: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise _refuse(key, value, f"a number from {least:g} to {most:g}")
        return float(value)

    return parse


def _size(least: int = 0, step: int = 1, *, auto: bool = True) -> Parser:
    """Bytes as an integer or as "64MiB"; "auto" (None) lets the daemon choose."""
    multiple = f" and a multiple of {step}" if step > 1 else ""
    allowed = f'a number of bytes, or a string such as "64MiB", of at least {least}{multiple}'

    def parse(value: Any, key: str) -> int | None:
        if auto and value == "auto":
            return None
        size_bytes = value
        if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
            size_bytes = int(match[1]) * _UNITS[match[2]]
        if (
            not isinstance(size_bytes, int)
            or isinstance(size_bytes, bool)
            or not least <= size_bytes <= _SIZE_BYTES_MAX
            or size_bytes % step
        ):
            raise _refuse(key, value, f'{allowed}, or "auto"' if auto else allowed)
        return size_bytes

    return parse


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise _refuse(key, value, "a string of printable characters")
    return value


def _directory(value: Any, key: str) -> str:
    if not isinstance(value, str) or not (value in ("auto", "off") or (value.isprintable() and value.startswith("/"))):
        raise _refuse(key, value, 'an absolute path, "auto" or "off"')
    return value


def _uuids(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _refuse(key, value, "a list of strings")
    uuids = tuple(_text(item, key) for item in value)
    if len(set(uuids)) != len(uuids) or HOST_UUID in uuids:
        raise _refuse(key, value, f"a list of strings that differ, none of them {HOST_UUID!r}")
    return uuids


def _users(value: Any, key: str) -> tuple[str | int, ...]:
    allowed = "a list of user names or user ids"
    if not isinstance(value, list):
        raise _refuse(key, value, allowed)
    for item in value:
        uid = isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**32 - 1
        if not uid and not (isinstance(item, str) and item and item.isprintable()):
            raise _refuse(key, value, allowed)
    return tuple(value)


def _groups(value: Any, key: str) -> tuple[str | int, ...]:
    try:
        return _users(value, key)
    except InvalidRequest:
        raise _refuse(key, value, "a list of group names or group ids") from None


def _domains(value: Any, key: str) -> dict[str, tuple[str | int, ...]]:
    if not isinstance(value, dict):
        raise _refuse(key, value, "a table of lists of users")
    return {_text(name, key): _users(users, f"{key}.{name}") for name, users in value.items()}


def _table(cls: type[T]) -> Parser:
    def parse(value: Any, key: str) -> T:
        if not isinstance(value, dict):
            raise _refuse(key, value, f"a table: [{key}]")
        return _parse(cls, value, f"{key}.")

    return parse


def _tables(cls: type[T]) -> Parser:
    def parse(value: Any, key: str) -> tuple[T, ...]:
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise _refuse(key, value, f"a list of tables: [[{key}]]")
        return tuple(_parse(cls, item, f"{key}[{i}].") for i, item in enumerate(value))

    return parse


def _key(default: Any, parse: Parser) -> Any:
    return field(default=default, metadata={"parse": parse})


def _parse(cls: type[T], table: Mapping[str, Any], prefix: str = "") -> T:
    parsers: dict[str, Parser] = {f.name: f.metadata["parse"] for f in fields(cls)}  # type: ignore[arg-type]
    for name in table:
        if name not in parsers:
            close = difflib.get_close_matches(name, parsers, 1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known are {', '.join(parsers)}"
            shown = name if name.isprintable() else repr(name)
            raise InvalidRequest(f"{prefix}{shown}: no such key; {hint}")
    return cls(**{name: parsers[name](value, prefix + name) for name, value in table.items()})


@dataclass(frozen=True)
class HostConfig:
    """The host driver's devices. Sizes of None are shares of the memory that can be had."""

    devices: int = _key(1, _integer(1, 64))
    device_bytes: int | None = _key(None, _size(_SLAB_STEP_BYTES))
    ram_bytes: int | None = _key(None, _size(_SLAB_STEP_BYTES))
    uuids: tuple[str, ...] = _key((), _uuids)

    def __post_init__(self) -> None:
        if self.uuids and len(self.uuids) != self.devices:
            raise _refuse("host.uuids", list(self.uuids), f"a list of host.devices = {self.devices} strings, or empty")

    def device_uuids(self) -> tuple[str, ...]:
        """Names of the simulated devices."""
        return self.uuids or tuple(f"HOST-SIM-{i}" for i in range(self.devices))

    def sizes_bytes(self, available_bytes: int) -> tuple[int, int]:
        """Bytes of each simulated device and of the host tier, given what can be had."""
        share_bytes = int(available_bytes * HOST_SHARE)
        device_bytes = share_bytes // self.devices if self.device_bytes is None else self.device_bytes
        return device_bytes, share_bytes if self.ram_bytes is None else self.ram_bytes


@dataclass(frozen=True)
class DeviceConfig:
    """What one device may give."""

    uuid: str = _key("", _text)
    cap_bytes: int | None = _key(None, _size())
    reserve_bytes: int = _key(0, _size(auto=False))


@dataclass(frozen=True)
class LimitsConfig:
    """What one user or session may ask for."""

    sessions_per_user_max: int = _key(64, _integer(1, 100_000))
    ranges_per_session_max: int = _key(256, _integer(1, 100_000))
    ranges_per_user_max: int = _key(1024, _integer(1, 1_000_000))
    calls_per_user_max: int = _key(256, _integer(1, 100_000))
    files_max: int = _key(1024, _integer(1, 100_000))
    conversations_per_user_max: int = _key(64, _integer(1, 100_000))
    waiting_per_user_max: int = _key(64, _integer(1, 100_000))


@dataclass(frozen=True)
class ConversationsConfig:
    """What becomes of conversations that nobody uses."""

    expiry_s: float = _key(21_600.0, _number(1, 31_536_000))
    spill_bytes: int = _key(0, _size(auto=False))


@dataclass(frozen=True)
class ShareConfig:
    """What some users, and each of their sessions, have of each computing device. Without users and groups: others."""

    users: tuple[str | int, ...] = _key((), _users)
    groups: tuple[str | int, ...] = _key((), _groups)
    guarantee_bytes: int = _key(0, _size(auto=False))
    cap_bytes: int | None = _key(None, _size())
    session_guarantee_bytes: int = _key(0, _size(auto=False))
    session_cap_bytes: int | None = _key(None, _size())
    priority: int = _key(0, _integer(-10, 10))

    def __post_init__(self) -> None:
        for name, guarantee_bytes, cap_bytes in (
            ("", self.guarantee_bytes, self.cap_bytes),
            ("session_", self.session_guarantee_bytes, self.session_cap_bytes),
        ):
            if cap_bytes is not None and guarantee_bytes > cap_bytes:
                raise _refuse(f"share.{name}guarantee_bytes", guarantee_bytes, f"{name}cap_bytes = {cap_bytes} at most")
        if self.guarantee_bytes and not self.users and not self.groups:
            raise _refuse("share.guarantee_bytes", self.guarantee_bytes, "0 where neither users nor groups are named")


@dataclass(frozen=True)
class Config:
    """All of it. None is "auto": the daemon chooses when it knows the device."""

    driver: str = _key("auto", _choice("auto", "host", "cuda"))
    peer_access: str = _key("auto", _choice("auto", "never"))
    slab_bytes: int | None = _key(None, _size(_SLAB_STEP_BYTES, _SLAB_STEP_BYTES))
    cap_bytes: int | None = _key(None, _size())
    host_cap_bytes: int | None = _key(None, _size())
    floor_slots: int = _key(0, _integer(0, 2**31 - 1))
    give_back_delay_s: float = _key(5.0, _number(0, 86_400))
    quiesce_deadline_ms: int = _key(2000, _integer(1, 3_600_000))
    revoke_deadline_ms: int = _key(5000, _integer(1, 3_600_000))
    heat_half_life_tokens: float = _key(128.0, _number(1, 1_000_000))
    placement_bytes_per_s: int = _key(8 * GIB, _size(auto=False))
    state_dir: str = _key("auto", _directory)
    log_level: str = _key("info", _choice("debug", "info", "warning", "error"))
    log_format: str = _key("auto", _choice("auto", "json", "console"))
    metrics_port: int = _key(0, _integer(0, 65535))
    admin_users: tuple[str | int, ...] = _key((), _users)
    host: HostConfig = field(default_factory=HostConfig, metadata={"parse": _table(HostConfig)})
    device: tuple[DeviceConfig, ...] = _key((), _tables(DeviceConfig))
    domains: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict, metadata={"parse": _domains})
    conversations: ConversationsConfig = field(
        default_factory=ConversationsConfig, metadata={"parse": _table(ConversationsConfig)}
    )
    share: tuple[ShareConfig, ...] = _key((), _tables(ShareConfig))
    limits: LimitsConfig = field(default_factory=LimitsConfig, metadata={"parse": _table(LimitsConfig)})

    def __post_init__(self) -> None:
        uuids = [device.uuid for device in self.device]
        for i, uuid in enumerate(uuids):
            if not uuid:
                raise InvalidRequest(f'device[{i}].uuid: missing; [[device]] needs uuid = "..."')
            if uuid in uuids[:i]:
                raise _refuse(f"device[{i}].uuid", uuid, "named once")

    def slab_bytes_for(self, driver_name: str, least_bytes: int = 0) -> int:
        """`slab_bytes`, or the driver's default: small models on the host, few mappings on CUDA.

        The default is `least_bytes` where that is more.
        """
        if self.slab_bytes is not None:
            return self.slab_bytes
        return max(least_bytes, MIB if driver_name == "host" else 64 * MIB)

    def device_config(self, uuid: str) -> DeviceConfig:
        """Cap and reserve of a device: its own where it has them, else the general cap.

        A cap of None is all that the device has.
        """
        general_bytes = self.host_cap_bytes if uuid == HOST_UUID else self.cap_bytes
        for device in self.device:
            if device.uuid == uuid:
                cap_bytes = general_bytes if device.cap_bytes is None else device.cap_bytes
                return DeviceConfig(uuid, cap_bytes, device.reserve_bytes)
        return DeviceConfig(uuid, general_bytes, 0)

    def admin_uids(self) -> frozenset[int]:
        """User ids of `admin_users`. Errors: `InvalidRequest` (no such user)."""
        return frozenset(uid_of(user, "admin_users") for user in self.admin_users)

    def domain_by_uid(self) -> dict[int, str]:
        """The domain of each user that is in one. Errors: `InvalidRequest` (no such user, or in two)."""
        result: dict[int, str] = {}
        for name, users in self.domains.items():
            for user in users:
                uid = uid_of(user, f"domains.{name}")
                if result.setdefault(uid, name) != name:
                    raise InvalidRequest(f"domains.{name}: {user!r} is in domain {result[uid]!r} already; one at most")
        return result

    def check_devices(self, uuids: Sequence[str]) -> None:
        """Refuses `[[device]]` entries that name none of these devices. Errors: `InvalidRequest`."""
        for i, device in enumerate(self.device):
            if device.uuid not in uuids:
                raise _refuse(f"device[{i}].uuid", device.uuid, f"a device of this host: {', '.join(uuids)}")


def load(path: Path) -> Config:
    """Reads a configuration file. Errors: `InvalidRequest`, one line that names file and key."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidRequest(f"cannot read the configuration {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest(f"{path} is no TOML: {error}") from error
    try:
        return _parse(Config, table)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error.message}") from error


def uid_of(user: str | int, key: str) -> int:
    """The id of a user that a key names. Errors: `InvalidRequest` (no such user)."""
    if isinstance(user, int):
        return user
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise InvalidRequest(f"{key}: there is no user {user!r} on this host") from None
