"""Kinds of operators: sums, savings and affinities of a synthetic machine by hand, and errors of its profile."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from oallama.data.entries import OperatorTime
from oallama.data.plan import HOST, ContextSettings
from oallama.planning.cost import CostModel
from oallama.planning.in_place import compare_in_place
from oallama.planning.operator_kinds import IN_ONE_PIECE, SMALL, OperatorKind, operator_kinds
from oallama.tracing.operator_times import TimedOperator
from oallama.views.operator_kinds import render_in_place, render_kinds
from support.synthetic import CONTEXT, CPU, DEVICE, GPU, QWQ_32B, Shape, Speed, graph, profile

MODEL = graph()  # 4 layers of 64 values; q 64x64, k and v 64x32, up 64x128, down 128x64, head 64x256, in F16


def costs(model=MODEL, accelerators=(DEVICE,), context: ContextSettings = CONTEXT, **machine) -> CostModel:
    return CostModel(model, profile(model, **machine), accelerators, context)


def by_name(kinds: list[OperatorKind]) -> dict[str, OperatorKind]:
    return {kind.kind: kind for kind in kinds}


def seconds(nbytes: float, flops: float, speed: Speed) -> float:
    return max(nbytes / speed.bandwidth, flops / speed.flops) + speed.overhead


def test_weights_by_hand():
    found = by_name(operator_kinds(costs(), 1, decode=True))
    nbytes = 2 * 64 * 128
    up = found["ffn_up"]
    assert (up.type, up.ne, up.number, up.nbytes) == ("f16", (64, 128), 4, 4 * nbytes)
    host, device = (4 * seconds(nbytes, 2 * 64 * 128, speed) for speed in (CPU, GPU))
    assert up.seconds == {HOST: pytest.approx(host), DEVICE: pytest.approx(device)}
    assert up.saved == pytest.approx(1e9 * (host - device) / (4 * nbytes))
    assert (found["output"].number, found["output"].nbytes) == (1, 2 * 64 * 256)
    prefill = by_name(operator_kinds(costs(), 512))["ffn_up"]
    assert prefill.seconds[HOST] == pytest.approx(4 * seconds(nbytes, 2 * 64 * 128 * 512, CPU))


def test_affinity_is_the_share_of_the_largest_saving():
    """One kind saves nothing, one most; a third lies between them as its saving does."""
    slow = {(64, 32): 1e-3, (64, 256): 0.0, (64, 64): 0.6e-3}  # seconds that the host takes longer
    made = profile(MODEL)
    times = {(t.ne, t.n_tokens): t for t in made.operators if t.device == DEVICE}

    def on_host(t: OperatorTime) -> OperatorTime:
        if t.device != HOST or t.ne[:2] not in slow:
            return t
        return replace(t, median_s=times[t.ne, t.n_tokens].median_s + slow[t.ne[:2]])

    machine = replace(made, operators=tuple(map(on_host, made.operators)))
    found = by_name(operator_kinds(CostModel(MODEL, machine, (DEVICE,), CONTEXT), 1, decode=True))
    most, least = 1e-3 / (2 * 64 * 32), 0.0
    assert found["attn_k"].affinity == pytest.approx(1.0) and found["output"].affinity == pytest.approx(0.0)
    assert found["attn_q"].affinity == pytest.approx((0.6e-3 / (2 * 64 * 64) - least) / (most - least))
    assert found["output"].saved == pytest.approx(0.0) and found["attn_k"].saved == pytest.approx(1e9 * most)


def test_attention_by_form_and_depth():
    made = costs(flash=(True, False), context=replace(CONTEXT, n_ctx=8192))
    found = by_name(operator_kinds(made, 1, decode=True, depths=(1024, 4096, 16384)))
    names = [f"attention {form}, {depth}" for form in ("fused", "unfused") for depth in (1024, 4096)]
    assert [name for name in found if name.startswith("attention")] == names
    fused, unfused = found[names[1]], found[names[3]]
    assert fused.nbytes == 4 * 4096 * 2 * 32 * 2 and fused.number == 4 and fused.affinity is None
    expected = 4 * made.profile.attention_time(HOST, (4, 2, 16, 16), 1, 4096).seconds
    assert fused.seconds[HOST] == pytest.approx(expected)
    assert unfused.seconds[HOST] == pytest.approx(1.25 * expected)
    assert fused.saved == pytest.approx(1e9 * (fused.seconds[HOST] - fused.seconds[DEVICE]) / fused.nbytes)


def test_our_kernels_stand_beside_ggmls():
    made = costs(flash=(True, False), own=2.0)
    found = by_name(operator_kinds(made, 1, decode=True, depths=(1024,)))
    names = [name for name in found if name.startswith("attention")]
    assert names == ["attention fused, 1024", "attention oallama, 1024", "attention unfused, 1024"]
    ggml, ours = (found[name].seconds for name in names[:2])
    assert ours[HOST] == pytest.approx(ggml[HOST] / 2) and ours[DEVICE] == ggml[DEVICE]
    assert found[names[1]].saved == pytest.approx(1e9 * (ours[HOST] - ours[DEVICE]) / found[names[1]].nbytes)


def test_a_form_that_a_device_lacks_has_no_time_there():
    made = profile(MODEL, flash=(True, False))
    kept = tuple(a for a in made.attention if not (a.device == DEVICE and a.flash))
    found = by_name(operator_kinds(CostModel(MODEL, replace(made, attention=kept), (DEVICE,), CONTEXT), 1, decode=True))
    fused, unfused = found["attention fused, 1024"], found["attention unfused, 1024"]
    assert {*fused.seconds} == {HOST} and fused.saved is None
    assert {*unfused.seconds} == {HOST, DEVICE} and unfused.saved is not None


def test_small_operators_and_what_one_piece_saves():
    """Per layer 4 of norms, 2 RoPE, 2 cache writes, 2 additions, a GLU; a look-up and the last norm's two."""
    plain = by_name(operator_kinds(costs(), 1, decode=True))
    assert plain[SMALL].number == 4 * 11 + 3 and IN_ONE_PIECE not in plain
    assert plain[SMALL].seconds[HOST] == pytest.approx(47 * 1e-6)
    fused = costs(in_one_piece={"norm+mul": 1e-6})
    found = by_name(operator_kinds(fused, 1, decode=True))[IN_ONE_PIECE]
    assert found.number == 9 and found.seconds == {HOST: 0.0, DEVICE: pytest.approx(-9e-6)}


