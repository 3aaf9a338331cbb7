"""Decoding on Hopper in one launch (Gluon): logits never leave the processor that made them.

What the three kernels of ``decode_kernel`` give. A group of programs shares the keys of the rows that use one head of
the cache. Each program goes through the keys of its split, keeps their logits in shared memory and publishes their
statistics. With those of the whole group it has beta, and goes through the values of the split. In between come the
keys of its next split, so that it hardly waits for others. In the end, parts of the output are added up.

One warp copies keys and values into a ring of tiles (:mod:`.decode_hopper_load`).

Products are transposed: keys (or columns of values) are the rows of a tile, of which a warpgroup takes 64, and queries
its columns, of which 8 suffice. A thread finds the logits that it kept where it put them.

How many splits a head gets follows from its keys in sight, which only the device knows: every program makes the same
plan (:mod:`.decode_plan`) before it begins. Those of each turn are as many as there are programs, which take one each.

No program waits for ever. All run at once (a cooperative launch), and each publishes the statistics of its split of a
turn before it waits for others, for the split of the turn before. A head has no more splits than there are programs, so
they lie in two turns that follow each other: what a program waits for is of its own turn or of one before. With all
statistics of earlier turns published, none waits for ever before it publishes those of the next, and so on for all
turns. No program waits for parts of the output before it has published all its own. The warp that copies waits for
tiles that were read, and for nothing else.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .decode_hopper_load import count, load
from .decode_hopper_stats import group_stats, merged
from .decode_kernel import LOG2E, MASKED
from .decode_plan import oldest_of, place_of, planned, recalled, splits_of
from .hopper_kernel import (
    advance,
    barriers,
    ex2,
    item_of_turn,
    lowered_beta,
    synchronize,
    turns_of,
)

WHOLE_NUMBERS = (
    "stride_qb", "stride_qh", "stride_ql", "stride_table", "stride_part", "stride_stats",
    "groups", "heads", "capacity", "left", "share", "limit", "overhead",
)  # fmt: skip
LOAD_REGISTERS = gl.constexpr(96)
"""Registers of a thread of the warp that copies."""
SLICE = gl.constexpr(32)
"""Rows of a tile of values that are cleared at a time: all of them at once take more registers than there are."""


@gluon.jit
def _row_span(row, length, left, QUERIES: gl.constexpr):
    """The newest and the oldest key that each row sees."""
    newest = length - QUERIES + row % QUERIES
    return newest, gl.where(left >= 0, gl.maximum(newest - left, 0), 0)


@gluon.jit
def _pair(place, heads):
    """The number of the head that a split belongs to."""
    return place[0] * heads + place[1]


@gluon.jit
def _publish(counters, number, splits, other, other_splits):
    """Count the program at two counters, where there are several splits; what it has written before can be read."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    one = gl.arange(0, 2, layout=layout) == 0
    several = gl.where(one, splits, other_splits) > 1
    once = gl.full([2], 1, gl.int32, layout)
    gl.atomic_add(counters + gl.where(one, number, other), once, mask=several, sem="release")


@gluon.jit
def _await(counter, number):
    """Wait until ``number`` programs have been counted; what they had written before can be read."""
    while gl.atomic_add(counter, 0, sem="acquire") < number:
        pass
    synchronize()


