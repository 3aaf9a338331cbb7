"""The gradients of key and value on Hopper, of attention and of its statistics in one pass (Gluon).

In the letters of :mod:`.hopper_query_kernel`, which has run before and left ``g`` and ``D`` of every row::

    dv = sum w do      dk = log(2) sum (beta unit a + g b) q

Everything is transposed: keys are the rows of a tile and queries its columns. A program owns ``ROWS`` keys: one warp
copies queries, cotangents and the numbers of their rows into a ring of tiles, and each of two warpgroups goes through
them with 64 keys and two accumulators of its own. The query heads that share a key come one after the other, so that
nothing is added atomically.
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

from .hopper_kernel import (
    LN2,
    advance,
    assigned,
    barriers,
    ex2,
    load_tile,
    reinterpret,
    store_tile,
    synchronize,
    turns_of,
)
from .hopper_query_kernel import (
    COMPUTE_REGISTERS,
    GROUPS,
    HIDDEN,
    LINES,
    LOAD_REGISTERS,
    NUMBERS,
    ROWS,
    halves,
    operand,
    products,
)

WHOLE_NUMBERS = ("items", "section", "blocks", "sequences", "heads", "group", "queries")


@gluon.jit
def _tiles_seeing(first, queries, CAUSAL: gl.constexpr):
    """The first tile of queries that sees the key ``first``, and how many there are."""
    count = (queries + LINES - 1) // LINES
    low = 0
    if CAUSAL:
        low = gl.minimum(first // LINES, count)
    return low, count


@gluon.jit
def _load(what, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """Keys and values of every warpgroup; all queries that see them, with their cotangents and numbers."""
    k_desc, v_desc, q_desc, g_desc, n_desc, k_tiles, v_tiles, q_tiles, g_tiles, n_tiles, barriers, sizes = what
    k_full, k_free, q_full, q_free = barriers
    items, section, blocks, sequences, heads, group, queries = sizes
    SIZE: gl.constexpr = q_desc.block_type.nbytes + g_desc.block_type.nbytes + n_desc.block_type.nbytes
    stage = 0
    phase = 1
    for turn in range(turns_of(items)):
        batch, head, block = assigned(turn, section, blocks, sequences, heads, False)
        first = block * ROWS
        for g in gl.static_range(GROUPS):
            mbarrier.wait(k_free.index(g), turn % 2 ^ 1)
            mbarrier.expect(k_full.index(g), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            load_tile(k_desc, [batch, head, first + LINES * g, 0], k_full.index(g), k_tiles.index(g))
            load_tile(v_desc, [batch, head, first + LINES * g, 0], k_full.index(g), v_tiles.index(g))
        low, count = _tiles_seeing(first, queries, CAUSAL)
        for member in range(group):
            source = head * group + member
            sequence = batch * (heads * group) + source
            for i in range(low, count):
                mbarrier.wait(q_free.index(stage), phase)
                mbarrier.expect(q_full.index(stage), SIZE)
                load_tile(q_desc, [batch, source, i * LINES, 0], q_full.index(stage), q_tiles.index(stage))
                load_tile(g_desc, [batch, source, i * LINES, 0], q_full.index(stage), g_tiles.index(stage))
                load_tile(n_desc, [sequence, i, 0, 0], q_full.index(stage), n_tiles.index(stage))
                stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _number(n_tile, N: gl.constexpr, HALF: gl.constexpr, layout: gl.constexpr):
    """Number N of half the rows of a tile, which are columns here.

    They lie in the order of ``place_of``, in which those of a thread are four by four beside each other.
    """
    linear: gl.constexpr = gl.DistributedLinearLayout(
        [[1], [2], [16]], [[4], [8], [0], [0], [0]], [[0], [0]], [], [LINES // 2]
    )
    found = n_tile.slice(N * LINES + HALF * LINES // 2, LINES // 2).load(linear)
    found = found.reshape([2, 4, 2, 2]).permute([0, 2, 1, 3]).reshape([LINES // 2])
    return gl.expand_dims(gl.convert_layout(found, gl.SliceLayout(0, layout), assert_trivial=True), 0)


@gluon.jit
def _hidden(product, first, start):
    """Products with those of queries that do not see a key put out of reach."""
    layout: gl.constexpr = product.type.layout
    key = first + gl.arange(0, LINES, layout=gl.SliceLayout(1, layout))
    row = start + gl.arange(0, LINES, layout=gl.SliceLayout(0, layout))
    return gl.where(gl.expand_dims(key, 1) <= gl.expand_dims(row, 0), product, HIDDEN)


@gluon.jit
def _exponents(n_tile, HALF: gl.constexpr, layout: gl.constexpr):
    """What makes exponents of products, for half the rows of a tile."""
    return _number(n_tile, 0, HALF, layout), _number(n_tile, 2, HALF, layout), _number(n_tile, 3, HALF, layout)


@gluon.jit
def _half_step(
    product, cotangent, exponents, q_tile, g_tile, n_tile, d_key, d_value, unit, HALF: gl.constexpr, wide: gl.constexpr
):
    """What half a tile of queries adds to both gradients."""
    layout: gl.constexpr = product.type.layout
    dtype: gl.constexpr = q_tile.dtype
    lse, factor, shift = exponents
    x = product * unit + shift
    of_stats = ex2(x) * x * _number(n_tile, 4, HALF, layout)
    weights = ex2(product * factor + lse)
    both = weights * (cotangent * factor + _number(n_tile, 6, HALF, layout)) + of_stats
    g_half = g_tile.slice(HALF * LINES // 2, LINES // 2)
    q_half = q_tile.slice(HALF * LINES // 2, LINES // 2)
    d_value = warpgroup_mma(operand(weights, dtype, wide), g_half, d_value, is_async=True)
    d_key = warpgroup_mma(operand(both, dtype, wide), q_half, d_key, is_async=True)
    return d_key, d_value


@gluon.jit
def _tile_step(
    product, cotangent, q_tile, g_tile, n_tile, d_key, d_value, first, start, masked, unit, wide: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """What one tile of queries adds to both gradients, half by half, from the two products that are under way."""
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LINES // 2, 16])
    exponents = _exponents(n_tile, 0, half)
    product, cotangent = warpgroup_mma_wait(0, deps=(product, cotangent))
    if CAUSAL:  # noqa: SIM102
        if masked:
            product = _hidden(product, first, start)
    left, right = halves(product)
    of_left, of_right = halves(cotangent)
    d_key, d_value = _half_step(left, of_left, exponents, q_tile, g_tile, n_tile, d_key, d_value, unit, 0, wide)
    exponents = _exponents(n_tile, 1, half)
    d_key, d_value = _half_step(right, of_right, exponents, q_tile, g_tile, n_tile, d_key, d_value, unit, 1, wide)
    return warpgroup_mma_wait(0, deps=(d_key, d_value))


@gluon.jit
def _put(out_desc, out_tile, gradient, batch, head, first):
    """Write the gradient of 64 keys, through a tile in which the one before may still be."""
    tma.store_wait(0)
    synchronize()
    out_tile.store(gradient.to(out_tile.dtype))
    fence_async_shared()
    store_tile(out_desc, [batch, head, first, 0], out_tile)


@gluon.jit
def _compute(what, G: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """Warpgroup G: its keys of every block of the program."""
    dk_desc, dv_desc, k_tiles, v_tiles, q_tiles, g_tiles, n_tiles, out_tiles, barriers, sizes, unit = what
    k_full, k_free, q_full, q_free = barriers
    items, section, blocks, sequences, heads, group, queries = sizes
    D: gl.constexpr = k_tiles.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LINES, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    zero = gl.zeros([LINES, LINES], gl.float32, layout=layout)
    stage = 0
    phase = 0
    for turn in range(turns_of(items)):
        batch, head, block = assigned(turn, section, blocks, sequences, heads, False)
        low, count = _tiles_seeing(block * ROWS, queries, CAUSAL)
        first = block * ROWS + LINES * G
        d_key = gl.zeros([LINES, D], gl.float32, layout=wide)
        d_value = gl.zeros([LINES, D], gl.float32, layout=wide)
        mbarrier.wait(k_full.index(G), turn % 2)
        i = low
        for _ in range((count - low) * group):
            mbarrier.wait(q_full.index(stage), phase)
            q_tile = q_tiles.index(stage)
            g_tile = g_tiles.index(stage)
            product, cotangent = products(k_tiles.index(G), v_tiles.index(G), q_tile, g_tile, zero)
            d_key, d_value = _tile_step(
                product, cotangent, q_tile, g_tile, n_tiles.index(stage), d_key, d_value, first, i * LINES,
                i * LINES < first + LINES, unit, wide, CAUSAL,
            )  # fmt: skip
            synchronize()
            mbarrier.arrive(q_free.index(stage), count=1)
            stage, phase = advance(stage, phase, STAGES)
            i = gl.where(i == count - 1, low, i + 1)
        synchronize()
        mbarrier.arrive(k_free.index(G), count=1)
        _put(dv_desc, out_tiles.index(G), d_value, batch, head, first)
        _put(dk_desc, out_tiles.index(G), d_key * LN2, batch, head, first)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=WHOLE_NUMBERS)
def hopper_key_kernel(
    k_desc, v_desc, q_desc, g_desc, n_desc, dk_desc, dv_desc,
    items, section, blocks, sequences, heads, group, queries, unit,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """dk and dv of blocks of keys."""
    D: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_tiles = gl.allocate_shared_memory(dtype, [GROUPS, LINES, D], shared)
    v_tiles = gl.allocate_shared_memory(dtype, [GROUPS, LINES, D], shared)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, LINES, D], shared)
    g_tiles = gl.allocate_shared_memory(dtype, [STAGES, LINES, D], shared)
    out_tiles = gl.allocate_shared_memory(dtype, [GROUPS, LINES, D], shared)
    n_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, NUMBERS, LINES], gl.NVMMASharedLayout(0, 32, 2))
    k_full = barriers(GROUPS, 1)
    k_free = barriers(GROUPS, 1)
    q_full = barriers(STAGES, 1)
    q_free = barriers(STAGES, GROUPS)
    fence_async_shared()
    synchronize()
    sizes = (items, section, blocks, sequences, heads, group, queries)
    all_barriers = (k_full, k_free, q_full, q_free)
    lines = reinterpret(n_tiles, gl.float32, [STAGES, NUMBERS * LINES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    what = (dk_desc, dv_desc, k_tiles, v_tiles, q_tiles, g_tiles, lines, out_tiles, all_barriers, sizes, unit)
    load = (k_desc, v_desc, q_desc, g_desc, n_desc, k_tiles, v_tiles, q_tiles, g_tiles, n_tiles, all_barriers, sizes)
    gl.warp_specialize([
        (_compute, (what, 0, STAGES, CAUSAL)),
        (_compute, (what, 1, STAGES, CAUSAL)),
        (_load, (load, STAGES, CAUSAL)),
    ], [4, 1], [COMPUTE_REGISTERS, LOAD_REGISTERS])  # fmt: skip
