"""Into which splits the caches of a batch are cut, planned on the device from their lengths (Gluon).

Every program of the decoding kernel makes the same plan before it begins: one number of tiles that no split exceeds.
Splits are numbered head by head, and found by that number alone.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _valid(lengths, batch, there, capacity):
    """How many keys of batch elements are valid, none where they are not there."""
    valid = gl.where(there, capacity, 0)
    if lengths is not None:
        valid = gl.minimum(gl.maximum(gl.load(lengths + batch, mask=there), 0), valid)
    return valid


@gluon.jit
def oldest_of(length, left, QUERIES: gl.constexpr):
    """The oldest key in sight."""
    return gl.where(left >= 0, gl.maximum(length - QUERIES - left, 0), 0)


@gluon.jit
def _sight(length, left, QUERIES: gl.constexpr, KEYS: gl.constexpr):
    """The first key of the oldest tile in sight, and how many tiles there are from it on."""
    start = oldest_of(length, left, QUERIES) // KEYS * KEYS
    return start, (length - start + KEYS - 1) // KEYS


@gluon.jit
def _pieces(n, most):
    """How many pieces of at most ``most`` there are in ``n``, at least one; exact up to a million."""
    return gl.maximum(((n + most - 0.5) * (1.0 / most)).to(gl.int32), 1)


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _uniform(x):
    """A whole number that all threads of a warp hold, so that the compiler sees that they do, and branches as one."""
    return gl.inline_asm_elementwise(
        "redux.sync.max.s32 $0, $1, -1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _suitable_share(tiles, there, alike, limit, programs, overhead, layout: gl.constexpr, TILES: gl.constexpr):
    """Of how many tiles splits should be, at most, so that programs that take one in each turn are done the soonest.

    All numbers up to ``TILES`` are tried at once, each for ``alike`` heads of each length. Turns take as long as their
    largest split; or, where splits differ, programs share all tiles about equally.
    """
    share = gl.maximum(gl.arange(0, TILES + 1, layout=gl.SliceLayout(0, layout)), 1)
    splits = _pieces(gl.expand_dims(tiles, 1), gl.expand_dims(share, 0))
    items = alike * gl.sum(gl.where(gl.expand_dims(there, 1), splits, 0), 0)
    turns = _pieces(items, programs)
    work = gl.minimum(turns * share, _pieces(alike * gl.sum(tiles, 0), programs) + share)
    possible = (items <= limit) & (_pieces(gl.max(tiles, 0), share) <= programs)
    cost = gl.where(possible, 4 * work + turns * overhead, 0x3FFFFFF)
    return TILES - gl.min(cost * (TILES + 1) + TILES - share, 0) % (TILES + 1)  # of equal costs, the fewest splits


@gluon.jit
def planned(
    lengths, share, sizes, limit, programs, overhead,
    BATCH: gl.constexpr, TILES: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """How many splits there are, the most tiles of one, and the valid keys and the first split of each batch element.

    Of elements of the same length, ``BATCH`` of 1 stands for all. Splits are at most ``limit``; a head has at most one
    for each program. Splits of more tiles come first, so that those of a turn are about equal. ``TILES`` is one less
    than a power of 2. Few numbers in each thread keep the code short, which matters for what runs once.
    """
    groups, heads, capacity, left = sizes
    W: gl.constexpr = gl.num_warps()
    if BATCH == 1:
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // (TILES + 1), TILES + 1], [W, 1], [1, 0])
    else:
        layout: gl.constexpr = gl.BlockedLayout([BATCH // 32, (TILES + 1) // W], [32, 1], [1, W], [0, 1])
    batch = gl.arange(0, BATCH, layout=gl.SliceLayout(1, layout))
    there = batch * heads < groups
    valid = _valid(lengths, batch, there, capacity)
    _, tiles = _sight(valid, left, QUERIES, KEYS)
    alike = groups if BATCH == 1 else heads
    if share == 0:
        share = _uniform(_suitable_share(tiles, there, alike, limit, programs, overhead, layout, TILES))
    splits = _pieces(tiles, share)
    counts = gl.where(there, alike * splits, 0)
    firsts = gl.zeros_like(counts)
    if BATCH > 1:
        level = gl.expand_dims(gl.arange(0, TILES + 1, layout=gl.SliceLayout(0, layout)), 0)
        size = gl.expand_dims(_pieces(tiles, splits), 1)
        larger = gl.sum(gl.where(size > level, gl.expand_dims(counts, 1), 0), 0)
        equal = gl.where(size == level, gl.expand_dims(counts, 1), 0)
        before = gl.associative_scan(equal, 0, _sum) - equal + gl.expand_dims(larger, 0)
        firsts = gl.where(there, gl.sum(gl.where(size == level, before, 0), 1), 0x7FFFFFFF)
    return _uniform(gl.sum(counts, 0)), share, valid, firsts


@gluon.jit
def recalled(kept, BATCH: gl.constexpr):
    """The plan for those warps that ask, whose numbers of batch elements lie in shared memory; with these elements."""
    items, share, valid, firsts = kept
    layout: gl.constexpr = gl.BlockedLayout([max(BATCH // 32, 1)], [32], [gl.num_warps()], [0])
    return items, share, gl.arange(0, BATCH, layout=layout), valid.load(layout), firsts.load(layout)


@gluon.jit
def place_of(item, plan, sizes, QUERIES: gl.constexpr, KEYS: gl.constexpr):
    """Where a split lies: batch element, head, valid keys, number within the head, how many that has, and its keys.

    These are the first one and the one after the last; there are none in a split beyond all.
    """
    _, heads, _, left = sizes
    items, share, each, valid, firsts = plan
    first = gl.max(gl.where(firsts <= item, firsts, 0), 0)
    length = gl.max(gl.where(firsts == first, valid, 0), 0)
    start, tiles = _sight(length, left, QUERIES, KEYS)
    splits = _pieces(tiles, share)
    head = (item - first) // splits
    split = item - first - head * splits
    if each.shape[0] == 1:
        batch = head // heads
        head -= batch * heads
    else:
        batch = gl.max(gl.where(firsts == first, each, 0), 0)
    size = _pieces(tiles, splits) * KEYS
    start += split * size
    return batch, head, length, split, splits, start, gl.where(item < items, gl.minimum(start + size, length), start)


@gluon.jit
def splits_of(pair, plan, sizes, QUERIES: gl.constexpr, KEYS: gl.constexpr):
    """The first split of a head, and how many there are."""
    _, heads, _, left = sizes
    _, share, each, valid, firsts = plan
    batch = gl.minimum(pair // heads, each.shape[0] - 1)
    length = gl.max(gl.where(each == batch, valid, 0), 0)
    splits = _pieces(_sight(length, left, QUERIES, KEYS)[1], share)
    return gl.max(gl.where(each == batch, firsts, 0), 0) + (pair - batch * heads) * splits, splits
