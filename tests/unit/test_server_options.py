"""`python -m oallama.server`: llama_cpp.server's options as `oallama serve`'s."""

from __future__ import annotations

import ast

import pytest

from oallama.errors import OallamaError
from oallama.server import KNOWN, command
from support.paths import ROOT


def test_its_address_is_llama_cpp_servers() -> None:
    assert command(["--model", "m.gguf"]) == ["serve", "m.gguf", "--host", "localhost", "--port", "8000"]


def test_options_are_translated() -> None:
    given = "--model=m.gguf --n_ctx 8192 --port 9000 --flash_attn true --n_threads 4 --api_key k --model_alias a"
    assert command(given.split()) == [
        *("serve", "m.gguf", "--host", "localhost", "--port", "9000", "--ctx", "8192", "--threads", "4"),
        *("--flash-attn", "on", "--", "--api-key", "k", "--alias", "a"),
    ]


def test_dashes_and_underscores_are_the_same() -> None:
    assert command(["--model", "m", "--n-ctx", "1"])[-2:] == ["--ctx", "1"]


def test_what_the_plan_decides_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(["--model", "m", "--n_gpu_layers", "-1", "--chat_format", "chatml"])
    assert arguments == command(["--model", "m"])
    said = capsys.readouterr().err
    assert "--n_gpu_layers -1 is not needed" in said and "--chat_format chatml is not needed" in said


def test_no_layers_on_gpus_is_the_cpu_alone() -> None:
    assert command(["--model", "m", "--n_gpu_layers", "0"])[-2:] == ["--device", "CPU"]


def test_values_are_those_of_llama_cpp_server() -> None:
    given = ["--n_threads", "-1", "--tensor_split", "0.5", "0.5", "--type_k", "8", "--rpc_servers", "a:1,b:2"]
    wanted = ["--type-k", "q8_0", "--threads", "0", "--rpc", "a:1", "--rpc", "b:2"]
    assert command(["--model", "m", *given])[-8:] == wanted


def test_every_setting_of_llama_cpp_server_is_known() -> None:
    """Its module needs packages that we do not, so its text is read."""
    found = ROOT / "third_party" / "llama.cpp" / "patched" / "python" / "llama_cpp" / "server" / "settings.py"
    classes = [node for node in ast.parse(found.read_text()).body if isinstance(node, ast.ClassDef)]
    names = {
        line.target.id
        for node in classes
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    assert len(names) > 50 and names - KNOWN == set()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no model"),
        (["m.gguf"], "expected an option"),
        (["--model"], "--model needs a value"),
        (["--model", "m", "--n_ctxx", "1"], "did you mean --n_ctx"),
        (["--model", "m", "--flash_attn", "maybe"], "takes true or false"),
        (["--hf_model_repo_id", "a/b"], "oallama serve --hf OWNER/REPO:FILE"),
        (["--model", "m", "--draft_model", "prompt-lookup-decoding"], "oallama serve MODEL --draft"),
        (["--model", "m", "--type_k", "f16"], "takes a number of ggml's"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(OallamaError, match=words):
        command(arguments)
