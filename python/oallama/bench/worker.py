"""One engine under test, in its own process: loads a libllama and times prompt and token steps.

The parent (`engines.Worker`) starts this file by path and chooses the engine by environment: LLAMA_CPP_LIB_PATH names
the folder of libllama (patched or not), OALLAMA_BACKEND_MAP the table a patched one obeys. Invariants:
* imports llama_cpp, its neighbour worker_ggml and the standard library only: nothing else of oallama colours what is
  measured;
* one JSON object a line each way; the real stdout is moved aside first, since native libraries print to fd 1 and 2;
* a failing command answers {"error": ...}; only a crash of the native code ends the process.

Commands: load, tokenize, run, unload, quit. The methods of `Session` document their fields.
"""

import ctypes
import gc
import json
import os
import re
import sys
import time

MIB = 1024 * 1024
ERROR = 4  # GGML_LOG_LEVEL_ERROR
MODEL_FIELDS = ("n_gpu_layers", "use_extra_bufts")
CONTEXT_FIELDS = ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_outputs_max", "op_offload", "offload_kqv")
OTHER_FIELDS = (
    "n_threads", "flash_attn", "type_k", "type_v", "rpc_servers", "devices", "load_mode", "override_tensor",
)  # fmt: skip

_SIZE = re.compile(
    r"^(?P<function>\S+?):\s+(?P<buffer>\S+)\s+(?:\S+ )*?(?P<what>model|LoRA|KV|RS|state|output|compute)"
    r" buffer size (?P<when>=|is|of)\s+(?P<mib>[\d.]+) MiB"
)
_KIND = {"LoRA": "model", "KV": "kv", "RS": "kv", "state": "kv"}


def parse_memory_log(lines):
    """Bytes per buffer type and kind, from llama.cpp's own "... buffer size = ... MiB" lines.

    Returns {buffer type: {"model" | "kv" | "output" | "compute": bytes}}. Models and caches may have several buffers
    of one type, which add up; compute buffers are reported anew by each reservation and at the end: the last counts.
    """
    memory, final = {}, False
    for line in lines:
        found = _SIZE.match(line)
        ended = bool(found) and found["when"] != "=" and not final
        final = final or ended
        if ended or line.rstrip().endswith(": reserving ..."):
            for sizes in memory.values():
                sizes.pop("compute", None)
        if found:
            sizes = memory.setdefault(found["buffer"], {})
            kind = _KIND.get(found["what"], found["what"])
            sizes[kind] = sizes.get(kind, 0) + round(float(found["mib"]) * MIB)
    return {buffer: sizes for buffer, sizes in memory.items() if any(sizes.values())}


