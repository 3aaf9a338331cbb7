"""Attention with beta on Hopper, with warps that load and warps that compute (Gluon).

``softmax(beta * z) v`` for plain and causal attention, where beta, not negative, meets the logits in float32. The
statistics of the same products have gone before, so that the maximum of every row is known: powers need no running
maximum, and the accumulator no rescaling.

A program owns ``ROWS`` query rows: one warp copies keys and values into two rings of tiles, and each of two warpgroups
goes through them with 64 rows of its own. The product of a tile of keys runs together with that of the values before,
and powers of the first are taken while the second is under way. Programs are persistent: while a block of rows is
finished, the next queries and keys are on their way.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import hopper
from .hopper_kernel import (
    KEYS,
    LINES,
    SLOTS,
    advance,
    assigned,
    barriers,
    by_thread,
    end_of,
    ex2,
    send,
    send_queries,
    store_tile,
    synchronize,
    tiles_seen,
    turns_of,
)

GROUPS = gl.constexpr(2)
"""Warpgroups that compute."""
ROWS = gl.constexpr(hopper.ATTEND_ROWS)
COMPUTE_REGISTERS = gl.constexpr(240)
"""Registers of a thread that computes: what is left of 65,536 when the loading warps have theirs."""
LOAD_REGISTERS = gl.constexpr(24)
"""Registers of a thread that loads: the fewest there may be."""
LOG2E = gl.constexpr(1.4426950408889634)
RESOLVED = gl.constexpr(1.0e7)
"""The largest beta times maximum: beyond it, float32 does not tell apart logits that beta would."""
WHOLE_NUMBERS = ("items", "section", "blocks", "sequences", "heads", "group", "queries", "keys", "shift")


@gluon.jit
def _tiles(first, queries, keys, shift, CAUSAL: gl.constexpr):
    """How many tiles of keys a block goes through, one at least, and how many of them all its rows see whole."""
    seen, whole = tiles_seen(first, queries, keys, shift, ROWS, CAUSAL)
    return gl.maximum(seen, 1), whole


@gluon.jit
def _send(desc, tiles, full, free, batch, head, start, stage, phase, STAGES: gl.constexpr):
    """Have the next tile of a ring filled."""
    send(desc, tiles, full, free, stage, phase, batch, head, start)
    return advance(stage, phase, STAGES)


@gluon.jit
def _load(what, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """Queries of both warpgroups, then keys and values that they see, from the last one down, as they are needed."""
    q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, rings, sizes = what
    q_full, q_free, k_full, k_free, v_full, v_free = rings
    items, section, blocks, sequences, heads, group, queries, keys, shift = sizes
    k_stage = 0
    k_phase = 1
    v_stage = 0
    v_phase = 1
    slot = 0
    slot_phase = 1
    for turn in range(turns_of(items)):
        batch, head, block = assigned(turn, section, blocks, sequences, heads, True)
        first = block * ROWS
        slot, slot_phase = send_queries(q_desc, q_tiles, q_full, q_free, slot, slot_phase, batch, head, first, GROUPS)
        source = head // group
        seen, _ = _tiles(first, queries, keys, shift, CAUSAL)
        start = (seen - 1) * KEYS
        k_stage, k_phase = _send(k_desc, k_tiles, k_full, k_free, batch, source, start, k_stage, k_phase, K_STAGES)
        for _ in range(seen - 1):
            k_stage, k_phase = _send(
                k_desc, k_tiles, k_full, k_free, batch, source, start - KEYS, k_stage, k_phase, K_STAGES
            )
            v_stage, v_phase = _send(v_desc, v_tiles, v_full, v_free, batch, source, start, v_stage, v_phase, V_STAGES)
            start -= KEYS
        v_stage, v_phase = _send(v_desc, v_tiles, v_full, v_free, batch, source, start, v_stage, v_phase, V_STAGES)


@gluon.jit
def _give_back(free, stage, phase, STAGES: gl.constexpr):
    """Give back a tile when all warps have read it."""
    synchronize()
    mbarrier.arrive(free.index(stage), count=1)
    return advance(stage, phase, STAGES)


@gluon.jit
def _powers(tile, factor, shift):
    """``2^(beta z - beta max)`` of a tile of products."""
    return ex2(tile * gl.expand_dims(factor, 1) - gl.expand_dims(shift, 1))


@gluon.jit
def _visible(power, start, row, shift, keys, CAUSAL: gl.constexpr):
    """Powers without those of keys that a row does not see."""
    layout: gl.constexpr = power.type.layout
    key = start + gl.arange(0, power.shape[1], layout=gl.SliceLayout(0, layout))
    return gl.where(gl.expand_dims(key, 0) < gl.expand_dims(end_of(row, shift, keys, CAUSAL), 1), power, 0.0)


@gluon.jit
def _compute(
    what, G: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CAUSAL: gl.constexpr, EDGES: gl.constexpr,
    LATER: gl.constexpr,
):  # fmt: skip
    """Warpgroup G: its rows of every block of the program."""
    out_desc, q_tiles, k_tiles, v_tiles, rings, rows, sizes, unit = what
    q_full, q_free, k_full, k_free, v_full, v_free = rings
    items, section, blocks, sequences, heads, _, queries, keys, shift = sizes
    beta, row_max, lse_out = rows
    D: gl.constexpr = q_tiles.shape[2]
    dtype: gl.constexpr = q_tiles.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    lines: gl.constexpr = gl.SliceLayout(1, layout)
    zero = gl.zeros([LINES, KEYS], gl.float32, layout=layout)
    k_stage = 0
    k_phase = 0
    v_stage = 0
    v_phase = 0
    slot = 0
    slot_phase = 0
    for turn in range(turns_of(items)):
        batch, head, block = assigned(turn, section, blocks, sequences, heads, True)
        first = block * ROWS
        seen, whole = _tiles(first, queries, keys, shift, CAUSAL)
        first = first + LINES * G
        row = first + gl.arange(0, LINES, layout=lines)
        at = (batch.to(gl.int64) * heads + head) * queries + row
        top = gl.load(row_max + at, mask=row < queries, other=0.0)
        top = gl.where(top == float("-inf"), 0.0, top)
        sharpness = gl.load(beta + at, mask=row < queries, other=0.0)
        limit = RESOLVED / gl.maximum(gl.abs(top), 1.0)
        served = gl.where(sharpness > limit, limit, sharpness)  # what is no number stays so
        origin = top * LOG2E * served
        factor = served * unit
        q_tile = q_tiles.index(slot * GROUPS + G)
        mbarrier.wait(q_full.index(slot * GROUPS + G), slot_phase)
        start = (seen - 1) * KEYS
        mbarrier.wait(k_full.index(k_stage), k_phase)
        tile = warpgroup_mma(q_tile, k_tiles.index(k_stage).permute([1, 0]), zero, use_acc=False, is_async=True)
        # The queries of the block before are given back now: its output has been read from there meanwhile.
        tma.store_wait(0)
        synchronize()
        mbarrier.arrive(q_free.index((slot + SLOTS - 1) % SLOTS * GROUPS + G), count=1, pred=turn > 0)
        tile = warpgroup_mma_wait(0, deps=(tile,))
        k_stage, k_phase = _give_back(k_free, k_stage, k_phase, K_STAGES)
        power = _powers(tile, factor, origin)
        if EDGES:
            power = _visible(power, start, row, shift, keys, CAUSAL)
        total = gl.sum(by_thread(power), 2)
        operand = gl.convert_layout(power.to(dtype), weights)
        result = gl.zeros([LINES, D], gl.float32, layout=wide)
        mbarrier.wait(k_full.index(k_stage), k_phase, pred=seen > 1)
        for i in range(1, seen):
            tile = warpgroup_mma(q_tile, k_tiles.index(k_stage).permute([1, 0]), zero, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            result = warpgroup_mma(operand, v_tiles.index(v_stage), result, is_async=True)
            tile = warpgroup_mma_wait(1, deps=(tile,))
            k_stage, k_phase = _give_back(k_free, k_stage, k_phase, K_STAGES)
            power = _powers(tile, factor, origin)
            if LATER:  # noqa: SIM102
                if i < seen - whole:
                    power = _visible(power, start - i * KEYS, row, shift, keys, CAUSAL)
            total += gl.sum(by_thread(power), 2)
            following = gl.convert_layout(power.to(dtype), weights)
            mbarrier.wait(k_full.index(k_stage), k_phase, pred=i < seen - 1)
            result, operand = warpgroup_mma_wait(0, deps=(result, following))
            v_stage, v_phase = _give_back(v_free, v_stage, v_phase, V_STAGES)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        result = warpgroup_mma(operand, v_tiles.index(v_stage), result, is_async=True)
        result = warpgroup_mma_wait(0, deps=(result,))
        v_stage, v_phase = _give_back(v_free, v_stage, v_phase, V_STAGES)
        sums = gl.convert_layout(gl.sum(total, 1), lines)
        lse = gl.where(sums == 0.0, float("-inf"), top * sharpness + gl.log(sums))
        gl.store(lse_out + at, lse, mask=row < queries)
        sums = gl.expand_dims(gl.convert_layout(sums, gl.SliceLayout(1, wide)), 1)
        q_tile.store(gl.where(sums == 0.0, 0.0, result / sums).to(dtype))
        fence_async_shared()
        store_tile(out_desc, [batch, head, first, 0], q_tile)
        slot, slot_phase = advance(slot, slot_phase, SLOTS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=WHOLE_NUMBERS)
def hopper_attend_kernel(
    q_desc, k_desc, v_desc, out_desc, beta, row_max, lse,
    items, section, blocks, sequences, heads, group, queries, keys, shift, unit,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CAUSAL: gl.constexpr, EDGES: gl.constexpr, LATER: gl.constexpr,
):  # fmt: skip
    """Blocks of query rows against all the keys that they see."""
    D: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(dtype, [SLOTS * GROUPS, LINES, D], shared)
    k_tiles = gl.allocate_shared_memory(dtype, [K_STAGES, KEYS, D], shared)
    v_tiles = gl.allocate_shared_memory(dtype, [V_STAGES, KEYS, D], shared)
    q_full = barriers(SLOTS * GROUPS, 1)
    q_free = barriers(SLOTS * GROUPS, 1)
    k_full = barriers(K_STAGES, 1)
    k_free = barriers(K_STAGES, GROUPS)
    v_full = barriers(V_STAGES, 1)
    v_free = barriers(V_STAGES, GROUPS)
    fence_async_shared()
    synchronize()
    rows = (beta, row_max, lse)
    sizes = (items, section, blocks, sequences, heads, group, queries, keys, shift)
    rings = (q_full, q_free, k_full, k_free, v_full, v_free)
    what = (out_desc, q_tiles, k_tiles, v_tiles, rings, rows, sizes, unit)
    load = (q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, rings, sizes)
    gl.warp_specialize([
        (_compute, (what, 0, K_STAGES, V_STAGES, CAUSAL, EDGES, LATER)),
        (_compute, (what, 1, K_STAGES, V_STAGES, CAUSAL, EDGES, LATER)),
        (_load, (load, K_STAGES, V_STAGES, CAUSAL)),
    ], [4, 1], [COMPUTE_REGISTERS, LOAD_REGISTERS])  # fmt: skip
