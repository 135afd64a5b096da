"""`oallama serve --hot --cold --device`: two llama-servers on GPUs that fake_cuda_backend.cpp makes of the CPU.

All but CUDA and its kernels is what runs on a GPU: the router, both models' processes, the receiver that the cold
model's first graph makes, the socket, the hot model's sender and its operators, admission.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from oallama.base.ports import free_port
from oallama.engine import device_list
from oallama.engine.device_list import Device
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.serving.serve_limits import Limits
from oallama.serving.serving import Served, environments, preset
from oallama.weave.distance import Distance
from oallama.weave.gpus import Places, check_places, mps_runs, parse_places, room_for_guests
from support.cli import oallama
from support.fake_cuda import needs_headers
from support.processes import process_of, ran_python, until
from support.servers import OALLAMA, PROMPTS, alike, answers, children, greedy

GIB = 1 << 30


# ---- what is planned ---------------------------------------------------------------------------------------------


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(name: str, backend: str) -> Device:
        return Device(name, "a card", "gpu", backend, 20 * GIB, 24 * GIB, True, True)

    there = {name: made(name, backend) for name, backend in (("CUDA0", "CUDA"), ("CUDA1", "CUDA"), ("V", "Vulkan"))}
    there["CPU"] = Device("CPU", "a CPU", "cpu", "CPU", 0, 0, False, False)
    monkeypatch.setattr(device_list, "device", lambda name: there[name])


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, Places()),
        ("CPU", Places()),
        ("CUDA0", Places("CUDA0", "CUDA0")),
        ("hot=CUDA0,cold=CUDA1", Places("CUDA0", "CUDA1")),
        ("cold=CPU, hot=CUDA0", Places("CUDA0", None)),
    ],
)
@pytest.mark.usefixtures("devices")
def test_places(given: str | None, found: Places) -> None:
    assert parse_places(given) == found


@pytest.mark.parametrize("given", ["CUDA0,CUDA1", "hot=CUDA0", "hot=CUDA0,warm=CUDA1", "hot=CUDA0,cold=CUDA1,CUDA0"])
@pytest.mark.usefixtures("devices")
def test_what_is_no_place(given: str) -> None:
    with pytest.raises(OallamaError, match=r"is one device or \"hot=CUDA0,cold=CUDA1\""):
        parse_places(given)


def mps(folder: Path, pid: int) -> dict[str, str]:
    folder.mkdir()
    (folder / "control").touch()
    (folder / "nvidia-cuda-mps-control.pid").write_text(f"{pid}\n")
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder)}


def gone() -> int:
    with subprocess.Popen(["true"]) as process:
        return process.pid


def test_whether_mps_runs(tmp_path: Path) -> None:
    assert not mps_runs(tmp_path)
    mps(tmp_path / "lives", os.getpid())
    assert mps_runs(tmp_path / "lives")
    mps(tmp_path / "dead", gone())  # its files are still there
    assert not mps_runs(tmp_path / "dead")
    (tmp_path / "lives" / "control").unlink()
    assert not mps_runs(tmp_path / "lives")
    mps(tmp_path / "damaged", 1)
    (tmp_path / "damaged" / "nvidia-cuda-mps-control.pid").write_text("one")
    assert not mps_runs(tmp_path / "damaged")


@pytest.mark.usefixtures("devices")
def test_two_processes_on_a_gpu_need_mps(tmp_path: Path) -> None:
    without, with_mps = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "none")}, mps(tmp_path / "mps", os.getpid())
    for one in (Places("CUDA0", "CUDA0"), Places("CUDA1", "CUDA1")):
        for guests in (0, 4):
            with pytest.raises(OallamaError, match=r"start it with: nvidia-cuda-mps-control -d$"):
                check_places(one, 1, guests, without)
            check_places(one, 1, guests, with_mps)
    with pytest.raises(OallamaError, match="2 processes on CUDA1"):
        check_places(Places("CUDA0", "CUDA1"), 2, 0, without)
    for fine in (Places(), Places("CUDA0", "CUDA1"), Places("CUDA0", None)):
        check_places(fine, 1, 0, without)
    check_places(Places("V", "V"), 1, 0, without)  # another backend's device has no MPS


@pytest.mark.usefixtures("devices")
def test_where_guests_can_be(tmp_path: Path) -> None:
    check_places(Places("CUDA0", "CUDA1"), 1, 4, {})
    check_places(Places(), 3, 4, {})
    for wrong in (Places("CUDA0", None), Places(None, "CUDA0"), Places("V", "CUDA0")):
        with pytest.raises(OallamaError, match="guests need both models on CUDA devices, or both on the CPU"):
            check_places(wrong, 1, 4, {})
    with pytest.raises(OallamaError, match="one cold model lends"):
        check_places(Places("CUDA0", "CUDA1"), 2, 4, mps(tmp_path / "mps", os.getpid()))


@pytest.mark.usefixtures("devices")
def test_room_for_guests() -> None:
    """Of 20 GiB free of 24: less what stays free (5 %), less the models."""
    assert room_for_guests("CUDA0", [4 * GIB, 6 * GIB]) == 10 * GIB - int(0.05 * 24 * GIB)
    assert room_for_guests("CUDA0", [4 * GIB], "512MiB") == 16 * GIB - GIB // 2
    with pytest.raises(OallamaError, match=r"the models on it take 19\.0 GiB"):
        room_for_guests("CUDA0", [19 * GIB])


def test_what_the_processes_are_told() -> None:
    settings = Settings(n_ctx=512, n_seq_max=2, n_batch=256, n_ubatch=64)
    hot = Served(Path("hot.gguf"), settings, guests=2, device="CUDA0")
    cold = Served(Path("cold.gguf"), settings, lend_nbytes=1000, device="CUDA1", distance=Distance(9, 3, 4))
    text = preset([hot, cold])
    for line in ("device = CUDA0", "device = CUDA1", "batch-size = 256", "ubatch-size = 64", "n-gpu-layers = all"):
        assert f"{line}\n" in text
    found = environments(hot, [cold], 0.1, Limits(), "/run/me")
    assert '"OALLAMA_WEAVE_CUDA_RECEIVER": "/run/me/0:1000:9:3:4"' in found
    assert '"OALLAMA_WEAVE_CHANNELS": "/run/me/0"' in found and "OALLAMA_WEAVE_RECEIVER" not in found


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--vram", "1GiB"], "what is for one model; leave out --vram"),
        (["--plan", "plan.json"], "leave out --plan"),
        (["--profile", "p.json"], "leave out --profile"),
        (["--rpc", "localhost:1"], "leave out --rpc"),
        (["--local-rpc"], "leave out --local-rpc"),
        (["--device", "CUDA7"], "unknown device 'CUDA7'"),
        (["--flash-attn", "off"], "guests need flash attention"),
        (["--margin", "1GiB"], "--margin is for models on GPUs"),
        (["--guests", "0", "--lend", "1GiB"], "--lend and --weave are for guests, and there are none"),
    ],
)
def test_options_are_applied_or_refused(tiny: Callable[..., Path], options: list[str], reason: str) -> None:
    done = oallama("serve", "--hot", tiny("llama", "F16"), "--cold", tiny("qwen2", "F16"), *options)
    assert done.returncode == 2 and reason in " ".join(done.stderr.split()), done.stderr


def test_options_of_guests_need_a_hot_model(tiny: Callable[..., Path]) -> None:
    for options in (["--guests", "2"], ["--lend", "1GiB"], ["--weave", "w.json"]):
        done = oallama("serve", tiny("llama", "F16"), *options)
        assert done.returncode == 2 and "for --hot MODEL with --cold MODEL; leave" in " ".join(done.stderr.split())


# ---- two processes -----------------------------------------------------------------------------------------------


@contextmanager
def serving(
    backend: Path, hot: Path, cold: Path, options: Sequence[str], log: Path, **more: str
) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A server of two sequences of the hot model at home; ends by SIGTERM, without leftovers."""
    port = free_port()
    command = [OALLAMA, "serve", "--hot", hot, "--cold", cold, "--parallel", "2", "--ctx", "2048", "--threads", "1"]
    command += ["--deadline", "20", "--port", str(port), *options]  # a busy machine is no failure
    environment = os.environ | {"GGML_BACKEND_PATH": str(backend), "OALLAMA_FAKE_LOG": str(log), **more}
    said = log.with_suffix(".err")
    with (
        said.open("w") as stderr,
        process_of(command, stdout=subprocess.DEVNULL, stderr=stderr, env=environment) as server,
    ):
        until(lambda: server.poll() is not None or (answers(port, hot) and answers(port, cold)))
        assert server.poll() is None, said.read_text()
        yield port, server
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, said.read_text()[-3000:]
    assert not children(hot) and not children(cold)


