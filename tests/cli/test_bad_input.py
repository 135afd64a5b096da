"""What users get wrong: one clear line with the remedy, exit code 2 (130 for Ctrl-C), nothing half-written."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from oallama.cli import loading
from oallama.cli.options import Placing
from oallama.data.plan import PlacementPlan
from oallama.data.profile import Profile
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading.autoplan import Choices
from oallama.loading.start import plan_model
from support.cli import CLI, oallama
from support.made_profile import made_profile
from support.processes import until

SETTINGS = Settings(n_ctx=256, n_batch=256, n_ubatch=256, n_threads=1)
SMALL = ("--ctx", "256", "--threads", "1")
started: list[subprocess.Popen[str]] = []


def environment(cache: Path | None = None) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k != "OALLAMA_DEBUG"}
    return env | ({"XDG_CACHE_HOME": str(cache)} if cache else {})


def start(*arguments: str | Path, cache: Path | None = None, **options: Any) -> subprocess.Popen[str]:
    """In a process of its own from the first line on."""
    process = subprocess.Popen(
        [*CLI, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment(cache),
        **options,
    )
    started.append(process)
    return process


@pytest.fixture(autouse=True)
def end_what_was_started() -> Iterator[None]:
    """A program that a failed test left behind would slow down everything after it."""
    yield
    while started:
        started.pop().kill()


def fails(expected: str, *arguments: str | Path, cache: Path | None = None) -> str:
    """The program ends with code 2 and nothing but one line `error: ...` that `expected` (a pattern) is found in."""
    done = oallama(*arguments, env=environment(cache))
    return is_one_line(expected, done.returncode, done.stdout, done.stderr)


def is_one_line(expected: str, code: int, out: str, err: str) -> str:
    assert code == 2, (code, out, err)
    assert "Traceback" not in out + err
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    assert re.search(expected, lines[0]), lines[0]
    return lines[0]


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama", "F16")


@pytest.fixture(scope="module")
def profile(model: Path, rpc: Any) -> Profile:
    """For the first RPC device of another process."""
    return made_profile(model, rpc.devices[0], SETTINGS, name="RPC0")


@pytest.fixture(scope="module")
def profile_file(profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    profile.save(path)
    return path


@pytest.fixture(scope="module")
def plan(model: Path, profile: Profile, rpc: Any) -> PlacementPlan:
    choices = Choices(device="RPC0", profile=profile, elsewhere=True)
    return plan_model(model, "50%", SETTINGS, choices)


@pytest.fixture
def plan_file(plan: PlacementPlan, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan.save(path)
    return path


# ---- model files -----------------------------------------------------------------------------------------------------


def broken_models(model: Path, folder: Path) -> dict[str, tuple[Path, str]]:
    whole = model.read_bytes()
    files = {
        "missing": (folder / "none.gguf", "no such model file"),
        "directory": (folder, "is a directory"),
        "text": (folder / "text.gguf", "is not a GGUF file"),
        "empty": (folder / "empty.gguf", "is not a GGUF file"),
        "truncated": (folder / "truncated.gguf", "not within.*file bounds|corrupted or incomplete"),
        "truncated in its header": (folder / "header.gguf", "header.gguf: "),
        "unknown": (folder / "unknown.gguf", "unknown model architecture: 'lambs'"),
    }
    files["text"][0].write_text("once upon a time")
    files["empty"][0].write_bytes(b"")
    files["truncated"][0].write_bytes(whole[: len(whole) // 2])
    files["truncated in its header"][0].write_bytes(whole[:5000])
    files["unknown"][0].write_bytes(whole.replace(b"llama", b"lambs", 1))
    return files


KINDS = ["missing", "directory", "text", "empty", "truncated", "truncated in its header", "unknown"]


@pytest.mark.parametrize("kind", KINDS)
def test_model_that_cannot_be_loaded(model: Path, profile_file: Path, tmp_path: Path, kind: str) -> None:
    path, expected = broken_models(model, tmp_path)[kind]
    fails(expected, "plan", path, "--local-rpc", "--vram", "50%", "--profile", profile_file, *SMALL)
    fails(expected, "run", path, "hello")


def test_a_demo_that_cannot_write_its_cache_folder() -> None:
    result = oallama("demo", env=environment(Path("/proc/nowhere")))
    assert result.returncode == 2 and not result.stdout
    assert result.stderr.startswith("error: cannot write to /proc/nowhere/oallama/demo: ") and "--out" in result.stderr


@pytest.mark.parametrize("command", ["profile", "chat", "serve", "bench", "demo"])
def test_missing_model_in_every_command(tmp_path: Path, command: str) -> None:
    option = ["--model"] if command == "demo" else []
    fails("no such model file", command, *option, tmp_path / "none.gguf")


# ---- plans and profiles ----------------------------------------------------------------------------------------------


def test_plan_for_another_model(tiny: Callable[..., Path], plan_file: Path) -> None:
    fails("for another model .*oallama plan", "run", tiny("qwen2"), "hello", "--plan", plan_file, "--local-rpc")
    fails("for another model", "serve", tiny("qwen2"), "--plan", plan_file, "--local-rpc")


def test_corrupt_json(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"\x00\xff")
    fails("plan .*x.json.*; make a new one", "run", model, "hello", "--plan", path)
    fails("profile .*x.json.*; record one", "plan", model, "--local-rpc", "--vram", "50%", "--profile", path, *SMALL)


# ---- budgets and names -----------------------------------------------------------------------------------------------


def test_minimal_is_a_planner_of_its_own(model: Path) -> None:
    fails("leave out planner 'layers'", "plan", model, "--vram", "minimal", "--planner", "layers", "--ctx", "256")


def test_budget_without_an_accelerator(model: Path) -> None:
    fails("this machine has none .*--local-rpc", "plan", model, "--vram", "1GiB", *SMALL)


@pytest.mark.parametrize("command", [("run", "hello"), ("serve",)])
def test_no_plan_beside_what_asks_for_one(model: Path, plan_file: Path, command: tuple[str, ...]) -> None:
    name, *rest = command
    fails("leave out --vram", name, model, *rest, "--no-plan", "--vram", "1GiB", *SMALL)
    fails("leave out --plan", name, model, *rest, "--no-plan", "--plan", plan_file)
    fails("for the CPU alone, and RPC0 is here; add --device CPU", name, model, *rest, "--no-plan", "--local-rpc")
    fails("the margin 1GiB is .*no plan is made", name, model, *rest, "--no-plan", "--margin", "1GiB")
    fails("the margin 1GiB is .*no accelerator", name, model, *rest, "--margin", "1GiB", *SMALL)


def test_a_port_that_is_taken(model: Path) -> None:
    """Before anything is measured, also where llama-server's own argument says so."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        fails(f"port {port} of 127.0.0.1 is taken", "serve", model, "--port", port)
        fails(f"port {port} of 127.0.0.1 is taken", "serve", model, "--", "--port", port)
        fails(f"port {port} of 127.0.0.1 is taken", "serve", "--hot", model, "--cold", model, "--port", port)


