"""Queries, keys and values that layers of a real model give to their attention, as files.

    python -m benchmarks.recorded_heads NAME [--layers N ...] [--length N] [--batch N] [--out FOLDER]

NAME is a model's as for ``sharpmax diagnose``; it reads this package's source, wherever it runs. Of each layer one file
is written, ``layerN.safetensors``, with q, k and v ``[batch, heads, length, columns]`` in bfloat16, which
``benchmarks.attention --heads`` measures on a GPU and ``benchmarks.dead_blocks`` looks at on a CPU. Both take attention
for causal: of a model with windows, ask for layers without one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

TENSORS = ("q", "k", "v")


def record(
    name: str, layers: Sequence[int], length: int, batch: int, device: str
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Of each of the layers, its tensors; each of ``batch`` texts goes on where the one before ends."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from benchmarks.diagnostics import tokens
    from sharpmax.huggingface.weights import load

    found: dict[int, dict[str, Tensor]] = {}

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        if module.layer_idx in layers:
            given = zip(TENSORS, (query, key, value), strict=True)
            found[module.layer_idx] = {name: x.to("cpu", torch.bfloat16).contiguous() for name, x in given}
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    ALL_ATTENTION_FUNCTIONS.register("benchmark_recorded_heads", attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("benchmark_recorded_heads", sdpa_mask)  # without it, windows would be lost
    loaded, tokenizer = load(name, dtype=torch.bfloat16, attn_implementation="benchmark_recorded_heads")
    model: Any = loaded
    model.to(device)
    with torch.no_grad():
        model.base_model(input_ids=tokens(tokenizer, batch * length, device).view(batch, length), use_cache=False)
    missing = sorted(set(layers) - set(found))
    if missing:
        raise SystemExit(f"{name} has {model.config.num_hidden_layers} layers: there is no layer {missing[0]}")
    yield from sorted(found.items())


def read(path: Path) -> tuple[dict[str, str], list[Tensor]]:
    """What a file says of its tensors, and q, k and v; keys and values repeated for the query heads that share them."""
    with safe_open(path, "pt") as file:
        said = file.metadata()
        q, k, v = (file.get_tensor(name) for name in TENSORS)
    return said, [q, *(x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the model")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 10, 20])
    parser.add_argument("--length", type=int, default=8192, help="tokens of a text")
    parser.add_argument("--batch", type=int, default=1, help="texts that the model reads at once")
    parser.add_argument("--out", type=Path, default=Path("out/heads"))
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments.out.mkdir(parents=True, exist_ok=True)
    for layer, tensors in record(arguments.name, arguments.layers, arguments.length, arguments.batch, device):
        path = arguments.out / f"layer{layer}.safetensors"
        save_file(tensors, path, {"model": arguments.name, "layer": str(layer)})
        print(path, {name: tuple(x.shape) for name, x in tensors.items()}, flush=True)


if __name__ == "__main__":
    main()
