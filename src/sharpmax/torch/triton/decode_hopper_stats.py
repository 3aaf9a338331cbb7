"""Statistics of rows from those of parts, in decoding on Hopper (Gluon)."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .decode_kernel import LOG2E, MASKED

FEW = gl.constexpr(32)
"""Splits of a head whose statistics are merged at once where they are no more, however many there might be."""


@gluon.jit
def _joined(high, total, moment, other_high, other_total, other_moment):
    """Statistics of two parts together."""
    top = gl.maximum(high, other_high)
    step, other_step = high - top, other_high - top
    fade, other_fade = gl.exp2(step * LOG2E), gl.exp2(other_step * LOG2E)
    return (
        top,
        fade * total + other_fade * other_total,
        fade * (moment + step * total) + other_fade * (other_moment + other_step * other_total),
    )


@gluon.jit
def merged(high, total, moment):
    """Maximum, sum and shifted moment from those of parts, which lie along axis 0."""
    top, total, moment = gl.reduce((high, total, moment), 0, _joined)
    some = top > MASKED
    return top, gl.where(some, total, 0.0), gl.where(some, moment, 0.0)


@gluon.jit
def _some_stats(parts, first, splits, stride_part, ROWS: gl.constexpr, COLUMNS: gl.constexpr, SPLITS: gl.constexpr):
    """Maximum, sum and shifted moment of rows from those of up to ``SPLITS`` splits from ``first`` on."""
    pairs: gl.constexpr = gl.BlockedLayout([1, 1], [32 // COLUMNS, COLUMNS], [gl.num_warps(), 1], [1, 0])
    each = gl.expand_dims(gl.arange(0, SPLITS, layout=gl.SliceLayout(1, pairs)), 1)
    line = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, pairs)), 0)
    place = parts + first.to(gl.int64) * ROWS + each * ROWS + line
    there = (each < splits) & (line < ROWS)
    return merged(
        gl.load(place, mask=there, other=MASKED),
        gl.load(place + stride_part, mask=there, other=0.0),
        gl.load(place + 2 * stride_part, mask=there, other=0.0),
    )


@gluon.jit
def group_stats(
    parts, first, splits, stride_part, layout: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    SPLITS: gl.constexpr,
):  # fmt: skip
    """Statistics of rows from those of all splits from ``first`` on.

    There may be more of them than ``SPLITS`` only where that exceeds ``FEW``. Their number, which is carried through a
    loop, bounds another one here: see :func:`.decode_hopper_load.count`. It is not lost, as it does more.
    """
    if SPLITS > FEW:
        if splits > FEW:
            top, total, moment = _some_stats(parts, first, splits, stride_part, ROWS, COLUMNS, SPLITS)
        else:
            top, total, moment = _some_stats(parts, first, splits, stride_part, ROWS, COLUMNS, FEW)
        for start in range(SPLITS, splits, FEW):
            more = _some_stats(parts, first + start, splits - start, stride_part, ROWS, COLUMNS, FEW)
            top, total, moment = _joined(top, total, moment, more[0], more[1], more[2])
    else:
        top, total, moment = _some_stats(parts, first, splits, stride_part, ROWS, COLUMNS, SPLITS)
    return gl.convert_layout(top, layout), gl.convert_layout(total, layout), gl.convert_layout(moment, layout)