def test_experts_and_a_machine_without_an_accelerator():
    model = graph(Shape(n_expert=8))
    found = by_name(operator_kinds(costs(model, ()), 1, decode=True))
    experts = found["ffn_up_exps"]
    assert experts.ne == (64, 128, 8) and experts.nbytes == 4 * 8 * 2 * 64 * 128
    assert {*experts.seconds} == {HOST} and experts.saved is None and experts.affinity is None


def test_two_types_of_one_weight_are_two_kinds():
    tensors = [replace(t, type="f32") if t.name == "blk.0.attn_v.weight" else t for t in MODEL.tensors]
    model = replace(MODEL, tensors=tuple(tensors))
    machine = profile(model)
    kinds = operator_kinds(CostModel(model, machine, (DEVICE,), CONTEXT), 1, decode=True)
    assert [(k.type, k.number) for k in kinds if k.kind == "attn_v"] == [("f32", 1), ("f16", 3)]


# ---- in place ------------------------------------------------------------------------------------------------------


def timed(weight: str, s: float, op: str = "MUL_MAT") -> TimedOperator:
    return TimedOperator(HOST, f"node of {weight}", op, weight, s)


def test_errors_of_a_profile_by_hand():
    made = costs(accelerators=())
    each = made.profile.op_time(HOST, "MUL_MAT", "f16", (64, 128), 1).seconds
    attention = made.profile.attention_time(HOST, (4, 2, 16, 16), 1, 1024).seconds
    records = [timed(f"blk.{il}.ffn_up.weight", 2 * each) for il in range(4)]
    records += [timed("q-0", attention / 2, "FLASH_ATTN_EXT") for _ in range(4)]
    records += [timed("norm-0", 1e-6, "RMS_NORM"), timed("unknown", 1.0, "MUL_MAT")]
    found = {row.kind: row for row in compare_in_place(made, records, 1, 1024, decode=True)}
    up = found["ffn_up"]
    assert (up.number, up.device, up.type) == (4, HOST, "f16") and up.error_percent == pytest.approx(-50.0)
    assert found["attention fused"].error_percent == pytest.approx(100.0)
    assert found[SMALL].measured_s == 1e-6
    assert found["attention unfused"].predicted_s is None and found["attention unfused"].error_percent is None


def test_a_device_that_ran_half_of_a_kind_is_compared_with_half():
    made = costs()
    each = made.profile.op_time(HOST, "MUL_MAT", "f16", (64, 128), 1).seconds
    records = [timed(f"blk.{il}.ffn_up.weight", each) for il in range(2)]
    (row,) = compare_in_place(made, records, 1, 1024, decode=True)
    assert row.error_percent == pytest.approx(0.0)


def test_a_tied_output_is_known_by_its_embedding():
    model = graph(Shape(tied=True))
    (row,) = compare_in_place(costs(model, ()), [timed("token_embd.weight", 1.0)], 1, 1024, decode=True)
    assert row.kind == "output"


# ---- tables --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [Shape(), Shape(n_expert=8), QWQ_32B])
def test_tables_fit_80_columns(shape):
    model = graph(shape)
    made = costs(model, flash=(True, False), in_one_piece={"norm+mul": 1e-6})
    out = io.StringIO()
    console = Console(file=out, width=80, no_color=True, legacy_windows=False)
    console.print(render_kinds("decode", operator_kinds(made, 1, decode=True)))
    console.print(render_in_place("decode", compare_in_place(made, [timed("output.weight", 1.0)], 1, 1024, True)))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert "ms/GB" in text and "affinity" in text and "attn_q" in text and "attention unfused" in text
