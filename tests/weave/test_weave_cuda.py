"""The channel between two processes on a GPU (csrc/weave/cuda), which may be one and the same.

On a GPU this needs nvcc, and a minute or two for it; OALLAMA_WEAVE_CUDA names a library that `bench/weave_cuda.py
--build` has made. Elsewhere the same tests run with CPU threads in place of kernels (weave_cuda_fake.cpp): what they
say is about the hosts, since test_weave_cuda_twin.py tries the kernels' algorithms. That needs CUDA's headers.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oallama.engine import device_list
from oallama.weave import Receiver, Sender, SequenceRows, channel_path
from oallama.weave.sequences import Sequences
from support.attention import Reference, floats, steps
from support.guests import play
from support.logits import greedy_differences, nmse
from support.processes import process_of, program, ran
from support.weave_cuda import KV_TYPES, Handle, OpenTask, build, build_fake, has_gpu, headers, load, nvcc, task_of

NMSE = {"f32": 1e-7, "f16": 1e-6, "bf16": 1e-4, "q8_0": 5e-4}
names = count()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            "fake", marks=pytest.mark.skipif(headers() is None or shutil.which("c++") is None, reason="no CUDA headers")
        ),
        pytest.param(
            "gpu",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not has_gpu() or nvcc() is None, reason="no CUDA device or no nvcc on this machine"),
            ],
        ),
    ],
)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weave_cuda")
    if request.param == "fake":
        return build_fake(folder)
    given = os.environ.get("OALLAMA_WEAVE_CUDA")
    return Path(given) if given else build(folder)


@pytest.fixture
def path() -> str:
    return f"/tmp/oallama-weave-test-{os.getpid()}-{next(names)}"


RECEIVE = """if True:
    import ctypes, sys
    from support.weave_cuda import load
    lib = load(sys.argv[1])
    receiver = ctypes.c_void_p(lib.wc_receiver_new(sys.argv[2].encode(), ctypes.c_uint64(1 << 28), 4 << 20, 4, 1, 0))
    assert receiver.value, lib.wc_error()
    print("ready", flush=True)
    for command in sys.stdin:
        if command == "graphs\\n":  # the device is the cold model's: only polls between its kernels
            lib.wc_cold_graphs(receiver, 50, 50, ctypes.c_uint64(50_000), 1, 1)
            print("done", flush=True)
        elif command == "stats\\n":
            counts = (ctypes.c_uint32 * 5)()
            lib.wc_receiver_stats(receiver, counts)
            print(*counts, flush=True)
        else:
            break
    lib.wc_receiver_delete(receiver)
