"""llama-server on the devices of a pipeline."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from oallama.base.children import die_with_parent
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from oallama.serving.command import planned_environment, planned_server

from .client import ClientJob, placed


@contextmanager
def server_of(job: ClientJob, arguments: tuple[str, ...]) -> Iterator[subprocess.Popen[Any]]:
    """llama-server on the job's devices; it ends with the block."""
    wanted = Settings(**asdict(job.context))
    made = placed(job, autoplan.read_graph(job.model, wanted))
    wanted = autoplan.resolve(replace(wanted, n_threads=job.n_threads), job.context.n_ctx)
    command = [*planned_server(Path(job.model), wanted, made, job.endpoints), *arguments]
    with planned_environment(made) as environment:
        process = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=die_with_parent)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
