"""Device memory that ggml-cuda takes while it computes and no dry run counts: the pool for converted operands.

cuBLAS multiplies F16 by F16 or F32 by F32, so ggml-cuda converts an operand of another type into a pool that grows to
the most that one operator ever needed (ggml-cuda.cu, ggml_cuda_mul_mat_cublas_impl). When the device has no memory for
it the process ends. The rules here are those of compute capability 7.5 and later; older cards convert quantised
weights, too. Other backends count such buffers themselves or have none.
"""

from __future__ import annotations

from ..data.entries import padded_rows
from ..data.operators import AttentionShape, Operator
from ..data.plan import HOST, PlacementPlan, TensorPlacement
from .cost import CostModel

BACKEND = "CUDA"
# The pool grows by whole pages of virtual memory management.
PAGE = 2 << 20
# Weight types that reach cuBLAS. The others are multiplied as they are (mmq.cu), by activations of 36 bytes per 32.
_CONVERTED = ("f32", "f16", "bf16", "iq1_m")
_ACTIVATION_BYTES = 36 / 32
_F16, _F32 = 2, 4


def pool_bytes(costs: CostModel, plan: PlacementPlan, device: str) -> int:
    """Bytes of the pool of `device` under `plan`, at the plan's micro-batch and a full context; 0 where it has none."""
    if device == HOST or costs.profile.device(device).backend != BACKEND:
        return 0
    first = costs.names[1:2] == (device,)
    tier, n_tokens = costs.prefill_tier, plan.context.n_ubatch
    needs = [
        _product(op, costs.graph.tensor[op.weight or ""].ne, plan.tensors[op.weight or ""].type, n_tokens)
        for op in costs.graph.targets(tier)
        if _computes(plan.tensors[op.weight or ""], device, first)
    ]
    if not costs.flash:
        reads = (home == device or (plan.stream_caches and first) for home in plan.layers)
        shapes = {shape for shape, here in zip(costs.graph.attention, reads, strict=False) if here and shape}
        needs += [_attention(shape, n_tokens, costs.context.n_ctx, plan.context.type_k) for shape in shapes]
    return -(-max(needs, default=0) // PAGE) * PAGE


def _computes(tensor: TensorPlacement, device: str, first: bool) -> bool:
    moved = first and tensor.mode in ("upload", "stream")
    return moved or any(segment.device == device for segment in tensor.segments)


def _product(op: Operator, ne: tuple[int, ...], type: str, n_tokens: int) -> int:
    """Bytes for a product with a weight: activations, and the weight and the result where cuBLAS multiplies."""
    k, m = ne[:2]
    rows = (n_tokens if op.n_tokens > 1 else 1) * op.n_used
    if type not in _CONVERTED:
        return int(k * rows * _ACTIVATION_BYTES)
    weight = k * m * _F16 if type == "iq1_m" else 0
    converted = 0 if type == "f32" else (k + m) * rows * _F16 + weight
    # Experts' rows are sorted first, in F32.
    return converted + ((k + m) * rows * _F32 if op.op == "MUL_MAT_ID" else 0)


def _attention(shape: AttentionShape, n_tokens: int, n_ctx: int, type_k: str) -> int:
    """Bytes for unfused attention: K in F32 for the scores, which are summed up in F32; the scores in F16 for V."""
    rows = padded_rows(n_ctx)
    keys = 0 if type_k == "f32" else rows * shape.n_head_kv * shape.head_dim_k * _F32
    scores = (rows + shape.head_dim_v) * n_tokens * shape.n_head * _F16
    return max(keys, scores)
