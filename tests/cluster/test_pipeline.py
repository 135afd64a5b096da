"""`oallama cluster plan` and `run --plan`: real RPC servers here and on emulated hosts, and real failures."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oallama.base.ports import free_port
from oallama.cluster.allocation.allocation import allocate
from oallama.cluster.allocation.cluster_plan import ClusterPlan
from oallama.cluster.allocation.devices import ClusterFile, load_devices
from oallama.cluster.allocation.network import LinkQuality, Network
from oallama.cluster.allocation.problem import Device, Layer, Problem
from oallama.cluster.pipeline.measure import Model, read_model
from oallama.cluster.pipeline.member import Member
from oallama.cluster.pipeline.members import members
from oallama.cluster.pipeline.pipeline import Options, Pipeline
from oallama.cluster.spread.choose import plan_of
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.netlab import Conditions, NetLab
from support.cli import oallama
from support.clusters import PROMPT, expected, port_pair, shown
from support.lab import needs_lab
from support.listening import beyond_loopback, descendants, listening
from support.processes import process_of, until
from support.servers import OALLAMA, call
from support.ssh import needs_sshd, sshd_on


def cluster_file(folder: Path, devices: dict[str, str], more: str = "") -> Path:
    """A devices.toml; devices: name to further lines."""
    path = folder / "devices.toml"
    entries = [f'[[device]]\nname = "{name}"\nthreads = 1\n{lines}\n' for name, lines in devices.items()]
    path.write_text("\n".join([more, *entries]))
    return path


def local(memory: str) -> str:
    return f'address = "127.0.0.1:{port_pair()}"\nmemory = "{memory}"'


def halves(n_layer: int) -> tuple[str, ...]:
    """The first half of the layers on a, the rest on b."""
    return ("a",) * (n_layer // 2) + ("b",) * (n_layer - n_layer // 2)


def plan_for(model: Model, cluster: ClusterFile, **flops: float) -> ClusterPlan:
    """A plan from rates instead of measurements, whose links are all alike."""
    graph = model.graph
    names = [cluster.client.name, *(entry.name for entry in cluster.devices)]
    weights = [sum(t.nbytes for t in graph.tensors if t.layer == at) for at in range(graph.n_layer)]
    layers = tuple(Layer(1e7, size + model.kv_bytes, 4 * model.width, model.kv_bytes) for size in weights)
    problem = Problem(
        devices=(
            Device(names[0], cluster.client.memory_bytes, 1e9),
            *(Device(e.name, e.memory_bytes, flops.get(e.name, 1e9)) for e in cluster.devices),
        ),
        network=Network.uniform(names, LinkQuality(1e-3, 1e8, message_bytes=4 * model.width, message_s=2e-3)),
        layers=layers,
        embedding=Layer(1e7, 0, 4 * model.width),
        settings=cluster.settings,
        links=cluster.links,
    )
    found = allocate(problem)
    context = autoplan.context_of(model.settings)
    return ClusterPlan(graph.model, context, cluster.client, cluster.devices, problem, found.layers, found.bound_s)


def saved_plan(model: Path, cluster: ClusterFile, path: Path, n_ctx: int = 1024, on_a: float = 0.5) -> ClusterPlan:
    """A plan in a file: that share of the layers on a, the rest on b."""
    made = plan_for(read_model(model, Settings(n_ctx=n_ctx, n_threads=1)), cluster)
    n = int(on_a * len(made.layers))
    made = made.allocated(made.problem, ("a",) * n + ("b",) * (len(made.layers) - n), 0.0)
    made.save(path)
    return made


@contextmanager
def pipeline(
    model: Path, folder: Path, devices: dict[str, str], notices: list[str], agent: Path | None = None, **options: Any
) -> Iterator[tuple[Pipeline, dict[str, Member]]]:
    read = read_model(model, Settings(n_ctx=1024, n_threads=1))
    cluster = load_devices(cluster_file(folder, devices))
    with members(cluster.devices, str(agent) if agent else None) as hosts:
        made = plan_for(read, cluster)
        yield (
            Pipeline(model, made, hosts, Options(n_threads=1, **options), notices.append),
            {member.name: member for member in hosts},
        )


@pytest.mark.parametrize("arch", ["llama", "qwen2", "minicpm3", "qwen3moe"])
def test_a_pipeline_says_what_one_process_says(arch: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny(arch)
    read = read_model(model, Settings(n_ctx=1024))
    half = sum(t.nbytes for t in read.graph.tensors if t.layer is not None) // 2 + read.kv_bytes * read.graph.n_layer
    budget = f"{half + (24 << 20)}"
    with pipeline(model, tmp_path, {"a": local(budget), "b": local(budget)}, []) as (running, _):
        # One layer here, and the others on both: every kind of boundary is crossed.
        n = read.graph.n_layer
        here = ("client",) if n > 2 else ()
        layers = here + ("a",) * (n // 2 - len(here)) + ("b",) * (n - n // 2)
        running.plan = running.plan.allocated(running.plan.problem, layers, 0.0)
        tokens = [token.id for token in running.complete(PROMPT, 24, 0.0, None)]
    assert tokens == expected(model, 24)
    assert set(running.memory) == {"a", "b"}
    assert all(0 < sum(held.values()) <= int(budget) for held in running.memory.values())


def split(running: Pipeline) -> None:
    running.plan = running.plan.allocated(running.plan.problem, halves(len(running.plan.layers)), 0.0)


def processes(pattern: str) -> set[int]:
    found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True).stdout
    return {int(line) for line in found.split()}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_others_go_on_with_the_same_tokens(number: int, tiny: Callable[..., Path], tmp_path: Path) -> None:
    model, notices = tiny("llama"), list[str]()
    n = 900  # takes longer than to notice: a stopped server's workers go on
    with pipeline(model, tmp_path, {"a": local("1GiB"), "b": local("1GiB")}, notices) as (running, hosts):
        split(running)
        tokens = []
        for token in running.complete(PROMPT, n, 0.0, None):
            tokens.append(token.id)
            if len(tokens) == 20:
                os.kill(hosts["b"].server_pid, number)
        # The stopped server too is gone, while the pipeline still lives.
        until(lambda: not Path(f"/proc/{hosts['b'].server_pid}").exists(), 60)
        # The survivor serves the next request.
        assert [token.id for token in running.complete(PROMPT, 8, 0.0, None)] == tokens[:8]
    assert tokens == expected(model, n)
    assert set(running.plan.layers) == {"a"}
    assert len(notices) == 1 and "the RPC server of b" in notices[0]


def test_a_model_that_no_longer_fits_ends_the_request(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("llama")
    with pipeline(model, tmp_path, {"a": local("1GiB"), "b": local("1GiB")}, []) as (running, hosts):
        split(running)
        client, *devices = running.plan.problem.devices
        held = sum(layer.memory_bytes for layer in running.plan.problem.layers)
        small = tuple(replace(device, memory_bytes=int(0.7 * held)) for device in devices)
        running.plan = replace(running.plan, problem=replace(running.plan.problem, devices=(client, *small)))
        stream = running.complete(PROMPT, 300, 0.0, None)
        next(stream)
        os.kill(hosts["b"].server_pid, signal.SIGKILL)
        with pytest.raises(OallamaError, match=r"RPC server of b .* without it the model.* too few"):
            list(stream)
    assert not processes("pipeline.client_proces[s]")


def on_lab(lab: NetLab) -> dict[str, str]:
    """Devices a and b on the hosts 1 and 2."""
    return {
        name: f'host = "h{host}"\naddress = "{lab.address(host)}:50052"\nmemory = "1GiB"'
        for host, name in enumerate(("a", "b"), 1)
    }


def run_on_lab(lab: NetLab, model: Path, plan: Path, *more: str, **options: Any) -> subprocess.Popen[str]:
    run = [OALLAMA, "cluster", "run", str(model), "--plan", str(plan), "--ssh-agent", str(lab.ssh_agent()), *more]
    return lab.popen(0, run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def complete_on_lab(lab: NetLab, model: Path, plan: Path, n_generate: int) -> subprocess.Popen[str]:
    more = [PROMPT, "--temperature", "0", "--json", "--n-generate", str(n_generate)]
    client = run_on_lab(lab, model, plan, *more)
    until(lambda: bool(processes("pipeline.client_proces[s]")) and min(lab.sent(1), lab.sent(2)) > 100_000, 60)
    return client


@needs_lab
def test_a_cut_cable_ends_within_five_seconds(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model, plan = tiny("llama"), tmp_path / "plan.json"
    with NetLab(3, Conditions(rate_bit=1e9, delay_s=0.2e-3)) as lab:
        saved_plan(model, load_devices(cluster_file(tmp_path, on_lab(lab))), plan)
        with complete_on_lab(lab, model, plan, 400) as client:
            lab.cut(2)
            cut = time.monotonic()
            assert client.stderr is not None
            # Whoever looks first says so: the watch, or a probe of the link that is under way.
            lost = re.compile("the host of b (has not answered for 3.5 s|cannot be reached)")
            lines = [*itertools.takewhile(lambda line: not lost.search(line), client.stderr)]
            noticed = time.monotonic() - cut
            out, more = client.communicate(timeout=90)
        assert client.returncode == 0, [*lines, more]
    assert noticed < 5, lines
    result = json.loads(out)
    assert result["tokens"] == expected(model, 400)
    assert set(result["layers"]) == {"a"} and result["changes"][0]["layers"] == result["layers"]


@needs_lab
def test_a_slower_link_moves_layers_with_their_kv_cache(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model, plan = tiny("llama"), tmp_path / "plan.json"
    with NetLab(3, Conditions(rate_bit=1e9, delay_s=5e-3)) as lab:  # 2000 tokens take 20 s
        saved_plan(model, load_devices(cluster_file(tmp_path, on_lab(lab))), plan, 4096, on_a=1.0)
        more = [PROMPT, "--temperature", "0", "--n-generate", "2000", "--threshold", "3"]
        with run_on_lab(lab, model, plan, *more) as client:
            assert client.stdout is not None and client.stderr is not None
            out = client.stdout.read(1)
            time.sleep(10)  # twice as long as the watch takes to know what is usual
            lab.set_conditions({1: Conditions(rate_bit=1e9, delay_s=50e-3)})
            out += client.stdout.read()
            said = client.stderr.read()
        assert client.returncode == 0, said
    changes = [line for line in said.splitlines() if "layers move" in line]
    assert len(changes) == 1 and "link client -> a" in changes[0] and changes[0].endswith("move: b 0-3"), said
    assert out == shown(model, expected(model, 2000, 4096)) + "\n"


@needs_lab
def test_weights_are_sent_once(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model, plan = tiny("llama", "F16"), tmp_path / "plan.json"
    with NetLab(2, Conditions(rate_bit=1e9)) as lab:
        lines = f'host = "h1"\naddress = "{lab.address(1)}:50052"\nmemory = "1GiB"'
        made = saved_plan(model, load_devices(cluster_file(tmp_path, {"a": lines})), plan, 512, on_a=1.0)
        sent = []
        for _ in range(2):
            with lab.traffic() as traffic:
                more = [PROMPT, "--temperature", "0", "--json", "--n-generate", "2"]
                client = run_on_lab(lab, model, plan, *more, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
                _, said = client.communicate(timeout=120)
            assert client.returncode == 0, said
            sent.append(traffic.sent[0])
    layers = sum(layer.memory_bytes - layer.kv_bytes for layer in made.problem.layers)
    assert sent[0] > layers and sent[1] < sent[0] - 0.8 * layers, (sent, layers)


def ask(port: int, n: int = 4) -> dict[str, Any]:
    return dict(call(port, "/v1/completions", {"prompt": PROMPT, "max_tokens": n, "temperature": 0}))


def answers(port: int) -> bool:
    try:
        return ask(port)["usage"]["completion_tokens"] > 0
    except OSError:
        return False


def test_a_server_goes_on_without_a_killed_device(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model, plan, port = tiny("llama"), tmp_path / "plan.json", free_port()
    cluster = load_devices(cluster_file(tmp_path, {"a": local("1GiB"), "b": local("1GiB")}))
    saved_plan(model, cluster, plan)
    command = [OALLAMA, "cluster", "run", str(model), "--plan", str(plan), "--serve", "--port", str(port)]
    with process_of(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as server:
        until(lambda: answers(port), 60)
        before = ask(port)["choices"][0]["text"]
        victim = processes(f"ggml-rpc-server.*{cluster.devices[1].address[1]}")
        for process in victim:
            os.kill(process, signal.SIGKILL)
        until(lambda: bool(processes(f"llama-server.*{port}")) and answers(port), 60)
        assert ask(port)["choices"][0]["text"] == before
        server.send_signal(signal.SIGTERM)
        _, said = server.communicate(timeout=30)
    assert server.returncode == 0 and "the RPC server of b has ended: killed by signal 9" in said
    assert not processes(f"llama-server.*{port}|ggml-rpc-server.*{cluster.devices[0].address[1]}")


def test_plan_measures_solves_and_explains(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The whole command on this machine; a plan of its file runs."""
    model, plan = tiny("llama"), tmp_path / "plan.json"
    cluster = cluster_file(tmp_path, {"a": local("1GiB"), "b": local("1GiB")})
    done = oallama("cluster", "plan", model, "--devices", cluster, "-o", plan, "--ctx", "512")
    assert done.returncode == 0, done.stderr
    for expected_text in ("client - a", "a - b", "link latency", "QoS: jitter", "no allocation costs less", "TPOT"):
        assert expected_text in done.stdout
    made = ClusterPlan.load(plan)
    assert made.to_json() == plan.read_text()
    assert {device.name for device in made.problem.devices} == {"client", "a", "b"}
    assert all(link.message_s > 0 and link.bandwidth > 1e6 for link in made.problem.network.links.values())
    layer = made.problem.layers[0]
    assert all(seconds > 0 for name in ("client", "a", "b") for _, seconds in layer.seconds[name])
    assert made.chosen is not None and {c.way for c in made.candidates} == {"here", "pipeline", "ranks"}
    run = ("cluster", "run", model, PROMPT, "--temperature", "0", "--json", "--n-generate", "8", "--plan")
    text = shown(model, expected(model, 8)).strip()
    for way in (c for c in made.candidates if not c.why_not):
        plan_of(made, way).save(plan)
        done = oallama(*run, plan)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["way"] == way.way and said["n_generated"] == 8
        assert said["text"].strip()[:7] == text[:7], way.name  # random weights: near ties part the texts later