@needs_headers
@pytest.mark.parametrize("shared", [False, True])
def test_guests_on_gpus(backend: Path, tiny: Callable[..., Path], tmp_path: Path, shared: bool) -> None:
    """Five requests at once, of two sequences at home and three guests: the tokens are those without guests."""
    hot, cold, log = tiny("llama", "F16"), tiny("qwen2", "F16"), tmp_path / "rows"
    device = ["--device", "CUDA0" if shared else "hot=CUDA0,cold=CUDA1"]
    environment = mps(tmp_path / "mps", os.getpid()) if shared else {}
    with serving(backend, hot, cold, [*device, "--guests", "0"], log, **environment) as (port, _):
        wanted = [greedy(port, hot, prompt) for prompt in PROMPTS[:5]]
        of_cold = greedy(port, cold, PROMPTS[0], 200)
    assert not log.exists()
    with (
        serving(backend, hot, cold, [*device, "--guests", "3"], log, **environment) as (port, _),
        ThreadPoolExecutor(6) as pool,
    ):
        n_guests = 0
        for _ in range(20):  # a receiver that is too busy to attach in time is tried again later
            busy = pool.submit(greedy, port, cold, PROMPTS[0], 200)  # its graphs look for the guests' tasks
            requests = [pool.submit(greedy, port, hot, prompt) for prompt in PROMPTS[:5]]
            found = [request.result() for request in requests]
            assert alike(busy.result(), of_cold)
            assert all(map(alike, found, wanted))
            n_guests += sum(one.slot >= 2 for one in found)
            if n_guests >= 3:
                break
    assert n_guests >= 3
    rows = [int(line) for line in log.read_text().split()]
    layers = 2
    assert sum(rows) >= layers * n_guests * 16 and max(rows) > 1


