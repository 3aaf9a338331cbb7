"""The assembler that kernels are compiled with, and its machine code for Hopper, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from sharpmax.torch.installed import triton_version
from sharpmax.torch.triton import assembler, hopper
from sharpmax.torch.triton.launch import Launch
from tests.torch.triton.compiled import LAUNCHES, printed
from tests.torch.triton.machine_code import read_before_set

LOOPS = """
        /*0000*/  ULDC UR4, c[0x0][0x260] ;
        /*0010*/  USHF.R.U32.HI UR4, URZ, 0x4, UR4 ;
        /*0020*/  @!P0 BRA 0x60 ;
        /*0030*/  UIADD3 UR12, UP0, UR4, 0x20, URZ ;
        /*0040*/  UIADD3.X UR13, URZ, 0x40000040, URZ, UP0, !UPT ;
        /*0050*/  HGMMA.64x16x16.F32 R56, R24, gdesc[UR10].tnspB, R56 ;
        /*0060*/  @!P1 BRA 0x90 ;
        {place}
        /*0080*/  HGMMA.64x16x16.F32 R56, R24, gdesc[UR10].tnspB, R56 ;
        /*0090*/  EXIT ;
        /*00a0*/  BRA 0xa0;
"""
"""Two products that may be passed over, each of a tile whose place UR12 and UR13 say."""


def test_registers_that_some_way_does_not_set_are_found() -> None:
    product = "80 HGMMA.64x16x16.F32 R56, R24, gdesc[UR10].tnspB, R56"
    assert read_before_set(LOOPS.format(place="/*0070*/  NOP ;")) == [product]
    assert read_before_set(LOOPS.format(place="/*0070*/  UMOV UR13, UR9 ;")) == [product]
    assert read_before_set(LOOPS.format(place="/*0070*/  ULDC.64 UR12, c[0x0][0x208] ;")) == []
    assert read_before_set(LOOPS.format(place="/*0070*/  UIADD3 UR12, UP0, UR12, 0x20, URZ ;")) == [
        "70 UIADD3 UR12, UP0, UR12, 0x20, URZ",
        product,
    ]


KERNELS = """
import pathlib, subprocess, tempfile
from sharpmax.torch.triton import hopper_backward

hopper_backward.known_processors = hopper.processors = hopper_backward.processors = lambda _: 132

def show(compiled):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", path]
        code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print("kernel", compiled.metadata.name + "\\n" + code)

def calls(rows, columns):
    shapes = zip((rows, 256, 256), columns)
    return (*(torch.zeros(1, 1, n, d, dtype=torch.float16) for n, d in shapes), torch.ones(1, 1, rows))

q, k, v, rows = calls(250, (64, 64, 64))
given = {"out": q, "lse": rows, "grad_out": q, "row_max": rows}
prefill.row_stats(q, k, Geometry(1.0), config="hopper")
prefill.attend(q, k, v, rows, Geometry(1.0), row_max=rows, config="hopper")
hopper_backward.adaptive_backward(q, k, v, rows, Geometry(1.0), POLICY, **given, row_sum=rows, row_moment=rows)
q, k, v, rows = calls(70, (20, 20, 7))
out = torch.zeros(1, 1, 70, 7, dtype=torch.float16)
window = Geometry(1.0, left=0, right=0)
prefill.attend(q, k, v, rows, window)
gradient.backward(q, k, v, rows, window, out=out, lse=rows, grad_out=out, row_max=rows, need_beta=True)
""".replace("POLICY", "__import__('sharpmax').PAPER.lower()")
"""The first and the last but two are those that ptxas 12.8 gets wrong."""
NAMES = [
    "hopper_stats_kernel", "hopper_attend_kernel", "numbers_kernel", "hopper_query_kernel", "hopper_key_kernel",
    "attend_kernel", "query_kernel", "key_kernel",
]  # fmt: skip


def test_no_register_is_read_before_it_is_set() -> None:
    pytest.importorskip("triton.experimental.gluon._runtime")
    if triton_version() in ((3, 4), (3, 5), (3, 7)):
        pytest.skip("this Triton has no sound assembler for Hopper")
    _, *kernels = ("\n" + printed(LAUNCHES + KERNELS)).split("\nkernel ")
    assert [code.partition("\n")[0] for code in kernels] == NAMES
    for name, code in zip(NAMES, kernels, strict=True):
        assert name == "numbers_kernel" or code.count("HGMMA") >= 2, name
        assert read_before_set(code) == [], name


class Tools:
    """Triton's, of certain versions; one that is missing is said to be, as Triton says it."""

    ptxas_options = None

    def __init__(self, used: str, other: str | None) -> None:
        self.used, self.other = used, other

    @property
    def ptxas(self) -> SimpleNamespace:
        return SimpleNamespace(version=self.used, path="used")

    @property
    def ptxas_blackwell(self) -> SimpleNamespace:
        if self.other is None:
            raise RuntimeError("Cannot find ptxas-blackwell")
        return SimpleNamespace(version=self.other, path="other")


class Kernel(triton.JITFunction):
    """Notes what it is launched with."""

    __hash__ = object.__hash__

    def __init__(self, tools: Tools) -> None:
        self.fn: Any = lambda x: None
        self.tools, self.seen = tools, []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **options: self.seen.append((options, vars(self.tools).get("ptxas")))


@pytest.mark.parametrize(
    ("used", "other", "arch", "expected", "sound"),
    [
        ("12.8", "12.9", 90, ({"ptx_options": "-v"}, "other"), True),
        ("12.8", "13.1", 90, ({}, None), False),
        ("12.8", "12.8", 90, ({}, None), False),
        ("12.8", None, 90, ({}, None), False),
        ("12.9", "13.4", 90, ({}, None), True),
        ("12.8", "12.9", 80, ({}, None), True),
    ],
)
def test_launches_pass_over_the_broken_assembler_for_a_sound_one(
    used: str, other: str | None, arch: int, expected: Any, sound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = Tools(used, other)
    kernel = Kernel(tools)
    target = SimpleNamespace(get_current_target=lambda: SimpleNamespace(arch=arch))
    monkeypatch.setattr(assembler, "_tools", lambda: tools)
    monkeypatch.setattr(assembler, "_state", assembler._state.__wrapped__)
    monkeypatch.setattr(assembler, "_remember_the_version", lambda: None)
    monkeypatch.setattr(triton.runtime.driver, "_active", target)
    Launch(kernel, 1, {}, {})._run({"x": torch.zeros(2)})
    assert kernel.seen == [expected]
    assert "ptxas" not in vars(tools)
    monkeypatch.setattr(hopper, "is_hopper", lambda _: True)
    monkeypatch.setattr(hopper, "RUN_WITH", (triton_version(),))
    monkeypatch.setattr(hopper, "processors", lambda _: 132)
    assert hopper.known_processors(torch.device("cuda")) == 132 * sound


def test_an_assembler_that_was_set_is_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Tools("12.8", "12.9")
    monkeypatch.setattr(assembler, "_tools", lambda: tools)
    monkeypatch.setattr(assembler, "_newer", lambda: "other")
    vars(tools)["ptxas"] = "mine"
    with assembler.sound_assembler(Kernel(tools)):
        assert vars(tools)["ptxas"] == "other"
    assert vars(tools)["ptxas"] == "mine"
