"""Guests of a receiver: the same logits as at home, whoever joins, leaves or fails."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oallama.data.plan import HOST
from oallama.engine import runtime
from oallama.engine.backend_map import backend_map
from oallama.errors import OallamaError
from oallama.weave import Receiver, channel_path
from oallama.weave.sequences import Sequences
from support.archs import TOKENS, write_models
from support.guests import play, tokens
from support.hand_plan import hand_plan
from support.logits import nmse
from support.processes import until
from support.receivers import receiver, strike

MIB = 1 << 20
BF16 = {"kv_type": 30}  # ggml-cpu adds up f16 in f16, which would hide small errors
names = count()
Hot = partial(Sequences, deadline_s=5.0)  # a busy machine is no failure


@pytest.fixture
def path() -> Iterator[str]:
    path = channel_path(f"test-{os.getpid()}-{next(names)}")
    yield path
    Path(path).unlink(missing_ok=True)  # of a receiver that was killed


@pytest.fixture(scope="module")
def at_home(tiny: Callable[..., Path]) -> list[np.ndarray]:
    """The logits without guests, of sequences that leave."""
    with Hot(tiny("llama"), **BF16) as hot:
        return play(hot, leave=True)


def same(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def by_our_kernels(model: Path, **options: Any) -> Sequences:
    plan = hand_plan(model, HOST)
    with backend_map(replace(plan, context=replace(plan.context, attention="oallama")).to_backend_map()):
        return Hot(model, **options)


@pytest.mark.parametrize("first_guest", [0, 2, 4, 6], ids=lambda first: f"from-{first}")
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3moe"])
def test_guests_have_the_same_logits(arch: str, first_guest: int, tiny: Callable[..., Path], path: str) -> None:
    model = tiny(arch)
    with Hot(model) as hot:
        expected = play(hot)
        assert hot.stats["n_guests"] == 0
    with Receiver(path, 64 * MIB) as receiver, Hot(model, channels=[path], first_guest=first_guest) as hot:
        assert same(play(hot), expected)
        stats = hot.stats
        assert stats["n_lost"] == 0 and (stats["n_guests"] > 0) == (first_guest < 6)
        assert receiver.stats()["n_refused"] == 0


@pytest.mark.parametrize("kv_type", [0, 1, 8], ids=["f32", "f16", "q8_0"])
@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_guests_have_the_same_logits_by_our_kernels(
    arch: str, kv_type: int, tiny: Callable[..., Path], path: str
) -> None:
    """A row is computed alone, so sequences whose cells lie between those of others have the same bits, too."""
    found, model = [], tiny(arch)
    with Receiver(path, 64 * MIB) as receiver:
        for first_guest in (6, 0, 2, 4):
            with by_our_kernels(model, channels=[path], first_guest=first_guest, kv_type=kv_type, n_threads=2) as hot:
                found.append(play(hot))
                assert hot.stats["n_lost"] == 0 and (hot.stats["n_guests"] > 0) == (first_guest < 6)
        assert receiver.stats()["n_refused"] == 0
    assert all(same(found[0], each) for each in found[1:])
    with Hot(model, kv_type=kv_type) as hot:
        theirs = play(hot)
    assert not same(found[0], theirs)  # ggml's kernels
    assert max(nmse(ours, other) for ours, other in zip(found[0], theirs, strict=True)) < 1e-3


@pytest.mark.parametrize("kv_type", [1, 8], ids=["f16", "q8_0"])
def test_long_prompts_side_by_side_by_our_kernels(kv_type: int, tiny: Callable[..., Path], path: str) -> None:
    """Several sequences with many rows in one micro-batch, whose cells lie anywhere."""
    script = [
        {0: tokens(150, 1), 1: tokens(90, 2)},
        {0: tokens(1, 3), 1: tokens(70, 4), 2: tokens(100, 5)},
        *({i: tokens(1, 10 * i + j) for i in range(3)} for j in range(3)),
    ]
    found, options = [], {"n_ubatch": 256, "n_threads": 2, "kv_type": kv_type}
    with Receiver(path, 64 * MIB):
        for first_guest in (3, 1, 0):
            with by_our_kernels(tiny("llama"), channels=[path], first_guest=first_guest, **options) as hot:
                found.append([logits for step in script for _, logits in sorted(hot.step(step).items())])
                assert hot.stats["n_guests"] == 3 - first_guest
    assert same(found[0], found[1]) and same(found[0], found[2])


@pytest.mark.parametrize("kv_type", [1, 8], ids=["f16", "q8_0"])
def test_a_long_cache_is_cut_alike_by_our_kernels(kv_type: int, tiny: Callable[..., Path], path: str) -> None:
    """By the number of cells, whatever the threads. Beside another sequence, between whose cells the new ones lie."""
    script = [{0: tokens(1100, 1)}, {1: tokens(30, 2)}, *({0: tokens(1, i), 1: tokens(1, i)} for i in range(5))]
    found = []
    with Receiver(path, 64 * MIB):
        for first_guest, n_threads in ((2, 1), (0, 3), (1, 2)):
            options = {"n_ubatch": 512, "n_threads": n_threads, "kv_type": kv_type}
            with by_our_kernels(tiny("llama"), channels=[path], first_guest=first_guest, **options) as hot:
                found.append([logits for step in script for _, logits in sorted(hot.step(step).items())])
                assert hot.stats["n_guests"] == 2 - first_guest and hot.stats["n_lost"] == 0
    assert same(found[0], found[1]) and same(found[0], found[2])


def test_guests_by_our_kernels_come_home(tiny: Callable[..., Path], path: str) -> None:
    """A killed receiver's guests are computed again at home: in cells behind those of the others."""
    found = []
    with by_our_kernels(tiny("llama"), channels=[path], first_guest=6) as hot:
        expected = play(hot)
    with receiver(path) as process, by_our_kernels(tiny("llama"), channels=[path], first_guest=2) as hot:
        found += play(hot, end=6)
        assert hot.stats["n_guests"] == 2
        strike(process, signal.SIGKILL)
        found += play(hot, first=6)
        assert hot.stats["n_lost"] == 2
    assert close(found, expected)


