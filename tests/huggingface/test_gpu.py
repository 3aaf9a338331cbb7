"""The families on a GPU: kernels against Figure 4 in float64, compiled generation, and memory at 65,536 tokens."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from sharpmax import PAPER
from sharpmax.huggingface import register, sharpen
from tests.huggingface import families
from tests.huggingface.oracle import NAME as ORACLE
from tests.huggingface.oracle import register_oracle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
register()
register_oracle()


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def results(model: Any, ids: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> list[torch.Tensor]:
    logits = model(ids, use_cache=False, **kwargs).logits * weight
    logits.square().mean().backward()
    return [logits.detach()] + [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("form", ["plain", "left", "right", "packed"])
@pytest.mark.parametrize("family", families.CAUSAL)
def test_logits_and_gradients(family, form):
    ids, mask = families.padded([70, 31, 50], 70, "left" if form == "left" else "right")
    kwargs: dict[str, Any] = {"attention_mask": mask.cuda()}
    if form in ("plain", "packed"):
        ids, mask = families.tokens(3, 70), torch.ones(3, 70)
        positions = torch.cat([torch.arange(33), torch.arange(1), torch.arange(36)]).expand(3, -1)
        kwargs = {"position_ids": positions.cuda()} if form == "packed" else {}
    ids, weight = ids.cuda(), mask.cuda()[..., None]
    found = results(families.causal(family, dtype=torch.float32).cuda(), ids, weight, **kwargs)
    expected = results(families.causal(family, attention=ORACLE).cuda(), ids, weight, **kwargs)
    for ours, theirs in zip(found, expected, strict=True):
        scale = float(theirs.abs().max()) + 1e-6
        assert float((ours.double() - theirs).abs().max()) < 2e-4 * scale


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores", "ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2"])
def test_compiled_generation(family, padded):
    model = families.causal(family, dtype=torch.float32).cuda()
    ids, mask = (x.cuda() for x in families.padded([20, 9 if padded else 20], 20, "left"))
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    expected = model.generate(ids, use_cache=False, **settings)
    assert torch.equal(model.generate(ids, **settings), expected)
    assert torch.equal(model.generate(ids, cache_implementation="static", **settings), expected)


def test_65536_padded_tokens_need_no_square_of_memory():
    """A dense boolean mask would be 4 GiB for each kind of layer, and all logits of a head 16 GiB."""
    gc.collect()
    model = families.causal("gemma3", attention="sdpa", dtype=torch.bfloat16).cuda()
    sharpen(model, PAPER)
    ids = families.tokens(1, 65536).cuda()
    mask = torch.ones_like(ids)
    mask[:, :1000] = 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        output = model.model(ids, attention_mask=mask).last_hidden_state
    assert bool(output[:, 1000:].isfinite().all())
    assert torch.cuda.max_memory_allocated() - before < 1 << 30
