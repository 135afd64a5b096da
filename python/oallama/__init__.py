"""oallama: llama.cpp with a measured decision about where every tensor lives.

Names are loaded at their first use, so that `import oallama` is light. Whatever llama-cpp-python exports under a name
with a capital letter or as `llama_*` (`LlamaGrammar`, `LLAMA_SPLIT_MODE_LAYER`, the module `llama_chat_format`, ...)
can be imported from here, too. A program that imports `llama_cpp` itself, or whose packages do, must `import oallama`
first: then it has the same engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from oallama.base.moved import keep_old_names
from oallama.base.processor import refuse_old_processor
from oallama.engine.upstream_import import take_ours

if TYPE_CHECKING:
    from oallama.data.plan import PlacementPlan
    from oallama.data.profile import Profile
    from oallama.engine.rpc import LocalRpcServer
    from oallama.errors import OallamaError
    from oallama.llama import Llama
    from oallama.loading.placement import Placement
    from oallama.storyteller import demo_model

    __version__: str

__all__ = [
    "Llama", "LocalRpcServer", "OallamaError", "Placement", "PlacementPlan", "Profile", "__version__", "demo_model"
]  # fmt: skip

_HOMES = {
    "Llama": "oallama.llama",
    "LocalRpcServer": "oallama.engine.rpc",
    "OallamaError": "oallama.errors",
    "Placement": "oallama.loading.placement",
    "PlacementPlan": "oallama.data.plan",
    "Profile": "oallama.data.profile",
    "demo_model": "oallama.storyteller",
}

keep_old_names()
take_ours()


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        refuse_old_processor()
        return getattr(import_module(_HOMES[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("oallama")
    if name[:1].isupper() or name.startswith("llama_"):  # never a submodule of ours: those must not load the engine
        from oallama.engine import runtime

        llama_cpp = runtime.llama_cpp()
        if hasattr(llama_cpp, name):
            return getattr(llama_cpp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