@pytest.mark.parametrize("kv_type", [0, 1, 8], ids=["f32", "f16", "q8_0"])
def test_a_long_prompt_and_a_single_sequence(kv_type: int, tiny: Callable[..., Path], path: str) -> None:
    """Chunks of many rows, which ggml-cpu computes in tiles, then single rows, whose tokens it cuts from 512 on."""
    model, script = tiny("llama"), [{0: tokens(490, 1)}, *({0: tokens(1, i)} for i in range(40))]
    found = []
    with Receiver(path, 64 * MIB):
        for channels in ([], [path]):
            with Hot(model, channels=channels, n_ubatch=128, n_threads=2, kv_type=kv_type) as hot:
                found.append([hot.step(step)[0] for step in script])
    assert same(*found)


def test_a_prompt_is_attended_at_home(tiny: Callable[..., Path], path: str) -> None:
    """The first micro-batch of a sequence, that is; the receiver is given its K and V."""
    with Receiver(path, 64 * MIB), Hot(tiny("llama"), channels=[path], n_ubatch=48) as hot:
        hot.step({0: tokens(40, 1), 1: tokens(8, 2)})
        n_layers = hot.stats["n_appended"] // 48
        assert hot.stats["n_appended"] == 48 * n_layers > 0 and hot.stats["n_rows"] == 0
        hot.step({0: tokens(1, 3), 2: tokens(60, 4)})  # 47 rows of the prompt beside a token, then 13
        assert hot.stats["n_appended"] == (48 + 47) * n_layers and hot.stats["n_rows"] == (1 + 13) * n_layers


@pytest.mark.parametrize("kv_type", [1, 8, 30], ids=["f16", "q8_0", "bf16"])
@pytest.mark.parametrize("first_guest", [0, 1])
def test_several_prompts_at_once(first_guest: int, kv_type: int, tiny: Callable[..., Path], path: str) -> None:
    """Beside a row at home or not, and a guest that is there already; by two receivers in turns."""
    script = [
        {1: tokens(9, 1)},
        {0: tokens(1, 2), 1: tokens(1, 3), 2: tokens(11, 4), 3: tokens(13, 5), 4: tokens(7, 6)},
        *({number: tokens(1, 10 * at + number) for number in range(5)} for at in range(1, 4)),
    ]
    found = []
    with Receiver(path, 64 * MIB) as one, Receiver(path + "-b", 64 * MIB) as other:
        for channels in ([], [path, path + "-b"]):
            with Hot(tiny("llama"), channels=channels, first_guest=first_guest, kv_type=kv_type) as hot:
                found.append([logits for step in script for logits in hot.step(step).values()])
                if channels:
                    assert hot.stats["n_guests"] == 5 - first_guest and hot.stats["n_lost"] == 0
                    assert one.stats()["n_sequences"] >= 2 and other.stats()["n_sequences"] >= 2
    assert same(*found)


