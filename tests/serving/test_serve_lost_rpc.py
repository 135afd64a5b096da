"""`oallama serve` with a plan on an RPC server: when it dies, the model is served without it."""

import os
import signal
import subprocess
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import pytest

from oallama.base.ports import free_port
from oallama.engine import runtime
from oallama.modelmaker import make_model
from support.cli import oallama
from support.processes import process_of, until
from support.servers import alike, answers, call, greedy, is_open, serving

PROMPT = "a fox and a hen"


@dataclass
class Device:
    """An RPC server on loopback."""

    endpoint: str
    process: subprocess.Popen[str]

    def worker(self) -> int:
        """The process that serves the client."""
        found = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True).stdout.split()
        return int(found[-1])


@contextmanager
def rpc_device() -> Iterator[Device]:
    port = free_port()
    command = [str(runtime.program("ggml-rpc-server")), "--host", "127.0.0.1", "--port", str(port), "--device", "CPU"]
    with process_of([*command, "--isolate"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(lambda: is_open(port))
        yield Device(f"127.0.0.1:{port}", process)


@contextmanager
def served(folder: Path) -> Iterator[tuple[int, Path, Device, Path]]:
    """Port, model, the RPC server that has all of it, and the log."""
    model = make_model(folder / "served.gguf", arch="llama", shape="tiny", file_type="F16")
    with rpc_device() as device:
        plan, log = folder / "plan.json", folder / "log"
        made = oallama(
            "plan", model, "--rpc", device.endpoint, "--vram", "100%", "--planner", "all", "--ctx", "512", "-o", plan
        )
        assert made.returncode == 0, made.stderr
        with serving(log, model, "--plan", plan, "--rpc", device.endpoint) as port:
            yield port, model, device, log


def refusal(port: int, refusals: list[str]) -> str:
    """What the server answers in place of its health; "" where it is well."""
    try:
        try:
            call(port, "/health")
        except urllib.error.HTTPError as error:
            refusals.append(error.read().decode())
        else:
            return ""
    except (OSError, HTTPException) as error:
        refusals.append(str(error))
    return refusals[-1]


@pytest.mark.parametrize("all_of_it", [True, False], ids=["server", "worker"])
def test_a_model_is_served_on_after_its_rpc_server_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_of_it: bool
) -> None:
    monkeypatch.setenv("OALLAMA_HISTORY", "1")  # the run is noted when the server is gone
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "oallama.toml").write_text('[plan]\nvram = "75%"\n')  # which does not fit the CPU alone
    with served(tmp_path) as (port, model, device, log):
        before = greedy(port, model, PROMPT)
        until(lambda: "serving served.gguf on" in log.read_text(errors="replace"))  # it is known to have loaded
        if all_of_it:
            device.process.kill()
            device.process.wait()
        else:
            os.kill(device.worker(), signal.SIGKILL)
        with pytest.raises(OSError):
            greedy(port, model, PROMPT)
        refusals: list[str] = []
        # For a moment both listen. Where the CPU was never profiled, that comes first.
        until(lambda: all(refusal(port, refusals) == "" for _ in range(10)) and answers(port, model), seconds=240)
        assert any("an RPC server failed; the model is loaded again" in said for said in refusals)
        assert alike(before, greedy(port, model, PROMPT))
        said = log.read_text(errors="replace")
        assert (f"{device.endpoint} no longer answers; planning without it" in said) == all_of_it
        assert ("loading the model again" in said) != all_of_it
