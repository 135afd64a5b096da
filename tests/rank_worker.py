"""One rank of a tensor-parallel group for tests: rank 0 does the jobs of logits_worker.py, the others follow.

The jobs are in a file: mpirun hands on a terminal or a pipe as standard input, not a file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from oallama import engine, runtime
from oallama.cluster.rank import RankJob, library, rank_llama


def main() -> None:
    core = engine.core()
    if not core.load_backend(str(library())):
        raise SystemExit("this process cannot be a rank")
    if int(os.environ["OMPI_COMM_WORLD_RANK"]) > 0:
        raise SystemExit(core.follow() or 0)
    if sys.argv[2:] == ["refusals"]:
        refusals(sys.argv[1])
        return
    import logits_worker

    logits_worker.main(Path(sys.argv[1]).read_text().splitlines())


def refusals(model: str) -> None:
    """What a model that is spread over ranks cannot do; the reasons are in the log."""
    llm = rank_llama(RankJob(model, (0.5, 0.5), n_ctx=256), n_threads=1)
    llama_cpp = runtime.llama_cpp()
    adapter = llama_cpp.llama_adapter_lora_init(llm.model, model.encode())
    vector = llama_cpp.llama_set_adapter_cvec(llm.ctx, None, 0, 1, 0, 1)
    print(json.dumps([llama_cpp.llama_state_get_size(llm.ctx), bool(adapter), vector]))
    llm.close()


if __name__ == "__main__":
    main()
