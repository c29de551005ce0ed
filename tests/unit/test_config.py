"""The configuration file: keys, types, values, and the example that documents them."""

import os
import pwd
import re
import tomllib
from dataclasses import fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from vmmd.config import Config, DeviceConfig, HostConfig, LimitsConfig, ShareConfig, load
from vmmd.errors import InvalidRequest


def load_text(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "vmmd.toml"
    path.write_text(text)
    return load(path)


def example() -> str:
    return resources.files("vmmd").joinpath("example.toml").read_text("utf-8")


def test_example_has_the_defaults(tmp_path: Path) -> None:
    """The shipped example, as it is, equals no configuration at all."""
    assert load_text(tmp_path, example()) == load_text(tmp_path, "") == Config()


def test_example_names_every_key(tmp_path: Path) -> None:
    """With its samples uncommented, the example has exactly the keys that exist, each after a comment."""
    text = re.sub(r"(?m)^#(?=\S)", "", example())
    table = tomllib.loads(text)

    def compare(cls: Any, got: dict[str, Any]) -> None:
        assert list(got) == [f.name for f in fields(cls)]

    compare(Config, table)
    compare(HostConfig, table["host"])
    compare(LimitsConfig, table["limits"])
    assert len(table["device"]) == 1
    compare(DeviceConfig, table["device"][0])
    assert len(table["share"]) == 1
    compare(ShareConfig, table["share"][0])
    config = load_text(tmp_path, text)
    assert config.device == (DeviceConfig(uuid=config.device[0].uuid),)
    assert config.share == (ShareConfig(users=("alice",), groups=("research",)),)
    assert config.domains == {"team": ("alice", "bob")}


def test_every_key_is_parsed() -> None:
    """No field of a configuration class lacks its parser."""
    for cls in (Config, HostConfig, DeviceConfig, ShareConfig, LimitsConfig):
        assert is_dataclass(cls)
        assert all("parse" in f.metadata for f in fields(cls))


def test_all_values(tmp_path: Path) -> None:
    """Integers, strings of sizes, lists and tables arrive as they were written."""
    config = load_text(
        tmp_path,
        """
        driver = "host"
        slab_bytes = "64MiB"
        cap_bytes = 1000000
        host_cap_bytes = "2 GiB"
        give_back_delay_s = 3
        admin_users = ["root", 1000]
        host = { devices = 2, device_bytes = "1GiB", ram_bytes = "auto", uuids = ["A", "B"] }
        domains = { team = ["root", 4242] }
        limits = { files_max = 7 }
        [[device]]
        uuid = "A"
        cap_bytes = "512MiB"
        [[device]]
        uuid = "B"
        reserve_bytes = "1MiB"
        """,
    )
    assert (config.slab_bytes, config.cap_bytes, config.host_cap_bytes) == (64 << 20, 1_000_000, 2 << 30)
    assert config.give_back_delay_s == 3.0
    assert config.host == HostConfig(2, 1 << 30, None, ("A", "B"))
    assert config.device_config("A") == DeviceConfig("A", 512 << 20, 0)
    assert config.device_config("B") == DeviceConfig("B", 1_000_000, 1 << 20)
    assert config.device_config("C") == DeviceConfig("C", 1_000_000, 0)
    assert config.device_config("HOST-RAM") == DeviceConfig("HOST-RAM", 2 << 30, 0)
    assert config.admin_uids() == {0, 1000}
    assert config.domain_by_uid() == {0: "team", 4242: "team"}
    assert config.limits == LimitsConfig(files_max=7)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slab_byte = 1", "slab_byte: no such key; did you mean slab_bytes?"),
        ("zzz = 1", "zzz: no such key; known are driver"),
        ("[limits]\nfile_max = 1", "limits.file_max: no such key; did you mean limits.files_max?"),
        ('[[device]]\nuuid = "x"\ncap_byte = 1', "device[0].cap_byte: no such key; did you mean device[0].cap_bytes?"),
        ('driver = "rocm"', "driver = 'rocm': must be one of 'auto', 'host', 'cuda'"),
        ("driver = 1", "driver = 1: must be one of"),
        ("slab_bytes = 5000", "slab_bytes = 5000: must be a number of bytes"),
        ("slab_bytes = 0", "of at least 4096 and a multiple of 4096"),
        ('slab_bytes = "64MB"', "slab_bytes = '64MB'"),
        ('slab_bytes = "-1MiB"', "slab_bytes = '-1MiB'"),
        ("slab_bytes = 1.5", "slab_bytes = 1.5"),
        ("cap_bytes = true", "cap_bytes = True"),
        ("cap_bytes = -1", "cap_bytes = -1"),
        ('cap_bytes = "99999999999TiB"', "cap_bytes = '99999999999TiB'"),
        ("floor_slots = -1", "floor_slots = -1: must be an integer from 0"),
        ("floor_slots = true", "floor_slots = True: must be an integer"),
        ("heat_half_life_tokens = 0.5", "heat_half_life_tokens = 0.5: must be a number from 1 to 1e+06"),
        ("heat_half_life_tokens = nan", "heat_half_life_tokens = nan: must be"),
        ('heat_half_life_tokens = "1"', "heat_half_life_tokens = '1'"),
        ("placement_bytes_per_s = -1", "placement_bytes_per_s = -1: must be"),
        ('state_dir = "here"', "state_dir = 'here': must be an absolute path"),
        ("quiesce_deadline_ms = 0", "quiesce_deadline_ms = 0: must be an integer from 1"),
        ("admin_users = 'root'", "admin_users = 'root': must be a list of user names or user ids"),
        ("admin_users = [-1]", "admin_users = [-1]"),
        ("admin_users = [true]", "admin_users = [True]"),
        ("host = 1", "host = 1: must be a table: [host]"),
        ("device = 1", "device = 1: must be a list of tables: [[device]]"),
        ("device = {}", "device = a table: must be a list of tables"),
        ("[[device]]\ncap_bytes = 1", "device[0].uuid: missing"),
        ('[[device]]\nuuid = "x"\n[[device]]\nuuid = "x"', "device[1].uuid = 'x': must be named once"),
        ('[[device]]\nuuid = "x"\nreserve_bytes = "auto"', "device[0].reserve_bytes = 'auto'"),
        ("[host]\ndevices = 2\nuuids = ['a']", "host.uuids = ['a']: must be a list of host.devices = 2"),
        ("[host]\ndevices = 2\nuuids = ['a', 'a']", "strings that differ"),
        ("[host]\nuuids = ['HOST-RAM']", "none of them 'HOST-RAM'"),
        ("[host]\nuuids = [1]", "host.uuids = 1: must be a string"),
        ("[domains]\nteam = 'alice'", "domains.team = 'alice': must be a list"),
        ("domains = []", "domains = []: must be a table"),
        ('log_level = "\\u001b[31m"', "log_level = '\\x1b[31m': must be one of"),
        ('"\\u001b" = 1', "'\\x1b': no such key"),
        ("driver = ", "is no TOML"),
    ],
)
def test_refusals(tmp_path: Path, text: str, says: str) -> None:
    """What cannot be is refused with one line: the file, the key, what is there, what is allowed."""
    with pytest.raises(InvalidRequest) as caught:
        load_text(tmp_path, text)
    message = caught.value.message
    assert says in message
    assert str(tmp_path / "vmmd.toml") in message
    assert message.isprintable()


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a directory and bytes that are no text are one line each."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for path in (tmp_path / "missing", tmp_path, binary):
        with pytest.raises(InvalidRequest, match=re.escape(str(path))):
            load(path)


