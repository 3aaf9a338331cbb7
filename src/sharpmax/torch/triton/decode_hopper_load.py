"""How tiles of keys and values come into shared memory, in decoding on Hopper (Gluon).

One warp copies them into a ring (TMA), as far ahead of those that read them as the ring allows. From a cache of pages a
tile comes in pieces, one for each page and 64 columns.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .decode_plan import oldest_of, place_of, recalled
from .hopper_kernel import advance, item_of_turn, load_tile, reinterpret, turns_of


@gluon.jit
def count(first, last, KEYS: gl.constexpr):
    """How many tiles there are from one key to another.

    From keys that are carried through a loop, it is counted anew: a number that is carried itself, and bounds a loop
    but does nothing else, is lost by Triton 3.6.
    """
    return gl.maximum((last - first + KEYS - 1) // KEYS, 0)


@gluon.jit
def _pages(
    table, stride_table, batch, start, oldest, last, COUNT: gl.constexpr, ROWS: gl.constexpr, PAGE: gl.constexpr
):
    """The pages of a tile, -1 for those in which no key is in sight; without pages, the batch element."""
    pages = batch
    if PAGE > 0:
        layout: gl.constexpr = gl.BlockedLayout([COUNT], [32], [gl.num_warps()], [0])
        key = start + gl.arange(0, COUNT, layout=layout) * ROWS
        place = table + batch.to(gl.int64) * stride_table + key // PAGE
        pages = gl.load(place, mask=(key < last) & (key + ROWS > oldest), other=-1)
    return pages


@gluon.jit
def _page(pages, i: gl.constexpr, PAGE: gl.constexpr):
    """One of the pages of a tile, all of which every thread holds; -1 for any number below."""
    page = pages
    if PAGE > 0:
        place = gl.arange(0, pages.shape[0], layout=pages.type.layout)
        page = gl.max(gl.where(place == i, pages, -1), 0)
    return page


@gluon.jit
def _send(
    desc, turn, ring, stage, phase, plan, sizes, table, stride_table,
    QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Copy the keys of a program's split, or its values, into the next tiles of the ring; where it stands then.

    What lies in no page is filled with zeros: no page has the number -1.
    """
    tiles, full, free = ring
    D: gl.constexpr = tiles.shape[2]
    ROWS: gl.constexpr = desc.block_type.shape[2]
    WIDTH: gl.constexpr = desc.block_type.shape[3]
    COUNT: gl.constexpr = KEYS // ROWS
    parts = reinterpret(tiles, tiles.dtype, [STAGES * (D // WIDTH) * COUNT, ROWS, WIDTH], tiles.layout)
    batch, head, length, _, _, first, last = place_of(item_of_turn(turn), plan, sizes, QUERIES, KEYS)
    oldest = oldest_of(length, sizes[3], QUERIES)
    pages = _pages(table, stride_table, batch, first, oldest, last, COUNT, ROWS, PAGE)
    for i in range(count(first, last, KEYS)):
        start = first + i * KEYS
        these = pages
        pages = _pages(table, stride_table, batch, start + KEYS, oldest, last, COUNT, ROWS, PAGE)
        mbarrier.wait(free.index(stage), phase)
        mbarrier.expect(full.index(stage), KEYS * D * tiles.dtype.primitive_bitwidth // 8)
        row = start % PAGE if PAGE > 0 else start
        for n in gl.static_range(COUNT):
            for m in gl.static_range(D // WIDTH):
                part = parts.index((stage * (D // WIDTH) + m) * COUNT + n)
                load_tile(desc, [_page(these, n, PAGE), head, row, m * WIDTH], full.index(stage), part)
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def load(
    what, BATCH: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr
):
    """All tiles of a program, in the order in which they are read: keys of a split, then values of the one before.

    Where a split lies is worked out for each anew: see :func:`count`.
    """
    k_desc, v_desc, ring, kept_plan, sizes, table, stride_table = what
    plan = recalled(kept_plan, BATCH)
    turns = turns_of(plan[0])
    stage = 0
    phase = 1
    for turn in range(turns + 1):
        if turn < turns:
            stage, phase = _send(
                k_desc, turn, ring, stage, phase, plan, sizes, table, stride_table, QUERIES, KEYS, STAGES, PAGE
            )  # fmt: skip
        if turn > 0:
            stage, phase = _send(
                v_desc, turn - 1, ring, stage, phase, plan, sizes, table, stride_table, QUERIES, KEYS, STAGES, PAGE
            )  # fmt: skip