"""


def receiving(library: Path, path: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return program(RECEIVE, str(library), path, stdin=subprocess.PIPE)


def tell(process: subprocess.Popen[str], command: str) -> None:
    assert process.stdin is not None
    process.stdin.write(command + "\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def ask(process: subprocess.Popen[str], command: str) -> str:
    tell(process, command)
    return answer(process)


class CudaSender:
    new = "wc_sender_new"

    def __init__(self, library: Path, path: str, shape: OpenTask, deadline_s: float = 10.0) -> None:
        self.lib: Any = load(library)
        made = getattr(self.lib, self.new)(path.encode(), ctypes.byref(shape), ctypes.c_double(deadline_s), 0xFFFFFFFA)
        assert made, self.lib.wc_error().decode()
        self.sender, self.shape = ctypes.c_void_p(made), shape

    def __enter__(self) -> CudaSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.lib.wc_sender_delete(self.sender)

    def open(self) -> Handle:
        handle = Handle()
        assert self.lib.wc_sender_open(self.sender, ctypes.byref(self.shape), ctypes.byref(handle)) == 0
        return handle

    def reserve(self, handle: Handle, n_tokens: int) -> bool:
        return int(self.lib.wc_sender_reserve(self.sender, handle, n_tokens)) == 0

    def attend(
        self,
        rows: list[tuple[Handle, int, int]],
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        *,
        scale: float = 0.1,
        max_bias: float = 0.0,
        softcap: float = 0.0,
        sinks: np.ndarray | None = None,
        n_layers: int = 1,
        captured: bool = False,
    ) -> np.ndarray:
        """Raises RuntimeError when the receiver has failed."""
        out = np.full((*q.shape[:2], v.shape[2]), np.nan, np.float32)
        given = task_of(0, rows, (sinks, q, k, v, out), scale, max_bias, softcap)
        if self.lib.wc_sender_attend(self.sender, *given, n_layers, int(captured)) < 0:
            raise RuntimeError(self.lib.wc_error().decode())
        return out


class GraphSender(CudaSender):
    """By the operators of a hot model's graph, after so many rows of its own."""

    new = "wc_graph_sender_new"
    n_own = 0

    def attend(
        self,
        rows: list[tuple[Handle, int, int]],
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        *,
        sinks: np.ndarray | None = None,
        captured: bool = False,
        **more: Any,
    ) -> np.ndarray:
        """Raises RuntimeError when the receiver has failed."""
        assert not more
        n_head, d_v = q.shape[1], v.shape[2]
        own, out = floats(self.n_own, n_head, d_v), np.full((self.n_own + len(q), n_head, d_v), np.nan, np.float32)
        given = task_of(0, rows, (sinks, q, k, v, out, own), 0.1)
        if self.lib.wc_graph_attend(self.sender, *given, self.n_own, int(captured)) < 0:
            raise RuntimeError(self.lib.wc_error().decode())
        assert np.array_equal(out[: self.n_own], own)
        return out[self.n_own :]


@pytest.mark.parametrize("kv", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize(
    ("n_head", "n_head_kv", "d_k", "d_v", "more"),
    [
        (16, 4, 128, 128, {}),
        (6, 2, 64, 96, {"softcap": 5.0}),
        (6, 3, 192, 128, {"max_bias": 8.0}),
        (5, 5, 96, 256, {"sinks": True}),
        (20, 1, 64, 64, {}),
    ],
)
def test_attention_is_right(
    library: Path, path: str, kv: str, n_head: int, n_head_kv: int, d_k: int, d_v: int, more: dict[str, Any]
) -> None:
    """Prompts in chunks, then tokens; while the receiver is idle, and while it computes graphs."""
    options = dict(more)
    if options.pop("sinks", False):
        options["sinks"] = floats(n_head)
    shape = OpenTask(1, 2048, KV_TYPES[kv], KV_TYPES[kv], n_head_kv * d_k, n_head_kv * d_v)
    with receiving(library, path), CudaSender(library, path, shape) as sender:
        handles = [sender.open(), sender.open()]
        chunks = ((7, 0), (300, 33), (1, 1), (0, 1), (65, 130), (1, 1))
        for step in steps(chunks, 1, n_head, n_head_kv, d_k, d_v, options):
            assert all(sender.reserve(handles[at], first + n) for at, first, n in step.rows)
            given = [(handles[at], first, n) for at, first, n in step.rows]
            assert nmse(sender.attend(given, step.q, step.k, step.v, **options), step.expected) < NMSE[kv]


@pytest.mark.parametrize("captured", [False, True])
def test_it_is_the_cpu_receivers(library: Path, path: str, captured: bool) -> None:
    there = channel_path(f"test-cuda-{os.getpid()}-{next(names)}")
    shape = OpenTask(4, 2048, 1, 1, 1024, 1024)
    with (
        receiving(library, path) as process, CudaSender(library, path, shape) as sender,
        Receiver(there, 1 << 28), Sender(there, deadline_s=30.0) as cpu,
    ):  # fmt: skip
        handle = sender.open()
        guest = cpu.open(n_layers=1, max_tokens=2048, k_width=1024, v_width=1024)
        assert guest is not None and cpu.reserve(guest, 500) and sender.reserve(handle, 500)
        position = 0
        for n in (150, 1, 64, 1, 1):
            q, k, v = floats(n, 32, 128), floats(n, 8, 128), floats(n, 8, 128)
            wanted = cpu.attend(0, [SequenceRows(guest, position, n)], q, k, v, scale=0.1)
            out = sender.attend([(handle, position, n)], q, k, v, n_layers=4, captured=captured)
            assert nmse(out, wanted) < 5e-4
            position += n
        counts = [int(x) for x in ask(process, "stats").split()]
        assert counts[1] >= 5 * 4 * (1 + captured) and counts[2] == 0


@pytest.mark.parametrize("captured", [False, True])
def test_more_tasks_than_slots(library: Path, path: str, captured: bool) -> None:
    n, n_head, width = 110, 64, 256
    shape = OpenTask(1, 2048, 1, 1, n_head * width, n_head * width)
    with receiving(library, path) as process, CudaSender(library, path, shape) as sender:
        handle = sender.open()
        assert sender.reserve(handle, n)
        q, k, v = (floats(n, n_head, width) for _ in range(3))
        out = sender.attend([(handle, 0, n)], q, k, v, captured=captured)
        assert nmse(out, Reference().attend(q, k, v, 0.1)) < NMSE["f16"]
        n_tasks = int(ask(process, "stats").split()[1]) - 1  # but the ping
        assert n_tasks > 4 * (1 + captured)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("n_own", "has_sinks"), [(0, True), (3, False)])