def test_a_plan_that_cannot_be_made_for_the_cpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OallamaError("no times of this operator")

    monkeypatch.setattr(loading, "plan_model", fail)
    with pytest.raises(OallamaError, match=r"^no times of this operator; --no-plan loads"):
        loading.make_plan(model, Placing(), SETTINGS, Choices())
    with pytest.raises(OallamaError, match="no such model file"):
        loading.make_plan(model.with_name("none.gguf"), Placing(), SETTINGS, Choices())


@pytest.mark.parametrize("command", [("plan", "--vram", "1GiB"), ("run", "hello")])
def test_unknown_device(model: Path, command: tuple[str, ...]) -> None:
    name, *rest = command
    fails("unknown device 'CUDA7'; devices here: CPU", name, model, *rest, "--device", "CUDA7")


def test_device_named_twice(model: Path, profile_file: Path) -> None:
    twice = ("--device", "RPC0,RPC0", "--profile", profile_file)
    fails("a device may be named once; got RPC0, RPC0", "plan", model, "--elsewhere", *twice)


def test_rpc_server_that_does_not_answer(model: Path) -> None:
    fails("no RPC server answers at 127.0.0.1:1: Connection refused", "devices", "--rpc", "127.0.0.1:1")
    fails("expected host:port, not 'nonsense'", "devices", "--rpc", "nonsense")


@pytest.mark.parametrize(
    ("expected", "arguments"),
    [
        ("unknown --type-k 'q3'; expected one of f32", ("--type-k", "q3")),
        ("unknown --flash-attn 'maybe'; expected one of auto", ("--flash-attn", "maybe")),
        ("unknown --format 'xml'; expected one of table", ("--format", "xml")),
        ("unknown planner 'magic', expected .*oato", ("--planner", "magic")),
        ("fraction must be above 0", ("--fraction", "1.5")),
        ("needs its profile", ("--elsewhere",)),
    ],
)
def test_unknown_choices(model: Path, profile_file: Path, expected: str, arguments: tuple[str, ...]) -> None:
    profile = () if "--elsewhere" in arguments else ("--profile", profile_file)
    fails(expected, "plan", model, "--local-rpc", "--vram", "50%", *profile, *SMALL, *arguments)


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 64, b"", pytest.param(None, marks=pytest.mark.slow)]
)
def test_port_that_is_not_an_rpc_server(answer: bytes | None, model: Path) -> None:
    """Garbage, an end, or silence (None): ggml would abort or wait for ever."""
    done = threading.Event()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            if answer is None:
                done.wait(30)
            else:
                connection.recv(64)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        what = f"the RPC server at {endpoint} (is not an RPC server|did not say hello: .*or no RPC server)"
        fails(what, "devices", "--rpc", endpoint)
        done.set()
        thread.join()


# ---- files that cannot be written ------------------------------------------------------------------------------------


