"""Training on a GPU: steps that wait for nothing, the same bits after a stop, and compiled layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sharpmax import PAPER
from sharpmax.tasks.clrs_text import TrainingSettings, train
from sharpmax.tasks.clrs_text.fine_tuning import Run
from sharpmax.tasks.clrs_text.journal import Window
from sharpmax.tasks.clrs_text.models import SCRATCH_CONFIG

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(params=[None, PAPER.to_dict()], ids=["plain", "paper"])
def settings(request, tmp_path) -> TrainingSettings:
    config = SCRATCH_CONFIG | {"num_hidden_layers": 2}
    (tmp_path / "small.json").write_text(json.dumps(config))
    return TrainingSettings(
        model=str(tmp_path / "small.json"), policy=request.param, tokens=8 * 8 * 512, batch=8, micro=4, length=512,
        algorithms=("minimum", "bfs"), sizes=(4, 5), checkpoint_every=3, log_every=2, precision="bf16",
    )  # fmt: skip


LEAF = r"ignore:The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed:UserWarning"
"""torch asks whether what it compiles for has a gradient, and hides its own warning when it is shown, not raised."""


def weights(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_a_step_does_not_wait_for_the_device(tmp_path, settings):
    run = Run.begin(settings, tmp_path / "run")
    batches, window = run._batches(), Window(0)
    run._take_step(batches, window)  # the first one makes the optimiser's state
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run._take_step(batches, window)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        batches.close()
    assert len(window.losses) == 4
    assert all(torch.isfinite(loss) for loss in window.losses)
    assert next(run.learner.parameters()).dtype == torch.float32


@pytest.mark.filterwarnings(LEAF)
@pytest.mark.parametrize("compile", [False, True])
def test_a_run_that_is_left_ends_with_the_same_bits(tmp_path, settings, compile):
    settings = replace(settings, compile=compile)
    result = train(settings, tmp_path / "whole")
    while train(settings, tmp_path / "pieces", minutes=1e-9) is None:
        pass
    assert weights(tmp_path / "whole") == weights(tmp_path / "pieces")
    assert result is not None
    assert result["peak_memory_bytes"] > 0


@pytest.mark.filterwarnings(LEAF)
def test_compiled_layers_learn_the_same(tmp_path, settings):
    plain, compiled = train(settings, tmp_path / "plain"), train(replace(settings, compile=True), tmp_path / "compiled")
    assert plain is not None
    assert compiled is not None
    assert compiled["curve"]["loss"] == pytest.approx(plain["curve"]["loss"], rel=2e-2)