@gluon.jit
def _queries(
    query, strides, batch, head, there, ROWS: gl.constexpr, QUERIES: gl.constexpr, COLUMNS: gl.constexpr,
    D: gl.constexpr, wide: gl.constexpr,
):  # fmt: skip
    """The rows that belong to a head, or zeros where it is not there."""
    row = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, wide))
    column = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, wide)), 0)
    place = (head * (ROWS // QUERIES) + row // QUERIES) * strides[1] + row % QUERIES * strides[2]
    at = query + batch.to(gl.int64) * strides[0] + gl.expand_dims(place, 1) + column
    return gl.load(at, mask=gl.expand_dims(row < gl.where(there, ROWS, 0), 1) & (column >= 0), other=0.0)


@gluon.jit
def _pass_keys(
    ring, place, stage, phase, q_tile, kept, slot, left, scale, softcap,
    layout: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    """Keep the logits of the keys of a split, from ``slot`` on; statistics of each row, and where the ring stands."""
    tiles, full, free = ring
    length, first, last = place[2], place[5], place[6]
    COLUMNS: gl.constexpr = q_tile.shape[0]
    zero = gl.zeros([KEYS, COLUMNS], gl.float32, layout=layout)
    row = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    newest, earliest = _row_span(row, length, left, QUERIES)
    # Every place of the tile has statistics of its own, merged once at the end: no reduction within the loop.
    high = zero + MASKED
    total = zero
    moment = zero
    for i in range(count(first, last, KEYS)):
        mbarrier.wait(full.index(stage), phase)
        z = warpgroup_mma(tiles.index(stage), q_tile.permute([1, 0]), zero, use_acc=False, is_async=True)
        z = warpgroup_mma_wait(0, deps=(z,))
        synchronize()
        mbarrier.arrive(free.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
        z = z * scale
        if CAPPED:
            z = softcap * (1.0 - 2.0 / (1.0 + ex2(z * (2.0 * LOG2E / softcap))))
        key = gl.expand_dims(first + i * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout)), 1)
        seen = (key < last) & (key <= gl.expand_dims(newest, 0)) & (key >= gl.expand_dims(earliest, 0))
        z = gl.where(seen, z, MASKED)
        kept.index(slot + i).store(z)
        higher = z > high
        gap = gl.where(higher, high - z, z - high)
        scaled = ex2(gap * LOG2E)
        moment = gl.where(higher, scaled * (moment + gap * total), moment + scaled * gap)
        total = gl.where(higher, scaled * total + 1.0, total + scaled)
        high = gl.where(higher, z, high)
    top, total, moment = merged(high, total, moment)
    return top, total, moment, stage, phase


@gluon.jit
def _pass_values(
    ring, place, stage, phase, w_tile, kept, slot, left, top, beta,
    layout: gl.constexpr, wide: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The sum of the values of a split with their weights, that of the weights, and where the ring stands."""
    tiles, full, free = ring
    first, last = place[5], place[6]
    oldest = oldest_of(place[2], left, QUERIES)
    dtype: gl.constexpr = tiles.dtype
    COLUMNS: gl.constexpr = w_tile.shape[0]
    D: gl.constexpr = tiles.shape[2]
    hard = beta == float("inf")
    factor = gl.expand_dims(gl.where(hard, 0.0, beta * LOG2E), 0)
    lowest = gl.expand_dims(gl.where(hard, gl.maximum(top, MASKED * 0.5), MASKED * 0.5), 0)
    peak = gl.expand_dims(top, 0)
    out = gl.zeros([D, COLUMNS], gl.float32, layout=layout)
    weight = gl.zeros([KEYS, COLUMNS], gl.float32, layout=layout)
    for i in range(count(first, last, KEYS)):
        z = kept.index(slot + i).load(layout)
        w = gl.where(z >= lowest, ex2(factor * (z - peak)), 0.0)
        weight += w
        w_tile.permute([1, 0]).store(w.to(dtype))
        start = first + i * KEYS
        mbarrier.wait(full.index(stage), phase)
        tile = tiles.index(stage)
        if (start < oldest) | (start + KEYS > last):  # what lies outside may be anything, even NaN
            for line in gl.static_range(0, KEYS, SLICE):
                n = start + line + gl.arange(0, SLICE, layout=gl.SliceLayout(1, wide))
                valid = gl.expand_dims((n >= oldest) & (n < last), 1)
                lines = tile.slice(line, SLICE)
                lines.store(gl.where(valid, lines.load(wide), 0.0).to(dtype))
        fence_async_shared()
        synchronize()
        out = warpgroup_mma(tile.permute([1, 0]), w_tile.permute([1, 0]), out, is_async=True)
        out = warpgroup_mma_wait(0, deps=(out,))
        synchronize()
        mbarrier.arrive(free.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
    return out, gl.sum(weight, 0), stage, phase


@gluon.jit
def _compute(
    what, ROWS: gl.constexpr, QUERIES: gl.constexpr, CAPPED: gl.constexpr, ENTROPY: gl.constexpr, BATCH: gl.constexpr,
    TILES: gl.constexpr, SPLITS: gl.constexpr, LINES: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """All splits of a program: their statistics, then the sums of their values, and some of the output in the end."""
    memory, tensors, numbers, kept_plan, sizes, policy = what
    ring, q_tile, w_tile, kept = memory
    query, strides, parts, stats, betas, shares, sums, output, counters = tensors
    stride_part, stride_stats, scale, softcap = numbers
    groups, heads, left = sizes[0], sizes[1], sizes[3]
    c, bounds = policy
    tiles = ring[0]
    STAGES: gl.constexpr = tiles.shape[0]
    KEYS: gl.constexpr = tiles.shape[1]
    D: gl.constexpr = tiles.shape[2]
    COLUMNS: gl.constexpr = q_tile.shape[0]
    W: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = tiles.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, COLUMNS, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, layout)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [W, 1], [1, 0])
    plan = recalled(kept_plan, BATCH)
    items = plan[0]
    turns = turns_of(items)
    before = (0, 0, 0, 0, 0, 0, 0)
    now = (0, 0, 0, 0, 0, 0, 0)
    after = place_of(item_of_turn(0), plan, sizes, QUERIES, KEYS)
    row = gl.arange(0, COLUMNS, layout=row_layout)
    q = _queries(query, strides, after[0], after[1], item_of_turn(0) < items, ROWS, QUERIES, COLUMNS, D, wide)
    later = place_of(item_of_turn(1), plan, sizes, QUERIES, KEYS)
    stage = 0
    phase = 0
    done_pair, done_splits = 0, 0
    for turn in range(turns + 1):
        done_pair, done_splits = _pair(before, heads), before[4]
        before = now
        now = after
        after = later
        if turn < turns:  # keys of a split
            item = item_of_turn(turn)
            q_tile.store(q)
            fence_async_shared()
            synchronize()
            there = item_of_turn(turn + 1) < items
            q = _queries(query, strides, after[0], after[1], there, ROWS, QUERIES, COLUMNS, D, wide)
            top, total, moment, stage, phase = _pass_keys(
                ring, now, stage, phase, q_tile, kept, turn % 2 * TILES, left, scale, softcap, layout, QUERIES, KEYS,
                STAGES, CAPPED,
            )  # fmt: skip
            later = place_of(item_of_turn(turn + 2), plan, sizes, QUERIES, KEYS)
            part = parts + item.to(gl.int64) * ROWS + row
            gl.store(part, top, mask=row < ROWS)
            gl.store(part + stride_part, total, mask=row < ROWS)
            gl.store(part + 2 * stride_part, moment, mask=row < ROWS)
            synchronize()
            # With it the part of the output that was written last: one wait for memory serves both.
            _publish(counters, _pair(now, heads), now[4], groups + done_pair, done_splits)
        if turn > 0:  # values of the split before
            item = item_of_turn(turn - 1)
            pair, length, split, splits = _pair(before, heads), before[2], before[3], before[4]
            if splits > 1:
                _await(counters + pair, splits)
            top, total, moment = group_stats(
                parts, item - split, splits, stride_part, row_layout, ROWS, COLUMNS, SPLITS
            )  # fmt: skip
            if ENTROPY:
                filled = gl.where(total > 0, total, 1.0)
                variable = gl.log(filled) - moment / filled
            else:
                newest, earliest = _row_span(row, length, left, QUERIES)
                variable = gl.log(gl.maximum(newest + 1 - earliest, 1).to(gl.float32))
            beta = lowered_beta(variable, c, bounds)
            writes = row < gl.where(split == 0, ROWS, 0)
            at = pair.to(gl.int64) * ROWS + row
            gl.store(stats + at, gl.where(total > 0, top, -float("inf")), mask=writes)
            gl.store(stats + stride_stats + at, total, mask=writes)
            gl.store(stats + 2 * stride_stats + at, moment, mask=writes)
            gl.store(betas + at, beta, mask=writes)
            out, weight, stage, phase = _pass_values(
                ring, before, stage, phase, w_tile, kept, (turn - 1) % 2 * TILES, left, top, beta, layout, wide,
                QUERIES, KEYS, STAGES,
            )  # fmt: skip
            column = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(1, layout)), 1)
            inside = gl.expand_dims(row < ROWS, 0) & (column >= 0)
            if splits == 1:
                out = out / gl.expand_dims(gl.where(weight > 0, weight, 1.0), 0)
                gl.store(output + gl.expand_dims(at, 0) * D + column, out.to(dtype), mask=inside)
            else:
                place = item.to(gl.int64) * ROWS + row
                gl.store(sums + place, weight, mask=row < ROWS)
                gl.store(shares + gl.expand_dims(place, 0) * D + column, out, mask=inside)
    if SPLITS > 1:
        synchronize()
        _publish(counters, groups + done_pair, done_splits, groups + _pair(before, heads), before[4])
        for task in range(gl.program_id(0), groups * (COLUMNS // LINES), gl.num_programs(0)):
            pair = task // (COLUMNS // LINES)
            first, splits = splits_of(pair, plan, sizes, QUERIES, KEYS)
            if splits > 1:
                _await(counters + groups + pair, splits)
                line = task % (COLUMNS // LINES) * LINES
                _combine(shares, sums, output, pair, line, first, splits, ROWS, LINES, D, CHUNK)


@gluon.jit
def _combine(
    shares, sums, output, pair, first_line, first, splits,
    ROWS: gl.constexpr, LINES: gl.constexpr, D: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Some rows of a head's output: the sum of all parts over the sum of all weights."""
    W: gl.constexpr = gl.num_warps()
    warps: gl.constexpr = [W, 1, 1] if LINES < W else [1, W, 1]  # along lines, there is nothing to add up across warps
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [32 // (D // 4), 1, D // 4], warps, [2, 1, 0])
    flat: gl.constexpr = gl.SliceLayout(0, layout)
    each = gl.expand_dims(gl.arange(0, CHUNK, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout))), 1)
    line = first_line + gl.expand_dims(gl.arange(0, LINES, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))), 0)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    column = gl.expand_dims(gl.expand_dims(column, 0), 1)
    out = gl.zeros([CHUNK, LINES, D], gl.float32, layout=layout)
    weight = gl.zeros([CHUNK, LINES], gl.float32, layout=gl.SliceLayout(2, layout))
    for start in range(0, splits, CHUNK):
        place = (first.to(gl.int64) + start + each) * ROWS + line
        there = (start + each < splits) & (line < ROWS)
        weight += gl.load(sums + place, mask=there, other=0.0)
        at = shares + gl.expand_dims(place, 2) * D + column
        out += gl.load(at, mask=gl.expand_dims(there, 2) & (column >= 0), other=0.0)
    row_weight = gl.convert_layout(gl.sum(weight, 0), gl.SliceLayout(1, flat))
    whole = gl.sum(out, 0) / gl.expand_dims(gl.where(row_weight > 0, row_weight, 1.0), 1)
    line = first_line + gl.expand_dims(gl.arange(0, LINES, layout=gl.SliceLayout(1, flat)), 1)
    column = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, flat)), 0)
    place = output + (pair.to(gl.int64) * ROWS + line) * D + column
    gl.store(place, whole.to(output.dtype.element_ty), mask=(line < ROWS) & (column >= 0))