@pytest.mark.parametrize("ours", [False, True], ids=["ggml", "ours"])
def test_the_bias_of_positions_is_kept(ours: bool, tmp_path: Path, path: str) -> None:
    """ALiBi, which the mask of a prompt at home has, too."""
    model = write_models(tmp_path, "^bloom$")[0]
    script = [{0: TOKENS[:20]}, {0: TOKENS[20:21], 1: TOKENS[:30]}, {0: TOKENS[21:22], 1: TOKENS[30:31]}]
    found = []
    with Receiver(path, 64 * MIB):
        for first_guest in (2, 0):
            channels = [path] if ours or first_guest == 0 else []
            with (by_our_kernels if ours else Hot)(model, channels=channels, first_guest=first_guest) as hot:
                found.append([logits for step in script for logits in hot.step(step).values()])
                assert (hot.stats["n_appended"] > 0) == (first_guest == 0)
    assert same(*found)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_lost_guests_come_home(number: int, at_home: list[np.ndarray], tiny: Callable[..., Path], path: str) -> None:
    model = tiny("llama")
    with receiver(path) as process, Sequences(model, channels=[path], first_guest=2, deadline_s=2.0, **BF16) as hot:
        found = play(hot, 0, 5, leave=True)
        strike(process, number)
        found += play(hot, 5, leave=True)
        assert hot.stats["n_lost"] == 2
    assert close(found, at_home)


