"""The layered form is the predictor: equal seconds for every placement, and its optimum is the optimum."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from oallama.data.operators import OperatorGraph
from oallama.data.plan import ContextSettings
from oallama.data.workload import Workload
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from oallama.planning.block import Block
from oallama.planning.cost import CostModel
from oallama.planning.exact import exact
from oallama.planning.layered_model import LayeredModel
from oallama.planning.layers import NotLayered
from oallama.planning.planner import make_plans
from oallama.planning.predict import Predictor
from oallama.planning.space import BudgetTooSmall
from oallama.planning.stage import OFFLOAD_MIN_TOKENS, Homes, spread
from oallama.solving.layered import Infeasible
from oallama.solving.solve import solve
from support.layered_costs import SLOWER, TINY, assert_equal_seconds, everything_on_the_host, random_machine
from support.logits import ARCHITECTURES
from support.synthetic import CONTEXT, DEVICE, SMALL, FakeMemory, Shape, graph, profile, raw_graph, space

# One and several micro-batches, the last one too small for uploads, several sequences; no prompt; no answer.
WORKLOADS = (Workload(1100, 50, depth=300), Workload(530, 20, n_parallel=3), Workload(0, 9), Workload(700, 1))


@pytest.mark.parametrize("accelerators", [(DEVICE,), (DEVICE, "GPU1")])
@pytest.mark.parametrize("uploads", [False, True])
@pytest.mark.parametrize(
    "shape", [SMALL, Shape(fused=False), Shape(tied=True), Shape(n_expert=8, n_layer=3), Shape(one_qkv=True, n_ff=0)]
)
def test_layers_add_up_to_the_prediction(shape: Shape, uploads: bool, accelerators: tuple[str, ...]) -> None:
    model = graph(shape)
    machine = profile(model, more={"GPU1": SLOWER}, flash=(shape.fused,))
    costs = CostModel(model, machine, accelerators, CONTEXT)
    for work in WORKLOADS:
        assert_equal_seconds(costs, work, uploads, n=8)


@pytest.mark.parametrize("concurrency", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("uploads", [False, True])
@pytest.mark.parametrize("shape", [SMALL, Shape(tied=True), Shape(n_expert=8, n_layer=3)])
def test_so_do_those_with_divided_weights(shape: Shape, uploads: bool, concurrency: float) -> None:
    model = graph(shape)
    costs = CostModel(model, profile(model, concurrency=concurrency), (DEVICE,), CONTEXT)
    for work in WORKLOADS:
        assert_equal_seconds(costs, work, uploads, n=24, divides=True)


@pytest.mark.parametrize("flash_attn", ["auto", "off"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_layers_of_the_engines_graphs_add_up_to_the_prediction(arch: str, flash_attn: str, tiny) -> None:
    context = ContextSettings(4096, flash_attn=flash_attn)
    model = autoplan.read_graph(tiny(arch), Settings(n_ctx=4096, flash_attn=flash_attn))
    machine = profile(model, more={"GPU1": SLOWER}, flash=(True, False))
    for (accelerators, work), uploads in product(
        [((DEVICE,), WORKLOADS[0]), ((DEVICE,), WORKLOADS[1]), ((DEVICE, "GPU1"), WORKLOADS[1])], [False, True]
    ):
        costs = CostModel(model, machine, accelerators, context)
        assert costs.flash == (flash_attn != "off")
        assert_equal_seconds(costs, work, uploads, n=4)
        if len(accelerators) == 1:
            assert_equal_seconds(costs, work, uploads, n=24, divides=True)


def test_an_empty_request_costs_nothing() -> None:
    model = graph()
    assert_equal_seconds(CostModel(model, profile(model), [DEVICE], CONTEXT), Workload(0, 1), False, n=2)


# ---- the optimum ---------------------------------------------------------------------------------------------------


class Everything:
    """All placements of a tiny model: homes of every target, every KV cache and the small weights of every layer.

    rows: (placements, targets + caches + layers) device ids. The layers' small weights are read off their names,
    not from `LayeredModel`.
    """

    def __init__(self, costs: CostModel) -> None:
        self.costs, n_layer = costs, costs.graph.n_layer
        n_targets = len(costs.targets)
        devices = range(len(costs.names))
        self.rows = np.array(list(product(devices, repeat=n_targets + n_layer + n_layer + 1)), dtype=np.int8)
        self.targets = self.rows[:, :n_targets]
        self.cache = self.rows[:, n_targets : n_targets + n_layer]
        own = [name.startswith("blk.") and int(name.split(".")[1]) for name in costs.small]
        self.layer_of_small = [n_layer if layer is False else layer for layer in own]
        self.embedding = costs.small.index("token_embd.weight") if "token_embd.weight" in costs.small else -1
        self.small = self.rows[:, [n_targets + n_layer + layer for layer in self.layer_of_small]].copy()
        if self.embedding >= 0:
            self.small[:, self.embedding] = 0

    def homes(self, row: int, upload: np.ndarray) -> Homes:
        targets = self.targets[row]
        layers = np.append(self.cache[row], self.rows[row, -1])
        nothing = np.zeros(len(self.costs.small), bool)
        return Homes(targets, upload & (targets == 0), self.small[row], nothing, layers)

    def nbytes(self, kv_bytes: list[int]) -> np.ndarray:
        """(placements, accelerators)."""
        small = np.array([self.costs.graph.tensor[name].nbytes for name in self.costs.small])
        return np.stack(
            [
                (self.targets == d) @ self.costs.nbytes + (self.small == d) @ small + (self.cache == d) @ kv_bytes
                for d in range(1, len(self.costs.names))
            ],
            axis=1,
        )

    def requests(self, work: Workload, upload: np.ndarray) -> np.ndarray:
        """(placements,) seconds of the request: `Predictor.request` for all of them at once."""
        costs = self.costs
        chunks = work.chunks(costs.context.n_ubatch)
        total = np.zeros(len(self.rows))
        for i, (n, depth) in enumerate(chunks):
            total += self._stage(n, depth, i == len(chunks) - 1, False, upload)
        steps = max(0, work.n_generate - 1)
        return total + steps * self._stage(work.n_parallel, work.middle, True, True, upload)

    def _stage(self, n_tokens: int, depth: int, logits: bool, decode: bool, upload: np.ndarray) -> np.ndarray:
        costs = self.costs
        at = costs.stage(n_tokens, decode)
        pins = np.zeros((len(self.rows), len(at.graph.operators)), np.int8)
        moved = np.zeros(pins.shape, bool)
        for op in range(pins.shape[1]):
            if (target := at.graph.target[op]) >= 0:
                home = self.targets[:, target]
                if upload[target] and costs.uploader and at.tokens[op] >= OFFLOAD_MIN_TOKENS:
                    moved[:, op] = home == 0
                pins[:, op] = np.where(moved[:, op], costs.uploader, home)
            elif (layer := at.graph.cache_layer[op]) >= 0:
                pins[:, op] = self.cache[:, layer]
            elif (small := at.graph.small[op]) >= 0:
                pins[:, op] = self.small[:, small]
        block = Block(at, 0, pins.shape[1], logits)
        return block.seconds(costs, spread(pins, at.graph.before, at.graph.after), moved, depth, None).total


@pytest.mark.parametrize(("accelerators", "n"), [(1, 40), pytest.param(1, 200, marks=pytest.mark.slow), (2, 40)])
def test_the_exact_plan_is_the_optimum_of_all_placements(accelerators: int, n: int, record_property) -> None:
    """At gap 0, over models, machines, budgets and workloads; the oracle follows the whole graph."""
    rng, solved, infeasible = random.Random(accelerators), 0, 0
    work_items = (Workload(100, 8), Workload(0, 8), Workload(150, 2, depth=900), Workload(64, 5, n_parallel=2))
    for trial in range(n):
        # All placements of two layers on three devices are too many to try often.
        model = rng.choice([m for m in TINY if accelerators == 1 or m.n_layer == 1 or trial % 20 == 0])
        machine = random_machine(model, rng, accelerators)
        names = [DEVICE, "GPU1"][:accelerators]
        costs = CostModel(model, machine, names, ContextSettings(4096, n_ubatch=64))
        work, predictor, all_of_them = rng.choice(work_items), Predictor(costs), Everything(costs)
        kv = [rng.randrange(40_000) for _ in range(model.n_layer)]
        need = all_of_them.nbytes(kv)
        capacity = [int(rng.uniform(0, 1.1) * n) for n in need.max(axis=0)]
        fits = (need <= capacity).all(axis=1)
        for upload in (np.zeros(len(costs.targets), bool), np.array([rng.random() < 0.5 for _ in costs.targets])):
            layered = LayeredModel(costs, work, upload, kv)
            ways_of_layers = [len(layered.classes[c][0].small) for c in layered.instance(capacity).layers]
            assert math.prod(ways_of_layers) == len(all_of_them.rows)
            seconds = np.where(fits, all_of_them.requests(work, upload), np.inf)
            best = int(seconds.argmin())
            assert seconds[best] == pytest.approx(predictor.request(all_of_them.homes(best, upload), work), rel=1e-12)
            try:
                found = solve(layered.instance(capacity), gap=0, time_limit_s=10)
            except Infeasible:
                infeasible += 1
                assert not fits.any()
                continue
            solved += 1
            homes = layered.homes(found.ways.tolist(), everything_on_the_host(costs))
            assert found.status == "optimal"
            assert predictor.request(homes, work) == pytest.approx(seconds[best], rel=1e-9)
            assert found.bound <= seconds[best] * (1 + 1e-9)
    record_property("solved", solved)
    record_property("infeasible", infeasible)
    assert solved >= {1: n // 2, 2: 50}[accelerators]


def test_the_exact_planner_finds_the_optimum_of_the_dry_runs() -> None:
    """The whole planner, with KV cache and compute buffers that the dry run counts."""
    rng = random.Random(3)
    for _ in range(40):
        model = rng.choice(TINY)
        machine = replace(random_machine(model, rng, 1))
        machine = replace(machine, devices=tuple(replace(d, op_offload=False) for d in machine.devices))
        context = ContextSettings(n_ctx=rng.choice((64, 256)), n_ubatch=64)
        memory = FakeMemory(model, compute=80_000)
        asked = {"machine": machine, "memory": memory, "context": context, "workload": Workload(30, 8), "gap": 0.0}
        request = space(model, 1, streams=False, **asked)
        builder = request.builder(request.ours)
        all_of_them, nothing = Everything(builder.costs), np.zeros(len(builder.costs.targets), bool)
        kv = [2 * context.n_ctx * s.n_head_kv * (s.head_dim_k + s.head_dim_v) for s in model.attention if s]
        need = all_of_them.nbytes(kv)[:, 0] + memory.compute * context.n_ubatch // 512
        budget = int(rng.uniform(need.min(), need.max()))
        seconds = all_of_them.requests(request.workload, nothing)[need <= budget]
        _, found = exact(space(model, budget, streams=False, **asked))
        assert found.dry_run.seconds == pytest.approx(seconds.min(), rel=1e-9)
        assert found.dry_run.on(DEVICE).total <= budget
        assert found.proposal.params["gap"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("percent", "compute"), [(15, 0.5), (15, 1.0), (50, 1.0)])
def test_a_small_budget_is_shared_with_the_compute_buffers_at_best(percent: int, compute: float) -> None:
    """compute: buffers of a micro-batch of 512 as a share of the budget."""
    model = graph(Shape(6, 1024, 8, 2, 128, 2816, 4096, "q4_K"))
    budget = model.weights_bytes * percent // 100
    asked = {
        "machine": profile(model, overlap=0.9),
        "memory": FakeMemory(model, compute=int(compute * budget)),
        "workload": Workload(256, 64),
    }

    def seconds(n_ubatch: int, streams: bool, free: bool) -> float:
        context = replace(CONTEXT, n_ubatch=n_ubatch)
        try:
            request = space(model, budget, context=context, streams=streams, free_ubatch=free, **asked)
            return exact(request)[1].dry_run.seconds
        except BudgetTooSmall:
            return math.inf

    fixed = [seconds(n, streams, False) for n, streams in product((64, 128, 256, 512), (False, True))]
    assert seconds(512, True, True) <= 1.002 * min(fixed)


# ---- graphs that cannot be cut -------------------------------------------------------------------------------------


def skipping(layer: int, read: int) -> OperatorGraph:
    """The synthetic model, but the residual of `layer` adds the result of layer `read`."""
    raw = raw_graph(SMALL)
    for nodes in raw["graphs"].values():
        at = {node["name"]: i for i, node in enumerate(nodes)}
        nodes[at[f"l_out-{layer}"]]["src"][1] = {"kind": "node", "index": at[f"l_out-{read}"]}
    return OperatorGraph.from_engine(raw)


@pytest.mark.parametrize(("layer", "read"), [(2, 0), (3, 0), (3, 1)])
def test_a_graph_that_skips_a_layer_is_not_layered(layer: int, read: int) -> None:
    """Also where the layer is like another in everything but what it reads."""
    model = skipping(layer, read)
    costs = CostModel(model, profile(model), [DEVICE], CONTEXT)
    layered = LayeredModel(costs, Workload(), np.zeros(len(costs.targets), bool), [0] * model.n_layer)
    with pytest.raises(NotLayered, match=f"'l_out-{read}' is read beyond the next layer"):
        layered.instance([10**9])


def test_a_graph_that_skips_a_layer_is_planned_by_the_others() -> None:
    model = skipping(2, 0)
    found = make_plans(space(model))
    assert isinstance(found.failed["exact"], NotLayered)
    assert {"oato", "layers", "cpu"} <= set(found.plans)


def test_equal_layers_share_a_class() -> None:
    model = graph(Shape(n_layer=12))
    costs = CostModel(model, profile(model), [DEVICE], CONTEXT)
    layered = LayeredModel(costs, Workload(), np.zeros(len(costs.targets), bool), [7] * model.n_layer)
    # The first layer holds the embedding as well; the head.
    assert layered.instance([10**9]).layers == (0, *[1] * 11, 2)
