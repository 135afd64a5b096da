"""Writes tests/native/fuzz/corpus: what clients of every kind send, as the fuzz targets beside it read it.

    cd tests && ../.venv/bin/python -m support.fuzz_corpus [FOLDER]

Addresses differ from run to run; the corpus has names for them: buffers are 1, 2, .. in the order of their making, the
data of a tensor is an offset into its buffer.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from support import rpc_wire as wire
from support.paths import NATIVE
from support.rpc_wire import F16, F32, I32, graph, message, tensor

OP = wire.operators()
SIZE = 1 << 16
SET = struct.Struct("<BQ")
TWO = struct.Struct("<QQ")
ALLOC = message(wire.ALLOC_BUFFER, struct.pack("<IQ", 0, SIZE))
CLEAR = message(wire.BUFFER_CLEAR, struct.pack("<QB", 1, 0))
AGAIN = message(wire.GRAPH_RECOMPUTE, bytes(4))
Q8_0 = 8
ATTEND_PARAM = 13  # OA_ATTEND_PARAM of csrc/attend/own_attention.h
PRODUCTS_PARAM = 13  # OA_PRODUCTS_PARAM of csrc/products/own_products.h
LAST_NOTHING_PARAM = 14  # OA_LAST_NOTHING_PARAM of csrc/base/skipped_experts.h


def t(ident: int, ne: tuple[int, ...], at: int = 0, kind: int = F32, **more: object) -> bytes:
    return tensor(ident, kind, ne, 1, at, **more)  # type: ignore[arg-type]


def compute(nodes: tuple[int, ...], *tensors: bytes, clear: bytes = CLEAR) -> bytes:
    return ALLOC + clear + message(wire.GRAPH_COMPUTE, graph(nodes, tensors)) + AGAIN


def operator(name: str, ne: tuple[int, ...], *sources: bytes, **more: object) -> bytes:
    """A graph of one operator."""
    ids = tuple(struct.unpack_from("<Q", source)[0] for source in sources)
    node = t(99, ne, SIZE // 2, op=OP[name], src=ids, **more)  # type: ignore[arg-type]
    return compute((99,), *sources, node)


def commands() -> Iterator[tuple[str, bytes]]:
    whole = TWO.pack(0, 64)
    x = t(1, (16,))
    yield "devices", message(wire.DEVICE_COUNT) + message(wire.GET_DEVICE_MEMORY, bytes(4))
    yield "sizes", message(wire.GET_ALIGNMENT, bytes(4)) + message(wire.GET_MAX_SIZE, bytes(4))
    base = message(wire.BUFFER_GET_BASE, struct.pack("<Q", 1))
    yield "buffers", ALLOC + ALLOC + base + CLEAR + message(wire.FREE_BUFFER, struct.pack("<Q", 1))
    yield "empty_buffer", message(wire.ALLOC_BUFFER, struct.pack("<IQ", 0, 0)) + base
    yield "set", ALLOC + message(wire.SET_TENSOR, x + SET.pack(0, 0) + bytes(range(64)))
    yield "set_and_keep", ALLOC + message(wire.SET_TENSOR, x + SET.pack(1, 32) + bytes(range(32)))
    yield "set_by_hash", ALLOC + message(wire.SET_TENSOR_HASH, x + TWO.pack(0, 1))
    yield "get", ALLOC + CLEAR + message(wire.GET_TENSOR, x + whole)
    yield "memset", ALLOC + message(wire.MEMSET_TENSOR, x + whole + b"\1") + message(wire.GET_TENSOR, x + whole)
    yield "copy", ALLOC + CLEAR + message(wire.COPY_TENSOR, x + t(2, (16,), 64))
    quantized = t(1, (32, 4), kind=Q8_0, nb=(34, 34, 136, 136))
    yield "init", ALLOC + message(wire.INIT_TENSOR, quantized)
    attention = t(9, (64, 2, 4), op=OP["FLASH_ATTN_EXT"], src=(1, 2, 3))
    sources = b"".join(t(i, (64, 4, 2), kind=F16) for i in (1, 2, 3)) + tensor(0, 0, (1,)) * 7
    yield "alloc_size", message(wire.GET_ALLOC_SIZE, bytes(4) + attention + sources)
    yield "alloc_size_plain", message(wire.GET_ALLOC_SIZE, bytes(4) + quantized + tensor(0, 0, (1,)) * 10)
    freed = message(wire.FREE_BUFFER, struct.pack("<Q", 1))
    yield "recompute_after_free", compute((2,), x, t(2, (16,), 64, op=OP["SQR"], src=(1,))) + freed + AGAIN
    yield "get_after_free", ALLOC + freed + message(wire.GET_TENSOR, x + whole)
    yield from graphs()


def graphs() -> Iterator[tuple[str, bytes]]:
    x, y = t(1, (16, 4)), t(2, (16, 4), 1024)
    row = t(3, (16,), 2048)
    ids = t(4, (4,), 3072, I32)
    half = t(5, (16, 4), 4096, F16)
    for name in ("ADD", "MUL", "SUB", "DIV"):
        yield name.lower(), operator(name, (16, 4), x, row)
    for name in ("SQR", "NORM", "RMS_NORM", "SCALE", "CLAMP", "SOFT_MAX", "L2_NORM", "CUMSUM", "CONT"):
        yield name.lower(), operator(name, (16, 4), x)
    yield "silu", operator("UNARY", (16, 4), x, params=(10,))
    yield "glu", operator("GLU", (8, 4), x, params=(2,))
    yield "glu_split", operator("GLU", (16, 4), x, y, params=(2,))
    yield "mul_mat", operator("MUL_MAT", (4, 4), x, y)
    yield "mul_mat_half", operator("MUL_MAT", (4, 4), half, y)
    blocks = t(1, (32, 4), kind=Q8_0, nb=(34, 34, 136, 136))
    yield "mul_mat_q8_0", operator("MUL_MAT", (4, 4), blocks, t(2, (32, 4), 1024))
    experts, tokens, chosen = t(1, (16, 4, 2)), t(2, (16, 1, 2), 1024), t(4, (2, 2), 3072, I32)
    yield "mul_mat_id", operator("MUL_MAT_ID", (4, 2, 2), experts, tokens, chosen)
    bias = t(3, (16, 2), 2048)
    yield "add_id", operator("ADD_ID", (16, 2, 2), t(1, (16, 2, 2)), bias, chosen)
    yield from skipped_experts()
    yield from own_products()
    yield "get_rows", operator("GET_ROWS", (16, 4), x, ids)
    yield "set_rows", operator("SET_ROWS", (16, 4), y, ids, half, kind=F16, view=(5, SIZE // 2 - 4096))
    kept = t(99, (16, 4), 4096, F16, op=OP["SET_ROWS"], src=(2, 4, 5), view=(5, 0))
    yield "set_rows_cache", compute((99,), y, ids, half, kept)
    yield "cpy", compute((99,), x, half, t(99, (16, 4), 4096, F16, op=OP["CPY"], src=(1, 5), view=(5, 0)))
    yield "cast", compute((99,), x, t(99, (16, 4), 4096, F16, op=OP["CPY"], src=(1, 99)))
    yield "concat", operator("CONCAT", (16, 8), x, y, params=(1,))
    yield "repeat", operator("REPEAT", (32, 4), x)
    yield (
        "rope",
        operator("ROPE", (16, 1, 4), t(1, (16, 1, 4)), ids, params=(0, 16, 0, 0, 2048, 0x461C4000, 0x3F800000)),
    )
    yield "argsort", operator("ARGSORT", (16, 4), x, kind=I32)
    yield "top_k", operator("TOP_K", (4, 4), x, kind=I32)
    q, k, v = t(1, (64, 4, 2)), t(2, (64, 8, 2), 4096, F16), t(3, (64, 8, 2), 8192, F16)
    mask = t(4, (8, 4), 16384, F16)
    yield "flash_attention", operator("FLASH_ATTN_EXT", (64, 2, 4), q, k, v, mask, params=(0x3E000000,))
    # Marked for our kernels: few rows, many rows, and a cache that is cut into parts.
    own = (0x3E000000, *[0] * (ATTEND_PARAM - 1), 1)
    yield "flash_attention_own", operator("FLASH_ATTN_EXT", (64, 2, 4), q, k, v, mask, params=own)
    rows, seen = t(1, (64, 16, 2), 16384), t(4, (8, 16), 1024, F16)
    yield "flash_attention_own_columns", operator("FLASH_ATTN_EXT", (64, 2, 16), rows, k, v, seen, params=own)
    one, keys, values = t(1, (16, 1, 1)), t(2, (16, 256, 1), 1024, F16), t(3, (16, 256, 1), 9216, F16)
    yield "flash_attention_own_parts", operator("FLASH_ATTN_EXT", (16, 1, 1), one, keys, values, params=own)
    yield "im2col", operator("IM2COL", (3, 14), t(1, (3, 1, 1)), t(2, (16, 1), 1024), params=(1, 1, 0, 0, 1, 1, 0))
    yield "pool_2d", operator("POOL_2D", (8, 2), x, params=(0, 2, 2, 2, 2, 0, 0))
    yield "pad", operator("PAD", (18, 4), x, params=(1, 1))
    yield "ssm_conv", operator("SSM_CONV", (4, 5, 1), t(1, (8, 4, 1)), t(2, (4, 4), 1024))
    wkv = [t(i, (16, 2, 4), 1024 * i) for i in (1, 2, 3)]
    first, decay, state = t(4, (16, 2), 8192), t(5, (16, 2, 4), 9216), t(6, (512, 1), 12288)
    yield "wkv6", operator("RWKV_WKV6", (32, 20), *wkv, first, decay, state)
    # A layer's worth: a norm, a matrix, a view, a residual.
    yield (
        "layer",
        compute(
            (11, 12, 13, 14, 15),
            x,
            t(11, (16, 4), 8192, op=OP["RMS_NORM"], src=(1,)),
            t(5, (16, 16), 4096, F16),
            t(12, (16, 4), 9216, op=OP["MUL_MAT"], src=(5, 11)),
            t(13, (4, 16), 9216, op=OP["TRANSPOSE"], src=(12,), nb=(64, 4, 256, 256), view=(12, 0)),
            t(14, (4, 16), 10240, op=OP["CONT"], src=(13,)),
            t(15, (16, 4), 11264, op=OP["ADD"], src=(1, 12)),
        ),
    )
    yield "function", operator("MAP_CUSTOM1", (16, 4), x, params=(0x41414141, 0, 1))


def blocks_of(ident: int, k: int, rows: int, matrices: int = 1, at: int = 0) -> bytes:
    """A weight of type Q8_0, or matrices of experts."""
    row = k // 32 * 34
    strides = (34, row, row * rows, row * rows * matrices)
    return t(ident, (k, rows, matrices), at, Q8_0, nb=strides)


def own_products() -> Iterator[tuple[str, bytes]]:
    """Marked for our kernels: whole panels and parts of them, columns with gaps, experts, and what has no values."""
    own = (*[0] * PRODUCTS_PARAM, 1)
    weight, panel = blocks_of(1, 64, 5), blocks_of(1, 32, 40)
    yield "mul_mat_own", operator("MUL_MAT", (5, 9), weight, t(2, (64, 9), 4096), params=own)
    yield "mul_mat_own_panels", operator("MUL_MAT", (40, 16), panel, t(2, (32, 16), 4096), params=own)
    gaps = t(2, (64, 8, 2), 4096, nb=(4, 512, 5120, 10240))
    yield "mul_mat_own_gaps", operator("MUL_MAT", (5, 8, 2), weight, gaps, params=own)
    odd = t(99, (5, 1, 9), SIZE // 2, op=OP["MUL_MAT"], src=(1, 2), params=own, nb=(4, 2**30, 20, 180))
    yield "mul_mat_own_odd_stride", compute((99,), weight, t(2, (64, 1, 9), 4096), odd)
    yield "mul_mat_own_few", operator("MUL_MAT", (5, 2), weight, t(2, (64, 2), 4096), params=own)
    experts, chosen = blocks_of(1, 32, 5, 2), t(4, (2, 9), 3072, I32)
    yield "mul_mat_id_own", operator("MUL_MAT_ID", (5, 2, 9), experts, t(2, (32, 1, 9), 4096), chosen, params=own)
    yield "mul_mat_own_no_rows", operator("MUL_MAT", (0, 9), blocks_of(1, 64, 0), t(2, (64, 9), 4096), params=own)
    none = blocks_of(1, 32, 5, 0)
    yield (
        "mul_mat_id_own_no_experts",
        operator("MUL_MAT_ID", (5, 2, 9), none, t(2, (32, 1, 9), 4096), chosen, params=own),
    )


def skipped_experts() -> Iterator[tuple[str, bytes]]:
    """All numbers of experts are -1, or the one expert is marked as nothing."""
    ones = message(wire.BUFFER_CLEAR, struct.pack("<QB", 1, 255))
    tokens, chosen = t(2, (32, 1, 9), 4096), t(4, (2, 9), 3072, I32)
    for name, mark in (("mul_mat_id_skipped", 0), ("mul_mat_id_own_skipped", 1)):
        params = (*[0] * PRODUCTS_PARAM, mark)
        node = t(99, (5, 2, 9), SIZE // 2, op=OP["MUL_MAT_ID"], src=(1, 2, 4), params=params)
        yield name, compute((99,), blocks_of(1, 32, 5, 2), tokens, chosen, node, clear=ones)
    last = (*[0] * PRODUCTS_PARAM, 1, 1)
    yield (
        "mul_mat_id_own_last_nothing",
        operator("MUL_MAT_ID", (5, 2, 9), blocks_of(1, 32, 5), tokens, chosen, params=last),
    )
    rows, bias, few = t(1, (16, 2, 2)), t(3, (16, 2), 2048), t(4, (2, 2), 3072, I32)
    node = t(99, (16, 2, 2), SIZE // 2, op=OP["ADD_ID"], src=(1, 3, 4))
    yield "add_id_skipped", compute((99,), rows, bias, few, node, clear=ones)


def handshakes() -> Iterator[tuple[str, bytes]]:
    answer = wire.answer(wire.MAGIC + bytes(32), bytes([7]) * 32)
    hello = struct.pack("<Q", 28) + bytes([7]) + bytes(27) + struct.pack("<QI", 4, 1)
    yield "stranger", b"\0" + wire.MAGIC + bytes(32) + bytes(40)
    yield "honest", b"\1" + bytes(41)
    yield "honest_queued", b"\1" + bytes([3]) + bytes(39) + bytes([0]) + bytes(40)
    yield "hello", b"\2" + hello
    yield "hello_magic", b"\2" + wire.MAGIC + bytes(32)
    yield "door", b"\3" + bytes([0, 80]) + answer + bytes([16 + 32, 8]) + wire.MAGIC + bytes([1, 0])
    yield "door_right", b"\3" + bytes([0, 0, 2 + 32, 80]) + answer
    yield "door_open", b"\4" + bytes([0, 4]) + b"abcd" + bytes([32, 0])
    yield "answer", b"\5" + answer


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else NATIVE / "fuzz" / "corpus"
    for target, made in (("commands", commands()), ("handshake", handshakes())):
        (folder / target).mkdir(parents=True, exist_ok=True)
        for name, data in made:
            (folder / target / name).write_bytes(data)


if __name__ == "__main__":
    main()
