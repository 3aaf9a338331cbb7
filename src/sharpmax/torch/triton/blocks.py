"""What the kernels of this folder share: which block a program has, its tiles, its logits and which of them count.

Logits are held in units of ``log 2`` (``exp2`` is what the hardware has): ``raw * unit`` is ``z * log2(e)``. Where the
logits are a plain product, ``raw`` is that product and ``unit`` carries the scale, so that scaling costs nothing; where
they are bent (softcap, bias, a scale that is not positive), ``raw`` is in those units already and ``unit`` is 1.

So a row's maximum is rounded in these units, and its sum and moment are relative to the rounded one (and backward to
that, up to one more rounding). With logits of 1e4 that is up to 1e-3 away from the maximum itself, and sum and moment
show it. What is made of the three (the log of the sum of exponentials, the entropy) does not change with what they are
relative to.

A mask is told by MASK: 0 for none, 1 for a boolean one, 2 for a bias. LEFT and RIGHT say whether the band is bounded.
Blocks that lie within the lengths and the band are whole: of those, a mask alone hides logits.

Kernels name the type of lengths, since Triton makes a constant of a 1 whose type is not named. Loops would be known to
be empty, and compilers fail at what their pipelines leave behind: ptxas (12.8, 12.9) crashes at a wait for products
where there are none, Triton gives up on descriptors made in a loop that has no loop inside.
"""

# pyright: reportArgumentType=false

import triton
import triton.language as tl

NONE, BOOLEAN, BIAS = 0, 1, 2
"""The kinds of masks."""

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(-1.0e4)  # an exponent whose power is exactly 0, and finite, so that 0 * exponent is 0
UNREACHED = tl.constexpr(1.0e20)  # a shift under which every power is exactly 0: that of rows without keys


@triton.jit
def document_of(slot, cu, documents, steps, BLOCK: tl.constexpr):
    """The packed document whose block has this number; document ``d`` owns those from ``cu[d] // BLOCK + d`` on."""
    low = 0
    high = documents
    for _ in range(steps):
        middle = (low + high) // 2
        after = tl.load(cu + middle) // BLOCK + middle > slot
        high = tl.where(after, middle, high)
        low = tl.where(after, low, middle)
    return low


