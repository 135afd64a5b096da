"""Where operators run under a placement, OATO's reduced graph, and what a forward pass costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oallama.data.entries import Note
from oallama.data.plan import HOST, ContextSettings
from oallama.data.workload import Workload
from oallama.errors import OallamaError
from oallama.planning.cost import CostModel
from oallama.planning.predict import Predictor
from oallama.planning.reduced import reduced_edges
from oallama.planning.stage import Homes
from support.synthetic import DEVICE, GPU, SMALL, Shape, graph, profile

CONTEXT = ContextSettings(n_ctx=4096)


def costs(shape: Shape = SMALL, **kwargs) -> CostModel:
    model = graph(shape)
    return CostModel(model, profile(model, **kwargs), [DEVICE], CONTEXT)


def place(model: CostModel, *on_host: str, upload: tuple[str, ...] = (), layers_on_host: int = 0) -> Homes:
    """Everything on the device but the embedding and the named targets."""
    hosted = {*on_host, *upload}
    return Homes(
        targets=np.array([name not in hosted for name in model.targets], dtype=np.int8),
        upload=np.array([name in upload for name in model.targets], dtype=bool),
        small=np.array([name != "token_embd.weight" for name in model.small], dtype=np.int8),
        small_upload=np.zeros(len(model.small), dtype=bool),
        layers=np.array([il >= layers_on_host for il in range(model.graph.n_layer + 1)], dtype=np.int8),
    )


def runs_on(model: CostModel, homes: Homes, n_tokens: int = 1) -> dict[str, int]:
    stage = model.stage(n_tokens, decode=n_tokens == 1)
    ids = stage.graph.assign(homes, stage.tokens)
    return {op.name: int(i) for op, i in zip(stage.graph.operators, ids, strict=True)}


# ---- scheduler rules -----------------------------------------------------------------------------------------------


def test_all_on_the_device_but_the_embedding():
    model = costs()
    ids = runs_on(model, place(model))
    assert [name for name, i in ids.items() if i == 0] == ["inp_embd"]


def test_operators_between_host_matrices_stay_on_the_host():
    model = costs()
    ids = runs_on(model, place(model, *(f"blk.1.ffn_{k}.weight" for k in ("up", "gate", "down"))))
    assert ids["swiglu-1"] == 0
    assert ids["l_out-1"] == 1 and ids["blk.2.attn_norm.weight-2"] == 1


def test_the_device_spreads_over_neighbours():
    model = costs()
    assert runs_on(model, place(model, "blk.1.ffn_up.weight", "blk.1.ffn_gate.weight"))["swiglu-1"] == 1
    assert runs_on(model, place(model, "blk.1.ffn_down.weight"))["swiglu-1"] == 1


def test_attention_stays_with_its_cache():
    model = costs()
    hosted = [f"blk.0.attn_{k}.weight" for k in ("q", "k", "v", "output")]
    assert runs_on(model, place(model, *hosted))["fa-0"] == 1
    assert runs_on(model, place(model, *hosted, layers_on_host=1))["fa-0"] == 0


def test_uploads_start_at_32_tokens():
    model = costs()
    homes = place(model, upload=("blk.0.ffn_up.weight", "output.weight"))
    assert runs_on(model, homes, 512)["blk.0.ffn_up.weight"] == 1
    assert runs_on(model, homes, 31)["blk.0.ffn_up.weight"] == 0
    assert runs_on(model, homes, 512)["result_output"] == 0  # logits are one token


# ---- reduced graph -------------------------------------------------------------------------------------------------


def test_reduced_graph_of_a_layer():
    model = costs()
    graph_1 = model.stage(1, decode=True).graph
    links = reduced_edges(graph_1, place(model))
    index = {name: i for i, name in enumerate(model.targets)}

    def of(name: str) -> list[tuple]:
        return sorted(
            (link.anchor_on_device, link.direction, link.nbytes) for link in links
            if link.i == index[name] and link.j is None
        )  # fmt: skip

    activations, feed = 4.0 * SMALL.n_embd, 4.0 * SMALL.n_ff
    # Input from the norm on the device, output to attention on the device.
    assert of("blk.1.attn_q.weight") == [(True, "d2h", activations), (True, "h2d", activations)]
    assert of("blk.1.ffn_up.weight") == [(True, "d2h", activations)]
    assert of("output.weight") == [(False, "d2h", 4.0 * SMALL.n_vocab), (True, "d2h", activations)]
    edges = {(model.targets[link.i], model.targets[link.j]): link.nbytes for link in links if link.j is not None}
    assert edges == {
        (f"blk.{il}.ffn_down.weight", f"blk.{il}.ffn_{kind}.weight"): feed
        for il in range(SMALL.n_layer)
        for kind in ("up", "gate")
    }


def test_oato_inputs_weigh_both_stages():
    model = costs()
    start = place(model, *model.targets)
    decode_host, decode_device, edges, anchors = model.oato_inputs(Workload(0, 2), start)
    both_host, _, both_edges, _ = model.oato_inputs(Workload(1024, 2), start)
    stage = model.stage(512)
    assert len(decode_host) == len(model.targets)
    at = model.targets.index("blk.0.ffn_up.weight")
    op = next(op for op in stage.graph.operators if op.weight == "blk.0.ffn_up.weight")
    assert both_host[at] == pytest.approx(decode_host[at] + 2 * stage.seconds[0, op.index])
    assert (decode_device < decode_host).all()
    assert sum(e.seconds for e in both_edges) > sum(e.seconds for e in edges) > 0
    assert all(0 <= a.i < len(model.targets) for a in anchors)
    # What is uploaded in prefill crosses nothing there.
    up = replace(start, upload=np.ones(len(model.targets), dtype=bool))
    _, _, up_edges, _ = model.oato_inputs(Workload(1024, 2), up)
    assert [e.seconds for e in up_edges] == pytest.approx([e.seconds for e in edges])


def test_upload_pays_on_a_fast_link_only():
    shape = Shape(n_embd=2048, n_ff=8192, n_layer=1)
    assert costs(shape, link=50e9).upload_pays(Workload(512, 1)).any()
    assert not costs(shape, link=1e7).upload_pays(Workload(512, 1)).any()
    assert not costs(shape, link=50e9, op_offload=False).upload_pays(Workload(512, 1)).any()
    # A workload of tiny prompts is judged by a full micro-batch.
    assert costs(shape, link=50e9).upload_pays(Workload(8, 1)).any()


# ---- prediction ----------------------------------------------------------------------------------------------------


def test_everything_on_the_device_pays_one_copy_and_the_logits():
    model = costs()
    seconds = Predictor(model).stage(place(model), 1, depth=1, decode=True)
    stage = model.stage(1, decode=True)
    assert seconds.targets == pytest.approx(stage.seconds[1].sum())
    first, last = stage.move[0, 1, 0], stage.move[1, 0, -1]
    assert seconds.transfers == pytest.approx(first + last)
    assert seconds.switches == pytest.approx(model.switch[0, 1])
    assert seconds.attention > 0 and seconds.other > 0
    assert seconds.total == pytest.approx(
        seconds.targets + seconds.attention + seconds.transfers + seconds.switches + seconds.other
    )


def test_a_result_is_copied_once_for_all_its_readers():
    model = costs()
    predictor = Predictor(model)

    def transfers(*on_host: str) -> float:
        return float(predictor.stage(place(model, *on_host), 1, 1, decode=True).transfers[0])

    alone = transfers()
    q = transfers("blk.1.attn_q.weight") - alone
    qkv = transfers(*(f"blk.1.attn_{k}.weight" for k in "qkv")) - alone
    latency = 1e-5
    assert q == pytest.approx(2 * latency, rel=0.1)  # norm down, query up
    assert qkv == pytest.approx(4 * latency, rel=0.1)  # the norm once down, three results up


def test_host_layers_pay_host_attention():
    model = costs()
    predictor = Predictor(model)
    hosted = [name for name in model.targets if name.startswith("blk.0.")]
    on_host = predictor.stage(place(model, *hosted, layers_on_host=1), 1, 4096, decode=True)
    on_device = predictor.stage(place(model, *hosted), 1, 4096, decode=True)
    assert on_host.attention > on_device.attention


def test_ttft_runs_in_micro_batches():
    model = costs()
    predictor = Predictor(model)
    homes = place(model)
    chunks = [(512, 512, False), (512, 1024, False), (76, 1100, True)]
    expected = sum(predictor.stage(homes, n, depth, logits).total[0] for n, depth, logits in chunks)
    assert predictor.ttft(homes, 1100) == pytest.approx(expected)
    assert Workload(1100, 1).chunks(512) == [(n, depth) for n, depth, _ in chunks]
    # Only the last micro-batch computes the output matrix.
    assert predictor.stage(homes, 512, 512, False).targets < predictor.stage(homes, 512, 512, True).targets


def test_tpot_grows_with_depth_and_request_adds_up():
    model = costs(Shape(n_head_kv=8, n_head=8, head_dim=128))
    predictor, homes = Predictor(model), place(model)
    assert predictor.tpot(homes, 16384) > predictor.tpot(homes, 0)
    expected = predictor.ttft(homes, 64) + 9 * predictor.tpot(homes, 69)
    assert predictor.request(homes, Workload(64, 10)) == pytest.approx(expected)


def test_many_placements_are_predicted_as_one_by_one():
    model, work = costs(), Workload(700, 20, 100)
    predictor, rng = Predictor(model), np.random.default_rng(1)
    names = [[name for name in model.targets if rng.random() < 0.4] for _ in range(70)]
    placements = [place(model, *some, layers_on_host=int(rng.integers(3))) for some in names]
    placements += [place(model, upload=tuple(some)) for some in names]
    alone = [Predictor(model).request(homes, work) for homes in placements]
    assert predictor.requests(placements, work) == pytest.approx(alone, rel=1e-12)
    # Nothing of another is left.
    assert [predictor.request(homes, work) for homes in placements] == alone
    assert len(set(alone)) > 100
    ttft = predictor.ttft(placements[0], 700, 100)
    steps = 19 * predictor.tpot(placements[0], work.middle)
    assert predictor.request(placements[0], work) == ttft + steps


def test_fused_attention_of_more_tokens_than_were_measured_is_that_of_their_pieces():
    shape = costs().graph.attention[0]
    for flash in (True, False):
        model = graph(replace(SMALL, fused=flash))
        machine = profile(model, flash=(flash,))
        whole = CostModel(model, machine, [DEVICE], CONTEXT).attention_s(shape, 1536, 2048)
        # What a mask hides is skipped by fused kernels.
        parts = ((512, 2048), (512, 1536), (512, 1024)) if flash else ((1536, 2048),)
        pieces = sum(machine.attention_time(DEVICE, shape, n, rows, flash=flash).seconds for n, rows in parts)
        assert whole[1] == pytest.approx(pieces)


def test_only_unfused_attention_works_on_positions_beyond_the_last_token():
    def seconds(fused: bool) -> list[float]:
        model = costs(Shape(n_head_kv=8, n_head=8, head_dim=128, fused=fused), flash=(fused,))
        shape = next(s for s in model.graph.attention if s)
        return [float(model.attention_s(shape, 1, depth)[0]) for depth in (1100, 1250, 1400)]

    first, second, third = seconds(fused=True)
    assert first < second < third
    first, second, third = seconds(fused=False)
    assert first == second < third


def test_cuda_computes_the_padding_of_the_cache_in_both_forms():
    """Its fused kernels skip what the mask hides for 1024 queries and more alone."""
    shape = Shape(n_head_kv=8, n_head=8, head_dim=128)
    model = graph(shape)
    machine = profile(model)
    cuda = replace(machine, devices=tuple(replace(d, backend="CUDA") for d in machine.devices if d.name != HOST))
    cuda = replace(cuda, devices=(*cuda.devices, machine.device(HOST)))
    first = next(s for s in model.attention if s)
    on_cuda, elsewhere = (
        [CostModel(model, m, [DEVICE], CONTEXT).attention_s(first, 1, depth) for depth in (1100, 1250, 1280)]
        for m in (cuda, machine)
    )
    assert on_cuda[0][1] == on_cuda[1][1] == on_cuda[2][1]
    assert elsewhere[0][1] < elsewhere[1][1] < elsewhere[2][1] == on_cuda[2][1]
    assert [s[0] for s in on_cuda] == [s[0] for s in elsewhere]


def test_a_device_without_fused_attention_is_priced_by_the_other_form():
    """llama.cpp's "auto" takes that form for all of the model; "on" computes attention on the host."""
    model = graph(Shape(n_head_kv=8, n_head=8, head_dim=128))
    machine = profile(model, flash=(True, False))
    only = tuple(a for a in machine.attention if a.device != DEVICE or not a.flash)
    lacks = replace(machine, attention=only)
    shape = next(s for s in model.attention if s)
    assert machine.fuses(DEVICE, shape) and not lacks.fuses(DEVICE, shape) and lacks.fuses(HOST, shape)

    def seconds(flash_attn: str) -> float:
        context = replace(CONTEXT, flash_attn=flash_attn)
        return float(CostModel(model, lacks, [DEVICE], context).attention_s(shape, 1, 1100)[1])

    assert seconds("auto") == lacks.attention_time(DEVICE, shape, 1, 1280, flash=False).seconds
    on_host = lacks.attention_time(HOST, shape, 1, 1100).seconds
    assert seconds("on") > on_host > 0


