"""Every environment variable that oallama reads or sets: what it takes, who reads it, what it does.

`python -m oallama.base.environment` writes docs/environment.md from this table. A test compares both, and looks for
variables in the sources that are missing here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One variable.

    Attributes:
        takes: its values.
        default: what holds when it is not set.
        reader: the file that reads it.
        effect: what it does.
    """

    name: str
    takes: str
    default: str
    reader: str
    effect: str

    def get(self) -> str | None:
        """Its value in this process; None where it is not set, or empty."""
        return os.environ.get(self.name) or None

    def row(self) -> str:
        """A row of the table in docs/environment.md."""
        cells = (f"`{self.name}`", self.takes, self.default, f"`{self.reader}`", self.effect)
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


# fmt: off
BACKEND_MAP = Variable("OALLAMA_BACKEND_MAP", "path of a table, or several with `:`", "unset",
    "csrc/map/backend_map.cpp",
    "Every llama.cpp program of this build loads by the table. Several take turns, load by load: a model, its draft. "
    "Pass `-fit off` to programs that fit by themselves.")
LIB_DIR = Variable("OALLAMA_LIB_DIR", "folder", "the installed one", "python/oallama/engine/runtime.py",
    "`libllama.so` and `libggml*.so` are taken from there.")
MODULES = Variable("OALLAMA_MODULES", "folders, separated by `:`", "unset", "csrc/base/modules.cpp",
    "Folders with more backends, for an engine whose backends are modules, as that of a wheel.")
BASELINE_DIR = Variable("OALLAMA_BASELINE_DIR", "folder", "`build/baseline/bin`", "python/oallama/bench/baselines.py",
    "Unpatched llama.cpp for comparisons.")
DEBUG = Variable("OALLAMA_DEBUG", "any text", "unset", "python/oallama/cli/app.py",
    "The CLI shows tracebacks and llama.cpp's log.")
DEBUGGER = Variable("OALLAMA_DEBUGGER", "any text", "unset", "third_party/llama.cpp/patches/0028-no-debugger.patch",
    "A program that aborts starts gdb or lldb to say where. Else it says so by itself.")
HOST_MEMORY = Variable("OALLAMA_HOST_MEMORY", "bytes", "what the system and control groups leave",
    "csrc/base/host_memory.cpp",
    "Memory that weights on the host may take when a model is loaded.")
AMX = Variable("OALLAMA_AMX", "`0`", "unset: as the CPU can", "third_party/llama.cpp/patches/0016-amx.patch",
    "`0` keeps ggml from repacking weights for AMX. Tests use it, so that CPUs agree.")
INSTRUCTIONS = Variable("OALLAMA_INSTRUCTIONS", "`base`, `avx2`, `avx-vnni`, `avx512`, `amx`", "unset: as the CPU can",
    "csrc/base/kernel_choice.h",
    "The largest instruction set that our kernels for attention and products take. ggml's are as it was built.")
HUGE_PAGES = Variable("OALLAMA_HUGE_PAGES", "`0`", "unset: where the system gives them", "csrc/base/huge_pages.cpp",
    "`0` asks for no huge pages for caches, repacked weights and other large blocks of memory.")
MMVQ_LIMITS = Variable("OALLAMA_MMVQ_LIMITS", "`CUDA0:q4_K=5,q6_K=7;CUDA1:..`", "unset: upstream's rules",
    "csrc/map/tuned_limits.cpp",
    "Most columns that a CUDA device multiplies by MMVQ, by weight type (1 to 8). "
    "`oallama serve` sets it from what `oallama tune` recorded.")
QUICK_PROFILE = Variable("OALLAMA_QUICK_PROFILE", "any text", "unset", "python/oallama/profiling/fingerprint.py",
    "Profiles take a fraction of the time and are too inexact to plan by. Tests use it.")
PLAN_CACHE = Variable("OALLAMA_PLAN_CACHE", "`0`", "unset: plans are kept", "python/oallama/loading/plan_cache.py",
    "`0` makes every plan anew, and keeps none.")
