"""Attention on a datasheet's CPU: shares read from measurements, scaled, chosen among; malformed files refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import product

import pytest

from oallama.data.operators import AttentionShape
from oallama.data.plan import HOST, ContextSettings
from oallama.data.workload import Workload
from oallama.errors import OallamaError
from oallama.planning import make_plans
from oallama.profiling.cpu_attention import FOLDER, FORMS, AttentionEfficiencies, Cell
from oallama.profiling.datasheet import FOLDER as SHEETS
from oallama.profiling.datasheet import Cpu, Datasheet, make_profile
from oallama.profiling.roofline import CACHE_BYTES, Attention
from support.paths import ROOT
from support.processes import ran
from support.synthetic import QWQ_32B, Shape, graph, space

QWQ = AttentionShape(40, 8, 128, 128)
SHIPPED = AttentionEfficiencies.load("epyc-2-cores")
FUSED, UNFUSED, OURS = FORMS
# The machine of the measurements, were its memory always read at 43.39 GB/s.
EPYC = Cpu("epyc", cores=2, ghz=4.31875, flops_per_cycle=64, dram_gb_s=43.39, bandwidth_efficiency=1, overhead_s=0)


def cell(form=FUSED, type="f16", n_tokens=1, depth=1024, bandwidth=0.5, compute=0.1):
    return Cell(*form, type, 40, 8, 128, n_tokens, depth, bandwidth, compute)


def seconds(cpu: Cpu, n_tokens: int, depth: int, types=("f16", "f16"), shape=QWQ) -> dict[tuple[str, bool], float]:
    return {(t.kernel, t.flash): t.seconds for t in cpu.attends(Attention(shape, *types, n_tokens, depth))}


def cpu_with(*cells: Cell) -> Cpu:
    return replace(EPYC, attention=AttentionEfficiencies("made", "a file", "a CPU", cells))


# ---- measurements --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_shares_are_those_of_the_file_they_name(path):
    made = AttentionEfficiencies.load(path.stem)
    lines = [json.loads(line) for line in (ROOT / made.source).read_text().splitlines()]
    assert made.name == path.stem and len(made.cells) == sum(len(line["ms"]) for line in lines)
    peak = made.measured_on.split(" GFLOP/s")[0].split()[-1]
    options = ("--efficiencies", made.name, "--from", ROOT / made.source, "--peak-gflops", peak)
    assert ran(sys.executable, ROOT / "bench/attention.py", *options).stdout == path.read_text()


def test_on_the_cpu_that_was_measured_they_give_the_measured_times():
    """Where its memory is read at the same rate, each cell takes what it took, to the three digits of its share."""
    lines = [json.loads(line) for line in (ROOT / SHIPPED.source).read_text().splitlines()]
    for line in lines:
        cpu = replace(EPYC, dram_gb_s=line["read_gb_s"])
        n_head, n_head_kv, dim = map(int, line["heads"].split("/"))
        shape = AttentionShape(n_head, n_head_kv, dim, dim)
        found = seconds(cpu, line["n_tokens"], line["depth"], (line["cache"],) * 2, shape)
        names = {"fused": FUSED, "unfused": UNFUSED, "ours": OURS}
        assert found == pytest.approx({names[form]: ms / 1e3 for form, ms in line["ms"].items()}, rel=0.01)


def test_every_shipped_datasheet_names_where_its_shares_are_from():
    for path in SHEETS.glob("*.json"):
        sheet = Datasheet.load(path.stem)
        assert any(sheet.cpu.attention.source in text for text in sheet.sources)
        (note,) = make_profile(graph(), sheet).remarks([HOST])
        assert sheet.cpu.attention.source in note and sheet.cpu.attention.measured_on in note


# ---- scaled to another CPU -----------------------------------------------------------------------------------------


def test_bound_by_products_it_scales_with_cores_clock_and_vectors():
    for form, n_tokens in product(FORMS, (32, 512)):
        base = seconds(EPYC, n_tokens, 16384)[form]
        more = replace(EPYC, cores=16, ghz=EPYC.ghz / 2, flops_per_cycle=32)
        assert seconds(more, n_tokens, 16384)[form] == pytest.approx(base / 2)
        assert seconds(replace(EPYC, dram_gb_s=400), n_tokens, 16384)[form] == pytest.approx(base)


def test_bound_by_memory_it_scales_with_memory():
    """Our decode of f16 reads at the best share of the rate; more cores do not help it, less bandwidth slows it."""
    many = replace(EPYC, cores=64)
    best = max(c.bandwidth_efficiency for c in SHIPPED.cells if (c.kernel, c.type) == ("oallama", "f16"))
    nbytes = 16384 * 8 * 256 * 2
    assert seconds(many, 1, 16384)[OURS] == pytest.approx(nbytes / (43.39e9 * best))
    assert seconds(replace(many, dram_gb_s=20), 1, 16384)[OURS] == pytest.approx(nbytes / (20e9 * best))


@pytest.mark.parametrize("name", sorted(path.stem for path in SHEETS.glob("*.json")))
def test_no_kernel_is_as_fast_as_memory_and_products(name):
    """What prices were before: all K and V at the speed of memory."""
    cpu = Datasheet.load(name).cpu
    for type, n_tokens, depth in product(("f16", "q8_0"), (1, 2, 8, 64, 512), (512, 4096, 32768)):
        work = Attention(QWQ, type, type, n_tokens, depth)
        memory = work.cache_bytes / cpu.roofline.bytes_s
        for form, found in seconds(cpu, n_tokens, depth, (type, type)).items():
            assert found > memory and found > work.flops / cpu.flops, (form, n_tokens, depth)
    deep = seconds(cpu, 1, 32768)
    assert deep[OURS] < deep[UNFUSED] < deep[FUSED]


def test_between_cells_shares_are_log_log_and_beyond_them_the_nearest():
    cpu = cpu_with(*(cell(n_tokens=n, depth=d, compute=c)
                     for n, d, c in ((1, 1024, 0.1), (1, 4096, 0.4), (64, 1024, 0.2))))  # fmt: skip
    peak = cpu.flops

    def share(n_tokens, depth):
        return Attention(QWQ, "f16", "f16", n_tokens, depth).flops / seconds(cpu, n_tokens, depth)[FUSED] / peak

    assert share(64, 1024) == pytest.approx(share(64, 9999)) == pytest.approx(0.2)
    assert share(8, 1024) == pytest.approx((0.1 * 0.2) ** 0.5)
    assert share(8, 2048) == pytest.approx((0.2 * 0.2) ** 0.5)
    assert share(1024, 7) == pytest.approx(0.2)


def test_types_and_heads_without_cells_take_the_nearest():
    cells = (cell(compute=0.2), cell(type="q8_0", compute=0.05), replace(cell(compute=0.1), n_head=8))
    cpu = replace(cpu_with(*cells), dram_gb_s=10**6)
    flops = Attention(QWQ, "f16", "f16", 1, 1024).flops
    for types, share in {("bf16", "f32"): 0.2, ("q4_0", "q5_1"): 0.05, ("f16", "q8_0"): 0.05}.items():
        assert seconds(cpu, 1, 1024, types)[FUSED] == pytest.approx(flops / cpu.flops / share)
    alone = AttentionShape(16, 16, 128, 128)
    assert seconds(cpu, 1, 1024, shape=alone)[FUSED] == pytest.approx(flops * 16 / 40 / cpu.flops / 0.1)


def test_forms_that_the_cache_or_the_heads_do_not_allow():
    assert set(seconds(EPYC, 1, 4096)) == {*FORMS}
    for type in CACHE_BYTES:
        have = set(seconds(EPYC, 1, 4096, (type, type)))
        assert FUSED in have and (UNFUSED in have) == (type in ("f16", "bf16", "f32"))
        assert (OURS in have) == (type in ("f16", "bf16", "f32", "q8_0", "q4_0"))
    assert OURS not in seconds(EPYC, 1, 4096, shape=AttentionShape(4, 4, 40, 40))


# ---- the choice ----------------------------------------------------------------------------------------------------


def chosen(model: Shape, depth: int, **more):
    """How the CPU alone attends, planned for the datasheet's machine."""
    forms = {"auto": graph(model), "off": graph(replace(model, fused=False))}
    machine = make_profile(forms["auto"], Datasheet.load("rtx4090-xeon4314"))
    asked = space(forms["auto"], machine=machine, accelerators=(), graphs=forms, workload=Workload(16, 64, depth),
                  context=ContextSettings(n_ctx=32768, flash_attn="auto"), **more)  # fmt: skip
    context = make_plans(asked, "cpu").best.context
    return context.attention, context.flash_attn


