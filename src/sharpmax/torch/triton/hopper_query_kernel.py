"""The gradient of the query on Hopper, of attention and of its statistics in one pass (Gluon).

With ``w`` the weights, ``p`` the softmax of the logits without beta, ``H`` its entropy and ``x = log p + H``::

    a = w (<do, v> - D)     b = 2^x x     dq = log(2) (beta unit sum a k + g sum b k)     g = slope sum a x

Logarithms are to base 2, except that of 2, and ``unit`` is what makes such logits of products: ``scale / log(2)``. One
product ``<q, k>`` serves ``w`` and ``p``. What is known of a row beforehand comes as numbers, which
:mod:`.hopper_backward` lists.

``D`` from a rounded output is off by ``sum a``, which is summed. ``g`` hardly feels it: ``x`` is 0 on average. For the
kernel of the keys, ``g`` and what ``D`` should have been are left among the numbers.

A program owns ``ROWS`` rows of queries: one warp copies keys and values into a ring of tiles, and each of two
warpgroups goes through them with 64 rows and two accumulators of its own, so that one's products run while the other
has exponentials to do. Programs are persistent: while a block of rows is finished, the next queries are on their way.
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

from . import hopper_backward
from .hopper_kernel import (
    LN2,
    SLOTS,
    advance,
    assigned,
    barriers,
    by_thread,
    ex2,
    load_tile,
    store_tile,
    synchronize,
    turns_of,
)

GROUPS = gl.constexpr(2)
"""Warpgroups that compute."""
LINES = gl.constexpr(hopper_backward.LINES)
"""Rows of a warpgroup, and of a tile."""
ROWS = gl.constexpr(hopper_backward.ROWS)
NUMBERS = gl.constexpr(hopper_backward.NUMBERS)
COMPUTE_REGISTERS = gl.constexpr(240)
"""Registers of a thread that computes: accumulators take 128 of them."""
LOAD_REGISTERS = gl.constexpr(24)
"""Registers of a thread that loads: the fewest there may be."""
HIDDEN = gl.constexpr(-1.0e30)
"""A product whose powers are 0, with the unit and with the least factor of a row, and finite times the unit."""
WHOLE_NUMBERS = ("items", "section", "blocks", "sequences", "heads", "group", "queries", "keys")


@gluon.jit
def _numbers_of(numbers, batch, head, heads, queries, first):
    """Where the numbers of the 64 rows from ``first`` on are."""
    tiles = (queries + LINES - 1) // LINES
    return numbers + ((batch.to(gl.int64) * heads + head) * tiles + first // LINES) * (NUMBERS * LINES)


@gluon.jit
def place_of(line):
    """Where a row's number is among those of its tile: as the threads of a product with rows for columns want it."""
    return line // 16 * 16 + line // 2 % 4 * 4 + line // 8 % 2 * 2 + line % 2


