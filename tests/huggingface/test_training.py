"""Gradient checkpointing, torch.compile, LoRA, the Trainer, and two processes of Accelerate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax import PAPER, Constant
from sharpmax.huggingface import Call, observe, register, sharpen, stored_rules
from tests.huggingface import families

register()
ROOT = Path(__file__).parents[2]
IDS = families.tokens(2, 17)


def gradients(model: Any, run: Any = None, **kwargs: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = (model if run is None else run)(IDS, labels=IDS, use_cache=False, **kwargs).loss
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None} | {
        "loss": loss.detach()
    }


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_gradient_checkpointing_changes_nothing(family, reentrant):
    model = families.causal(family).train()
    expected = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    calls: list[Call] = []
    with observe(calls.append):
        found = gradients(model)
    assert len(calls) == 4  # two layers, twice
    check_equal(found, expected)


@pytest.mark.parametrize("dynamic", [None, True], ids=["sizes", "symbols"])
def test_the_whole_model_compiles_with_gradients(dynamic):
    model = families.causal("gemma2")
    ids, mask = families.padded([17, 6], 17, "left")
    sharpen(model, PAPER, heads={0: [0, 1], 1: [2]})
    expected = gradients(model, attention_mask=mask)
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager", fullgraph=True, dynamic=dynamic)
    check_equal(gradients(model, run, attention_mask=mask), expected)
    with torch.no_grad(), sharpen(model, Constant(2.0)):
        assert torch.allclose(run(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits, atol=1e-9)


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft")


def test_lora_trains_its_own_weights_through_the_policy(peft):
    base = families.causal("llama", attention="sdpa", dtype=torch.float32)
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )  # fmt: skip
    stock = adapted(IDS).logits
    with pytest.warns(UserWarning, match="PEFT adapter have no place"):
        handle = sharpen(adapted, PAPER)
    calls: list[Call] = []
    with observe(calls.append):
        loss = adapted(IDS, labels=IDS).loss
    assert [call.policy for call in calls] == [PAPER, PAPER]
    loss.backward()
    trained = {name for name, p in adapted.named_parameters() if p.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)
    merged = adapted.merge_and_unload()
    assert stored_rules(merged) == handle.rules
    assert torch.allclose(merged(IDS, labels=IDS).loss, loss, atol=1e-4)
    handle.undo()
    assert torch.allclose(merged(IDS).logits, stock, atol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_trains_and_saves_the_policy(tmp_path, checkpointing):
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    model = families.causal("mistral", attention="sdpa", dtype=torch.float32)
    rules = sharpen(model, PAPER, layers=[1]).rules
    data: Any = [{"input_ids": row, "labels": row} for row in families.tokens(4, 17)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=4, learning_rate=3e-3, use_cpu=True, report_to=[],
        logging_steps=1, save_steps=6, disable_tqdm=True, gradient_checkpointing=checkpointing,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6", attn_implementation="sharpmax").eval()
    assert stored_rules(saved) == rules
    with torch.no_grad():
        torch.testing.assert_close(saved(IDS).logits, model.eval()(IDS).logits)


def test_two_processes_of_accelerate_agree_with_one(tmp_path):
    pytest.importorskip("accelerate")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m",
        "tests.huggingface.two_processes", str(tmp_path),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    sums = [json.loads(file.read_text()) for file in tmp_path.glob("process_*.json")]
    assert [each["processes"] for each in sums] == [2, 2]
    for each in sums:
        assert each["together"] == pytest.approx(each["alone"], rel=1e-9)  # the loss is float32
        assert abs(each["together"] - each["start"]) > 1e-3
