"""RPC servers that somebody else started, as devices of a cluster: llama.cpp's own, unpatched, from the same pin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oallama.base.ports import free_port
from oallama.cluster.allocation.devices import load_devices
from oallama.errors import OallamaError
from support.cli import oallama
from support.clusters import PROMPT, expected, shown
from support.processes import process_of, until
from support.servers import OALLAMA, is_open

SERVER = """
import ctypes, sys
folder, endpoint = sys.argv[1:]
parts = ("-base", "-cpu", "-rpc", "")
_, _, rpc, ggml = (ctypes.CDLL(f"{folder}/libggml{part}.so", ctypes.RTLD_GLOBAL) for part in parts)
ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
device = ctypes.c_void_p(ggml.ggml_backend_dev_by_type(0))  # the CPU
size = ctypes.c_size_t
rpc.ggml_backend_rpc_start_server(endpoint.encode(), None, size(1), size(1), ctypes.byref(device))
"""
SMALL = {"OALLAMA_HOST_MEMORY": str(4 << 20)}  # of this host: too little for the model


@contextmanager
def stock_server(baseline_lib: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    command = [sys.executable, "-c", SERVER, str(baseline_lib), endpoint]
    variables = os.environ | {"LD_LIBRARY_PATH": str(baseline_lib)}
    with process_of(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(lambda: is_open(port))
        yield endpoint, process


def planned(model: Path, folder: Path, *hosts: str) -> Path:
    """A plan with all layers on the hosts, in equal parts, by the same kernels everywhere."""
    plan = folder / "plan.json"
    more = ["--hosts", ",".join(hosts), "--ctx", "1024", "-o", plan]
    done = oallama("cluster", "plan", model, *more, env=os.environ | SMALL)
    assert done.returncode == 0, done.stderr
    content = json.loads(plan.read_text())
    assert not any(content["tiled"][host] for host in hosts)  # our kernels are not there
    n = len(content["layers"])
    content |= {"layers": [hosts[at * len(hosts) // n] for at in range(n)], "chosen": None, "tiled": {}}
    content["context"]["attention"] = "ggml"
    plan.write_text(json.dumps(content))
    return plan


def test_an_unpatched_server_is_a_device(baseline_lib: Path, tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("llama")
    with stock_server(baseline_lib) as (endpoint, _):
        plan = planned(model, tmp_path, endpoint)
        for _ in range(2):  # it serves the next client, too
            done = oallama("cluster", "run", model, PROMPT, "--temperature", "0", "--n-generate", "24", "--plan", plan)
            assert done.returncode == 0 and f"layers on {endpoint}" in done.stderr, done.stderr
            assert done.stdout == shown(model, expected(model, 24)) + "\n"
        links = json.loads(oallama("cluster", "probe", "--hosts", endpoint, "--json").stdout)["links"]
        assert len(links) == 2 and all(link["message_s"] > 0 for link in links)


def test_attention_of_ours_is_asked_of_nobody_else(
    baseline_lib: Path, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """It computes by its own kernels, whatever the plan says of attention."""
    model = tiny("llama")
    with stock_server(baseline_lib) as (endpoint, _):
        plan = planned(model, tmp_path, endpoint)
        plan.write_text(plan.read_text().replace('"attention": "ggml"', '"attention": "oallama"'))
        done = oallama("cluster", "run", model, PROMPT, "--temperature", "0", "--n-generate", "1", "--plan", plan)
        assert done.returncode == 0 and done.stdout == shown(model, expected(model, 1)) + "\n", done.stderr


def test_a_server_that_ends_is_planned_without(baseline_lib: Path, tiny: Callable[..., Path], tmp_path: Path) -> None:
    model, n = tiny("llama"), 600
    with stock_server(baseline_lib) as (first, one), stock_server(baseline_lib) as (second, _):
        plan = planned(model, tmp_path, first, second)
        # A busy machine's links are measured slower: without a high threshold layers move before the server ends.
        words = [PROMPT, "--temperature", "0", "--n-generate", str(n), "--plan", plan, "--threshold", "1000"]
        with process_of([OALLAMA, "cluster", "run", model, *words], stdout=-1, stderr=-1) as client:
            assert client.stdout is not None and client.stderr is not None
            out = client.stdout.read(1)
            one.kill()
            out, said = out + client.stdout.read(), client.stderr.read()
    assert client.returncode == 0 and f"device {first}" in said and "layers move" in said, said
    assert out == shown(model, expected(model, n)) + "\n"


def test_a_server_that_is_not_there(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    done = oallama("cluster", "plan", tiny("llama"), "--hosts", f"127.0.0.1:{free_port()}")
    assert done.returncode == 2 and "no RPC server answers at" in done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('host = "phone"', "no host beside agent = false"),
        ("threads = 2", "no threads beside agent = false"),
        ('device = "CPU"', "no device beside agent = false"),
    ],
)
def test_nothing_is_started_on_such_a_device(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "devices.toml"
    lines = ["[[device]]", 'name = "phone"', 'address = "127.0.0.1:50052"', 'memory = "3GiB"', "agent = false", line]
    file.write_text("\n".join(lines))
    with pytest.raises(OallamaError, match=message):
        load_devices(file)
