"""Adapters (LoRA) of a mixture whose experts are on two devices: of its routers, and of its experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from support.expert_slots import difference, plan_of, sampled, steps

RANK, ALPHA = 4, 64.0
N_EXPERTS = 16


def adapter(path: Path, model: Path, kinds: tuple[str, ...]) -> Path:
    """Random LoRA tensors for every weight of these kinds."""
    reader, rng = gguf.GGUFReader(model), np.random.default_rng(1)
    arch = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(path, arch)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", ALPHA)
    for tensor in reader.tensors:
        if tensor.name.split(".")[-2] not in kinds:
            continue
        n_in, n_out, *experts = tensor.shape.tolist()
        for end, shape in (("a", (*experts, RANK, n_in)), ("b", (*experts, n_out, RANK))):
            values = rng.standard_normal(shape) / np.sqrt(shape[-1])
            writer.add_tensor(f"{tensor.name}.lora_{end}", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kinds", [("ffn_gate_inp",), ("ffn_up_exps", "ffn_down_exps"), ("attn_q",)])
def test_an_adapter_changes_what_it_changes_elsewhere(
    kinds: tuple[str, ...], tiny: Callable[..., Path], rpc: Any, tmp_path: Path
) -> None:
    """The same logits as with all experts in one place: of a list, and of slots.

    Both sides' parts are added in another order. An activation that is then rounded the other way is 6e-5 in its token,
    which was seen in one of 40.
    """
    path, device = tiny("qwen3moe", "Q8_0"), rpc.devices[0]
    lora = str(adapter(tmp_path / "lora.gguf", path, kinds))
    with steps(path, plan_of(path, device), lora_path=lora) as whole, steps(path, plan_of(path, device)) as without:
        tokens = sampled(whole, 40)
        assert difference(whole, without, tokens) > 1e-3, "an adapter that does nothing"
        for slots, first in ((0, (0, 3, 9)), (5, (1, 2))):
            whole.forget()
            with steps(path, plan_of(path, device, slots, first), lora_path=lora) as divided:
                assert difference(divided, whole, tokens) <= 1e-5, (slots, first)


def test_hits_are_those_of_the_routing_with_the_adapter(tiny: Callable[..., Path], rpc: Any, tmp_path: Path) -> None:
    path, device = tiny("qwen3moe", "Q8_0"), rpc.devices[0]
    lora = str(adapter(tmp_path / "lora.gguf", path, ("ffn_gate_inp",)))
    plan, found = plan_of(path, device, first=tuple(range(8))), []
    for arguments in ({}, {"lora_path": lora}):
        with steps(path, plan, **arguments) as divided:
            for token in range(5, 37):
                divided.feed(token)
            uses, hits, *_ = divided.counts()
            assert uses == 32 * 4 * 2
            found.append(hits)
    assert found[0] != found[1]
