"""Row statistics, beta and ``beta * q`` on Hopper, with warps that load and warps that compute (Gluon).

The numbers of ``stats_kernel`` for plain and causal attention. A program owns ``ROWS`` query rows: one warp copies keys
into a ring of tiles in shared memory (TMA), and each of GROUPS warpgroups goes through them with 64 rows of its own, at
its own pace, so that while one waits for its product the others fold theirs. Programs are persistent: while a block of
rows is finished, the next queries and keys are on their way.

Every thread keeps the statistics of the logits that it holds itself (of two rows, a quarter of the keys); the four
threads of a row are merged at the end, so that the loop has no shuffles. Units are those of ``stats_kernel``:
``raw * unit`` is a logit in units of log 2.
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

# What triton 3.6 calls by other names.
synchronize = getattr(gl, "thread_barrier", None) or gl.barrier
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
reinterpret = (
    getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
)  # fmt: skip

GROUPS = gl.constexpr(4)
"""Warpgroups that compute."""
LINES = gl.constexpr(hopper.LINES)
"""Query rows of a warpgroup."""
ROWS = gl.constexpr(hopper.ROWS)
KEYS = gl.constexpr(hopper.KEYS)
"""Keys of a tile."""
SLOTS = gl.constexpr(2)
"""Blocks of query rows in shared memory."""
COMPUTE_REGISTERS = gl.constexpr(112)
"""Registers of a thread that computes: what is left of 65,536 when the loading warps have theirs."""
LOAD_REGISTERS = gl.constexpr(24)
"""Registers of a thread that loads: the fewest there may be."""
LN2 = gl.constexpr(0.6931471805599453)
NOTHING = gl.constexpr(-1.0e4)  # an exponent whose power is exactly 0, and finite, so that 0 * exponent is 0
LOWEST = gl.constexpr(-3.4028234663852886e38)  # the maximum of no logits, finite
WHOLE_NUMBERS = ("items", "section", "blocks", "sequences", "heads", "group", "queries", "keys", "shift")


@gluon.jit
def by_thread(tile):
    """A tile of logits ``[rows, keys]`` as ``[rows, 4, keys / 4]``: the last axis lies in one thread."""
    M: gl.constexpr = tile.shape[0]
    N: gl.constexpr = tile.shape[1]
    return tile.reshape([M, N // 8, 4, 2]).permute([0, 2, 1, 3]).reshape([M, 4, N // 4])


@gluon.jit
def ex2(x):
    """The hardware's ``2^x`` without the steps that keep subnormal results."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def unfused(a, b):
    """``a * b``, rounded: never a part of a fused multiply-add."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _added(exponent, new, highest, total, moment):
    """Statistics with those of logits whose exponents are relative to the new maximum."""
    power = ex2(exponent)
    step = gl.maximum(highest - new, NOTHING)
    fade = ex2(step)
    moment = fade * (moment + step * total) + gl.sum(power * exponent, 2)
    total = fade * total + gl.sum(power, 2)
    return new, total, moment


@gluon.jit
def _fold(tile, unit, highest, total, moment):
    """Statistics of what each thread has seen with those of one tile, which all its rows see whole."""
    raw = by_thread(tile)
    new = gl.maximum(highest, gl.max(raw, 2) * unit)
    return _added(raw * unit - gl.expand_dims(new, 2), new, highest, total, moment)


@gluon.jit
def _fold_masked(tile, first_key, row, shift, keys, unit, highest, total, moment, CAUSAL: gl.constexpr):
    """The same for a tile of which some rows do not see all; ``row`` is the row of each line of ``tile``."""
    layout: gl.constexpr = tile.type.layout
    key = first_key + gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, layout))
    visible = gl.expand_dims(key, 0) < gl.expand_dims(end_of(row, shift, keys, CAUSAL), 1)
    raw = by_thread(gl.where(visible, tile, LOWEST))
    new = gl.maximum(highest, gl.max(raw, 2) * unit)
    exponent = gl.where(raw == LOWEST, NOTHING, raw * unit - gl.expand_dims(new, 2))
    return _added(exponent, new, highest, total, moment)


@gluon.jit
def _merged(highest, total, moment):
    """Statistics of the rows, from those of the four threads of each; the same bits in all four."""
    top = gl.max(highest, 1)
    step = gl.maximum(highest - gl.expand_dims(top, 1), NOTHING)
    fade = ex2(step)
    return top, gl.sum(unfused(fade, total), 1), gl.sum(unfused(fade, moment + step * total), 1)


@gluon.jit
def lowered_beta(variable, c, bounds):
    """Beta of every row: the formula of ``sharpmax.core.policies.Lowered``."""
    u = gl.minimum(gl.maximum(variable, bounds[0]), bounds[1])
    value = c[0] * u + c[1]
    for i in gl.static_range(2, 8):
        value = value * u + c[i]
    return gl.where(variable > bounds[2], gl.maximum(value, bounds[3]), 1.0)


@gluon.jit
def end_of(row, shift, keys, CAUSAL: gl.constexpr):
    """How many keys a row sees: all, or those up to its own number plus ``shift``."""
    end = gl.zeros_like(row) + keys
    if CAUSAL:
        end = gl.maximum(gl.minimum(end, row + shift + 1), 0)
    return end


@gluon.jit
def item_of_turn(turn):
    """The number of what a program takes: programs take one each, in turn from the first on and from the last on.

    What they take is sorted, the longest first, so that the one who had the longest gets the shortest next.
    """
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)


@gluon.jit
def turns_of(items):
    """How many turns a program has, of so many items."""
    whole = items // gl.num_programs(0)
    return whole + (item_of_turn(whole) < items).to(gl.int32)


@gluon.jit
def assigned(turn, section, blocks, sequences, heads, LAST_FIRST: gl.constexpr):
    """Batch element, head and number of a program's block.

    Sequences come in sections of a bounded size; in a section the last blocks of all sequences come
    first, or the first ones.
    """
    item = item_of_turn(turn)
    start = item // (section * blocks) * section
    width = gl.minimum(section, sequences - start)
    place = item - start * blocks
    sequence = start + place % width
    block = place // width
    if LAST_FIRST:
        block = blocks - 1 - block
    return sequence // heads, sequence % heads, block


@gluon.jit
def tiles_seen(first, queries, keys, shift, COUNT: gl.constexpr, CAUSAL: gl.constexpr):
    """How many tiles of keys the ``COUNT`` rows from ``first`` on see, and how many of these they see whole."""
    high = keys
    whole = keys
    if CAUSAL:
        high = gl.minimum(keys, gl.minimum(first + COUNT, queries) + shift)
        whole = gl.minimum(keys, first + shift + 1)
    high = gl.where(first < queries, gl.maximum(high, 0), 0)
    seen = (high + KEYS - 1) // KEYS
    return seen, gl.minimum(gl.maximum(whole, 0) // KEYS, seen)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many barriers, each of which waits for so many arrivals; to be used after a fence and a synchronisation."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next place in a ring, and the parity of the barrier there."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def send(desc, tiles, full, free, at, phase, batch, head, start):
    """Have a place of a ring filled with the rows from ``start`` on, when it has been given back."""
    mbarrier.wait(free.index(at), phase)
    mbarrier.expect(full.index(at), desc.block_type.nbytes)
    load_tile(desc, [batch, head, start, 0], full.index(at), tiles.index(at))


@gluon.jit
def send_queries(q_desc, q_tiles, q_full, q_free, slot, phase, batch, head, first, GROUPS: gl.constexpr):
    """Have a block of queries come, for each warpgroup its own."""
    for g in gl.static_range(GROUPS):
        send(q_desc, q_tiles, q_full, q_free, slot * GROUPS + g, phase, batch, head, first + LINES * g)
    return advance(slot, phase, SLOTS)


@gluon.jit
def _load(what, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """Queries of every warpgroup and all keys that they see, from the last one down, block after block."""
    q_desc, k_desc, q_tiles, k_tiles, q_full, q_free, k_full, k_free, sizes = what
    items, section, blocks, sequences, heads, group, queries, keys, shift = sizes
    stage = 0
    phase = 1
    slot = 0
    slot_phase = 1
    for turn in range(turns_of(items)):
        batch, head, block = assigned(turn, section, blocks, sequences, heads, True)
        first = block * ROWS
        slot, slot_phase = send_queries(q_desc, q_tiles, q_full, q_free, slot, slot_phase, batch, head, first, GROUPS)
        seen, _ = tiles_seen(first, queries, keys, shift, ROWS, CAUSAL)
        for i in range(seen):
            start = (seen - 1 - i) * KEYS
            send(k_desc, k_tiles, k_full, k_free, stage, phase, batch, head // group, start)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _logits(q_tile, k_tiles, k_full, k_free, stage, phase, zero):
    """The product of the queries and the next tile of keys, which is given back."""
    mbarrier.wait(k_full.index(stage), phase)
    tile = warpgroup_mma(q_tile, k_tiles.index(stage).permute([1, 0]), zero, use_acc=False, is_async=True)
    tile = warpgroup_mma_wait(0, deps=(tile,))
    synchronize()
    mbarrier.arrive(k_free.index(stage), count=1)
    return tile


@gluon.jit
def _compute(
    what, G: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EDGES: gl.constexpr, POLICY: gl.constexpr,
    SCALED_QUERY: gl.constexpr,
):  # fmt: skip
    """Warpgroup G: its rows of every block of the program."""
    out_desc, q_tiles, k_tiles, q_full, q_free, k_full, k_free, outputs, sizes, unit, c, bounds = what
    items, section, blocks, sequences, heads, _, queries, keys, shift = sizes
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    lines: gl.constexpr = gl.SliceLayout(1, layout)
    zero = gl.zeros([LINES, KEYS], gl.float32, layout=layout)
    none = gl.zeros_like(gl.max(by_thread(zero), 2))
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    for turn in range(turns_of(items)):
        batch, head, block = assigned(turn, section, blocks, sequences, heads, True)
        first = block * ROWS
        all_tiles, _ = tiles_seen(first, queries, keys, shift, ROWS, CAUSAL)
        first = first + LINES * G
        seen, whole = tiles_seen(first, queries, keys, shift, LINES, CAUSAL)
        row = first + gl.arange(0, LINES, layout=lines)
        highest = none + LOWEST
        total = none
        moment = none
        q_tile = q_tiles.index(slot * GROUPS + G)
        mbarrier.wait(q_full.index(slot * GROUPS + G), slot_phase)
        if EDGES:
            for _ in range(all_tiles - seen):  # keys that only other warpgroups see
                mbarrier.wait(k_full.index(stage), phase)
                synchronize()
                mbarrier.arrive(k_free.index(stage), count=1)
                stage, phase = advance(stage, phase, STAGES)
            for i in range(seen - whole):
                tile = _logits(q_tile, k_tiles, k_full, k_free, stage, phase, zero)
                stage, phase = advance(stage, phase, STAGES)
                highest, total, moment = _fold_masked(
                    tile, (seen - 1 - i) * KEYS, row, shift, keys, unit, highest, total, moment, CAUSAL
                )
        # The queries of the block before are given back now: beta * q has been read from there meanwhile.
        tma.store_wait(0)
        synchronize()
        mbarrier.arrive(q_free.index((slot + SLOTS - 1) % SLOTS * GROUPS + G), count=1, pred=turn > 0)
        for _ in range(whole):
            tile = _logits(q_tile, k_tiles, k_full, k_free, stage, phase, zero)
            stage, phase = advance(stage, phase, STAGES)
            highest, total, moment = _fold(tile, unit, highest, total, moment)
        _finish(
            out_desc, q_tile, highest, total, moment, row, batch, head, first, outputs, heads, queries, keys, shift, c,
            bounds, lines, CAUSAL, POLICY, SCALED_QUERY,
        )  # fmt: skip
        slot, slot_phase = advance(slot, slot_phase, SLOTS)
    tma.store_wait(0)


@gluon.jit
def _finish(
    out_desc, q_tile, highest, total, moment, row, batch, head, first, outputs, heads, queries, keys, shift, c, bounds,
    lines: gl.constexpr, CAUSAL: gl.constexpr, POLICY: gl.constexpr, SCALED_QUERY: gl.constexpr,
):  # fmt: skip
    """Write the statistics of 64 rows; beta and ``beta * q`` too, which takes the place of q in ``q_tile``."""
    out_max, out_sum, out_moment, out_count, out_beta = outputs
    highest, total, moment = _merged(highest, total, moment)
    highest = gl.convert_layout(highest, lines)
    total = gl.convert_layout(total, lines)
    moment = gl.convert_layout(moment, lines) * LN2
    inside = row < queries
    at = (batch.to(gl.int64) * heads + head) * queries + row
    gl.store(out_max + at, gl.where(total == 0.0, float("-inf"), highest * LN2), mask=inside)
    gl.store(out_sum + at, total, mask=inside)
    gl.store(out_moment + at, moment, mask=inside)
    gl.store(out_count + at, end_of(row, shift, keys, CAUSAL), mask=inside)
    if POLICY:
        filled = gl.where(total == 0.0, 1.0, total)
        beta = lowered_beta(gl.log(filled) - moment / filled, c, bounds)
        gl.store(out_beta + at, beta, mask=inside)
        if SCALED_QUERY:
            wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, q_tile.shape[1], 16])
            scaled = q_tile.load(wide).to(gl.float32)
            factor = gl.convert_layout(beta, gl.SliceLayout(1, wide))
            q_tile.store((scaled * gl.expand_dims(factor, 1)).to(q_tile.dtype))
            fence_async_shared()
            store_tile(out_desc, [batch, head, first, 0], q_tile)


@gluon.jit(do_not_specialize=WHOLE_NUMBERS)
def hopper_stats_kernel(
    q_desc, k_desc, out_desc, out_max, out_sum, out_moment, out_count, out_beta,
    items, section, blocks, sequences, heads, group, queries, keys, shift, unit,
    c0, c1, c2, c3, c4, c5, c6, c7, policy_low, policy_high, threshold, floor,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, EDGES: gl.constexpr, POLICY: gl.constexpr, SCALED_QUERY: gl.constexpr,
):  # fmt: skip
    """Blocks of query rows against all the keys that they see."""
    D: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(dtype, [SLOTS * GROUPS, LINES, D], shared)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], shared)
    q_full = barriers(SLOTS * GROUPS, 1)
    q_free = barriers(SLOTS * GROUPS, 1)
    k_full = barriers(STAGES, 1)
    k_free = barriers(STAGES, GROUPS)
    fence_async_shared()
    synchronize()
    outputs = (out_max, out_sum, out_moment, out_count, out_beta)
    sizes = (items, section, blocks, sequences, heads, group, queries, keys, shift)
    c = (c0, c1, c2, c3, c4, c5, c6, c7)
    bounds = (policy_low, policy_high, threshold, floor)
    what = (out_desc, q_tiles, k_tiles, q_full, q_free, k_full, k_free, outputs, sizes, unit, c, bounds)
    load = (q_desc, k_desc, q_tiles, k_tiles, q_full, q_free, k_full, k_free, sizes)
    gl.warp_specialize([
        (_compute, (what, 0, STAGES, CAUSAL, EDGES, POLICY, SCALED_QUERY)),
        (_compute, (what, 1, STAGES, CAUSAL, EDGES, POLICY, SCALED_QUERY)),
        (_compute, (what, 2, STAGES, CAUSAL, EDGES, POLICY, SCALED_QUERY)),
        (_compute, (what, 3, STAGES, CAUSAL, EDGES, POLICY, SCALED_QUERY)),
        (_load, (load, STAGES, CAUSAL)),
    ], [4, 4, 4, 1], [COMPUTE_REGISTERS, COMPUTE_REGISTERS, COMPUTE_REGISTERS, LOAD_REGISTERS])  # fmt: skip
