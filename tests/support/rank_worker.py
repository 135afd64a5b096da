"""One rank of a tensor-parallel group for tests: rank 0 does what it is told, the others follow.

JOBS: those of logits_worker.py, in a file: mpirun hands on a terminal or a pipe as standard input, not a file.
MODEL refusals: see there.
MODEL reads FILE: rank 0 answers with the model, the others read it from FILE.
MODEL stops FILE: rank 0 stops rank 1, whose process FILE says, and has it compute a long prompt.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from oallama.cluster.ranks.rank import RankJob, library, rank_llama
from oallama.cluster.ranks.rank_process import answer
from oallama.engine import native, runtime


def main() -> None:
    core = native.core()
    if not core.load_backend(str(library())):
        raise SystemExit("this process cannot be a rank")
    what, file = (*sys.argv[2:], "", "")[:2]
    if int(os.environ["OMPI_COMM_WORLD_RANK"]) > 0:
        if what == "stops":
            Path(file).write_text(str(os.getpid()))
        raise SystemExit(core.replay(file if what == "reads" else "") or 0)
    job = RankJob(sys.argv[1], (0.5, 0.5), prompt="Once", n_ctx=256)
    if what == "refusals":
        refusals(job)
        return
    if what == "reads":
        answer(job, n_threads=1)
        return
    if what == "stops":
        llm = rank_llama(job, n_threads=1)
        os.kill(int(Path(file).read_text()), signal.SIGSTOP)
        llm.eval(range(200))
        return
    from support import logits_worker

    logits_worker.main(Path(sys.argv[1]).read_text().splitlines())


def refusals(job: RankJob) -> None:
    """What a model that is spread over ranks cannot do; the reasons are in the log."""
    llm = rank_llama(job, n_threads=1)
    llama_cpp = runtime.llama_cpp()
    adapter = llama_cpp.llama_adapter_lora_init(llm.model, job.model.encode())
    vector = llama_cpp.llama_set_adapter_cvec(llm.ctx, None, 0, 1, 0, 1)
    print(json.dumps([llama_cpp.llama_state_get_size(llm.ctx), bool(adapter), vector]))
    llm.close()


if __name__ == "__main__":
    main()
