"""Bytes that a load really takes of a device."""

from __future__ import annotations

from pathlib import Path

from oallama.data.plan import PlacementPlan
from oallama.engine import load_settings, native, runtime
from oallama.engine.backend_map import backend_map
from oallama.engine.load_settings import Settings


def device_bytes(path: Path, settings: Settings, plan: PlacementPlan, device: str) -> int:
    """Bytes the backends really allocated on the device for a load under the plan, by the ledger."""
    llama_cpp, params = runtime.llama_cpp(), load_settings.make_params(settings)

    def allocated() -> int:
        return sum(entry["current"] for name, entry in native.core().ledger().items() if name.startswith(device))

    before = allocated()
    with backend_map(plan.to_backend_map()):
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params.model)
    context = llama_cpp.llama_init_from_model(model, params.context)
    tokens = (llama_cpp.llama_token * 300)(*range(300))
    assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, 200)) == 0
    used = allocated() - before
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    assert allocated() == before, "the ledger does not return to where it was"
    return used