def test_unknown_users() -> None:
    """A user that this host does not have is named; one in two domains is refused, also by name and id."""
    with pytest.raises(InvalidRequest, match=r"admin_users: there is no user 'no-such-user'"):
        Config(admin_users=("no-such-user",)).admin_uids()
    with pytest.raises(InvalidRequest, match=r"domains.a: there is no user 'no-such-user'"):
        Config(domains={"a": ("no-such-user",)}).domain_by_uid()
    me = pwd.getpwuid(os.getuid())
    with pytest.raises(InvalidRequest, match=r"domains.b: .* is in domain 'a' already"):
        Config(domains={"a": (me.pw_name,), "b": (me.pw_uid,)}).domain_by_uid()


def test_derived_values() -> None:
    """Defaults that depend on driver and host follow from what can be had."""
    config = Config()
    assert config.slab_bytes_for("host") == 1 << 20
    assert config.slab_bytes_for("cuda") == 64 << 20
    assert Config(slab_bytes=4096).slab_bytes_for("cuda") == 4096
    assert HostConfig().sizes_bytes(1000) == (400, 400)
    assert HostConfig(devices=2).sizes_bytes(1000) == (200, 400)
    assert HostConfig(device_bytes=7, ram_bytes=8).sizes_bytes(1000) == (7, 8)
    assert HostConfig(devices=2).device_uuids() == ("HOST-SIM-0", "HOST-SIM-1")


def test_least_slab_size() -> None:
    """What a client needs raises the driver's choice, and never the configuration's."""
    assert Config().slab_bytes_for("host", 4 << 20) == 4 << 20
    assert Config().slab_bytes_for("cuda", 4 << 20) == 64 << 20
    assert Config().slab_bytes_for("cuda", 128 << 20) == 128 << 20
    assert Config(slab_bytes=4096).slab_bytes_for("host", 4 << 20) == 4096


def test_device_that_does_not_exist() -> None:
    """A section for a device that the host does not have is refused with those that it has."""
    config = Config(device=(DeviceConfig("GPU-1"),))
    config.check_devices(["GPU-1", "HOST-RAM"])
    with pytest.raises(InvalidRequest, match=r"device\[0\].uuid = 'GPU-1': must be a device of this host: GPU-2"):
        config.check_devices(["GPU-2", "HOST-RAM"])