@triton.jit
def assigned(
    program,
    heads,
    q_len,
    k_len,
    cu_q,
    cu_k,
    documents,
    steps,
    key_lengths,
    BLOCK: tl.constexpr,
    BY_KEY: tl.constexpr,
    BACKWARDS: tl.constexpr,
    PACKED: tl.constexpr,
    LENGTHS: tl.constexpr,
    LOWER_RIGHT: tl.constexpr,
):
    """The work of a program: batch element, head, first row (or key) of its block, where its sequence starts among the
    queries and the keys, their lengths there, and the shift of positions. A first row beyond the length means no work.
    """
    length = k_len if BY_KEY else q_len
    if PACKED:
        slots = tl.cdiv(length, BLOCK) + documents
        batch = 0
        head = program // slots
        slot = program % slots
        cu = cu_k if BY_KEY else cu_q
        document = document_of(slot, cu, documents, steps, BLOCK)
        first = (slot - tl.load(cu + document) // BLOCK - document) * BLOCK
        q_start = tl.load(cu_q + document)
        k_start = tl.load(cu_k + document)
        queries = tl.load(cu_q + document + 1) - q_start
        keys = tl.load(cu_k + document + 1) - k_start
        first = tl.where(first < 0, tl.maximum(queries, keys), first)  # tokens before the first document
    else:
        blocks = tl.cdiv(length, BLOCK)
        batch = program // blocks // heads
        head = program // blocks % heads
        first = program % blocks * BLOCK
        if BACKWARDS:
            first = (blocks - 1) * BLOCK - first
        q_start = 0
        k_start = 0
        queries = q_len
        keys = k_len
        if LENGTHS:
            keys = tl.minimum(tl.load(key_lengths + batch), k_len)
    shift = 0
    if LOWER_RIGHT:
        shift = keys - queries
    return batch, head, first, q_start, k_start, queries, keys, shift


@triton.jit
def key_range(
    first,
    queries,
    keys,
    shift,
    left,
    right,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """The keys that rows ``first .. first + ROWS`` see: blocks start at ``low``, those in ``[a, b)`` are seen whole by
    every row, the last one ends at ``high``.
    """
    last = tl.minimum(first + ROWS, queries) - 1
    low = 0
    high = keys
    whole_low = 0
    whole_high = keys
    if LEFT:
        low = tl.maximum(first + shift - left, 0) // BLOCK * BLOCK
        whole_low = tl.maximum(last + shift - left, 0)
    if RIGHT:
        high = tl.minimum(keys, last + shift + right + 1)
        whole_high = tl.minimum(keys, first + shift + right + 1)
    high = tl.maximum(high, low)
    a = tl.minimum(tl.cdiv(whole_low, BLOCK) * BLOCK, tl.cdiv(high, BLOCK) * BLOCK)
    b = tl.maximum(tl.maximum(whole_high, 0) // BLOCK * BLOCK, a)
    return low, a, b, high


@triton.jit
def row_range(
    first,
    queries,
    keys,
    shift,
    left,
    right,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """The rows that see keys ``first .. first + KEYS``, in the form of :func:`key_range`."""
    last = tl.minimum(first + KEYS, keys) - 1
    low = 0
    high = queries
    whole_low = 0
    whole_high = queries
    if RIGHT:
        low = tl.maximum(first - shift - right, 0) // BLOCK * BLOCK
        whole_low = tl.maximum(last - shift - right, 0)
    if LEFT:
        high = tl.minimum(queries, last - shift + left + 1)
        whole_high = tl.minimum(queries, first - shift + left + 1)
    high = tl.maximum(tl.where(first < keys, high, 0), low)
    a = tl.minimum(tl.cdiv(whole_low, BLOCK) * BLOCK, tl.cdiv(high, BLOCK) * BLOCK)
    b = tl.maximum(tl.maximum(whole_high, 0) // BLOCK * BLOCK, a)
    b = tl.where(first + KEYS > keys, a, b)
    return low, a, b, high


@triton.jit
def edge_blocks(low, a, b, high, BLOCK: tl.constexpr):
    """How many blocks lie before ``a`` and after ``b``: those where some logits do not count."""
    return (a - low) // BLOCK + tl.maximum(high - b + BLOCK - 1, 0) // BLOCK


@triton.jit
def edge_block(i, low, a, b, BLOCK: tl.constexpr):
    """Where the ``i``-th of the :func:`edge_blocks` starts."""
    start = low + i * BLOCK
    return tl.where(start < a, start, b + start - a)


@triton.jit
def matrix(base, length, stride_row, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    """What :func:`tile` reads from: the address of a matrix, or a descriptor of it for Hopper's copy engine."""
    if TMA:
        source = tl.make_tensor_descriptor(
            base, shape=[tl.maximum(length, 1), WIDTH], strides=[stride_row, 1], block_shape=[ROWS, COLS]
        )
    else:
        source = base
    return source


@triton.jit
def tile(
    source,
    first,
    length,
    stride_row,
    stride_col,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    EDGE: tl.constexpr,
    TMA: tl.constexpr = False,
):
    """Rows ``first .. first + ROWS`` of a matrix of WIDTH columns as ``[ROWS, COLS]``, with zeros outside of it."""
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    if TMA:
        values = source.load([first, 0])
    else:
        pointers = source + tl.cast(first, tl.int64) * stride_row + (row * stride_row + col * stride_col)
        if EDGE:
            values = tl.load(pointers, mask=(row < length - first) & (col < WIDTH), other=0.0)
        elif WIDTH != COLS:
            values = tl.load(pointers, mask=col < WIDTH, other=0.0)
        else:
            values = tl.load(pointers)
    return values


@triton.jit
def put_tile(base, values, first, length, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr):
    """Write ``values`` as rows ``first .. first + ROWS`` of a contiguous matrix of WIDTH columns."""
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    pointers = base + tl.cast(first, tl.int64) * WIDTH + (row * WIDTH + col)
    tl.store(pointers, values.to(base.dtype.element_ty), mask=(row < length - first) & (col < WIDTH))


@triton.jit
def seen(
    row,
    key,
    queries,
    keys,
    shift,
    left,
    right,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """Whether the query at ``row`` may see the key at ``key``, by length and band."""
    visible = (key < keys) & (row < queries)
    distance = key - (row + shift)
    if LEFT:
        visible = visible & (distance >= -left)
    if RIGHT:
        visible = visible & (distance <= right)
    return visible


@triton.jit
def entries(mask, row, key, there, stride_mq, stride_mk, MASK: tl.constexpr):
    """The entries of a mask at rows and keys, zeros where it is not ``there``; no tensor without a mask."""
    found = 0
    if MASK != 0:
        pointers = mask + row.to(tl.int64) * stride_mq + key.to(tl.int64) * stride_mk
        found = tl.load(pointers, mask=there, other=0)
    return found


@triton.jit
def logits(
    product,
    entry,
    visible,
    limit,
    scale2,
    cap2,
    MASK: tl.constexpr,
    CAP: tl.constexpr,
    BENT: tl.constexpr,
    EDGE: tl.constexpr,
):
    """``raw`` logits, which of them are visible, and what the softcap multiplies their gradient by (1 without one).

    ``scale2`` is ``scale * log2(e)``, or ``2 log2(e) scale / softcap`` with a softcap, where ``cap2`` is
    ``softcap * log2(e)``. ``entry`` is that of the mask; a bias of at most ``limit`` hides a key. ``visible`` says
    which logits are seen by lengths and band, and counts where EDGE says that the block is not whole.
    """
    raw = product
    slope = 1.0
    if CAP:
        curved = 1.0 - 2.0 / (1.0 + tl.exp2(tl.minimum(product * scale2, 100.0)))
        raw = curved * cap2
        slope = 1.0 - curved * curved
    elif BENT:
        raw = product * scale2
    if MASK != 0:
        bias = entry.to(tl.float32)
        shown = entry != 0 if MASK == 1 else ~(bias <= limit)  # what is no number hides nothing
        visible = visible & shown if EDGE else shown
        if MASK == 2:
            raw = raw + tl.where(visible, bias, 0.0) * LOG2E
    return raw, visible, slope


@triton.jit
def kept(seed, sequence, row, key, dropout_p):
    """Which weights dropout leaves; the same ones forward and backward, whatever the tiles.

    Row, key and sequence are counters of their own, so that no two weights share a number at any length.
    """
    none = tl.zeros_like(row + key)
    bits, _, _, _ = tl.philox(seed, key + none, row + none, sequence + none, none)
    return tl.uint_to_uniform_float(bits) >= dropout_p


@triton.jit
def survival(dropout_p):
    """What the weights that dropout leaves are multiplied by; 0 where it leaves none."""
    left = 1.0 - dropout_p
    return tl.where(left > 0.0, 1.0 / tl.where(left > 0.0, left, 1.0), 0.0)