def test_operators_of_a_graph(library: Path, path: str, n_own: int, has_sinks: bool, captured: bool) -> None:
    """Prompts of two guests, then a token of each."""
    shape = OpenTask(1, 2048, 1, 1, 2 * 64, 2 * 64)
    sinks = floats(6) if has_sinks else None
    with receiving(library, path), GraphSender(library, path, shape) as sender:
        sender.n_own = n_own
        handles, references = [sender.open(), sender.open()], [Reference(), Reference()]
        assert all(sender.reserve(handle, 200) for handle in handles)
        position = 0
        for n in (70, 1, 1):
            q, k, v = floats(2 * n, 6, 64), floats(2 * n, 2, 64), floats(2 * n, 2, 64)
            out = sender.attend([(handle, position, n) for handle in handles], q, k, v, sinks=sinks, captured=captured)
            for at, reference in enumerate(references):
                part = slice(at * n, (at + 1) * n)
                options = {} if sinks is None else {"sinks": sinks}
                assert nmse(out[part], reference.attend(q[part], k[part], v[part], 0.1, **options)) < NMSE["f16"]
            position += n


def test_operators_are_those_of_their_sender(library: Path, path: str) -> None:
    shape = OpenTask(1, 2048, 1, 1, 128, 128)
    changes = ("mark", "number", "operator", "offset", "heads", "width", "type", "source", "device")
    with receiving(library, path):
        with GraphSender(library, path, shape) as sender:
            assert sender.lib.wc_graph_supported(sender.sender, b"nothing") == 1
            for what in changes:
                assert sender.lib.wc_graph_supported(sender.sender, what.encode()) == 0, what
            first = sender.lib.wc_graph_number(sender.sender)
        with GraphSender(library, path, shape) as sender:  # graphs of the last one are not this one's
            assert sender.lib.wc_graph_number(sender.sender) > first


EIGHT_LAYERS = OpenTask(8, 2048, 1, 1, 1024, 1024)


def attend_tokens(sender: CudaSender, n_tokens: int, before: Callable[[int], None] = lambda at: None) -> None:
    """A new sequence token by token in eight layers, every second one captured: all as the CPU computes it."""
    handle, reference = sender.open(), Reference()
    assert sender.reserve(handle, 200)
    for at in range(n_tokens):
        before(at)
        q, k, v = floats(1, 32, 128), floats(1, 8, 128), floats(1, 8, 128)
        out = sender.attend([(handle, at, 1)], q, k, v, n_layers=8, captured=at % 2 == 1)
        assert nmse(out, reference.attend(q, k, v, 0.1)) < NMSE["f16"]


