"""`python -m oallama.server`: for those who start `python -m llama_cpp.server`. It takes that program's options and
runs `oallama serve`, whose own options say more.

python -m oallama.server --model model.gguf --n_ctx 8192 --port 8000
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import takewhile

from gguf import GGMLQuantizationType

from oallama.base.printing import say
from oallama.errors import OallamaError

# llama_cpp.server's own.
_HOST, _PORT = "localhost", "8000"
_OURS = {
    "host": "--host",
    "port": "--port",
    "n_ctx": "--ctx",
    "n_batch": "--batch",
    "n_ubatch": "--ubatch",
    "n_threads": "--threads",
    "type_k": "--type-k",
    "type_v": "--type-v",
}
_LLAMA_SERVERS = {
    "model_alias": "--alias",
    "api_key": "--api-key",
    "ssl_keyfile": "--ssl-key-file",
    "ssl_certfile": "--ssl-cert-file",
    "root_path": "--api-prefix",
    "clip_model_path": "--mmproj",
    "lora_path": "--lora",
    "rope_freq_base": "--rope-freq-base",
    "rope_freq_scale": "--rope-freq-scale",
    "rope_scaling_type": "--rope-scaling",
    "yarn_ext_factor": "--yarn-ext-factor",
    "yarn_attn_factor": "--yarn-attn-factor",
    "yarn_beta_fast": "--yarn-beta-fast",
    "yarn_beta_slow": "--yarn-beta-slow",
    "yarn_orig_ctx": "--yarn-orig-ctx",
    "seed": "--seed",
    "n_threads_batch": "--threads-batch",
}
# By llama_cpp's numbers.
_ROPE_SCALING = {"0": "none", "1": "linear", "2": "yarn"}
_FLAGS = {"embedding": "--embeddings", "verbose": "--verbose"}
# What oallama decides itself, and why.
_DECIDED = {
    "n_gpu_layers": "the plan decides where every layer is; --n_gpu_layers 0 means the CPU alone",
    "tensor_split": "the plan decides how much each device holds",
    "main_gpu": "the plan decides which device computes what",
    "split_mode": "the plan decides how devices share the model",
    "offload_kqv": "the plan decides where KV caches are",
    "mul_mat_q": "ggml decides by the weights' type",
    "chat_format": "the model's own chat template is used",
    "hf_tokenizer_config_path": "the model's own chat template is used",
    "hf_pretrained_model_name_or_path": "the model's own tokenizer is used",
    "chat_template_kwargs": "each request may have them",
    "use_mmap": "the model's file is mapped",
    "use_mlock": "the system decides which pages stay in memory",
    "numa": "threads stay where the system puts them",
    "interrupt_requests": "requests run beside each other",
    "disable_ping_events": "there are none",
    "last_n_tokens_size": "each request says how it samples",
    "logits_all": "each request says which logits it wants",
    "cache": "prompts are kept",
    "cache_type": "prompts are kept",
    "cache_size": "prompts are kept",
    "lora_base": "an adapter is for the model itself",
    "draft_model_num_pred_tokens": "drafts are a matter of `oallama serve --draft`",
}
# What it has other ways for.
_OTHERWISE = {
    "hf_model_repo_id": "oallama serve --hf OWNER/REPO:FILE",
    "draft_model": "oallama serve MODEL --draft SMALLER.gguf",
    "config_file": "oallama serve --hot MODEL --cold MODEL for several models, oallama.toml for defaults",
    "models": "oallama serve --hot MODEL --cold MODEL",
    "vocab_only": "oallama plan MODEL, which loads no weights",
    "kv_overrides": "oallama serve MODEL -- --override-kv KEY=TYPE:VALUE",
}


KNOWN = {"model", "flash_attn", "rpc_servers", *_OURS, *_LLAMA_SERVERS, *_FLAGS, *_DECIDED, *_OTHERWISE}


def command(arguments: Sequence[str]) -> list[str]:
    """The arguments of `oallama` for those of llama_cpp.server.

    Raises:
        OallamaError: an option that neither knows, one without its value, or no model.
    """
    model, ours, theirs = "", {"--host": _HOST, "--port": _PORT}, []
    more: list[str] = []
    for name, value in _options(arguments):
        if name == "model":
            model = value
        elif name in _OTHERWISE:
            raise OallamaError(f"--{name} is not for this program; there is {_OTHERWISE[name]}")
        elif (name, value) == ("n_threads", "-1"):
            more += ["--threads", "0"]
        elif name in ("type_k", "type_v"):
            ours[_OURS[name]] = _type(name, value)
        elif name == "rpc_servers":
            more += [word for server in value.split(",") for word in ("--rpc", server)]
        elif name == "rope_scaling_type":
            theirs += [_LLAMA_SERVERS[name], _ROPE_SCALING.get(value, value)] if value != "-1" else []
        elif name in _OURS:
            ours[_OURS[name]] = value
        elif name in _LLAMA_SERVERS:
            theirs += [_LLAMA_SERVERS[name], value]
        elif name == "flash_attn":
            more += ["--flash-attn", "on"] if _truth(name, value) else []
        elif name in _FLAGS:
            theirs += [_FLAGS[name]] if _truth(name, value) else []
        elif (name, value) == ("n_gpu_layers", "0"):
            more += ["--device", "CPU"]
        elif name in _DECIDED:
            say(f"--{name} {value} is not needed: {_DECIDED[name]}")
        else:
            near = get_close_matches(name, KNOWN, n=1)
            hint = f"; did you mean --{near[0]}?" if near else "; see oallama serve --help"
            raise OallamaError(f"unknown option --{name}{hint}")
    if not model:
        raise OallamaError("no model: --model FILE.gguf")
    pairs = [word for pair in ours.items() for word in pair]
    return ["serve", model, *pairs, *more, *(["--", *theirs] if theirs else [])]


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names without dashes and their values, of "--name value" and "--name=value"; several values with spaces."""
    rest = [*arguments]
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            raise OallamaError(f"expected an option such as --model FILE.gguf, got {word!r}")
        if not equals:
            values = [*takewhile(lambda other: not other.startswith("--"), rest)]
            del rest[: len(values)]
            value = " ".join(values)
            if not value:
                raise OallamaError(f"{word} needs a value")
        yield name.replace("-", "_"), value


def _type(name: str, value: str) -> str:
    """The name of a type of the KV cache, which llama_cpp.server knows by ggml's number."""
    try:
        return GGMLQuantizationType(int(value)).name.lower()
    except ValueError:
        raise OallamaError(
            f"--{name} takes a number of ggml's types, 1 for f16 and 8 for q8_0, got {value!r}"
        ) from None


def _truth(name: str, value: str) -> bool:
    truth = {"1": True, "true": True, "0": False, "false": False}.get(value.lower())
    if truth is None:
        raise OallamaError(f"--{name} takes true or false, got {value!r}")
    return truth


def main() -> None:
    """Run the server; ends the process."""
    from oallama.cli import main as oallama

    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(__doc__)
        return
    try:
        arguments = command(sys.argv[1:])
    except OallamaError as error:
        say(f"error: {error}")
        raise SystemExit(2) from None
    oallama(arguments)


if __name__ == "__main__":
    main()
