"""The model maker: its files are right, reproducible and run in llama.cpp, and failures leave no trace.

Quantised files and generation need the engine's libraries; those cases are skipped where it is not built.
"""

from __future__ import annotations

import errno
import math
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, quants

from oallama.engine import runtime
from oallama.errors import OallamaError
from oallama.modelmaker import ARCHITECTURES, FILE_TYPES, OVERRIDES, SHAPES, make_model, partial_file
from oallama.modelmaker.gguf_header import read_metadata
from oallama.modelmaker.shapes import resolve
from oallama.modelmaker.tensors import tensors_of
from oallama.modelmaker.vocab import default_vocab_dir, load_vocab

TEXT = "Hello world, 123 äöü 你好"
FILES = [(arch, file_type) for arch in ARCHITECTURES for file_type in FILE_TYPES]


def engine_is_built() -> bool:
    try:
        return runtime.lib_dir().is_dir()
    except OallamaError:
        return False


needs_engine = pytest.mark.skipif(not engine_is_built(), reason="the engine is not built")
needs_vocab = pytest.mark.skipif(not default_vocab_dir().is_dir(), reason="llama.cpp's source is not fetched")
pytestmark = needs_vocab


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A function (arch, file_type) -> path of that tiny model, each made once."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def make(arch: str, file_type: str) -> Path:
        if file_type != "F16" and not engine_is_built():
            pytest.skip("the engine is not built")
        return make_model(folder / f"{arch}-{file_type}.gguf", arch=arch, file_type=file_type)

    return make


def tensor_types(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}


@pytest.mark.parametrize(("arch", "file_type"), FILES)
def test_file_holds_the_shape(tiny, arch, file_type):
    shape, reader = SHAPES[arch]["tiny"], GGUFReader(tiny(arch, file_type))

    def field(key):
        return reader.get_field(key).contents()

    assert field("general.architecture") == arch
    assert field("general.file_type") == FILE_TYPES[file_type][0]
    assert field("general.quantization_version") == 2
    assert field(f"{arch}.block_count") == shape.n_layer
    assert field(f"{arch}.attention.head_count_kv") == shape.n_head_kv
    assert len(reader.get_field("tokenizer.ggml.tokens").data) == shape.n_vocab
    assert "message['role']" in field("tokenizer.chat_template")

    expected = {spec.name: spec for spec in tensors_of(shape)}
    assert [tensor.name for tensor in reader.tensors] == list(expected)
    for tensor in reader.tensors:
        spec = expected[tensor.name]
        assert tuple(tensor.shape) == spec.ne
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all()
        if values.size >= 4096 and not spec.logits:
            assert math.isclose(values.std(), spec.std, rel_tol=0.05)
            assert abs(values.mean() - spec.mean) < 0.05 * spec.std
    assert tiny(arch, file_type).stat().st_size < 25e6


@pytest.mark.parametrize("file_type", ["F16", pytest.param("Q4_K_M", marks=needs_engine)])
def test_bytes_depend_on_the_arguments_only(tiny, tmp_path, file_type):
    def make(**more):
        return make_model(tmp_path / "again.gguf", arch="minicpm3", file_type=file_type, **more).read_bytes()

    first = tiny("minicpm3", file_type).read_bytes()
    assert make() == first
    assert make(seed=1) != first


def test_rows_differ_where_the_pool_is_reused(tmp_path, monkeypatch):
    monkeypatch.setattr("oallama.modelmaker.weights._POOL_VALUES", 1 << 12)
    path = make_model(tmp_path / "m.gguf", overrides={"n_layer": 2, "n_vocab": 600})
    for tensor in GGUFReader(path).tensors:
        if len(tensor.shape) == 2:
            assert len(np.unique(tensor.data, axis=0)) == tensor.shape[1], tensor.name