def test_results_travel_by_pinned_memory_and_weights_from_the_file():
    model = costs()
    pinned, pageable = (model.profile.link_time(DEVICE, "h2d", 1 << 24, kind) for kind in ("pinned", "pageable"))
    assert model.link_s(1, "h2d", 1 << 24) == model.move_s(0, 1, 1 << 24) == pinned < pageable
    large = costs(Shape(n_embd=2048, n_ff=8192, n_layer=1))
    stage, up = large.stage(512), large.targets.index("blk.0.ffn_up.weight")
    at = int(np.flatnonzero(stage.graph.target == up)[0])
    nbytes = large.graph.tensor["blk.0.ffn_up.weight"].nbytes
    assert stage.upload[at] - stage.seconds[1, at] == pytest.approx(large.link_s(1, "h2d", nbytes, "pageable"))


def test_a_context_smaller_than_the_padding_is_padded_too():
    model = graph(Shape(fused=False))
    machine = profile(model, flash=(False,))
    shape = next(s for s in model.attention if s)
    small, large = (CostModel(model, machine, [DEVICE], replace(CONTEXT, n_ctx=n)) for n in (100, 4096))
    assert (small.attention_s(shape, 1, 100) == large.attention_s(shape, 1, 256)).all()


def test_notes_say_what_the_profiler_left_out():
    model = graph()
    notes = tuple(Note(name, f"task {i}", "not measured: no room") for name in (DEVICE, "GPU7") for i in range(3))
    predictor = Predictor(CostModel(model, replace(profile(model), notes=notes), [DEVICE], CONTEXT))
    assert predictor.notes() == (f"{DEVICE}: not measured: no room (task 0, task 1 and 1 more)",)


