"""What tests of clusters share."""

from __future__ import annotations

import json
import random
import socket
from contextlib import suppress
from pathlib import Path

from oallama import Llama
from oallama.cluster.allocation.devices import DeviceEntry
from support.processes import ran_python

PROMPT = "The quick brown fox jumps over the lazy dog"


def port_pair() -> int:
    """A port for an agent's RPC server whose probe's port is free, too; below those that outgoing connections take."""
    while True:
        port = random.randrange(10_000, 22_000)
        with suppress(OSError), socket.socket() as server, socket.socket() as probe:
            server.bind(("127.0.0.1", port))
            probe.bind(("127.0.0.1", DeviceEntry("a", "local", ("127.0.0.1", port), 1).echo_port))
            return port


def expected(model: Path, n_generate: int, n_ctx: int = 1024) -> list[int]:
    """Tokens that one process generates greedily."""
    code = (
        "import json, sys; from oallama import Llama; llm = Llama(sys.argv[1], n_ctx=int(sys.argv[3]), verbose=False, "
        "flash_attn=True); prompt = llm.tokenize(sys.argv[4].encode(), special=True); stream = llm.generate(prompt, "
        "temp=0.0); print(json.dumps([next(stream) for _ in range(int(sys.argv[2]))]))"
    )
    return list(json.loads(ran_python(code, model, str(n_generate), str(n_ctx), PROMPT).stdout))


def shown(model: Path, tokens: list[int]) -> str:
    """What `oallama cluster run` prints of tokens, as a pipe in text mode reads it."""
    text = Llama(str(model), vocab_only=True, verbose=False).detokenize(tokens, prev_tokens=[0])
    return text.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