class Session:
    """The engine with at most one model and context."""

    def __init__(self):
        from llama_cpp import llama_cpp
        from worker_ggml import Ggml, TensorOverride  # beside this file, which runs as a program

        self.lib, self.overrides = llama_cpp, TensorOverride
        self.lines, self.errors = [], []
        self._log = llama_cpp.llama_log_callback(self._on_log)  # kept: ctypes does not hold it
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        self.ggml = Ggml(llama_cpp._lib)
        self.ggml.handles()
        self.model = self.ctx = None
        self.prefilled = []

    def _on_log(self, level, text, _):
        text = text.decode("utf-8", "replace")
        sys.stderr.write(text)
        if level == ERROR:
            self.errors.append(text.strip())
        if "buffer size" in text or "reserving" in text:
            self.lines.append(text)

    def load(self, model, **params):
        """Load a model and make its context.

        params: MODEL_FIELDS and CONTEXT_FIELDS as in llama.h; n_threads; flash_attn auto|on|off; type_k, type_v (ggml
        type names); load_mode as llama.cpp's --load-mode; rpc_servers [host:port]; devices [names], empty for CPU only,
        null for all; override_tensor [[pattern, buffer type]].
        Returns load_s, model {description, size_bytes, n_params, n_layer}, devices and memory (see parse_memory_log).
        """
        unknown = set(params) - {*MODEL_FIELDS, *CONTEXT_FIELDS, *OTHER_FIELDS}
        if unknown:
            raise ValueError(f"unknown load parameters: {', '.join(sorted(unknown))}")
        if self.model:
            raise ValueError("a model is loaded already; unload it first")
        self.lines.clear(), self.errors.clear()
        for endpoint in params.get("rpc_servers") or ():
            self.ggml.add_rpc_server(endpoint)
        model_params, keep_alive = self._model_params(params)
        context_params = self._context_params(params)
        start = time.perf_counter()
        self.model = self.lib.llama_model_load_from_file(os.fsencode(model), model_params)
        if not self.model:
            raise ValueError(self._why(f"cannot load {model}"))
        del keep_alive
        if self.lib.llama_model_has_encoder(self.model):
            self._free()
            raise ValueError(f"{model} has an encoder; the benchmark measures decoder-only models")
        self.ctx = self.lib.llama_init_from_model(self.model, context_params)
        if not self.ctx:
            why = self._why(f"cannot create a context for {model}")
            self._free()
            raise ValueError(why)
        load_s = time.perf_counter() - start
        self.n_seq = params.get("n_seq_max", 1)
        self.sampler = self.lib.llama_sampler_init_greedy()
        # Without flash attention V is kept transposed: such a cache cannot be read into another's.
        self.form = "unfused" if params.get("flash_attn") == "off" else "fused"
        return {
            "load_s": load_s,
            "model": self._describe_model(),
            "devices": [self.ggml.describe(d) for d in self.ggml.handles()],
            "memory": parse_memory_log(self.lines),
        }

    def _why(self, what):
        # The first error is the cause; those after it only pass it up.
        return f"{what}: {self.errors[0]}" if self.errors else what

    def _describe_model(self):
        text = ctypes.create_string_buffer(128)
        self.lib.llama_model_desc(self.model, text, len(text))
        return {
            "description": text.value.decode(),
            "size_bytes": self.lib.llama_model_size(self.model),
            "n_params": self.lib.llama_model_n_params(self.model),
            "n_layer": self.lib.llama_model_n_layer(self.model),
        }

    def _constant(self, prefix, name, what):
        value = getattr(self.lib, prefix + name.upper().replace("+", "_"), None)
        if value is None:
            raise ValueError(f"unknown {what} {name!r}")
        return value

    def _model_params(self, params):
        """The C structure and the arrays it points to, which must outlive the load."""
        native, keep_alive = self.lib.llama_model_default_params(), []
        for field in MODEL_FIELDS:
            if field in params:
                setattr(native, field, params[field])
        mode = {"dio": "direct_io"}.get(params.get("load_mode", "auto"), params.get("load_mode", "auto"))
        native.load_mode = self._constant("LLAMA_LOAD_MODE_", mode, "load_mode")
        if params.get("devices") is not None:
            handles = [self.ggml.device(name) for name in params["devices"]]
            keep_alive.append((ctypes.c_void_p * (len(handles) + 1))(*handles, None))
            native.devices = ctypes.cast(keep_alive[-1], ctypes.c_void_p)
        if params.get("override_tensor"):
            rows = [self.overrides(p.encode(), self.ggml.buffer_type(b)) for p, b in params["override_tensor"]]
            keep_alive.append((self.overrides * (len(rows) + 1))(*rows))  # ends with zeros
            native.tensor_buft_overrides = ctypes.cast(keep_alive[-1], ctypes.c_void_p)
        return native, keep_alive

    def _context_params(self, params):
        native = self.lib.llama_context_default_params()
        for field in CONTEXT_FIELDS:
            if field in params:
                setattr(native, field, params[field])
        if params.get("n_threads"):
            native.n_threads = native.n_threads_batch = params["n_threads"]
        modes = {"auto": "auto", "on": "enabled", "off": "disabled"}
        flash_attn = params.get("flash_attn", "auto")
        native.flash_attn_type = self._constant(
            "LLAMA_FLASH_ATTN_TYPE_", modes.get(flash_attn, flash_attn), "flash_attn"
        )
        native.type_k = self._constant("GGML_TYPE_", params.get("type_k", "f16"), "type_k")
        native.type_v = self._constant("GGML_TYPE_", params.get("type_v", "f16"), "type_v")
        return native

    def tokenize(self, text):
        """Tokens of a text, with the model's own tokenizer and the special tokens that it adds to a text."""
        self._need_model()
        vocab, data = self.lib.llama_model_get_vocab(self.model), text.encode()
        tokens = (self.lib.llama_token * (len(data) + 8))()
        count = self.lib.llama_tokenize(vocab, data, len(data), tokens, len(tokens), True, False)
        if count <= 0:
            raise ValueError("the model's tokenizer cannot tokenize the prompt text (a vocab-less model?)")
        return {"tokens": tokens[:count]}

    def run(self, prompt_tokens, n_gen, depth_tokens=(), state_dir=None):
        """Process a prompt behind a filled cache and generate n_gen tokens greedily, end-of-text ignored.

        Returns ttft_s, token_times_s (seconds since the prompt was handed over, one per token; the first is the TTFT)
        and tokens. Filling the cache with depth_tokens and tokenisation are not timed; sampling is. state_dir: folder
        where filled caches are kept, so that engines with caches of one form fill it once.

        With n_seq_max above 1 the prompt is one sequence's. Then all sequences go on from there, a token of each in
        every step; that they are copied is not timed.
        """
        self._need_model()
        if not prompt_tokens or n_gen < 1:
            raise ValueError("a run needs at least one prompt token and one generated token")
        used, n_ctx = len(depth_tokens) + len(prompt_tokens) + n_gen, self.lib.llama_n_ctx_seq(self.ctx)
        if used > n_ctx:
            raise ValueError(f"depth + prompt + generated tokens are {used}, more than n_ctx = {n_ctx}")
        self._prefill(depth_tokens, state_dir)
        times, tokens = [], []
        gc.disable()
        try:
            start = time.perf_counter()
            self._decode(prompt_tokens)
            while True:
                tokens.append(self.lib.llama_sampler_sample(self.sampler, self.ctx, -1))
                times.append(time.perf_counter() - start)
                if len(tokens) == n_gen:
                    break
                if self.n_seq > 1:
                    if len(tokens) == 1:
                        start += self._copy_sequences()
                    self._step(tokens[-1])
                else:
                    self._decode(tokens[-1:])
        finally:
            gc.enable()
        return {"ttft_s": times[0], "token_times_s": times, "tokens": tokens}

    def _copy_sequences(self):
        """All sequences become copies of the first one; returns the seconds it took.

        llama.cpp copies with the next step. That one is taken back, where the cache can (recurrent states cannot).
        """
        start = time.perf_counter()
        memory = self.lib.llama_get_memory(self.ctx)
        end = self.lib.llama_memory_seq_pos_max(memory, 0) + 1
        for i in range(1, self.n_seq):
            self.lib.llama_memory_seq_cp(memory, 0, i, -1, -1)
        self._step(0)
        for i in range(self.n_seq):
            self.lib.llama_memory_seq_rm(memory, i, end, -1)
        self.lib.llama_synchronize(self.ctx)
        return time.perf_counter() - start

    def _step(self, token):
        """One token of every sequence, with its logits."""
        position = self.lib.llama_memory_seq_pos_max(self.lib.llama_get_memory(self.ctx), 0) + 1
        batch = self.lib.llama_batch_init(self.n_seq, 0, 1)
        batch.n_tokens = self.n_seq
        for i in range(self.n_seq):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, i
        status = self.lib.llama_decode(self.ctx, batch)
        self.lib.llama_batch_free(batch)
        if status:
            raise ValueError(self._why(f"llama_decode failed with status {status}"))

    def _prefill(self, depth_tokens, state_dir):
        """Leave exactly depth_tokens in the cache.

        Repeats at one depth only cut off what the last run added; caches that cannot (recurrent models) or that have
        forgotten the beginning (sliding windows) are filled again.
        """
        memory, depth = self.lib.llama_get_memory(self.ctx), list(depth_tokens)
        for i in range(1, self.n_seq):
            self.lib.llama_memory_seq_rm(memory, i, -1, -1)
        kept = (
            depth
            and depth == self.prefilled
            and self.lib.llama_memory_seq_rm(memory, 0, len(depth), -1)
            and self.lib.llama_memory_seq_pos_min(memory, 0) == 0
        )
        if not kept:
            self.prefilled = []
            self.lib.llama_memory_clear(memory, True)
            if depth:
                self._fill(depth, state_dir)
            self.prefilled = depth
        self.lib.llama_synchronize(self.ctx)

    def _fill(self, depth, state_dir):
        """Decode the depth tokens, or take the state that another engine left in state_dir."""
        if state_dir is None:
            self._decode(depth)
            return
        array, count = (self.lib.llama_token * len(depth))(*depth), ctypes.c_size_t()
        path = os.path.join(state_dir, f"depth-{len(depth)}-{self.form}").encode()
        taken = os.path.exists(path) and self.lib.llama_state_seq_load_file(
            self.ctx, path, 0, (self.lib.llama_token * len(depth))(), len(depth), ctypes.byref(count)
        )
        if not taken:
            self.lib.llama_memory_clear(self.lib.llama_get_memory(self.ctx), True)
            self._decode(depth)
            self.lib.llama_state_seq_save_file(self.ctx, path, 0, array, len(depth))

    def _decode(self, tokens):
        n_batch = self.lib.llama_n_batch(self.ctx)
        for i in range(0, len(tokens), n_batch):
            part = tokens[i : i + n_batch]
            array = (self.lib.llama_token * len(part))(*part)  # named: the batch only points to it
            status = self.lib.llama_decode(self.ctx, self.lib.llama_batch_get_one(array, len(part)))
            if status:
                raise ValueError(self._why(f"llama_decode failed with status {status}"))

    def _need_model(self):
        if not self.ctx:
            raise ValueError("no model is loaded")

    def _free(self):
        if self.ctx:
            self.lib.llama_sampler_free(self.sampler)
            self.lib.llama_free(self.ctx)
        if self.model:
            self.lib.llama_model_free(self.model)
        self.model = self.ctx = None
        self.prefilled = []

    def unload(self):
        """Free the model; returns memory as load does, with the compute buffers as they ended (they may have grown)."""
        self._need_model()
        self._free()
        return {"memory": parse_memory_log(self.lines)}


def main():
    """Serve commands until quit or the end of the input."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    session = Session()
    commands = {name: getattr(session, name) for name in ("load", "tokenize", "run", "unload")}
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("command", None)
        if name == "quit":
            return
        try:
            if name not in commands:
                raise ValueError(f"unknown command {name!r}")
            reply = commands[name](**request)
        except (ValueError, TypeError) as error:
            reply = {"error": str(error)}
        replies.write(json.dumps(reply) + "\n")
    session._free()


if __name__ == "__main__":
    main()
