"""Random operators that are marked for our kernels, as inputs of the fuzz target of commands; some cannot be.

Every tensor is a buffer of its own size, so that ASan sees a read or write beyond it. Of a right operator one number
may be changed: a dimension, a stride, a type, an offset, an expert's number, or the tensor that another is a view of.
Some choices of experts are skipped: by a negative number, or because the last expert is marked as nothing.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

from support import rpc_wire as wire
from support.fuzz_corpus import ATTEND_PARAM, OP, PRODUCTS_PARAM, SET
from support.rpc_wire import F16, F32, I32, graph, message, tensor

# Types with their values and bytes of a block: those of our kernels, and two that are ggml's alone.
BLOCKS = {F32: (1, 4), F16: (1, 2), I32: (1, 4), 2: (32, 18), 8: (32, 34), 39: (32, 17), 12: (256, 144), 14: (256, 210)}
OTHERS = {3: (32, 20), 10: (256, 84)}
WEIGHTS = (2, 8, 39, 12, 14)
CACHES = (F32, F16, 2, 8)
NODE = 9


@dataclass(frozen=True)
class Part:
    """A tensor in a buffer of its own; offset: of its data in the buffer. of: the part it is a view of, 0: none."""

    kind: int
    ne: tuple[int, ...]
    nb: tuple[int, ...]
    offset: int = 0
    of: int = 0

    @property
    def nbytes(self) -> int:
        """From its first byte to behind its last; what is empty has one."""
        block, _ = (BLOCKS | OTHERS)[self.kind]
        if min(self.ne) <= 0:
            return 1
        return max(
            1,
            self.ne[0] * self.nb[0] // block + sum((n - 1) * b for n, b in zip(self.ne[1:], self.nb[1:], strict=True)),
        )


def part(kind: int, *ne: int, gap: int = 0) -> Part:
    """gap: bytes between rows."""
    block, size = BLOCKS[kind]
    ne = (*ne, *[1] * (4 - len(ne)))
    row = ne[0] // block * size + gap
    return Part(kind, ne, (size, row, row * ne[1], row * ne[1] * ne[2]))


def right_one(dice: random.Random) -> tuple[str, list[Part], Part, tuple[int, ...]]:
    """Operator, its sources, its result, parameters."""
    mark = (*[0] * PRODUCTS_PARAM, 1)
    gap = 64 * dice.choice((0, 0, 1))
    weight, rows = dice.choice(WEIGHTS), dice.randint(1, 40)
    k = BLOCKS[weight][0] * dice.randint(1, 3)
    what = dice.choice(("MUL_MAT", "MUL_MAT_ID", "FLASH_ATTN_EXT"))
    if what == "MUL_MAT":
        n, m = dice.randint(1, 40), dice.choice((1, 1, 3))
        return what, [part(weight, k, rows), part(F32, k, n, m, gap=gap)], part(F32, rows, n, m), mark
    if what == "MUL_MAT_ID":
        experts, n = dice.randint(1, 4), dice.choice((dice.randint(1, 2), dice.randint(1, 40)))
        used = dice.randint(1, experts)
        x = part(F32, k, dice.choice((1, used)), n, gap=gap)
        mark = (*mark, dice.choice((0, 0, 1)))  # LAST_NOTHING_PARAM
        return what, [part(weight, k, rows, experts), x, part(I32, used, n)], part(F32, rows, used, n), mark
    heads, shared, rows, n = dice.randint(1, 3), dice.randint(1, 4), dice.randint(1, 40), dice.randint(1, 300)
    width, wide = dice.choice((32, 64)), dice.choice((32, 64))
    key, value = dice.choice(CACHES), dice.choice(CACHES)
    sources = [part(F32, width, rows, heads * shared, gap=gap), part(key, width, n, heads), part(value, wide, n, heads)]
    sources += [part(F16, n, rows)] * dice.choice((0, 1, 1))
    attend = (0x3E000000, *[0] * (ATTEND_PARAM - 1), 1)
    return what, sources, part(F32, wide, heads * shared, rows), attend


def changed(dice: random.Random, one: Part, n_sources: int) -> Part:
    at = dice.randrange(4)
    kind = dice.choice((*BLOCKS, *OTHERS))
    other = dice.choice((0, 1, 2, 3, 31, 32, 33, 64, 256, 2**20, 2**31))

    def put(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:at], value, *values[at + 1 :])

    return dice.choice(
        (
            replace(one, ne=put(one.ne, other)),
            replace(one, ne=put(one.ne, max(0, one.ne[at] + dice.choice((-1, 1))))),
            replace(one, nb=put(one.nb, other)),
            replace(one, nb=put(one.nb, 0)),
            replace(one, kind=kind),
            replace(one, offset=dice.choice((1, 2, 4, 64))),
            replace(one, of=dice.randint(1, n_sources)),
        )
    )


def message_of(dice: random.Random) -> bytes:
    """A client that allocates, fills and computes."""
    what, sources, node, params = right_one(dice)
    parts = [*sources, node]
    sizes = [each.nbytes for each in parts]  # of the right one: what was changed must fit into it or be refused
    if dice.random() < 0.7:
        at = dice.randrange(len(parts))
        parts[at] = changed(dice, parts[at], len(sources))
        if dice.random() < 0.3:  # so that it is not refused for its buffer
            sizes[at] = min(1 << 16, parts[at].nbytes + parts[at].offset)
    *idents, last = (*range(1, len(parts)), NODE)
    written = [
        tensor(
            ident, each.kind, each.ne, number, each.offset, each.nb,
            op=OP[what] if ident == last else 0,
            src=tuple(idents) if ident == last else (),
            params=params if ident == last else (),
            view=(each.of, each.offset) if each.of and each.of != ident else (0, 0),
        )
        for number, (ident, each) in enumerate(zip((*idents, last), parts, strict=True), 1)
    ]  # fmt: skip
    made = b"".join(message(wire.ALLOC_BUFFER, struct.pack("<IQ", 0, size)) for size in sizes)
    for number in range(1, len(parts) + 1):
        made += message(wire.BUFFER_CLEAR, struct.pack("<QB", number, dice.choice((0, 0, 1, 60))))
    if what == "MUL_MAT_ID":
        chosen, (used, n) = sources[2], sources[2].ne[:2]
        worst = dice.choice((0, 0, 0, 1))  # an expert that is not there
        least = dice.choice((0, 0, 0, -1, -4))  # those below zero are skipped
        experts = [dice.randrange(least, sources[0].ne[2] + worst) for _ in range(used * n)]
        whole = tensor(8, I32, chosen.ne, 3, 0, chosen.nb)
        made += message(wire.BUFFER_CLEAR, struct.pack("<QB", 3, 0))
        if sizes[2] >= 4 * used * n:
            made += message(wire.SET_TENSOR, whole + SET.pack(0, 0) + struct.pack(f"<{used * n}i", *experts))
    return made + message(wire.GRAPH_COMPUTE, graph((last,), tuple(written)))


def messages(n: int, seed: int = 1) -> Iterator[bytes]:
    dice = random.Random(seed)
    return (message_of(dice) for _ in range(n))