def test_polls_between_a_graphs_kernels(library: Path, path: str) -> None:
    with receiving(library, path) as process, CudaSender(library, path, EIGHT_LAYERS) as sender:
        tell(process, "graphs")
        attend_tokens(sender, 20)
        assert answer(process) == "done\n"


HOOKS = """if True:
    import ctypes, sys
    from support.weave_cuda import load
    lib = load(sys.argv[1])
    n_graphs, n_splits, n_nodes, n_rows, node_ns = map(int, sys.argv[2:])
    for command in sys.stdin:
        sizes = (ctypes.c_uint64(n_rows), ctypes.c_uint64(node_ns))
        assert lib.wc_ggml_graphs(n_graphs, n_splits, n_nodes, *sizes) == 0, lib.wc_error()
        counts = (ctypes.c_uint32 * 3)()
        if "fake" in sys.argv[1]:
            lib.fake_counts(counts)
        print("done", *counts, flush=True)
"""


def hooks(library: Path, n_graphs: int = 20, n_splits: int = 1, n_nodes: int = 50, n_rows: int = 1) -> list[str]:
    """The command of a process with nothing but the hooks of ggml-cuda, whose kernels take 50 us each."""
    sizes = map(str, (n_graphs, n_splits, n_nodes, n_rows, 50_000))
    return [sys.executable, "-c", HOOKS, str(library), *sizes]


def computed(library: Path, receiver: str, *, working: str = "", **graphs: int) -> subprocess.CompletedProcess[str]:
    """A process that computes graphs once, with a receiver and no sender."""
    environment = {"OALLAMA_WEAVE_CUDA_RECEIVER": receiver, "OALLAMA_WEAVE_CUDA_WORK": working}
    return ran(*hooks(library, **graphs), input="graphs\n", env=environment, timeout=60)


def fake_counts(library: Path, path: str, given: str = "", **more: Any) -> list[int]:
    """Looks, works and waits of a stream for another one."""
    if "fake" not in library.name:
        pytest.skip("only the fake counts them")
    done = computed(library, f"{path}:{1 << 28}{given}", **more)
    assert done.stderr == "", done.stderr
    return [int(count) for count in done.stdout.split()[1:]]


@pytest.mark.parametrize(
    ("given", "n_rows", "n_looks"),
    [
        ("", 1, 7),  # after every 8 of 50 products, and at the end
        ("", 16, 7),
        ("", 17, 25),
        (":50:50:1", 1, 1),
        (":1000:3:4", 4, 1),
        (":1000:3:4", 5, 17),
        (":1:1:1", 1, 50),
    ],
)
def test_looks_are_as_far_apart_as_they_are_told(
    library: Path, path: str, given: str, n_rows: int, n_looks: int
) -> None:
    """Also in replayed graphs; operators between products do not count, nor whether they are fused."""
    assert fake_counts(library, path, given, n_graphs=5, n_rows=n_rows)[0] == 5 * n_looks