@gluon.jit
def _tiles_seen(first, queries, keys, COUNT: gl.constexpr, CAUSAL: gl.constexpr):
    """How many tiles of keys the ``COUNT`` rows from ``first`` on see, and how many of these not whole."""
    high = keys
    whole = keys
    if CAUSAL:
        high = gl.minimum(keys, gl.minimum(first + COUNT, queries))
        whole = gl.minimum(keys, first + 1)
    high = gl.where(first < queries, high, 0)
    seen = (high + LINES - 1) // LINES
    return seen, seen - gl.minimum(whole // LINES, seen)


@gluon.jit
def _load(what, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """Queries and cotangents of every warpgroup and all keys and values that they see, from the last one down."""
    q_desc, g_desc, k_desc, v_desc, q_tiles, g_tiles, k_tiles, v_tiles, q_full, q_free, k_full, k_free, sizes = what
    items, section, blocks, sequences, heads, group, queries, keys = sizes
    stage = 0
    phase = 1
    slot = 0
    slot_phase = 1
    for turn in range(turns_of(items)):
        batch, head, block = assigned(turn, section, blocks, sequences, heads, True)
        first = block * ROWS
        for g in gl.static_range(GROUPS):
            at = slot * GROUPS + g
            mbarrier.wait(q_free.index(at), slot_phase)
            mbarrier.expect(q_full.index(at), q_desc.block_type.nbytes + g_desc.block_type.nbytes)
            load_tile(q_desc, [batch, head, first + LINES * g, 0], q_full.index(at), q_tiles.index(at))
            load_tile(g_desc, [batch, head, first + LINES * g, 0], q_full.index(at), g_tiles.index(at))
        slot, slot_phase = advance(slot, slot_phase, SLOTS)
        seen, _ = _tiles_seen(first, queries, keys, ROWS, CAUSAL)
        for i in range(seen):
            start = (seen - 1 - i) * LINES
            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            load_tile(k_desc, [batch, head // group, start, 0], k_full.index(stage), k_tiles.index(stage))
            load_tile(v_desc, [batch, head // group, start, 0], k_full.index(stage), v_tiles.index(stage))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def products(left, right, left_tile, right_tile, zero):
    """Start ``left left_tile^T`` and ``right right_tile^T``."""
    first = warpgroup_mma(left, left_tile.permute([1, 0]), zero, use_acc=False, is_async=True)
    second = warpgroup_mma(right, right_tile.permute([1, 0]), zero, use_acc=False, is_async=True)
    return first, second


@gluon.jit
def operand(tile, dtype: gl.constexpr, wide: gl.constexpr):
    """A tile as the left operand of a product, rounded."""
    return gl.convert_layout(tile.to(dtype), gl.DotOperandLayout(0, wide, 2))


@gluon.jit
def halves(tile):
    """The left and the right half of a tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LINES // 2, 16])
    left, right = tile.reshape([LINES, 2, LINES // 2]).permute([0, 2, 1]).split()
    left = gl.convert_layout(left, layout, assert_trivial=True)
    return left, gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def _hidden(product, start, row, keys, CAUSAL: gl.constexpr):
    """Products with those of keys that a row does not see put out of reach."""
    layout: gl.constexpr = product.type.layout
    key = gl.expand_dims(start + gl.arange(0, product.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    end = gl.zeros_like(row) + keys
    if CAUSAL:
        end = gl.minimum(end, row + 1)
    return gl.where(key < gl.expand_dims(end, 1), product, HIDDEN)


@gluon.jit
def column(x, layout: gl.constexpr):
    """Numbers of rows, beside a tile of that layout."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout), assert_trivial=True), 1)


@gluon.jit
def _factors(product, unit, of_row):
    """``w`` and ``b`` of a tile of products."""
    layout: gl.constexpr = product.type.layout
    lse, _, factor, shift = of_row
    x = product * unit + column(shift, layout)
    return ex2(product * column(factor, layout) + column(lse, layout)), ex2(x) * x


@gluon.jit
def _with(excess, a):
    """The sum of ``a`` that each thread has of a row, with that of one more tile; of ``a`` as products take it.

    What all logits of a row have in common is then the same factor of this sum and of ``along``, and goes out of ``g``.
    """
    return excess + gl.convert_layout(gl.sum(by_thread(a.to(gl.float32)), 2), excess.type.layout, assert_trivial=True)


@gluon.jit
def _whole_step(product, cotangent, k_tile, along, across, excess, unit, of_row, wide: gl.constexpr):
    """What one tile of keys adds to both accumulators and to the sum of ``a`` that each thread has.

    Exponentials do not wait for the second product.
    """
    dtype: gl.constexpr = k_tile.dtype
    layout: gl.constexpr = product.type.layout
    weights, b = _factors(product, unit, of_row)
    across = warpgroup_mma(operand(b, dtype, wide), k_tile, across, is_async=True)
    cotangent = warpgroup_mma_wait(1, deps=(cotangent,))
    a = (weights * (cotangent + column(of_row[1], layout))).to(dtype)
    along = warpgroup_mma(operand(a, dtype, wide), k_tile, along, is_async=True)
    return along, across, _with(excess, a)


@gluon.jit
def _half_step(product, cotangent, k_tile, along, across, excess, unit, of_row, wide: gl.constexpr):
    """The same for half a tile, whose products are done."""
    dtype: gl.constexpr = k_tile.dtype
    layout: gl.constexpr = product.type.layout
    weights, b = _factors(product, unit, of_row)
    a = (weights * (cotangent + column(of_row[1], layout))).to(dtype)
    across = warpgroup_mma(operand(b, dtype, wide), k_tile, across, is_async=True)
    along = warpgroup_mma(operand(a, dtype, wide), k_tile, along, is_async=True)
    return along, across, _with(excess, a)


@gluon.jit
def _tile_step(
    product, cotangent, k_tile, along, across, excess, row, start, masked, keys, unit, of_row, wide: gl.constexpr,
    CAUSAL: gl.constexpr, EDGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """What one tile of keys adds to all three sums, from the two products that are under way."""
    if HALVES:
        product, cotangent = warpgroup_mma_wait(0, deps=(product, cotangent))
    else:
        product = warpgroup_mma_wait(1, deps=(product,))
    if EDGES:  # noqa: SIM102
        if masked:
            product = _hidden(product, start, row, keys, CAUSAL)
    if HALVES:
        left, right = halves(product)
        of_left, of_right = halves(cotangent)
        first = k_tile.slice(0, LINES // 2)
        along, across, excess = _half_step(left, of_left, first, along, across, excess, unit, of_row, wide)
        last = k_tile.slice(LINES // 2, LINES // 2)
        along, across, excess = _half_step(right, of_right, last, along, across, excess, unit, of_row, wide)
    else:
        along, across, excess = _whole_step(product, cotangent, k_tile, along, across, excess, unit, of_row, wide)
    along, across = warpgroup_mma_wait(0, deps=(along, across))
    return along, across, excess


@gluon.jit
def _compute(
    what, G: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EDGES: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """Warpgroup G: its rows of every block of the program."""
    out_desc, q_tiles, g_tiles, k_tiles, v_tiles, q_full, q_free, k_full, k_free, numbers, sizes, unit = what
    items, section, blocks, sequences, heads, _, queries, keys = sizes
    D: gl.constexpr = q_tiles.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LINES, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    lines: gl.constexpr = gl.SliceLayout(1, layout)
    zero = gl.zeros([LINES, LINES], gl.float32, layout=layout)
    line = gl.arange(0, LINES, layout=lines)
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    for turn in range(turns_of(items)):
        batch, head, block = assigned(turn, section, blocks, sequences, heads, True)
        all_tiles, _ = _tiles_seen(block * ROWS, queries, keys, ROWS, CAUSAL)
        first = block * ROWS + LINES * G
        seen, masked = _tiles_seen(first, queries, keys, LINES, CAUSAL)
        at = _numbers_of(numbers, batch, head, heads, queries, gl.minimum(first, queries - 1)) + place_of(line)
        of_row = (gl.load(at), gl.load(at + LINES), gl.load(at + 2 * LINES), gl.load(at + 3 * LINES))
        row = first + line
        along = gl.zeros([LINES, D], gl.float32, layout=wide)
        across = gl.zeros([LINES, D], gl.float32, layout=wide)
        excess = gl.zeros_like(gl.sum(by_thread(zero), 2))
        q_tile = q_tiles.index(slot * GROUPS + G)
        g_tile = g_tiles.index(slot * GROUPS + G)
        mbarrier.wait(q_full.index(slot * GROUPS + G), slot_phase)
        if EDGES:
            for _ in range(all_tiles - seen):  # keys that only the other warpgroup sees
                mbarrier.wait(k_full.index(stage), phase)
                synchronize()
                mbarrier.arrive(k_free.index(stage), count=1)
                stage, phase = advance(stage, phase, STAGES)
        # The queries of the block before are given back now: its gradient has been read from there meanwhile.
        tma.store_wait(0)
        synchronize()
        mbarrier.arrive(q_free.index((slot + SLOTS - 1) % SLOTS * GROUPS + G), count=1, pred=turn > 0)
        for i in range(seen):
            mbarrier.wait(k_full.index(stage), phase)
            k_tile = k_tiles.index(stage)
            product, cotangent = products(q_tile, g_tile, k_tile, v_tiles.index(stage), zero)
            along, across, excess = _tile_step(
                product, cotangent, k_tile, along, across, excess, row, (seen - 1 - i) * LINES, i < masked, keys, unit,
                of_row, wide, CAUSAL, EDGES, HALVES,
            )  # fmt: skip
            synchronize()
            mbarrier.arrive(k_free.index(stage), count=1)
            stage, phase = advance(stage, phase, STAGES)
        _finish(out_desc, q_tile, along, across, excess, at, of_row, unit, batch, head, first, row < queries, wide)
        slot, slot_phase = advance(slot, slot_phase, SLOTS)
    tma.store_wait(0)


@gluon.jit
def _finish(out_desc, q_tile, along, across, excess, at, of_row, unit, batch, head, first, inside, wide: gl.constexpr):
    """Write numbers of 64 rows for the kernel of the keys, and dq, which takes the place of the query in ``q_tile``."""
    _, delta, factor, shift = of_row
    lines: gl.constexpr = factor.type.layout
    query = q_tile.load(wide).to(gl.float32)
    excess = gl.convert_layout(gl.sum(excess, 1), lines)
    g = gl.load(at + 5 * LINES) * (unit * gl.convert_layout(gl.sum(along * query, 1), lines) + shift * excess)
    gl.store(at + 4 * LINES, g, mask=inside)
    gl.store(at + 6 * LINES, (delta - excess) * factor, mask=inside)
    gradient = column(factor * LN2, wide) * along + column(g * LN2, wide) * across
    q_tile.store(gradient.to(q_tile.dtype))
    fence_async_shared()
    store_tile(out_desc, [batch, head, first, 0], q_tile)


@gluon.jit(do_not_specialize=WHOLE_NUMBERS)
def hopper_query_kernel(
    q_desc, g_desc, k_desc, v_desc, out_desc, numbers,
    items, section, blocks, sequences, heads, group, queries, keys, unit,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, EDGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """dq of blocks of rows, and two more of their ``numbers``."""
    D: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(dtype, [SLOTS * GROUPS, LINES, D], shared)
    g_tiles = gl.allocate_shared_memory(dtype, [SLOTS * GROUPS, LINES, D], shared)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, LINES, D], shared)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, LINES, D], shared)
    q_full = barriers(SLOTS * GROUPS, 1)
    q_free = barriers(SLOTS * GROUPS, 1)
    k_full = barriers(STAGES, 1)
    k_free = barriers(STAGES, GROUPS)
    fence_async_shared()
    synchronize()
    sizes = (items, section, blocks, sequences, heads, group, queries, keys)
    what = (out_desc, q_tiles, g_tiles, k_tiles, v_tiles, q_full, q_free, k_full, k_free, numbers, sizes, unit)
    load = (
        q_desc, g_desc, k_desc, v_desc, q_tiles, g_tiles, k_tiles, v_tiles, q_full, q_free, k_full, k_free, sizes
    )  # fmt: skip
    gl.warp_specialize([
        (_compute, (what, 0, STAGES, CAUSAL, EDGES, HALVES)),
        (_compute, (what, 1, STAGES, CAUSAL, EDGES, HALVES)),
        (_load, (load, STAGES, CAUSAL)),
    ], [4, 1], [COMPUTE_REGISTERS, LOAD_REGISTERS])  # fmt: skip