@gluon.jit(do_not_specialize=WHOLE_NUMBERS)
def hopper_decode_kernel(
    query, k_desc, v_desc, lengths, table, parts, stats, betas, shares, sums, output, counters,
    stride_qb, stride_qh, stride_ql, stride_table, stride_part, stride_stats, groups, heads, capacity, left, share,
    limit, overhead, scale, softcap,
    lo, hi, threshold, floor, c7, c6, c5, c4, c3, c2, c1, c0,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, QUERIES: gl.constexpr, CAPPED: gl.constexpr, ENTROPY: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, BATCH: gl.constexpr, TILES: gl.constexpr,
    SPLITS: gl.constexpr, LINES: gl.constexpr, CHUNK: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Output, statistics and beta of ``ROWS`` queries for each head; ``counters``, two for each, are 0 at first.

    Splits have at most ``share`` tiles, or as many as is best where it is 0, if each costs ``overhead`` half tiles of
    keys or values beside those that it has. There is room for ``limit`` of them. ``table`` lists pages, of ``PAGE``
    keys each.
    """
    dtype: gl.constexpr = k_desc.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], shared)
    q_tile = gl.allocate_shared_memory(dtype, [COLUMNS, D], shared)
    w_tile = gl.allocate_shared_memory(dtype, [COLUMNS, KEYS], shared)
    kept = gl.allocate_shared_memory(gl.float32, [2 * TILES, KEYS, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    kept_valid = gl.allocate_shared_memory(gl.int32, [BATCH], flat)
    kept_firsts = gl.allocate_shared_memory(gl.int32, [BATCH], flat)
    full = barriers(STAGES, 1)
    free = barriers(STAGES, 1)
    fence_async_shared()
    sizes = (groups, heads, capacity, left)
    items, share, valid, firsts = planned(
        lengths, share, sizes, limit, gl.num_programs(0), overhead, BATCH, TILES, QUERIES, KEYS
    )  # fmt: skip
    kept_valid.store(valid)
    kept_firsts.store(firsts)
    synchronize()
    kept_plan = (items, share, kept_valid, kept_firsts)
    ring = (tiles, full, free)
    tensors = (
        query, (stride_qb, stride_qh, stride_ql), parts, stats, betas, shares, sums, output, counters
    )  # fmt: skip
    numbers = (stride_part, stride_stats, scale, softcap)
    policy = ((c7, c6, c5, c4, c3, c2, c1, c0), (lo, hi, threshold, floor))
    what = ((ring, q_tile, w_tile, kept), tensors, numbers, kept_plan, sizes, policy)
    sources = (k_desc, v_desc, ring, kept_plan, sizes, table, stride_table)
    gl.warp_specialize([
        (_compute, (what, ROWS, QUERIES, CAPPED, ENTROPY, BATCH, TILES, SPLITS, LINES, CHUNK)),
        (load, (sources, BATCH, QUERIES, KEYS, STAGES, PAGE)),
    ], [1], [LOAD_REGISTERS])  # fmt: skip