def test_several_requests_at_once_are_planned_and_run(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model, file = tiny("llama"), tmp_path / "plan.json"
    cluster = cluster_file(tmp_path, {"a": local("1GiB")})
    asked = ("--n-prompt", "32", "--n-generate", "16", "--parallel")
    command = ("cluster", "plan", model, "--devices", cluster, "--ctx", "512", *asked)
    done = oallama(*command, "40")
    assert done.returncode == 2 and "the request takes 1920 tokens, the context has 512" in done.stderr
    done = oallama(*command, "4", "-o", file)
    assert done.returncode == 0 and "4 requests at once" in done.stdout, done.stderr
    made = ClusterPlan.load(file)
    assert made.context.n_seq_max == 4 and (made.request.n_prompt, made.request.n_parallel) == (32, 4)
    assert sum(each.count * each.n_tokens for each in made.problem.passes) == 4 * (32 + 15)
    for way in (c for c in made.candidates if not c.why_not):
        plan_of(made, way).save(file)
        done = oallama("cluster", "run", model, PROMPT, "--plan", file, "--n-generate", "4", "--json")
        assert done.returncode == 0 and json.loads(done.stdout)["n_generated"] == 4, done.stderr


def test_a_model_that_fits_this_host_alone_stays(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Devices that are too small are no error while this host is large enough; with too little memory here, it is."""
    cluster = cluster_file(tmp_path, {"a": local("7MiB")})
    done = oallama("cluster", "plan", tiny("llama"), "--devices", cluster, "--ctx", "512", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["chosen"]["way"] == "here"
    assert "too few" in next(c["why_not"] for c in plan["candidates"] if c["name"] == "pipeline")
    cluster = cluster_file(tmp_path, {"a": local("7MiB")}, '[client]\nmemory = "3MiB"')
    done = oallama("cluster", "plan", tiny("llama"), "--devices", cluster, "--ctx", "512")
    assert (
        done.returncode == 2 and "cannot be run on this cluster" in done.stderr and "3.0 MiB are given" in done.stderr
    )


@pytest.mark.parametrize(
    ("memory", "entry", "more", "message"),
    [
        ("1GiB", 'host = "nowhere.invalid"', [], "device a on nowhere"),
        ("900GiB", "", [], "900.0 GiB are promised"),
        ("1MiB", "", [], "its compute buffers alone take"),
        ("1GiB", 'device = "CUDA7"', [], "unknown device 'CUDA7'"),
        ("1GiB", "", ["--solver", "luck"], "unknown --solver 'luck'"),
    ],
    ids=["unreachable", "more memory than there is", "not even buffers", "unknown device", "solver"],
)
def test_what_is_wrong_is_one_line(
    memory: str, entry: str, more: list[str], message: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    cluster = cluster_file(tmp_path, {"a": f"{local(memory)}\n{entry}"})
    done = oallama("cluster", "plan", tiny("llama"), "--devices", cluster, "--ctx", "512", *more)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_prompt_that_is_too_long_is_one_line(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Also one that is longer than an argument of a program may be."""
    with (
        pipeline(tiny("llama"), tmp_path, {"a": local("1GiB")}, []) as (running, _),
        pytest.raises(OallamaError, match="tokens leave no room in a context of 1024"),
    ):
        list(running.complete(PROMPT * 5000, 1, 0.0, None))


def test_a_port_in_use_is_one_line(tiny: Callable[..., Path], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        lines = f'address = "127.0.0.1:{port}"\nmemory = "1GiB"'
        with (
            pipeline(tiny("llama"), tmp_path, {"a": lines}, []) as (running, _),
            pytest.raises(OallamaError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"),
        ):
            list(running.complete(PROMPT, 1, 0.0, None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "", "is not valid JSON"),
        (lambda text: text.replace("oallama.cluster/2", "oallama.cluster/9"), "has schema 'oallama.cluster/9'"),
        (lambda text: text.replace('"layers": [', '"layers": ["x", ', 1), "is not valid"),
        (lambda text: text.replace('"from": "client"', '"from": "nobody"', 1), "was not measured"),
        (lambda text: text.replace('"latency_s": 0.001', '"latency_s": -1', 1), "latency_s is -1"),
    ],
    ids=["empty", "schema", "layers", "link", "value"],
)
def test_a_plan_file_that_is_wrong_is_refused(
    change: Callable[[str], str], message: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    cluster = load_devices(cluster_file(tmp_path, {"a": local("1GiB")}))
    path = tmp_path / "plan.json"
    saved_plan(tiny("llama"), cluster, path, 512, on_a=1.0)
    path.write_text(change(path.read_text()))
    with pytest.raises(OallamaError, match=message):
        ClusterPlan.load(path)


def test_a_plan_is_for_its_model(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    saved_plan(tiny("llama"), load_devices(cluster_file(tmp_path, {"a": local("1GiB")})), path, 512, on_a=1.0)
    done = oallama("cluster", "run", tiny("qwen2"), PROMPT, "--plan", path)
    assert done.returncode == 2 and "this plan is for another model (arch 'llama' against 'qwen2'" in done.stderr


@needs_sshd
@pytest.mark.skipif(os.geteuid() != 0, reason="an sshd needs root")
def test_a_device_behind_ssh(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Started by ssh, and reached through its tunnel: its server listens on loopback alone."""
    model, notices = tiny("llama"), list[str]()
    command, options = sshd_on(tmp_path, "127.0.0.1", free_port())
    with process_of(command, stderr=subprocess.DEVNULL):
        lines = f'host = "localhost"\nssh_options = {json.dumps(options)}\n'
        devices = {"a": lines + local("1GiB"), "b": local("1GiB")}
        with pipeline(model, tmp_path, devices, notices) as (running, hosts):
            split(running)
            assert hosts["a"].has_tunnel and not hosts["b"].has_tunnel
            tokens = [token.id for token in running.complete(PROMPT, 8, 0.0, None)]
            assert hosts["a"].endpoint != f"127.0.0.1:{hosts['a'].entry.address[1]}"
            quality = hosts["a"].measure_link(4096)
        pids = [hosts[name].server_pid for name in "ab"]
    assert tokens == expected(model, 8) and quality.message_s > 0 and not notices
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 60)


def test_a_worker_that_crashes_is_not_the_end(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The process that listens lives on, and serves the rest of the answer."""
    model, notices = tiny("llama"), list[str]()
    with pipeline(model, tmp_path, {"a": local("1GiB")}, notices) as (running, hosts):
        tokens = []
        for token in running.complete(PROMPT, 300, 0.0, None):
            tokens.append(token.id)
            if len(tokens) == 20:
                pid = hosts["a"].server_pid
                for worker in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                    os.kill(int(worker), signal.SIGKILL)
    assert tokens == expected(model, 300)
    assert len(notices) == 1 and "once more, from the tokens so far" in notices[0] and not running.changes_made


def test_only_who_has_the_token_is_served(tiny: Callable[..., Path], tmp_path: Path) -> None:
    with pipeline(tiny("llama"), tmp_path, {"a": local("1GiB")}, []) as (running, _):
        (member,) = running.start_servers()
        code = "import sys; from oallama.engine import device_list; device_list.add_rpc_server(sys.argv[1])"
        stranger = {name: value for name, value in os.environ.items() if name != "OALLAMA_RPC_TOKEN_FILE"}
        command = [sys.executable, "-c", code, member.endpoint]
        done = subprocess.run(command, env=stranger, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0 and "token" in done.stderr.splitlines()[-1]
        assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def test_devices_of_this_host_are_reached_from_it_alone(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The RPC server, and what the agent answers probes with: TCP and UDP."""
    with pipeline(tiny("llama"), tmp_path, {"a": local("1GiB")}, []) as (running, hosts):
        running.start_servers()
        entry, seen = hosts["a"].entry, listening(descendants(os.getpid()))
    ends = (("tcp", entry.address[1]), ("tcp", entry.echo_port), ("udp", entry.echo_port))
    assert {(kind, "127.0.0.1", port) for kind, port in ends} <= set(seen)
    assert not beyond_loopback(seen), seen
