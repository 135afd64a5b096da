"""Random faults of receivers while a hot model decodes: are its logits those of a run without guests, and at once?

python bench/weave_soak.py [--out FILE.jsonl] [--faults 1000] [--seed 1] [--only N] [--kinds kill,stop] [--deadline 0.1]

A tiny model with eight sequences, five of which may be guests of two receivers in processes of their own; some of those
compute a cold model meanwhile. Sequences join, lose their end, sleep, leave. Every batch is decoded by a context
without guests, too: argmax (but for ties) and logits (NMSE 1e-6) have to be the same. A fault befalls one of the
receivers at a random moment; when it is over, guests have to go there again. Every fault begins with new sequences and
has random numbers of its own: --only N plays fault N again (but for its timing). A call of more than ten seconds ends
the run.

  kill, replace    SIGKILL; the next receiver comes later, or at once and up to three times
  stop             SIGSTOP, then SIGCONT or SIGKILL
  slow             SIGSTOP for 5 to 80 ms, again and again
  hog              four processes that compute, beside a receiver and the hot model on two cores
  task, result     another process writes random bytes into the slots
  word             it writes over a word of a page or the header, once
  quota            prompts that are longer than what is left of the quota
  drain            the receiver wants its memory back

"noticed": seconds in calls of the hot model between the fault and the line of the log by which its guests are computed
at home. Writes into a slot that nobody reads any more and short stops do nothing, so that not all faults of some kinds
are noticed. One JSON line per kind.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from weave_fault_processes import HANG_S, Helper
from weave_faults import KINDS, Fault, show, summary

from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record, words
from oallama.weave.channel import layout

N_LAYERS, N_SEQUENCES, FIRST_GUEST, N_CONTEXT = 3, 8, 3, 4096
LONGEST = 100  # tokens of a sequence, but for those of the kind "quota"
QUOTA_BLOCKS = 10  # of 64 tokens: enough for all guests in one receiver
BF16 = 30  # ggml-cpu adds up f16 caches in f16, which would hide small errors


def main() -> None:
    parser = arguments(__doc__, "weave-soak")
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one fault")
    parser.add_argument("--kinds", type=words, default=KINDS, help="default: all")
    parser.add_argument("--deadline", type=float, default=0.1, help="seconds; default: %(default)s")
    options = parser.parse_args()
    kinds = options.kinds
    numbers = range(options.faults) if options.only is None else [options.only]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Soak(Path(folder), options.seed, options.deadline) as soak:
        faults = []
        for number in numbers:
            try:
                faults.append(soak.play(number, kinds[number % len(kinds)]))
            except BaseException:
                note(f"while fault {number} was played: --seed {options.seed} --only {number}")
                raise
            if faults[-1].bad:
                note(f"fault {number}: {faults[-1]}")
            if number % 100 == 99:
                note(f"{time.monotonic() - begin:.0f} s, {number + 1} faults")
    played = {kind: [fault for fault in faults if fault.kind == kind] for kind in kinds}
    lines = [summary(kind, of_kind, options.deadline) for kind, of_kind in played.items() if of_kind]
    lines.append({**summary("all", faults, options.deadline), "seconds": round(time.monotonic() - begin, 1)})
    head = {**describe(), "seed": options.seed, "deadline_s": options.deadline}
    record(lines, options.out, head=head, quiet=True)
    show(lines, options.deadline)
    sys.exit(any(fault.bad for fault in faults))


class Cold:
    """One of the receivers, in whatever process it is now, and what the hot model's log said of it last."""

    def __init__(self, spawner: Helper, path: str, model: Path, quota_nbytes: int) -> None:
        self.path, self.pid = path, 0
        self.attached = False
        self._spawner, self._options = spawner, {"path": path, "model": str(model), "quota": quota_nbytes}

    def start(self, serves: bool) -> int:
        """A new receiver, in place of the last one. Returns how many ended by themselves."""
        answer = self._spawner.ask(**self._options, serves=serves)
        self.pid = answer["pid"]
        return int(answer["crashed"])

    def lives(self) -> bool:
        return bool(self._spawner.ask(path=self.path)["lives"])

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)  # no other process has this number: its parent has not looked for it yet

    def drain(self, wanted: bool) -> bool:
        """False: it does not answer."""
        self.signal(signal.SIGUSR1 if wanted else signal.SIGUSR2)
        try:
            return self._spawner.answer() == {"drains": wanted}
        except TimeoutError:
            return False

    def has_guests(self) -> bool:
        with open(self.path, "rb") as file:
            file.seek(layout().words["free_nbytes"][0])
            return self.attached and struct.unpack("<Q", file.read(8))[0] < self._options["quota"]


