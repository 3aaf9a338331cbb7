"""Train a tiny sharpened model with Accelerate on two processes, and on one.

    torchrun --nproc_per_node 2 -m tests.huggingface.two_processes FOLDER

Every process writes the parameters' sum after three steps on its half of the batches to a file of its own; gradients
are averaged, so the processes agree with each other and with one process that sees all of the batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from sharpmax import PAPER
from sharpmax.huggingface import sharpen
from tests.huggingface import families


def trained(model: torch.nn.Module, accelerator: Accelerator | None) -> float:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(families.tokens(12, 9), batch_size=4 if accelerator is None else 2)  # pyright: ignore
    if accelerator is not None:
        model, optimiser, loader = accelerator.prepare(model, optimiser, loader)
    for ids in loader:
        loss = model(ids, labels=ids).loss
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimiser.step()
        optimiser.zero_grad()
    return float(sum(p.detach().abs().sum() for p in model.parameters()))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    models = [families.causal("gemma3", attention="sdpa") for _ in range(2)]
    for model in models:
        sharpen(model, PAPER, layers=[1])
    start = float(sum(p.detach().abs().sum() for p in models[0].parameters()))
    together, alone = trained(models[0], accelerator), trained(models[1], None)
    sums = {"processes": accelerator.num_processes, "start": start, "together": together, "alone": alone}
    (folder / f"process_{accelerator.process_index}.json").write_text(json.dumps(sums))
    accelerator.end_training()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
