"""The program of every rank of `oallama cluster run`: `mpirun ... python -m oallama.cluster.ranks.rank_process JOB`.

Rank 0 completes the prompt or becomes llama-server, the others repeat its calls. JOB is a RankJob as JSON; what else a
rank must know is in its environment (docs/architecture.md).
"""

from __future__ import annotations

import os
import sys

from oallama.base.environment import RANK_THREADS
from oallama.base.printing import print_json, say
from oallama.cluster.ranks.rank import RankJob, library, rank_llama, server_command
from oallama.engine import native
from oallama.engine.runtime import quiet
from oallama.errors import OallamaError
from oallama.loading.completion import complete, warm_up

USER_ERROR = 2
RANK_VARIABLE = "OMPI_COMM_WORLD_RANK"


def main() -> None:
    """Ends the process with an exit code when something failed."""
    job, rank = RankJob.loads(sys.argv[1]), int(os.environ[RANK_VARIABLE])
    threads = [int(n) for n in (RANK_THREADS.get() or "1").split(",")]
    n_threads = threads[rank % len(threads)] or 1
    if rank == 0 and job.server is not None:
        command = server_command(job, n_threads, job.server)
        os.execve(command[0], command, {**os.environ, "GGML_BACKEND_PATH": str(library())})
    quiet()
    if not native.core().load_backend(str(library())):
        raise SystemExit(1)
    if rank > 0:
        if why := native.core().replay(job.model, n_threads):
            raise SystemExit(f"rank {rank} stopped: {why}")
        return
    try:
        answer(job, n_threads)
    except OallamaError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(USER_ERROR) from None


def answer(job: RankJob, n_threads: int) -> None:
    """Complete the prompt on rank 0.

    Raises:
        OallamaError: when a rank is gone.
    """
    try:
        llm = rank_llama(job, n_threads)
        warm_up(llm)
        clock, text = complete(llm, job.prompt, job.n_generate, job.temperature, job.seed, quiet=job.json)
    except (RuntimeError, ValueError) as error:
        if why := native.core().rank_error():
            raise OallamaError(f"the answer ends here: {why}") from error
        raise
    n_prompt = len(llm.tokenize(job.prompt.encode()))
    if job.json:
        times = {"ttft_s": clock.ttft_s, "tpot_s": clock.tpot_s}
        print_json({"text": text, "n_prompt": n_prompt, "n_generated": len(clock.times), **times})
    else:
        say(clock.summary(n_prompt))
    llm.close()


if __name__ == "__main__":
    main()