class Soak:
    """The hot model, the same without guests, two receivers, and what starts and harms them; a context manager."""

    def __init__(self, folder: Path, seed: int, deadline_s: float) -> None:
        self._seed = seed
        self._stack = ExitStack()
        self._spawner, self._injector = (self._stack.enter_context(Helper(role)) for role in ("spawner", "injector"))
        self._open(folder, deadline_s)
        self._next: dict[int, int] = {}  # of the sequences that are there
        self._fault = Fault(-1, "none")
        self._target = self.colds[0]
        self._call_began: float | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def _open(self, folder: Path, deadline_s: float) -> None:
        from oallama.engine import runtime
        from oallama.modelmaker import make_model
        from oallama.weave import channel_path
        from oallama.weave.sequences import Sequences

        small = {"n_layer": N_LAYERS, "n_vocab": 1024}
        model = make_model(folder / "model.gguf", shape="tiny", file_type="F16", overrides=small)
        options: dict[str, Any] = {"n_seq": N_SEQUENCES, "n_ctx": N_CONTEXT, "kv_type": BF16}
        self.home = self._stack.enter_context(Sequences(model, **options))
        a_block = N_LAYERS * 2 * 128 * 2 * 64  # layers, K and V, values of two bytes, tokens
        paths = [channel_path(f"soak-{os.getpid()}-{at}") for at in range(2)]
        self.colds = [Cold(self._spawner, path, model, QUOTA_BLOCKS * a_block) for path in paths]
        for cold in self.colds:
            cold.start(serves=False)
        self.hot = self._stack.enter_context(
            Sequences(model, channels=paths, first_guest=FIRST_GUEST, deadline_s=deadline_s, **options)
        )
        llama_cpp = runtime.llama_cpp()
        self._log = llama_cpp.llama_log_callback(self._hear)
        llama_cpp.llama_log_set(self._log, None)
        self._stack.callback(llama_cpp.llama_log_set, llama_cpp._logger.llama_log_callback, None)

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for cold in self.colds:
            Path(cold.path).unlink(missing_ok=True)

    def _hear(self, level: int, text: bytes, data: object) -> None:
        """The hot model's log: when a receiver has failed or wants its memory back, and when it is there again."""
        message, now = text.decode(errors="replace").strip(), time.monotonic()
        for cold in self.colds:
            if f": {cold.path}" in message and "attention of sequences" in message:
                cold.attached = True
            elif cold.path in message and "its guests are computed here" in message:
                cold.attached = False
                reason = message.partition(f"{cold.path} ")[2].partition(";")[0]
                reason = "".join(c for c in reason if not c.isdigit())
                if cold is self._target and self._fault.begins:
                    self._notice(now, reason)
                else:
                    self._fault.alarms.append(reason)
        if "tokens are computed again" in message and (self._fault.kind != "drain" or not self._target.has_guests()):
            self._notice(now)

    def _notice(self, now: float, reason: str = "") -> None:
        fault = self._fault
        if fault.begins and not fault.over:
            if fault.noticed_s is None:
                began = self._call_began or now
                fault.noticed_s = fault.inside(fault.begins[-1], now) + now - max(fault.begins[-1], began)
            fault.reason = fault.reason or reason

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Of the hot model."""
        self._call_began = begin = time.monotonic()
        try:
            yield
        finally:
            self._call_began = None
            self._fault.calls.append((begin, time.monotonic()))

    def _watch(self) -> None:
        while True:
            time.sleep(0.1)
            began = self._call_began
            if began is not None and time.monotonic() > began + HANG_S:
                fault = self._fault
                print(f"a call takes more than {HANG_S:.0f} s: --seed {self._seed} --only {fault.number}, {fault}")
                sys.stdout.flush()
                os._exit(1)

    def step(self, batch: Mapping[int, list[int]]) -> None:
        """One batch, with guests and without."""
        from oallama.errors import OallamaError

        if not batch:
            return
        fault = self._fault
        lost = self.hot.stats["n_lost"]
        found: dict[int, np.ndarray] = {}
        try:
            with self._call():
                found = self.hot.step(batch)
        except OallamaError:
            fault.n_failed += 1
        fault.n_lost += int(self.hot.stats["n_lost"] - lost)
        if fault.kind == "drain" and not self._target.has_guests():
            self._notice(time.monotonic())
        expected = self.home.step(batch)
        for seq_id, logits in expected.items():
            self._next[seq_id] = int(logits[-1].argmax())
            if found:
                fault.likeness.add(found[seq_id], logits)
            else:
                self.leave(seq_id)

    def leave(self, seq_id: int) -> None:
        self._remove(seq_id, 0)
        self._next.pop(seq_id, None)

    def lose_end(self, seq_id: int, first: int, token: int) -> None:
        self._remove(seq_id, first)
        self._next[seq_id] = token

    def _remove(self, seq_id: int, first: int) -> None:
        with self._call():
            self.hot.remove(seq_id, first)
        self.home.remove(seq_id, first)

    def random_step(self, rng: np.random.Generator, awake: np.ndarray, *, joins: bool = False) -> None:
        """A token of most sequences that are awake; now and then somebody joins, loses its end or leaves.

        joins: a guest does so in any case, asleep or not.
        """
        lengths = self.hot.lengths
        comer = int(rng.integers(FIRST_GUEST, N_SEQUENCES)) if joins else int(rng.integers(N_SEQUENCES))
        if joins or rng.random() < 0.1 or lengths[comer] > LONGEST:
            self.leave(comer)
        elif rng.random() < 0.05 and lengths.get(comer, 0) > 1:
            self.lose_end(comer, int(rng.integers(1, lengths[comer])), random_tokens(rng, 1)[0])
        batch = {
            seq_id: [token]
            for seq_id, token in self._next.items()
            if awake[seq_id] and rng.random() < 0.8 and lengths[seq_id] <= LONGEST
        }
        if comer not in self._next and (joins or awake[comer]):
            batch[comer] = random_tokens(rng, int(rng.integers(1, 60)))
        self.step(batch)

    def play(self, number: int, kind: str) -> Fault:
        """All of one fault: new sequences, the fault, the receiver's return, guests with it again."""
        rng, of_harm, of_repair = (np.random.default_rng([self._seed, number, i]) for i in range(3))
        fault = self._fault = Fault(number, kind)
        target = self._target = self.colds[int(rng.integers(2))]
        for seq_id in range(N_SEQUENCES):
            self.leave(seq_id)
        self.step({seq_id: random_tokens(rng, int(rng.integers(1, 60))) for seq_id in range(N_SEQUENCES)})
        self._bring_guests(rng, target)
        for _ in range(int(rng.integers(1, 4))):
            self.random_step(rng, np.ones(N_SEQUENCES, bool))

        harm = threading.Thread(target=self._harm, args=(fault, target, of_harm))
        harm.start()
        awake, n_steps = rng.random(N_SEQUENCES) < 0.8, 0
        while harm.is_alive() or n_steps < 8 or (fault.unnoticed and fault.inside(fault.begins[0], np.inf) < 2):
            if kind == "quota" and n_steps == 3:
                self._outgrow(rng)
            self.random_step(rng, awake)
            n_steps += 1
        harm.join()

        fault.over = True
        self._repair(fault, target, of_repair)
        back, absent_s = time.monotonic(), time.monotonic() - fault.begins[0]
        fault.back_limit_s = absent_s + 0.1 + 0.5  # a pause is no longer than all before it and 0.1 s
        if self._bring_guests(rng, target):
            fault.back_s = time.monotonic() - back
        else:
            fault.n_crashed += target.start(serves=False)
            self._bring_guests(rng, target)
        for _ in range(3):
            self.random_step(rng, np.ones(N_SEQUENCES, bool))
        return fault

    def _bring_guests(self, rng: np.random.Generator, target: Cold) -> bool:
        """Sequences join until the receiver has some; False: not within five seconds."""
        awake, end = rng.random(N_SEQUENCES) < 0.7, time.monotonic() + 5
        while not target.has_guests():
            if time.monotonic() > end:
                return False
            self.random_step(rng, awake, joins=True)
        return True

    def _outgrow(self, rng: np.random.Generator) -> None:
        """The guests grow until a receiver has no more room for one."""
        guests = range(FIRST_GUEST, N_SEQUENCES)
        while self._fault.noticed_s is None and sum(map(self.hot.lengths.__getitem__, guests)) < N_CONTEXT / 2:
            batch = {seq_id: random_tokens(rng, int(rng.integers(20, 90))) for seq_id in guests if rng.random() < 0.7}
            self._fault.begins.append(time.monotonic())
            self.step(batch)

    def _repair(self, fault: Fault, target: Cold, rng: np.random.Generator) -> None:
        serves = bool(rng.random() < 0.3)
        if fault.kind == "stop" and rng.random() < 0.5:
            target.signal(signal.SIGCONT)
        elif fault.kind in ("kill", "stop") or fault.detail in layout().header:
            fault.n_crashed += target.start(serves)
        if not target.lives():
            fault.n_crashed += 1
            target.start(serves)
        fault.stuck = not target.drain(False)
        if fault.stuck:
            target.start(serves)

    def _harm(self, fault: Fault, target: Cold, rng: np.random.Generator) -> None:
        """In a thread of its own: the fault, at a random moment of the steps meanwhile."""
        time.sleep(rng.uniform(0, 0.03))
        kind, fault.attached = fault.kind, target.attached
        if kind == "quota":
            return
        if kind in ("task", "result", "word", "hog"):
            seconds = 0.0 if kind == "word" else rng.uniform(0.005, 0.06)
            fault.detail = self._inject(fault, target, kind, seconds, rng)
            if fault.detail in layout().header:  # read by the next sender only: this one has to fail
                self._inject(fault, target, "result", 0.02, rng)
            return
        fault.begins.append(time.monotonic())
        if kind in ("kill", "replace"):
            target.signal(signal.SIGKILL)
            time.sleep(rng.uniform(0, 0.3) if kind == "kill" else 0)
            for _ in range(int(rng.integers(1, 4)) if kind == "replace" else 0):
                fault.n_crashed += target.start(serves=bool(rng.random() < 0.3))
                time.sleep(rng.uniform(0, 0.15))
        elif kind == "stop":
            target.signal(signal.SIGSTOP)
            time.sleep(rng.uniform(0, 0.5))
        elif kind == "slow":
            for _ in range(int(rng.integers(1, 5))):
                fault.begins.append(time.monotonic())
                target.signal(signal.SIGSTOP)
                time.sleep(rng.uniform(0.005, 0.08))
                target.signal(signal.SIGCONT)
                time.sleep(rng.uniform(0.001, 0.03))
        elif kind == "drain":
            fault.stuck = not target.drain(True)

    def _inject(self, fault: Fault, target: Cold, kind: str, seconds: float, rng: np.random.Generator) -> str:
        fault.begins.append(time.monotonic())
        command = {"path": target.path, "kind": kind, "seconds": seconds, "seed": int(rng.integers(1 << 32))}
        fault.begins[-1] = self._injector.ask(**command)["begin"]
        return str(self._injector.answer()["what"])


def random_tokens(rng: np.random.Generator, n: int) -> list[int]:
    return [int(token) for token in rng.integers(300, 1000, size=n)]


if __name__ == "__main__":
    main()
