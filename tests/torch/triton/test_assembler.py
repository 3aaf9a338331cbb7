"""The assembler that kernels are compiled with, and its machine code for Hopper, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

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


TWO_LOOPS = """
import pathlib, subprocess, tempfile

def show(compiled):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", path]
        code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        print("kernel", compiled.metadata.name + "\\n" + code)

def calls(queries, columns):
    given = {"dtype": torch.float16}
    return (torch.zeros(1, 1, n, d, **given) for n, d in zip((queries, 256, 256), columns))

q, k, _ = calls(250, (64, 64, 64))
prefill.row_stats(q, k, Geometry(1.0), config="hopper")
q, k, v = calls(70, (20, 20, 7))
prefill.attend(q, k, v, torch.ones(1, 1, 70), Geometry(1.0, left=0, right=0))
"""
"""Kernels that ptxas 12.8 gets wrong."""


def test_no_register_is_read_before_it_is_set() -> None:
    pytest.importorskip("triton.experimental.gluon._runtime")
    _, *kernels = ("\n" + printed(LAUNCHES + TWO_LOOPS)).split("\nkernel ")
    assert [code.splitlines()[0] for code in kernels] == ["hopper_stats_kernel", "attend_kernel"]
    for code in kernels:
        assert code.count("HGMMA") >= 4
        assert read_before_set(code) == []


ASSEMBLER = """#!/bin/sh
echo "Cuda compilation tools, release 12.8, V12.8.93"
test "$1" = --version
"""
"""One that is as old as the broken one, and assembles nothing."""

ONE_KERNEL = """
from sharpmax.torch.triton.assembler import sound_assembler

def show(compiled):
    print("kernel", len(compiled.asm["cubin"]) > 0, compiled.metadata.ptx_options)

prefill.row_stats(*torch.zeros(2, 1, 1, 70, 16), Geometry(1.0))
print("after", triton.knobs.nvidia.ptxas.version)
"""


def test_the_broken_assembler_is_passed_over_for_a_newer_one(tmp_path: Path) -> None:
    pytest.importorskip("triton.experimental.gluon._runtime")
    path = tmp_path / "ptxas"
    path.write_text(ASSEMBLER)
    path.chmod(0o755)
    environment = {"TRITON_PTXAS_PATH": str(path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    said = printed(LAUNCHES + ONE_KERNEL, **environment).splitlines()
    assert said[-2:] == ["kernel True -O3", "after 12.8"]
    sound = printed(LAUNCHES + ONE_KERNEL, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert ("after 12.8" in sound) == ("kernel True -O3" in sound)
