"""Drafts and MTP heads: predicted against measured seconds per token, for every place and every length of a guess.

python bench/drafts.py [--out FILE.jsonl] [--acceptance 0.7] [--rounds 3] [--tokens 96] [--longest 4]
    [--planners auto,layers]
PYTHONPATH=tests python bench/drafts.py --heads glm4moe,deepseek2,qwen35 [...]

A loopback RPC server with all cores is the accelerator; the host has one thread. Two budgets: "roomy" holds both models
on the device, "tight" just the target, so that a draft pushes some of it off. llama-server runs every way by its plan
and accepts guesses at random (--spec-synth-rates), each with the given probability, since random weights guess nothing.
The ways take turns, round by round. One JSON line per budget and way: medians of the seconds of a step, and those
per token that they give with the expected tokens of a step. "stock" plans the target by llama.cpp's layers.

--heads: models of these architectures with heads of their own instead, upstream's tiny ones with the widths of a
published model (wide_models.py), six layers and one more as the head.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oallama.base.children import die_with_parent
from oallama.base.ports import free_port
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record, words
from oallama.data.workload import Workload
from oallama.drafts import Acceptance, Joint, plan_jointly, plan_with_heads
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.engine.runtime import quiet
from oallama.loading.autoplan import Choices
from oallama.loading.start import plan_model
from oallama.modelmaker import make_model
from oallama.planning.speculation import LONGEST, Choice
from oallama.serving.command import Draft, Heads, planned_environment, planned_server

TARGET = {"n_layer": 16, "n_embd": 1024, "n_ff": 4096, "n_head": 16, "n_head_kv": 4, "n_vocab": 8192}
DRAFT = {"n_layer": 3, "n_embd": 1024, "n_ff": 4096, "n_head": 16, "n_head_kv": 4, "n_vocab": 8192}
SETTINGS = Settings(n_ctx=1024, n_threads=1)
N_PROMPT = 128


def main() -> None:
    parser = arguments(__doc__, "drafts")
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--longest", type=int, default=LONGEST)
    parser.add_argument("--planners", type=words, default=["auto", "layers"])
    parser.add_argument("--heads", type=words, default=[], help="architectures whose MTP heads guess")
    options = parser.parse_args()
    quiet()
    server = LocalRpcServer()

    def lines() -> Iterator[dict[str, Any]]:
        for target, draft in _with_heads(options.heads) if options.heads else _with_draft():
            yield from measured(target, draft, server, options)

    record(lines(), options.out, each={"machine": describe()})


def _with_draft() -> Iterator[tuple[Path, Path | None]]:
    with tempfile.TemporaryDirectory() as folder:
        target, draft = (Path(folder) / name for name in ("target.gguf", "draft.gguf"))
        for path, overrides in ((target, TARGET), (draft, DRAFT)):
            make_model(path, arch="llama", shape="tiny", file_type="Q8_0", overrides=overrides)
        yield target, draft


def _with_heads(archs: list[str]) -> Iterator[tuple[Path, Path | None]]:
    from wide_models import build, wide_models

    from support.mtp_model import add_heads

    with tempfile.TemporaryDirectory() as name:
        folder, trunks = Path(name), Path(name) / "trunks"
        trunks.mkdir()
        program = build(folder)
        for arch in archs:
            for trunk in wide_models(program, trunks, [f"^{arch}$"]):  # the last one has experts
                add_heads(trunk, folder / f"{arch}.gguf", arch, 1, keeps_sections=arch != "glm4moe")
            if not (folder / f"{arch}.gguf").exists():
                raise SystemExit(f"upstream's program writes no {arch}")
            yield folder / f"{arch}.gguf", None


def measured(
    target: Path, draft: Path | None, server: LocalRpcServer, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    whole = _whole(target, server.devices[0])
    for budget, vram in (("roomy", 2 * whole), ("tight", whole + (1 << 20))):
        for planner in options.planners:
            work = Workload(N_PROMPT, options.tokens)
            choices = Choices(server.devices[0], planner=planner, workload=work)
            known = Acceptance(options.acceptance, "given")
            if draft:
                joint = plan_jointly(target, draft, vram, SETTINGS, choices, known, options.longest)
            else:
                joint = plan_with_heads(target, vram, SETTINGS, choices, known, options.longest)
            found = _rounds(joint, server.endpoint, options)
            for choice, steps in found:
                step = statistics.median(steps)
                yield {
                    "target": target.stem, "budget": budget,
                    "vram": vram, "planner": "stock" if planner == "layers" else "auto",
                    "pair": choice.pair, "n": choice.n, "chosen": choice is joint.best,
                    "acceptance": options.acceptance, "tokens_per_step": choice.tokens, "steps_s": steps,
                    "step_s": step, "step_predicted_s": choice.step_s, "token_s": step / choice.tokens,
                    "token_predicted_s": choice.token_s, "bytes": dict(joint.pairs[choice.pair].nbytes),
                }  # fmt: skip


def _whole(target: Path, device: str) -> int:
    """Bytes of the target with everything on the device."""
    plan = plan_model(target, 8 << 30, SETTINGS, Choices(device, planner="all"))
    return plan.predicted.devices[device].total


def _rounds(joint: Joint, endpoint: str, options: argparse.Namespace) -> list[tuple[Choice, list[float]]]:
    found: list[tuple[Choice, list[float]]] = [(choice, []) for choice in joint.choices]
    for i in range(options.rounds):
        for choice, steps in found:
            note(f"round {i + 1} of {options.rounds}: {choice.pair}, n = {choice.n}")
            steps.append(_step_seconds(joint, choice, endpoint, options))
    return found


def _step_seconds(joint: Joint, choice: Choice, endpoint: str, options: argparse.Namespace) -> float:
    """Of the second of two equal requests."""
    with _server(joint, choice, endpoint, options.acceptance) as port:
        prompt = [300 + 7 * i for i in range(N_PROMPT)]
        body = {
            "prompt": prompt,
            "n_predict": options.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        timings = [_post(port, body)["timings"] for _ in range(2)][-1]
    # The last guesses of a request may be cut.
    n_steps = -(-timings["draft_n"] // choice.n) if choice.n else timings["predicted_n"]
    return float(timings["predicted_ms"] / 1e3 / n_steps)


@contextmanager
def _server(joint: Joint, choice: Choice, endpoint: str, acceptance: float) -> Iterator[int]:
    target, guesser, port = joint.targets[choice.pair], joint.drafts.get(choice.pair), free_port()
    draft: Draft | Heads | None = None
    if choice.n:
        draft = Draft(joint.draft, guesser, choice.n) if joint.draft and guesser else Heads(choice.n)
    context = target.context
    settings = Settings(context.n_ctx, context.n_batch, context.n_ubatch, flash_attn=context.flash_attn, n_threads=1)
    command = [*planned_server(joint.target, settings, target, (endpoint,), draft), "--port", str(port)]
    if choice.n:
        command += ["--spec-synth-rates", ",".join(f"{acceptance ** (i + 1):.6f}" for i in range(choice.n))]
    with planned_environment(target, guesser) as environment, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, preexec_fn=die_with_parent)
        try:
            _wait(process, port)
            yield port
        finally:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("llama-server ended before it answered")


def _post(port: int, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