def close(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    """Tokens that are computed anew, or have other cells, are added up in another order."""
    return nmse(np.concatenate(a), np.concatenate(b)) < 1e-6


def test_sequences_leave_and_others_come(at_home: list[np.ndarray], tiny: Callable[..., Path], path: str) -> None:
    model = tiny("llama")
    with Receiver(path, 64 * MIB), Hot(model, channels=[path], first_guest=2, **BF16) as hot:
        assert close(play(hot, leave=True), at_home) and hot.stats["n_guests"] == 3


def test_without_room_sequences_stay(at_home: list[np.ndarray], tiny: Callable[..., Path], path: str) -> None:
    """A quota of three blocks: the third guest outgrows its own."""
    model = tiny("llama")
    with Receiver(path, 0), Hot(model, channels=[path], **BF16) as hot:
        assert same(play(hot, leave=True), at_home)
        assert hot.stats["n_rows"] == 0
    with Receiver(path, 8 * MIB) as one, Hot(model, channels=[path], **BF16) as hot:
        hot.step({0: tokens(40, 1)})
        a_block = 8 * MIB - one.stats()["free_nbytes"]
    with Receiver(path, 3 * a_block), Hot(model, channels=[path], **BF16) as hot:
        assert close(play(hot, leave=True), at_home)
        assert hot.stats["n_guests"] > 0 and hot.stats["n_lost"] > 0


def test_a_batch_that_finds_no_room_fails_alone(tiny: Callable[..., Path], path: str) -> None:
    """Home is full, and the receiver takes what a lost guest had, but not the next token: so it is lost again."""
    model, others, own = tiny("llama"), tokens(240, 1), tokens(64, 2)
    with Receiver(path, 8 * MIB) as one, Hot(model, channels=[path], **BF16) as hot:
        hot.step({0: own})
        a_block = 8 * MIB - one.stats()["free_nbytes"]
    with Hot(model, **BF16) as hot:
        hot.step({0: own})
        at_home = hot.step({0: [7]})[0]
    with Receiver(path, a_block), Hot(model, channels=[path], first_guest=1, n_ctx=256, n_seq=2, **BF16) as hot:
        hot.step({0: others})
        hot.step({1: own})
        with pytest.raises(OallamaError, match=r"llama_decode returned 1$"):  # another number ends all requests
            hot.step({1: [7]})
        assert hot.stats["n_lost"] > 4
        hot.remove(0)
        assert close([hot.step({1: [7]})[1]], [at_home])


def test_a_receiver_on_a_gpu_needs_the_cache_there(
    tiny: Callable[..., Path], path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its path is a socket. Why it is not taken is said once, and all stay at home."""
    with socket.socket(socket.AF_UNIX) as listener, Hot(tiny("llama"), channels=[path]) as hot:
        listener.bind(path)
        runtime.llama_cpp()._logger.set_verbose(True)
        play(hot, 0, 4)
        runtime.llama_cpp()._logger.set_verbose(False)
        assert hot.stats["n_guests"] == 0
    assert capsys.readouterr().err.count("is on a GPU, so all of the KV cache has to be on one CUDA device") == 1


def test_a_receiver_gets_its_memory_back(at_home: list[np.ndarray], tiny: Callable[..., Path], path: str) -> None:
    model = tiny("llama")
    with Receiver(path, 64 * MIB) as cold, Hot(model, channels=[path], **BF16) as hot:
        found = play(hot, 0, 6, leave=True)
        assert cold.stats()["n_sequences"] == 3
        cold.drain()
        found += play(hot, 6, leave=True)
        assert cold.stats()["n_sequences"] == 0 and cold.stats()["free_nbytes"] == 64 * MIB
        assert cold.stats()["n_drains"] == 1
        assert hot.stats["n_lost"] == 3
        cold.drain(False)
        hot.remove(7)
        hot.step({7: tokens(5, 1)})
        assert cold.stats()["n_sequences"] == 1
    assert close(found, at_home)


def test_a_receiver_that_is_back_is_used_again(tiny: Callable[..., Path], path: str) -> None:
    model = tiny("llama")
    with Sequences(model, channels=[path]) as hot:
        hot.step({0: tokens(5, 1)})
        assert hot.stats["n_guests"] == 0  # nobody there yet
        with receiver(path) as process:
            until(lambda: joins(hot))
            before = hot.stats["n_guests"]
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        hot.step({1: tokens(1, 1)})
        with receiver(path):
            until(lambda: joins(hot))
            assert hot.stats["n_guests"] > before


def joins(hot: Sequences) -> bool:
    before = hot.stats["n_guests"]
    hot.remove(1)
    hot.step({1: tokens(3, 2)})
    return hot.stats["n_guests"] > before


def test_the_threads_of_the_cold_models_graphs_work(tiny: Callable[..., Path], path: str) -> None:
    """Two models in one process: while the cold one computes, its threads do the guests' attention at its operators."""
    hot_model, cold_model = tiny("llama"), tiny("qwen2")
    with Hot(hot_model) as hot, Hot(cold_model, n_threads=2) as cold:
        expected, of_cold = play(hot), play(cold)
    found: dict[str, Any] = {}
    with (
        Receiver(path, 64 * MIB) as receiver,
        receiver.serving(),
        Hot(cold_model, n_threads=2) as cold,
        Hot(hot_model, channels=[path]) as hot,
    ):
        ended = threading.Event()

        def compute() -> None:
            while not ended.is_set():
                for seq_id in list(cold.lengths):
                    cold.remove(seq_id)
                found["cold"] = play(cold)

        thread = threading.Thread(target=compute)
        thread.start()
        found["hot"] = play(hot)
        ended.set()
        thread.join()
        assert hot.stats["n_lost"] == 0 and receiver.stats()["n_looks"] >= 64
    assert same(found["hot"], expected) and same(found["cold"], of_cold)


@pytest.mark.parametrize("kv_type", [0, 1, 8], ids=["f32", "f16", "q8_0"])
@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_looks_inside_of_operators_change_nothing(
    arch: str, kv_type: int, tiny: Callable[..., Path], path: str
) -> None:
    """The cold model's own logits, of prompts that fill no tile, with a look at every opportunity."""
    script = [{0: tokens(100, 1)}, {1: tokens(230, 2)}, {0: tokens(1, 3), 1: tokens(1, 4), 2: tokens(70, 5)}]
    found = []
    with Receiver(path, MIB, part=1) as receiver:
        for serving in (nullcontext(), receiver.serving()):
            with serving, Hot(tiny(arch), n_ubatch=256, n_threads=2, kv_type=kv_type) as cold:
                found.append([logits for step in script for logits in cold.step(step).values()])
    assert same(*found)


def test_looks_inside_of_repacked_experts(tiny: Callable[..., Path], path: str) -> None:
    """Each expert's matrix is cut, for each of its rows: 4 experts of a token, 2 layers, 96 groups of 8 outputs."""
    found = []
    for part in (1 << 40, 1):
        with Receiver(path, MIB, part=part) as receiver, receiver.serving(), Hot(tiny("qwen3moe", "Q4_0")) as cold:
            before = receiver.stats()["n_looks"]
            logits = cold.step({0: tokens(40, 1)})[0]
            found.append((receiver.stats()["n_looks"] - before, logits))
    (few, expected), (many, logits) = found
    assert few < 5000 and many > 40 * 4 * 2 * 96
    assert np.array_equal(logits, expected)