def test_notes_say_what_is_missing():
    model = graph()
    full = profile(model)
    bare = replace(full, switches=(), operators=tuple(o for o in full.operators if o.op != "OTHER"))
    predictor = Predictor(CostModel(model, bare, [DEVICE], CONTEXT))
    predictor.ttft(place(predictor.costs), 100)
    notes = " ".join(predictor.notes())
    assert "interpolated" in notes and "small operators" in notes and "device change" in notes
    complete = Predictor(costs())
    complete.tpot(place(complete.costs), 0)
    assert complete.notes() == ()


def test_experts_and_unfused_attention_are_costed():
    model = costs(Shape(n_expert=8, fused=False))
    seconds = Predictor(model).stage(place(model), 512, 512)
    assert seconds.targets > 0 and seconds.attention > 0


def test_without_accelerator():
    model = graph()
    host_only = CostModel(model, profile(model), (), CONTEXT)
    predictor = Predictor(host_only)
    nothing = replace(
        place(host_only, *host_only.targets, layers_on_host=SMALL.n_layer + 1),
        small=np.zeros(len(host_only.small), dtype=np.int8),
    )
    seconds = predictor.stage(nothing, 1, 1)
    assert seconds.transfers == seconds.switches == 0
    with pytest.raises(IndexError):  # never the seconds of some other device
        predictor.stage(place(host_only), 1, 1)