@needs_engine
@pytest.mark.parametrize(("arch", "file_type"), FILES)
def test_llama_cpp_generates(tiny, arch, file_type):
    llm = runtime.llama_cpp().Llama(str(tiny(arch, file_type)), n_ctx=256, logits_all=True, verbose=False)
    try:
        tokens = llm.tokenize(TEXT.encode(), add_bos=False)
        assert llm.detokenize(tokens).decode().lstrip(" ") == TEXT
        prompt = llm.tokenize(b"The quick brown fox")

        def greedy() -> list[int]:
            llm.reset()
            llm.eval(prompt)
            out = []
            for _ in range(12):
                out.append(int(np.argmax(llm.scores[llm.n_tokens - 1])))
                llm.eval(out[-1:])
            return out

        first = greedy()
        logits = np.sort(llm.scores[: llm.n_tokens], axis=1)
        assert greedy() == first
        assert len(set(first)) > 3
        assert np.isfinite(logits).all()
        assert 1.0 < logits.std() < 5.0
        assert np.median(logits[:, -1] - logits[:, -2]) > 0.1
        assert llm.token_eos() not in first
        reply = llm.create_chat_completion([{"role": "user", "content": "hi"}], max_tokens=2)
        assert reply["usage"]["prompt_tokens"] < 30  # more: <|im_start|> and the like fell apart into letters
    finally:
        llm.close()


QUANTIZE_CASES = [(arch, {"n_vocab": 512}) for arch in ARCHITECTURES] + [
    ("llama", {"n_layer": 17, "n_embd": 256, "n_ff": 256, "n_vocab": 512}),
    ("llama", {"n_layer": 80, "n_embd": 32, "n_ff": 32, "n_head": 2, "n_head_kv": 1, "n_vocab": 512}),
    ("llama", {"n_layer": 8, "n_embd": 96, "n_ff": 416, "n_head": 3, "n_head_kv": 1, "n_vocab": 512}),
    ("llama", {"n_embd": 48, "n_ff": 40, "n_head": 3, "n_head_kv": 1, "n_vocab": 512}),
    ("minicpm3", {"n_embd": 288, "q_lora_rank": 96, "kv_lora_rank": 160, "n_vocab": 512}),
    ("qwen3moe", {"n_expert": 8, "n_layer": 5, "n_vocab": 512}),
    ("deepseek2", {"n_expert": 8, "n_layer": 9, "n_vocab": 512}),
    ("qwen35moe", {"n_expert": 8, "n_layer": 17, "n_vocab": 512}),
]


@needs_engine
@pytest.mark.parametrize(("arch", "overrides"), QUANTIZE_CASES)
def test_types_equal_llama_quantize(tmp_path, arch, overrides):
    try:
        program = runtime.program("llama-quantize")
    except OallamaError as error:
        pytest.skip(str(error))
    source = make_model(tmp_path / "f16.gguf", arch=arch, overrides=overrides)
    for file_type in ("Q4_K_M", "Q4_0", "Q8_0", "MXFP4"):
        theirs = tmp_path / "theirs.gguf"
        name = "MXFP4_MOE" if file_type == "MXFP4" else file_type
        subprocess.run([program, source, theirs, name, "2"], check=True, capture_output=True, timeout=60)
        ours = make_model(tmp_path / "ours.gguf", arch=arch, file_type=file_type, overrides=overrides)
        assert tensor_types(ours) == tensor_types(theirs)
        difference = {k for k, v in read_metadata(theirs).items() if str(v) != str(read_metadata(ours)[k])}
        assert difference == {"general.name"}


@pytest.mark.parametrize(
    ("arch", "n_vocab"), [("llama", 4096), ("llama", 128256), ("minicpm3", 73448), ("qwen2", 152064), ("qwen3moe", 900)]
)
def test_vocabulary_of_any_size_is_valid(arch, n_vocab):
    vocab = load_vocab(arch, n_vocab)
    assert len(vocab.tokens) == len(set(vocab.tokens)) == len(vocab.types) == n_vocab
    known = set(vocab.tokens)
    for merge in vocab.merges or []:
        left, right = merge.split(b" ")
        assert {left, right, left + right} <= known
    if vocab.scores is not None:
        assert len(vocab.scores) == n_vocab
    names = {"llama": (b"<|begin_of_text|>", b"<|end_of_text|>"), "minicpm3": (b"<s>", b"</s>")}
    expected = names.get(arch, (b"<|endoftext|>", b"<|endoftext|>"))
    ids = (vocab.other["tokenizer.ggml.bos_token_id"], vocab.other["tokenizer.ggml.eos_token_id"])
    assert tuple(vocab.tokens[i] for i in ids) == expected