VERIFY = Variable("OALLAMA_VERIFY", "seconds", "`5`", "python/oallama/loading/trial.py",
    "Time for measuring a plan beside its rivals at the first use of a model. `0` takes the prediction's word.")
HISTORY = Variable("OALLAMA_HISTORY", "`0`", "unset: runs are kept", "python/oallama/loading/learning.py",
    "`0` keeps nothing of what runs took, and learns nothing from it.")
PIN_LIMIT = Variable("OALLAMA_PIN_LIMIT", "bytes", "half of the free memory", "csrc/stream/stream_reader.cpp",
    "Most pinned host memory that keeps streamed weights.")
STREAM_QUEUE = Variable("OALLAMA_STREAM_QUEUE", "`0`, `1`", "`1` on CUDA, else `0`", "csrc/stream/stream_lane.cpp",
    "Whether the device itself keeps the order of copies and computing, or the host does.")
STREAM_JITTER = Variable("OALLAMA_STREAM_JITTER", "microseconds", "`0`", "csrc/stream/stream_lane.cpp",
    "Random delays on both sides of a weight stream, for tests.")
REQUEST_LIMIT = Variable("OALLAMA_REQUEST_LIMIT", "requests", "unset: no limit", "csrc/serve/admission.cpp",
    "Requests that a server takes at once; more get 503. `oallama serve` sets it.")
DRAIN_S = Variable("OALLAMA_DRAIN_S", "seconds", "`0`", "csrc/serve/admission.cpp",
    "How long a server that is to end waits for its requests. `oallama serve` sets it.")
MODEL_ENVIRONMENTS = Variable("OALLAMA_MODEL_ENVIRONMENTS", "JSON: model, variable, value", "unset",
    "csrc/serve/child_environment.h",
    "Variables for single models of llama-server's router.")
REVIVE = Variable("OALLAMA_REVIVE", "`1`", "unset", "csrc/serve/revival.cpp",
    "llama-server's router loads a model again whose process died. `oallama serve --hot` sets it.")
RANK_DEVICE = Variable("OALLAMA_RANK_DEVICE", "device", "`CPU`", "csrc/ranks/module.cpp",
    "The ggml device that a tensor-parallel rank computes on. `oallama cluster run` sets all of `OALLAMA_RANK_*`.")
RANK_THREADS = Variable("OALLAMA_RANK_THREADS", "numbers by rank", "the backend's", "csrc/ranks/module.cpp",
    "CPU threads of each rank; one number is for all.")
OWN_KERNELS = Variable("OALLAMA_OWN_KERNELS", "`1`", "unset", "csrc/map/weight_marks.cpp",
    "Models that are loaded without a plan are computed on CPUs by our kernels. Ranks set it where these are faster.")
THREADS = Variable("OALLAMA_THREADS", "`openmp`", "unset: threads of our own", "csrc/base/thread_team.cpp",
    "Graphs on the CPU are computed by OpenMP's threads, as upstream does. They spin where others need their CPUs.")
BIND_THREADS = Variable("OALLAMA_BIND_THREADS", "`1`, `0`",
    "`1` for RPC servers that `oallama` starts with a thread for every CPU", "csrc/base/thread_team.cpp",
    "Each thread that computes stays on one CPU.")
RANK_HOST = Variable("OALLAMA_RANK_HOST", "id", "the host's name", "csrc/ranks/module.cpp",
    "Ranks with one id share memory.")
RANK_SPEEDS = Variable("OALLAMA_RANK_SPEEDS", "numbers by rank", "all alike", "csrc/ranks/module.cpp",
    "Shares of the weights.")
RANK_TIMEOUT = Variable("OALLAMA_RANK_TIMEOUT", "seconds", "`60`", "csrc/ranks/module.cpp",
    "After which a rank that others wait for is given up.")