def test_virtual_devices_share_a_card(library: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GGML_CUDA_DEVICES=2 on one card: ggml's second device is CUDA's first."""
    monkeypatch.setenv("GGML_CUDA_DEVICES", "2")
    assert fake_counts(library, path, ":1:1:1", n_graphs=2, n_nodes=3)[0] == 2 * 3


def test_only_a_hit_launches_work(library: Path, path: str) -> None:
    """Nobody sends: captured graphs launch looks, no work. Two graphs are not captured, whose works leave at once."""
    looks, works, _ = fake_counts(library, path, n_graphs=10)
    assert (looks, works) == (10 * 7, 2 * 7)
    looks, works, _ = fake_counts(library, path, n_graphs=10, working="plain")
    assert (looks, works) == (10 * 7, 10 * 7)


def test_a_run_begins_once(library: Path, path: str) -> None:
    """Not with every split: each beginning stops the idle device's look, and waits for that."""
    waits = fake_counts(library, path, n_graphs=6, n_splits=5, n_nodes=2)[2]
    assert waits == 5  # of six runs all but the first follow another one


def test_graphs_without_conditional_nodes(library: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said once, and every look launches; a receiver that is to have them is none."""
    if "fake" not in library.name:
        pytest.skip("a GPU has what it has")
    monkeypatch.setenv("OALLAMA_FAKE_WAYS", "mapped")
    for working, said, works in (("", "every look launches", "70"), ("conditional", "no guests on this GPU", "0")):
        done = computed(library, f"{path}:{1 << 28}", working=working, n_graphs=10)
        assert done.stdout.split()[2] == works
        assert done.stderr.count("oallama: ") == 1 and said in done.stderr and "not in this fake" in done.stderr


def test_hooks_of_ggml(library: Path, path: str) -> None:
    """A process with nothing but the hooks and a variable; it ends while a sender is attached."""
    environment = os.environ | {"OALLAMA_WEAVE_CUDA_RECEIVER": f"{path}:{1 << 28}:2:2:16"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with process_of(hooks(library), env=environment, **pipes) as process:
        assert ask(process, "graphs").startswith("done")
        with CudaSender(library, path, EIGHT_LAYERS) as sender:
            # Polls of graphs; else of the device at rest.
            attend_tokens(sender, 20, lambda at: tell(process, "graphs") if at % 10 == 5 else None)
            _, said = process.communicate(timeout=60)
            assert process.returncode == 0 and said == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{path}", "is path:bytes[:decode:prompt:few], got"),
        ("{path}:12:0:1:1", "is path:bytes[:decode:prompt:few], got"),
        ("{path}:12:8", "is path:bytes[:decode:prompt:few], got"),
        ("{path}:12:8:1:1:1", "is path:bytes[:decode:prompt:few], got"),
        ("/nowhere/{path}:1000000", "cannot make /nowhere/"),
    ],
)
def test_hooks_without_a_receiver(library: Path, path: str, given: str, said: str) -> None:
    """Graphs are computed, and why there are no guests is said once."""
    process = computed(library, given.format(path=path))
    assert process.stdout.startswith("done")
    assert process.stderr.count("oallama: no guests on this GPU: ") == 1 and said in process.stderr


MODEL = """if True:
    import sys
    from oallama import Llama
    llm = Llama(sys.argv[1], n_ctx=512, n_gpu_layers=int(sys.argv[2]), flash_attn=True, verbose=False)
    for _ in sys.stdin:
        llm.reset()
        tokens = llm.generate(list(range(300, 340)), temp=0.0)
        print(*(next(tokens) for _ in range(200)), flush=True)
"""


@pytest.fixture
def ggml_cuda(library: Path) -> None:
    """Tests of whole models: kernels as threads are not enough, oallama itself must be built for the GPU."""
    if "fake" in library.name or not any(d.backend == "CUDA" for d in device_list.devices()):
        pytest.skip("this build of oallama has no CUDA device here")


@pytest.mark.usefixtures("ggml_cuda")
def test_a_models_graphs_serve_guests(library: Path, path: str, tiny: Callable[..., Path]) -> None:
    """ggml-cuda itself: the model's tokens are those without a receiver."""
    command = [sys.executable, "-c", MODEL, tiny("llama"), "99"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with process_of(command, **pipes) as process:
        alone = ask(process, "generate")
    environment = os.environ | {"OALLAMA_WEAVE_CUDA_RECEIVER": f"{path}:{1 << 28}"}
    with process_of(command, env=environment, **pipes) as process:
        assert ask(process, "generate") == alone
        with CudaSender(library, path, EIGHT_LAYERS) as sender:
            tell(process, "generate")
            attend_tokens(sender, 60)
            assert answer(process) == alone


@pytest.mark.usefixtures("ggml_cuda")
@pytest.mark.parametrize("first_guest", [0, 2])
def test_guests_of_a_model_on_the_gpu(library: Path, path: str, first_guest: int, tiny: Callable[..., Path]) -> None:
    """ggml-cuda's graphs send rows; all sequences are guests, or some. At last the receiver is killed."""
    model = tiny("llama")
    with Sequences(model, n_gpu_layers=99) as hot:
        expected = play(hot)
    command = [sys.executable, "-c", MODEL, model, "99"]
    environment = os.environ | {"OALLAMA_WEAVE_CUDA_RECEIVER": f"{path}:{1 << 28}"}
    with process_of(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as cold:
        ask(cold, "generate")
        options: dict[str, Any] = {"channels": [path], "first_guest": first_guest, "deadline_s": 5.0}
        with Sequences(model, n_gpu_layers=99, **options) as hot:
            found = play(hot, 0, 4)
            tell(cold, "generate")
            found += play(hot, 4, 8)
            assert hot.stats["n_guests"] > 0 and hot.stats["n_rows"] > 0 and hot.stats["n_lost"] == 0
            cold.kill()
            cold.wait()
            found += play(hot, 8)
            assert hot.stats["n_lost"] > 0
    for logits, wanted in zip(found, expected, strict=True):
        assert nmse(logits, wanted) <= 5e-4
    assert greedy_differences(np.concatenate(found), np.concatenate(expected)) == 0


@pytest.mark.parametrize("sender_type", [CudaSender, GraphSender])
def test_a_receiver_that_is_killed_is_noticed(library: Path, path: str, sender_type: type[CudaSender]) -> None:
    shape = OpenTask(1, 2048, 1, 1, 128, 128)
    with receiving(library, path) as process, sender_type(library, path, shape, deadline_s=1.0) as sender:
        handle = sender.open()
        assert sender.reserve(handle, 64)
        q, k, v = floats(1, 4, 64), floats(1, 2, 64), floats(1, 2, 64)
        sender.attend([(handle, 0, 1)], q, k, v)
        process.kill()
        process.wait()
        with pytest.raises(RuntimeError, match=r"is gone|has not answered"):
            sender.attend([(handle, 1, 1)], q, k, v)
    with receiving(library, path), sender_type(library, path, shape) as sender:  # in its place
        assert sender.reserve(sender.open(), 64)


def test_what_is_refused(library: Path, path: str) -> None:
    shape = OpenTask(1, 2048, 1, 1, 128, 128)
    with receiving(library, path):
        q, k, v = floats(1, 4, 64), floats(1, 2, 64), floats(1, 2, 64)
        for position, generation in ((64, 0), (0, 1)):
            with CudaSender(library, path, shape) as sender:
                handle = sender.open()
                assert sender.reserve(handle, 64)
                handle.generation += generation
                with pytest.raises(RuntimeError, match="refuses a task"):
                    sender.attend([(handle, position, 1)], q, k, v)


def test_ways_of_sharing_memory(library: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "fake" not in library.name:
        pytest.skip("a GPU has the ways that it has")
    shape = OpenTask(1, 2048, 1, 1, 128, 128)
    for ways, used in (("mapped", "mapped memory"), ("host", "pinned memory of the host"), ("", None)):
        monkeypatch.setenv("OALLAMA_FAKE_WAYS", ways)
        with receiving(library, path):
            if used:
                with CudaSender(library, path, shape) as sender:
                    assert sender.lib.wc_sender_way(sender.sender).decode() == used
                    assert sender.reserve(sender.open(), 64)
            else:
                with pytest.raises(AssertionError, match=r"no memory to share .* pinned memory of the host"):
                    CudaSender(library, path, shape)


def test_who_may_not_attach(library: Path, path: str) -> None:
    shape = OpenTask(1, 2048, 1, 1, 128, 128)
    with pytest.raises(AssertionError, match="no receiver at"):
        CudaSender(library, path, shape)
    with receiving(library, path), CudaSender(library, path, shape) as sender:
        with pytest.raises(AssertionError, match="does not answer"):
            CudaSender(library, path, shape)  # there is a sender
        assert sender.reserve(sender.open(), 64)
    with receiving(library, path), pytest.raises(AssertionError, match="are not kept"):
        CudaSender(library, path, OpenTask(1, 2048, 1, 8, 128, 128))
