"""What a token sends to an RPC server: how many packets, which bytes, how fast."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oallama.cluster.pipeline.client import pipeline_plan
from oallama.data.plan import HOST, PlacementPlan
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.llama import Llama
from oallama.loading import autoplan

N_TOKENS = 16
# A server is sent six tensors, the order to compute and one to answer: 24 packets where each is sent in three parts.
MOST_SENT, MOST_BACK = 9, 2


DEFAULT = Path("/proc/sys/net/ipv4/tcp_congestion_control")

pytestmark = pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss: apt-get install iproute2")


@pytest.fixture(scope="module")
def server() -> Iterator[LocalRpcServer]:
    with LocalRpcServer(1) as started:
        yield started


def port_of(server: LocalRpcServer) -> int:
    return int(server.endpoint.rpartition(":")[2])


def connections(port: int) -> str:
    """What the kernel says of connections of clients to a port of this host."""
    return subprocess.run(["ss", "-tinH", "dport", "=", f":{port}"], capture_output=True, text=True, check=True).stdout


def counted(port: int, name: str) -> int:
    return sum(int(n) for n in re.findall(rf"\b{name}:(\d+)", connections(port)))


def segments(port: int) -> tuple[int, int]:
    """Data segments that clients have sent to a port of this host, and that came back."""
    return counted(port, "data_segs_out"), counted(port, "data_segs_in")


def planned(model: Path, device: str, n_here: int) -> PlacementPlan:
    """The first layers here, the others on the device."""
    settings = Settings(n_ctx=256)
    graph = autoplan.read_graph(model, settings)
    context = autoplan.context_of(autoplan.resolve(settings, graph.n_ctx_train))
    return pipeline_plan(graph, context, [HOST] * n_here + [device] * (graph.n_layer - n_here), [device])


def test_a_message_is_one_packet(tiny: Callable[..., Path], server: LocalRpcServer) -> None:
    port, model = port_of(server), tiny("llama")
    with closing(Llama(str(model), plan=planned(model, server.devices[0], 0), verbose=False)) as llm:
        llm.eval([1, 2, 3])
        llm.eval([4])  # the graph of single tokens is sent once
        before = segments(port)
        for token in range(N_TOKENS):
            llm.eval([token])
            llm._ctx.get_logits_ith(-1)
        sent, back = (now - then for now, then in zip(segments(port), before, strict=True))
    assert N_TOKENS <= sent <= MOST_SENT * N_TOKENS, sent / N_TOKENS
    assert N_TOKENS <= back <= MOST_BACK * N_TOKENS, back / N_TOKENS


@pytest.mark.parametrize("arch", ["llama", "minicpm3", "qwen3moe", "gpt-oss", "deepseek2", "qwen35moe"])
def test_one_activation_is_sent(arch: str, tiny: Callable[..., Path], server: LocalRpcServer) -> None:
    """Where a layer's last sum ran on the next layer's device, both of its terms were sent."""
    port, model = port_of(server), tiny(arch)
    whole = planned(model, server.devices[0], 1)
    sent, logits = {}, {}
    for plan in (whole, replace(whole, whole_layers=False)):
        with closing(Llama(str(model), plan=plan, verbose=False)) as llm:
            tokens = list(range(1, 33))
            llm.eval(tokens)
            llm.reset()  # the graph has been sent now
            before = counted(port, "bytes_sent")
            llm.eval(tokens)
            logits[plan.whole_layers] = llm._ctx.get_logits_ith(-1)[: llm.n_vocab()]
            sent[plan.whole_layers] = counted(port, "bytes_sent") - before
            activation = len(tokens) * llm.n_embd() * 4
    assert activation < sent[True] < 2 * activation <= sent[False]
    np.testing.assert_array_equal(logits[True], logits[False])


@pytest.mark.skipif(DEFAULT.read_text().strip() != "bbr", reason="connections are not BBR's here")
def test_messages_are_not_paced(tiny: Callable[..., Path], server: LocalRpcServer) -> None:
    port, model = port_of(server), tiny("llama")
    with closing(Llama(str(model), plan=planned(model, server.devices[0], 0), verbose=False)) as llm:
        llm.eval([1, 2, 3])
        there = subprocess.run(["ss", "-tinH", "sport", "=", f":{port}"], capture_output=True, text=True, check=True)
        assert "cwnd" in connections(port) and "cwnd" in there.stdout
        assert "bbr" not in connections(port) + there.stdout