RANK_MEMORY = Variable("OALLAMA_RANK_MEMORY", "`resident`, `minimal`", "`resident`", "csrc/ranks/module.cpp",
    "Whether a CPU rank keeps its weights in memory or in a file.")
RANK_FOLDER = Variable("OALLAMA_RANK_FOLDER", "folder", "`/var/tmp`", "csrc/ranks/weight_window.cpp",
    "Where that file is.")
RANK_SHARING = Variable("OALLAMA_RANK_SHARING", "numbers, separated by `,`", "unset: memory for all weights",
    "csrc/ranks/module.cpp",
    "By rank, how many share its host's memory. Set by `oallama cluster run --memory minimal`.")
RANK_SUMS = Variable("OALLAMA_RANK_SUMS", "`device`, `host`", "`device`", "csrc/ranks/module.cpp",
    "Where ranks on NVIDIA GPUs add up: in GPU memory, if all ranks can, or in host memory.")
ALLREDUCE = Variable("OALLAMA_ALLREDUCE", "`auto`, `star`, `tree`, `exchange`, `rabenseifner`, `pipelined`", "`auto`",
    "csrc/ranks/module.cpp",
    "How ranks add up partial results.")
WIRE = Variable("OALLAMA_WIRE", "`native`, `q8`", "`native`", "csrc/ranks/module.cpp",
    "What travels between the hosts of ranks.")
RPC_TOKEN_FILE = Variable("OALLAMA_RPC_TOKEN_FILE", "path", "unset", "csrc/rpc/rpc_auth.cpp",
    "Token of RPC servers and clients: a file that only its owner may read, at least 16 bytes "
    "([cluster.md](cluster.md#security)).")
RPC_NO_TOKEN = Variable("OALLAMA_RPC_NO_TOKEN", "`host:port,..`", "unset", "csrc/rpc/rpc_auth.cpp",
    "RPC servers that are spoken to without the token.")
RPC_TIMEOUT = Variable("OALLAMA_RPC_TIMEOUT", "seconds", "upstream's: never", "csrc/rpc/rpc_socket.cpp",
    "RPC servers and clients give up a peer that the network has lost.")
RPC_HASH_BYTES = Variable("OALLAMA_RPC_HASH_BYTES", "bytes", "`10485760`", "csrc/rpc/rpc_client.cpp",
    "Larger weights are looked for in the RPC server's cache (`-c`) before they are sent. "
    "Values above the default do nothing.")
WEAVE_RECEIVER = Variable("OALLAMA_WEAVE_RECEIVER",
    "`path:bytes[:graphs, operators, parts or a number of multiply-adds]`", "unset",
    "csrc/weave/cpu/receiver_of_process.cpp",
    "This process keeps guests' sequences and computes their attention ([weave.md](weave.md)). "
    "`oallama serve --hot` sets it.")
WEAVE_CUDA_RECEIVER = Variable("OALLAMA_WEAVE_CUDA_RECEIVER", "`path:bytes[:decode:prompt:few]`", "unset; `8:2:16`",
    "csrc/weave/cuda/receiver_of_process_cuda.cpp",
    "The same on the GPU whose graph comes first, in `bytes` of its memory; products between two looks, of `few` rows "
    "at most and of more ([weave-cuda.md](weave-cuda.md)). `oallama serve --hot --device` sets it.")
WEAVE_CUDA_WORK = Variable("OALLAMA_WEAVE_CUDA_WORK", "`conditional`, `plain`", "unset: conditional where it works",
    "csrc/weave/cuda/receiver_of_process_cuda.cpp",
    "Whether a look in vain launches nothing else, by conditional nodes of graphs, or blocks that leave at once.")
WEAVE_CHANNELS = Variable("OALLAMA_WEAVE_CHANNELS", "paths by commas, or one on a GPU", "unset",
    "csrc/weave/guests/guest_decode.cpp",
    "Channels to the processes that keep guests.")
WEAVE_FIRST_GUEST = Variable("OALLAMA_WEAVE_FIRST_GUEST", "number", "`0`", "csrc/weave/guests/guest_decode.cpp",
    "Sequences from that number on may be guests.")