def test_published_sizes():
    billions = {
        "llama3-8b": 8.03,
        "minicpm3-4b": 4.07,
        "qwq-32b": 32.76,
        "qwen3-30b-a3b": 30.53,
        "gpt-oss-20b": 20.91,
        "glm-4.7-flash": 29.94,
        "deepseek-v2-lite": 15.71,
        "qwen3.6-35b-a3b": 34.66,
    }
    for name, expected in billions.items():
        n = sum(math.prod(spec.ne) for spec in tensors_of(resolve(None, name)))
        assert n / 1e9 == pytest.approx(expected, abs=0.01), name


def test_progress_reaches_the_size_of_the_file(tmp_path):
    calls = []
    path = make_model(tmp_path / "m.gguf", progress=lambda done, total: calls.append((done, total)))
    done = [d for d, _ in calls]
    assert done == sorted(done)
    assert calls[-1] == (path.stat().st_size, path.stat().st_size)


MISTAKES = [
    ({"arch": "bert"}, "llama, minicpm3, qwen2, qwen3moe"),
    ({"shape": "huge"}, "tiny, small, llama3-8b"),
    ({"file_type": "Q2_K"}, "F16, Q8_0, Q4_0, MXFP4, Q4_K_M"),
    ({"seed": -1}, "non-negative"),
    ({"overrides": {"n_experts": 2}}, ", ".join(OVERRIDES["llama"])),
    ({"overrides": {"n_layer": 0}}, "positive integer"),
    ({"overrides": {"n_layer": 2.5}}, "positive integer"),
    ({"overrides": {"n_layer": 513}}, "512"),
    ({"overrides": {"n_head": 3}}, "multiple of n_head"),
    ({"overrides": {"n_head_kv": 3}}, "multiple of n_head_kv"),
    ({"overrides": {"n_vocab": 100}}, "n_vocab 100 is too small"),
    ({"arch": "minicpm3", "overrides": {"n_head_kv": 2}}, "n_head_kv = n_head"),
    ({"arch": "qwen3moe", "overrides": {"n_expert_used": 99}}, "n_expert_used"),
    ({"arch": "deepseek2", "overrides": {"n_layer": 1}}, "must exceed 1: the first has no experts"),
    ({"arch": "deepseek2", "overrides": {"n_layer": 27}}, "for one without q_lora_rank"),
    ({"arch": "deepseek2", "overrides": {"n_head_kv": 2}}, "no override 'n_head_kv'"),
    ({"arch": "qwen35moe", "overrides": {"n_layer": 1}}, "or no layer has attention"),
    ({"vocab_dir": "/nowhere"}, "make setup"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_named(tmp_path, arguments, message):
    with pytest.raises(OallamaError) as error:
        make_model(tmp_path / "m.gguf", **arguments)
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_bad_vocabulary_file(tmp_path):
    name = "ggml-vocab-llama-bpe.gguf"
    for content in (b"not a model, but more than 24 bytes", (default_vocab_dir() / name).read_bytes()[:100000]):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(OallamaError, match="is broken"):
            make_model(tmp_path / "m.gguf", vocab_dir=tmp_path)


def test_bad_paths(tmp_path, monkeypatch):
    with pytest.raises(OallamaError, match="is a directory"):
        make_model(tmp_path)
    with pytest.raises(OallamaError, match="does not exist"):
        make_model(tmp_path / "missing" / "m.gguf")

    def denied(*_args, **_kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(partial_file, "open", denied, raising=False)  # root, who runs CI, may write everywhere
    with pytest.raises(OallamaError, match=r"cannot write .*m\.gguf: Permission denied"):
        make_model(tmp_path / "m.gguf")


def test_too_little_space_is_seen_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(partial_file.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(OallamaError, match=r"\d{7} bytes .* needed, 1000 bytes .* free"):
        make_model(tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("failure", "expected"),
    [(OSError(errno.ENOSPC, "No space left on device"), OallamaError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_failure_keeps_the_good_file_and_leaves_no_other(tmp_path, failure, expected):
    good = make_model(tmp_path / "m.gguf", overrides={"n_layer": 1})
    before = good.read_bytes()

    def fail_half_way(done, total):
        assert len(list(tmp_path.glob("m.gguf.partial-*"))) == 1
        if done > total / 2:
            raise failure

    with pytest.raises(expected) as error:
        make_model(good, seed=1, progress=fail_half_way)
    if expected is OallamaError:
        assert "not enough disk space" in str(error.value)
    assert list(tmp_path.iterdir()) == [good]
    assert good.read_bytes() == before