def test_at_depth_the_choice_flips_to_our_kernels():
    model = replace(QWQ_32B, n_layer=2)
    assert chosen(model, 0) == ("ggml", "auto")
    assert chosen(model, 16384) == ("oallama", "auto")
    assert chosen(model, 16384, own_attention=False) == ("ggml", "off")


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("schema", "oallama.datasheet/1"), "schema is not"),
        (("source", None), "no 'source'"),
        (("measured_on", 3), "measured_on is 3, expected a text"),
        (("cells", None), "no 'cells'"),
        (("cells", []), "none of ggml's fused attention"),
        (("cells", [7]), r"cells\[0\] is 7, expected an object"),
        (("cells", 1, "kernel", "ik"), r"cells\[1\].kernel is 'ik', expected one of ggml, oallama"),
        (("cells", 2, "flash", False), r"cells\[2\] is unfused and of oallama"),
        (("cells", 0, "flash", 1), r"cells\[0\].flash is 1, expected true or false"),
        (("cells", 0, "type", "q3_K"), r"cells\[0\].type is 'q3_K'"),
        (("cells", 0, "n_head", 41), r"cells\[0\].n_head is 41, expected a multiple of n_head_kv"),
        (("cells", 0, "n_tokens", 0), r"cells\[0\].n_tokens is 0"),
        (("cells", 0, "compute_efficiency", 1.2), r"cells\[0\].compute_efficiency is 1.2.*at most 1"),
        (("cells", 0, "bandwidth_efficiency", None), r"cells\[0\] has no bandwidth_efficiency"),
        (("cells", 0, "ms", 3), r"cells\[0\].ms is not known"),
        (("cells", 3, "depth", 4096), r"cells\[3\] was there before"),
    ],
)
def test_malformed_shares_are_refused(tmp_path, change, words):
    content = json.loads((FOLDER / "epyc-2-cores.json").read_text())
    *way, key, value = change
    place = content
    for step in way:
        place = place[step]
    if value is None:
        del place[key]
    else:
        place[key] = value
    sheet = json.loads((SHEETS / "h200.json").read_text())
    sheet["cpu"]["attention"] = "shares.json"  # beside the datasheet
    for name, text in (("shares", content), ("sheet", sheet)):
        (tmp_path / f"{name}.json").write_text(json.dumps(text))
    with pytest.raises(OallamaError, match=words) as error:
        Datasheet.load(tmp_path / "sheet.json")
    assert str(tmp_path / "shares.json") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (7, r"cpu.attention is 7, expected the name of a shipped file, or a path"),
        ("epyc-9", r"no file of attention efficiencies is called 'epyc-9'.*epyc-2-cores"),
        ("missing.json", r"missing.json does not exist"),
    ],
)
def test_a_datasheet_names_shares_that_exist(tmp_path, attention, words):
    sheet = json.loads((SHEETS / "h200.json").read_text())
    sheet["cpu"]["attention"] = attention
    (tmp_path / "sheet.json").write_text(json.dumps(sheet))
    with pytest.raises(OallamaError, match=words):
        Datasheet.load(tmp_path / "sheet.json")


def test_a_datasheet_that_names_none_takes_the_shipped_ones(tmp_path):
    sheet = json.loads((SHEETS / "h200.json").read_text())
    del sheet["cpu"]["attention"]
    (tmp_path / "sheet.json").write_text(json.dumps(sheet))
    assert Datasheet.load(tmp_path / "sheet.json").cpu.attention == SHIPPED