WEAVE_DEADLINE_MS = Variable("OALLAMA_WEAVE_DEADLINE_MS", "milliseconds", "`100`", "csrc/weave/guests/guest_decode.cpp",
    "How long the attention of guests may take.")
NETLAB = Variable("OALLAMA_NETLAB", "name of a lab", "unset", "csrc/netlab/ssh_agent.sh",
    "Set for programs inside an emulated network (`python -m oallama.netlab`).")
NETLAB_CPUS = Variable("OALLAMA_NETLAB_CPUS", "`h0=0;h1=1`", "all", "csrc/netlab/ssh_agent.sh",
    "CPUs of the hosts of an emulated network.")
OURS = tuple(value for value in list(globals().values()) if isinstance(value, Variable))

# Read by `make`, before there is a package.
BUILD = (
    *(
        Variable(f"OALLAMA_{backend}", "`AUTO`, `ON`, `OFF`", "`AUTO`", "scripts/setup.sh", f"Whether to build {what}.")
        for backend, what in (("CUDA", "CUDA"), ("VULKAN", "Vulkan"), ("RPC", "RPC"), ("MPI", "the ranks over MPI"))
    ),
    Variable("OALLAMA_EXTRAS", "names by commas", "`test,plot,cluster,dev,browser`", "scripts/setup.sh",
        "Extras to install."),
)
OTHERS = (
    Variable("CUDA_HOME, CUDA_PATH", "folder", "the toolkit of `nvcc`, then `/usr/local/cuda*`",
        "python/oallama/engine/cuda_libraries.py",
        "CUDA's libraries are looked for there when neither the loader nor an `nvidia-*` wheel has them."),
    Variable("CUDA_MPS_PIPE_DIRECTORY", "folder", "`/tmp/nvidia-mps`", "python/oallama/weave/gpus.py",
        "NVIDIA's: `oallama serve --hot` looks for MPS there before two processes share a GPU."),
    Variable("GGML_BACKEND_PATH", "path of a library", "unset", "python/oallama/engine/native.py",
        "ggml's: a backend that llama.cpp's programs load, and oallama with them."),
    Variable("XDG_CACHE_HOME", "folder", "`~/.cache`", "python/oallama/profiling/recorder.py",
        "Profiles are kept in `oallama/` below it."),
    Variable("XDG_CONFIG_HOME", "folder", "`~/.config`", "python/oallama/cli/config.py",
        "`oallama.toml` in it has the defaults of `oallama`'s options, `oallama/` the keys of hosts that join."),
    Variable("OPENAI_API_KEY", "text", "unset", "python/oallama/bench/load/client.py",
        "`oallama bench serve` and `oallama top` send it to servers that ask for a key."),
    Variable("OMP_PROC_BIND, OMP_PLACES, GOMP_CPU_AFFINITY", "OpenMP's", "unset", "csrc/base/thread_team.cpp",
        "Where OpenMP's threads run. These threads compute the graphs if one of the variables is set, unless it is "
        "`OMP_PROC_BIND=false`."),
    Variable("GOMP_SPINCOUNT", "number", "`20000` beside a loopback RPC server", "python/oallama/engine/rpc.py",
        "How long idle threads spin before they sleep, OpenMP's and ours: 100 are about a microsecond. With long times "
        "two processes on the same cores fight for them at every device change."),
)
# fmt: on


def page() -> str:
    """docs/environment.md."""
    head = "| variable | takes | default | read by | effect |\n|---|---|---|---|---|\n"
    source = "`python/oallama/base/environment.py`"
    parts = [f"# Environment variables\n\nUsers need none of them. {source} makes this page."]
    for title, variables in (("oallama's own", OURS), ("Of the build", BUILD), ("Of others", OTHERS)):
        parts.append(f"## {title}\n\n{head}" + "\n".join(variable.row() for variable in variables))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(page(), end="")
