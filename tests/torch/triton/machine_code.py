"""Machine code for Hopper, as cuobjdump prints it: uniform registers that are read where they may not have been set.

They hold where products find their tiles in shared memory. A compiler that sets one on some ways to an instruction, and
not on all, makes products of anything that lies in shared memory.
"""

from __future__ import annotations

import re
from typing import NamedTuple

LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
GUARD = re.compile(r"@!?(U?P\w+)\s+")
WITHOUT_RESULT = ("UTMA", "UBLK", "SYNCS", "USTS", "UCGABAR")
"""Instructions whose first operand is read, though they begin like those that set it."""
NOT_FOLLOWED = re.compile(r"(CALL|JMP|JMX|RET|BRX\.|WARPSYNC\.COLLECTIVE)\b")
"""Ways through the code that are not known here."""


class Instruction(NamedTuple):
    """Where it stands, its text, what it reads and sets, where it may jump to, and whether the next one may follow."""

    address: int
    text: str
    reads: frozenset[int]
    sets: frozenset[int]
    jumps: int | None
    goes_on: bool

    @property
    def copies(self) -> bool:
        """Whether it copies a register, which is no use of it: halves of pairs are copied that nobody reads."""
        return bool(self.reads) and "UMOV" in self.text

    def after(self, known: frozenset[int]) -> frozenset[int]:
        """What is set behind it, where ``known`` is set before."""
        return known - self.sets if self.copies and not self.reads <= known else known | self.sets


def registers(operand: str, count: int = 1) -> set[int]:
    """The numbers of the uniform registers in an operand: ``count`` are taken together, or two where it says so."""
    found = re.finditer(r"(?<![A-Z])UR(\d+)(\.64)?", operand)
    return {int(m[1]) + i for m in found for i in range(2 if m[2] else count)}


def of_tiles(operand: str, position: int) -> set[int]:
    """The registers that ``gdesc[...]`` stands for: two for each factor that lies in shared memory."""
    first = int(operand.removeprefix("gdesc[UR").partition("]")[0])
    return {first + i for i in range(0 if position == 1 else 2, 4)}  # behind a factor in registers, two are not read


def instruction(address: int, text: str) -> Instruction:
    guard = GUARD.match(text)
    name, _, rest = text[guard.end() if guard else 0 :].partition(" ")
    operands = [operand.strip() for operand in rest.split(",")]
    pairs = 2 if ".64" in name or "WIDE" in name else 1
    is_uniform = name.startswith(("U", "S2UR", "R2UR", "REDUX", "VOTEU")) and not name.startswith(WITHOUT_RESULT)
    result = 1 if re.match(r"U?P[\dT]", operands[0]) and not name.startswith("UISETP") else 0  # a predicate comes first
    reads, sets = set(), set()
    for i, operand in enumerate(operands):
        if operand.startswith("gdesc["):
            reads |= of_tiles(operand, i)
        elif is_uniform and i == result:
            sets |= registers(operand, pairs)
        else:
            reads |= registers(operand, pairs if name == "UIADD3.64" else 1)
    branches = name.partition(".")[0] == "BRA"
    target = re.search(r"0x([0-9a-f]+)", rest) if branches else None
    always = guard is None and name in ("EXIT", "BRA") and not re.match(r"!?U?P\d", operands[0])
    return Instruction(
        address, text, frozenset(reads), frozenset(sets), int(target[1], 16) if target else None, not always
    )


def read_before_set(code: str) -> list[str]:
    """The instructions that read a uniform register which some way to them does not set.

    What is set on a condition counts as set. Of what copies of tiles are told by, the first registers alone are known.
    """
    found = [instruction(int(m[1], 16), m[2]) for m in LINE.finditer(code)]
    strange = [x.text for x in found if NOT_FOLLOWED.search(x.text)]
    if not found or strange:
        raise ValueError(f"expected code whose ways are known, got {strange or 'none'}")
    place = {x.address: i for i, x in enumerate(found)}
    ways = [
        ([] if x.jumps is None else [place[x.jumps]]) + ([i + 1] if x.goes_on and i + 1 < len(found) else [])
        for i, x in enumerate(found)
    ]
    table = next((i for i, x in enumerate(found) if "BRX" in x.text.split()), 0)
    known: dict[int, frozenset[int]] = {0: frozenset()}
    for start in range(len(found)):
        if start in known and start > 0:
            continue
        # A table of jumps, by which warps go their ways, leads to what follows it and to where nothing else leads.
        ways[table] += [start] * (start > 0)
        waiting = [table if start else 0]
        while waiting:
            i = waiting.pop()
            after = found[i].after(known[i])
            for way in ways[i]:
                both = after & known.get(way, after)
                if known.get(way) != both:
                    known[way] = both
                    waiting.append(way)
    return [f"{x.address:x} {x.text}" for i, x in enumerate(found) if x.reads - known[i] and not x.copies]
