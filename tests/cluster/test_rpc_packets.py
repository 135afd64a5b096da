"""How many packets a token takes to and from an RPC server."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from oallama.cluster.pipeline.client import pipeline_plan
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.llama import Llama
from oallama.loading import autoplan

N_TOKENS = 16
# A server is sent six tensors, the order to compute and one to answer: 24 packets where each is sent in three parts.
MOST_SENT, MOST_BACK = 9, 2


def segments(port: int) -> tuple[int, int]:
    """Data segments that clients have sent to a port of this host, and that came back."""
    said = subprocess.run(["ss", "-tinH", "dport", "=", f":{port}"], capture_output=True, text=True, check=True).stdout
    sent, back = (sum(int(n) for n in re.findall(rf"\bdata_segs_{way}:(\d+)", said)) for way in ("out", "in"))
    return sent, back


@pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss: apt-get install iproute2")
def test_a_message_is_one_packet(tiny: Callable[..., Path]) -> None:
    settings = Settings(n_ctx=256)
    model = tiny("llama")
    graph = autoplan.read_graph(model, settings)
    context = autoplan.context_of(autoplan.resolve(settings, graph.n_ctx_train))
    with LocalRpcServer(1) as server:
        (name,) = server.devices
        port = int(server.endpoint.rpartition(":")[2])
        plan = pipeline_plan(graph, context, [name] * graph.n_layer, [name])
        llm = Llama(str(model), plan=plan, verbose=False)
        llm.eval([1, 2, 3])
        llm.eval([4])  # the graph of single tokens is sent once
        before = segments(port)
        for token in range(N_TOKENS):
            llm.eval([token])
            llm._ctx.get_logits_ith(-1)
        sent, back = (now - then for now, then in zip(segments(port), before, strict=True))
        llm.close()
    assert N_TOKENS <= sent <= MOST_SENT * N_TOKENS, sent / N_TOKENS
    assert N_TOKENS <= back <= MOST_BACK * N_TOKENS, back / N_TOKENS