def test_plan_that_cannot_be_written(model: Path, profile_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fails("cannot write plan", "plan", model, "--local-rpc", "--vram", "50%", "--profile", profile_file, *SMALL,
          "-o", tmp_path / "file" / "plan.json")  # fmt: skip


def test_disk_full_while_a_model_is_written(tmp_path: Path) -> None:
    good = tmp_path / "m.gguf"
    good.write_bytes(b"precious")
    limit = 1 << 20

    def full_after_a_mebibyte() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = start("make-model", good, preexec_fn=full_after_a_mebibyte)
    out, err = process.communicate(timeout=120)
    is_one_line("cannot write .*m.gguf", process.returncode, out, err)
    assert good.read_bytes() == b"precious" and list(tmp_path.iterdir()) == [good]


def test_models_that_cannot_be_made(tmp_path: Path) -> None:
    fails("NAME=N", "make-model", tmp_path / "m.gguf", "--set", "n_layer")


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def interrupted(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (process.returncode, out, err)
    assert err.strip().splitlines()[-1] == "interrupted" and "Traceback" not in out + err


def test_interrupted_profile_keeps_what_was_measured(tiny: Callable[..., Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    process = start("profile", tiny("minicpm3", "F16"), "--ctx", "16384", "--threads", "1", cache=cache)
    until(lambda: bool(list(cache.glob("oallama/profile-*.json"))) or process.poll() is not None)
    interrupted(process)
    (file,) = cache.glob("oallama/profile-*.json")
    partial = Profile.load(file)
    assert partial.operators and asdict(partial)["fingerprint"]["n_threads"] == 1


def test_interrupted_while_the_program_starts_or_loads(model: Path) -> None:
    for delay in (0.4, 0.8, 1.2):  # earlier, Python itself is not up yet
        process = start("run", model, "hello", "-n", "4000", "--ctx", "8192", "--threads", "1")
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130 and "interrupted" in err and "Traceback" not in out + err, (delay, err)


def first_use(model: Path, cache: Path) -> subprocess.Popen[str]:
    """`oallama run` that profiles, plans and measures the plan, in a group that a terminal's Ctrl-C reaches."""
    env = environment(cache) | {"OALLAMA_VERIFY": "600"}
    env.pop("OALLAMA_PLAN_CACHE", None)
    words = (*CLI, "run", str(model), "hello", "-n", "4000", "--ctx", "8192", "--threads", "1")
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    )
    started.append(process)
    return process


def workers(process: subprocess.Popen[str]) -> list[str]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    commands = [Path(f"/proc/{child}/cmdline").read_text() for child in children]
    return [command for command in commands if "worker.py" in command]


@pytest.mark.parametrize("what", ["profile", "trial"])
def test_interrupted_at_the_first_use(tiny: Callable[..., Path], tmp_path: Path, what: str) -> None:
    """While operators are timed, and while the plan takes turns with llama.cpp's own placement."""
    process = first_use(tiny("llama", "Q4_0"), tmp_path)
    begun: dict[str, Callable[[], bool]] = {
        "profile": lambda: bool([*tmp_path.glob("oallama/profile-*.json")]),
        "trial": lambda: bool(workers(process)),
    }
    until(lambda: process.poll() is not None or begun[what]())
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert err.splitlines()[-1] == "interrupted" and "Traceback" not in out + err
    if what == "profile":
        assert not [*tmp_path.glob("oallama/plans/*.json")]


def test_interrupted_while_the_engine_calls_back() -> None:
    """What is raised in a callback (llama.cpp's log) is dropped by ctypes."""
    program = (
        "import ctypes, os, signal, time; from oallama import cli\n"
        "log = ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "cli._imported_app = lambda: lambda *_, **options: [log(), time.sleep(60)]\n"
        "cli.main()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


def test_interrupted_while_an_object_begins() -> None:
    """llama-cpp-python's context asks at its end for what only a whole beginning has set."""
    program = (
        "import os, signal; from oallama import cli\n"
        "class Half:\n"
        "    def __init__(self): os.kill(os.getpid(), signal.SIGINT); self.stack = []\n"
        "    def __del__(self): self.stack.pop()\n"
        "cli._imported_app = lambda: lambda *_, **options: Half()\n"
        "cli.main()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


def test_interrupted_inside_the_engine() -> None:
    """Python would wait for a long native call (loading tens of GB) before it looks at a Ctrl-C."""
    program = (
        "import hashlib; from oallama.cli.terminal import interruptible\n"
        "with interruptible():\n"
        "    print('deep in C', flush=True)\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "deep in C\n"
    time.sleep(0.5)  # from the print into the call
    interrupted(process)


def test_interrupted_model_leaves_nothing(tmp_path: Path) -> None:
    process = start("make-model", tmp_path / "m.gguf", "--shape", "llama3-8b", "--set", "n_layer=8")
    until(lambda: bool(list(tmp_path.glob("*partial*"))) or process.poll() is not None)
    interrupted(process)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [("run", "hello"), ("plan", "--device", "CPU"), ("profile", "--device", "CPU")])
def test_more_threads_than_cpus(command: tuple[str, ...], model: Path) -> None:
    name, *more = command
    fails(r"9999 threads on the \d+ CPUs .* take at most", name, model, *more, "--threads", "9999")