def test_accelerators_exchange_data_through_the_host():
    model = graph()
    slow = replace(GPU, bandwidth=GPU.bandwidth / 4, flops=GPU.flops / 4)
    two = CostModel(model, profile(model, more={"GPU1": slow}), [DEVICE, "GPU1"], CONTEXT)
    stage = two.stage(1, decode=True)
    assert stage.move[1, 2] == pytest.approx(stage.move[1, 0] + stage.move[0, 2])
    assert (stage.move[[0, 1, 2], [0, 1, 2]] == 0).all()
    assert two.switch[1, 2] == pytest.approx(two.switch[1, 0] + two.switch[0, 2])
    assert two.uploader == 1  # upstream sends uploads to the first accelerator
    # A result that both accelerators read is copied to each of them.
    predictor, start = Predictor(two), place(two)
    at = two.targets.index("blk.1.attn_q.weight")
    moved = replace(start, targets=np.where(np.arange(len(two.targets)) == at, 2, start.targets).astype(np.int8))
    here, there = (predictor.stage(p, 1, 1, decode=True) for p in (start, moved))
    assert there.transfers - here.transfers == pytest.approx(2 * stage.move[1, 2, 1], rel=0.1)  # norm out, query back
    assert there.targets > here.targets


def test_parallel_sequences_decode_together():
    model = costs()
    predictor, homes = Predictor(model), place(model)
    one, four = (predictor.stage(homes, n, 4096, decode=True) for n in (1, 4))
    assert four.attention == pytest.approx(4 * one.attention)  # each sequence attends to its own cache
    assert one.targets < four.targets < 4 * one.targets  # weights are read once for all of them
    work = Workload(64, 10, n_parallel=4)
    step = predictor.stage(homes, 4, work.middle, decode=True).total[0]
    expected = predictor.ttft(homes, 64) + 9 * step
    assert predictor.request(homes, work) == pytest.approx(expected)


def test_unknown_device():
    model = graph()
    with pytest.raises(OallamaError, match="no device 'GPU5'"):
        CostModel(model, profile(model), ["GPU5"], CONTEXT)


def test_weights_that_were_read_are_uploaded_from_pinned_memory():
    """The synthetic machine copies from there twice as fast as from a mapped file."""
    model = graph(SMALL)
    machine = profile(model, link=1e6)
    mapped, read = (
        CostModel(model, machine, [DEVICE], replace(CONTEXT, use_mmap=way)).stage(512) for way in (None, False)
    )
    copies = [(stage.upload - stage.seconds[1])[np.isfinite(stage.upload)] for stage in (mapped, read)]
    assert len(copies[0]) > 0 and copies[0] == pytest.approx(2 * copies[1], rel=0.05)
    assert mapped.small_upload == pytest.approx(2 * read.small_upload, rel=0.05)
