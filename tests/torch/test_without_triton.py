"""Without Triton all of it works on a CPU, what needs Triton says what to install, and the other tests are found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HIDDEN = """
import importlib.machinery, importlib.util, sys

class WithoutTriton(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "triton" else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = WithoutTriton
assert importlib.util.find_spec("triton") is None
"""


def without_triton(code: str) -> str:
    """What a process prints in which there is no package of that name."""
    command = [sys.executable, "-c", HIDDEN + code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


CALLS = """
import json, torch
from torch.testing import assert_close
from sharpmax.torch import (
    MultiheadAttention, decode_attention, paged_decode_attention, row_stats, scaled_dot_product_attention,
    varlen_attention,
)

x = torch.randn(2, 4, 9, 16, requires_grad=True)
tokens, starts = torch.randn(9, 4, 16, requires_grad=True), torch.tensor([0, 4, 9])

def attend(x, impl="auto"):
    return scaled_dot_product_attention(x, x, x, is_causal=True, impl=impl)

expected = attend(x, "reference")
gradient, = torch.autograd.grad(expected.square().sum(), x)
for run in (
    attend,
    lambda x: attend(x, "streaming"),
    lambda x: attend(x, "stock"),
    torch.compile(attend, backend="aot_eager", fullgraph=True),
):
    found = run(x)
    assert_close(found, expected)
    assert_close(torch.autograd.grad(found.square().sum(), x)[0], gradient, rtol=1e-4, atol=1e-5)

assert torch.autograd.grad(row_stats(x, x).entropy.sum(), x)[0].any()
packed = varlen_attention(tokens, tokens, tokens, starts, starts)
assert torch.autograd.grad(packed.square().sum(), tokens)[0].any()
model = MultiheadAttention(16, 4)
model(tokens, tokens, tokens)[0].sum().backward()
assert all(p.grad is not None for p in model.parameters())

held, pages = x.detach(), x.detach().transpose(1, 2)
newest, lengths = held[:, :, -1:], torch.tensor([9, 9])
assert_close(decode_attention(newest, held, held), expected[:, :, -1:])
assert_close(paged_decode_attention(newest, pages, pages, torch.tensor([[0], [1]]), lengths),
             expected[:, :, -1:])

said = []
for call in (
    lambda: attend(x, "triton"),
    lambda: row_stats(x, x, impl="triton"),
    lambda: varlen_attention(tokens, tokens, tokens, starts, starts, impl="triton"),
    lambda: decode_attention(newest, held, held, impl="triton"),
    lambda: __import__("sharpmax.torch.triton"),
):
    try:
        call()
    except (ValueError, ModuleNotFoundError) as error:
        said.append(str(error))
print(json.dumps(said))
"""


def test_calls_work_and_those_for_triton_say_what_to_install() -> None:
    said = json.loads(without_triton(CALLS).splitlines()[-1])
    assert len(said) == 5
    for sentence in said:
        assert "pip install 'sharpmax[triton]'" in sentence
        assert "\n" not in sentence


COLLECT = """
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", *FOLDERS]))
"""


def test_the_tests_that_need_no_triton_are_found() -> None:
    folders = ["tests/torch/test_attention.py", "tests/torch/triton", "tests/gluon", "tests/test_readme.py"]
    found = without_triton(COLLECT.replace("FOLDERS", repr(folders)))
    assert "tests/torch/test_attention.py::" in found
    assert "tests/test_readme.py::test_tables" in found
    assert "tests/torch/triton/test_prefill.py::" not in found
