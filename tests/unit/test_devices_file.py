"""devices.toml: what it says, and that every mistake is one line with file, key, what was expected and what came."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oallama.cluster.allocation.devices import load_devices
from oallama.cluster.allocation.problem import Settings
from oallama.errors import OallamaError

GOOD = """
[client]
name = "laptop"
memory = "6GiB"
flops = 2e10

[[device]]
name = "desk"
host = "me@desk.lan"
address = "192.168.1.20:50052"
memory = "8GiB"
ssh_options = ["-p", "2222"]

[[device]]
name = "here"
address = "localhost:50053"
memory = 1000000
device = "CUDA1"
threads = 3
python = "/opt/python"
flops = 3e10
prefill_flops = 4e11
bandwidth = "117MB"

[settings]
wq1 = 0
E_p = 1.0
beta = 0.8
links = "direct"
first_layer = "desk"
"""
DEVICE = '[[device]]\nname = "a"\naddress = "10.0.0.1:1"\nmemory = 1\n'


def write(tmp_path, text):
    path = tmp_path / "devices.toml"
    path.write_text(text)
    return path


def test_everything_is_read(tmp_path):
    found = load_devices(write(tmp_path, GOOD))
    assert (found.client.name, found.client.memory_bytes, found.client.flops) == ("laptop", 6 * 2**30, 2e10)
    desk, here = found.devices
    assert (desk.host, desk.address, desk.memory_bytes) == ("me@desk.lan", ("192.168.1.20", 50052), 8 * 2**30)
    assert desk.ssh_options == ("-p", "2222") and not desk.is_local and desk.flops is None and desk.bandwidth is None
    assert here.is_local and here.address == ("127.0.0.1", 50053) and here.memory_bytes == 1000000
    assert (here.device, here.threads, here.python) == ("CUDA1", 3, "/opt/python") and here.is_loopback
    assert (desk.device, desk.threads, desk.python) == (None, 0, None) and not desk.is_loopback
    assert (desk.echo_port, replace(desk, address=("10.0.0.1", 60000)).echo_port) == (60052, 50000)
    assert (here.flops, here.prefill_flops, here.bandwidth) == (3e10, 4e11, 117e6)
    assert found.settings == Settings(wq1=0.0, e_p=1.0, beta=0.8, first_layer="desk") and found.links == "direct"


def test_defaults(tmp_path):
    found = load_devices(write(tmp_path, DEVICE))
    assert (found.client.name, found.client.memory_bytes) == ("client", 0)
    assert found.settings == Settings(e_p=1.0) and found.links == "via-client"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x =", "is not TOML"),
        ("", r"device: expected at least one \[\[device\]\], got \[\]"),
        ("[device]\nname = 'a'", "device: expected at least one"),
        ("devices = 1\n" + DEVICE, "the file: expected only the keys client, device, settings, got 'devices'"),
        (DEVICE + "speed = 1", r"device\[0\] \(a\): expected only the keys name, host.*got 'speed'"),
        (DEVICE.replace('name = "a"\n', ""), r"device\[0\]\.name: expected a value, got 'none'"),
        (DEVICE.replace('"a"', '""'), r"device\[0\] \(\)\.name: expected a text that is not empty, got ''"),
        (DEVICE.replace('"a"', "3"), r"device\[0\]\.name: expected a text that is not empty, got 3"),
        (DEVICE.replace("memory = 1", "memory = -5"), r"\(a\)\.memory: expected bytes .*above 0, got -5"),
        (DEVICE.replace("memory = 1", 'memory = "-5GiB"'), r"\(a\)\.memory: expected bytes .*got '-5GiB'"),
        (DEVICE.replace("memory = 1", 'memory = "much"'), r"\(a\)\.memory: expected bytes .*got 'much'"),
        (DEVICE.replace("memory = 1", 'memory = "50%"'), r"\(a\)\.memory: expected bytes .*got '50%'"),
        (DEVICE.replace("memory = 1", "memory = true"), r"\(a\)\.memory: expected bytes .*got True"),
        *(
            (
                DEVICE.replace("10.0.0.1:1", wrong),
                rf"\(a\)\.address: expected an IPv4 address and a port .*got '{wrong}'",
            )
            for wrong in ("h", "h:1", "10.0.0.1:99999", "10.0.0.1:0", "0.0.0.0:1", "::1:50052", "10.0.0.1")
        ),
        (DEVICE + 'host = "-oProxyCommand=x"', r"\(a\)\.host: expected a text that does not begin with a dash"),
        (DEVICE + "flops = 0", r"\(a\)\.flops: expected a number above 0 per second, got 0"),
        (DEVICE + "flops = nan", r"\(a\)\.flops: expected a number above 0 per second, got nan"),
        (DEVICE + 'ssh_options = "-p 22"', r"\(a\)\.ssh_options: expected a list of texts, got '-p 22'"),
        (DEVICE + DEVICE.replace(".1:1", ".1:2"), "device.name: expected every name once, got 'a 2 times'"),
        (
            DEVICE + DEVICE.replace('"a"', '"b"'),
            "device.address: expected every address once, got '10.0.0.1:1 on the network 2 times'",
        ),
        ('[client]\nname = "a"\n' + DEVICE, "device.name: expected every name once, got 'a 2 times'"),
        ("client = 1\n" + DEVICE, "client: expected a table, got 1"),
        ("[client]\nport = 1\n" + DEVICE, "client: expected only the keys name, memory"),
        (DEVICE + "[settings]\nwq4 = 1", "settings: expected only the keys w_c.*got 'wq4'"),
        (DEVICE + "[settings]\nwq1 = -1", "settings: weight wq1 is -1.0, expected 0 or more"),
        (DEVICE + "[settings]\nbeta = 'a'", "settings.beta: expected a number, got 'a'"),
        (DEVICE + "[settings]\nE_p = 2", "settings: setting E_p is 2.0, expected a share"),
        (DEVICE + "[settings]\nfirst_layer = 'b'", "settings.first_layer: expected one of client, a, got 'b'"),
        (DEVICE + "[settings]\nlinks = 'ring'", "settings.links: expected via-client or direct, got 'ring'"),
    ],
)
def test_mistakes_are_one_line(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(OallamaError, match=message) as caught:
        load_devices(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(OallamaError, match="does not exist; expected"):
        load_devices(tmp_path / "none.toml")
    with pytest.raises(OallamaError, match="cannot read"):
        load_devices(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OallamaError, match="cannot read"):
        load_devices(binary)