@needs_headers
@pytest.mark.slow
def test_the_hot_model_outlives_the_cold_one_on_gpus(backend: Path, tiny: Callable[..., Path], tmp_path: Path) -> None:
    hot, cold, log = tiny("llama", "F16"), tiny("qwen2", "F16"), tmp_path / "rows"
    device = ["--device", "hot=CUDA0,cold=CUDA1", "--guests", "3"]
    with serving(backend, hot, cold, device, log) as (port, _):
        wanted = [greedy(port, hot, prompt, 100) for prompt in PROMPTS[:5]]
        with ThreadPoolExecutor(5) as pool:
            while not log.exists():  # a receiver that is too busy to attach in time is tried again later
                requests = [pool.submit(greedy, port, hot, prompt, 100) for prompt in PROMPTS[:5]]
                until(lambda sent=requests: log.exists() or all(one.done() for one in sent))
            (pid,) = children(cold)
            os.kill(pid, signal.SIGKILL)
            assert all(alike(request.result(), one) for request, one in zip(requests, wanted, strict=True))
        assert alike(greedy(port, hot, PROMPTS[0], 100), wanted[0])
        until(lambda: answers(port, cold))  # the router starts it again


RUNS = """if True:
    import ctypes, sys
    from oallama.weave.sequences import Sequences
    from oallama.engine import native
    native.core()
    fake = ctypes.CDLL(sys.argv[2])
    with Sequences(sys.argv[1], n_gpu_layers=99) as model:
        for _ in range(5):
            model.step({0: [300]})
        counts = (ctypes.c_uint32 * 3)()
        fake.fake_counts(counts)
        print(fake.fake_graphs(), counts[2])
"""


@needs_headers
def test_the_schedulers_run_begins_once(backend: Path, tiny: Callable[..., Path], tmp_path: Path) -> None:
    """A device without an operator of every layer has many splits in a run; the receiver begins with the run."""
    environment = {"GGML_BACKEND_PATH": str(backend), "OALLAMA_FAKE_WITHOUT": "ROPE"}
    environment["OALLAMA_WEAVE_CUDA_RECEIVER"] = f"{tmp_path}/receiver:{1 << 24}"
    done = ran_python(RUNS, tiny("llama", "F16"), backend, env=environment, timeout=60)
    n_graphs, n_waits = map(int, done.stdout.split())
    assert n_graphs >= 5 * 3 and n_waits == 4  # each run but the first follows another one


@needs_headers
def test_more_is_lent_than_there_is(backend: Path, tiny: Callable[..., Path]) -> None:
    hot, cold = tiny("llama", "F16"), tiny("qwen2", "F16")
    for memory, options, reason in (
        (GIB // 2, [], "of which 1.0 GiB are to stay free"),
        (2 * GIB, ["--lend", "1.5GiB"], "less than --lend 1.5GiB"),
        (2 * GIB, ["--lend", "1.5GiB", "--margin", "1.9GiB"], "less than --lend 1.5GiB"),
    ):
        arguments = ("serve", "--hot", hot, "--cold", cold, "--device", "hot=CUDA0,cold=CUDA1", *options)
        environment = os.environ | {"GGML_BACKEND_PATH": str(backend), "OALLAMA_FAKE_MEMORY": str(memory)}
        done = oallama(*arguments, env=environment)
        assert done.returncode == 2 and reason in " ".join(done.stderr.split()), done.stderr
