"""Models to train: packaged ones, folders, names on the hub, and small ones with random weights.

All come as a model of transformers that attends through sharpmax, with a policy in its config, and a tokenizer of
transformers; so training, evaluation and diagnostics take any of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.files import write_text
from ...core.policies import Constant, Policy
from ...extras import require
from .tokens import CHARACTERS, CharacterTokenizer, Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = ("float32", "bfloat16")
"""Of the weights of a model that is saved."""

VOLATILE = ("transformers_version", "_name_or_path", "dtype", "sharpmax", "attn_implementation")
SCRATCH = "scratch"
CHARACTERS_NAME = CharacterTokenizer.name_or_path

SCRATCH_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2_048,
    "tie_word_embeddings": True,
    "tokenizer": CHARACTERS_NAME,
}
"""The model that ``scratch`` means: a Llama with about 3 million parameters and a token for each character."""


def find_model(
    name: str, *, policy: Policy | None = None, seed: int = 0
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in float32 whose every head follows ``policy``, and its tokenizer.

    Args:
      name: a packaged model, a folder, or a name on the Hugging Face hub, as for
        :func:`sharpmax.huggingface.weights.load`; ``scratch``, a small model with random weights; or a JSON file with
        the config of such a model, as transformers writes it, and ``"tokenizer"``: ``"characters"``, or anything that
        has a tokenizer.
      policy: of all heads; plain softmax if not given. Policies that the model was saved with are replaced.
      seed: of random weights.
    """
    for package in ("transformers", "safetensors"):
        require(package, "huggingface", "a model for CLRS-Text")
    from ...huggingface import sharpen
    from ...huggingface.weights import load

    model: PreTrainedModel
    if name == SCRATCH:
        model, tokenizer = _made(SCRATCH_CONFIG, seed)
    elif name.endswith(".json"):
        model, tokenizer = _made(_read(Path(name)), seed)
    else:
        model, tokenizer = load(name, dtype="float32", attn_implementation="sharpmax")
    if model.config.is_encoder_decoder or model.get_output_embeddings() is None:
        raise ValueError(f"expected a model that continues a text, got {name!r}, a {type(model).__name__}")
    sharpen(model, Constant(1.0) if policy is None else policy)
    return model, tokenizer


def check_length(network: Any, length: int) -> None:
    """Raise ValueError if a model has a learned vector for each position, and fewer of them than ``length``."""
    from torch import nn

    named = {name.rpartition(".")[2] for name, module in network.named_modules() if isinstance(module, nn.Embedding)}
    most = getattr(network.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and length > most and any("pos" in name or name == "wpe" for name in named):
        raise ValueError(
            f"expected a length of at most {most} tokens, since a {type(network).__name__} has learned no more "
            f"positions, got {length}"
        )


def encoder_for(tokenizer: Any) -> Encoder:
    """The encoder of a model's tokenizer: documents begin with the token that begins texts if the tokenizer sees to it.

    That is so for Gemma's, and not for SmolLM2's; a tokenizer that is saved with a model keeps it.
    """
    begin = getattr(tokenizer, "bos_token_id", None)
    return Encoder(tokenizer, begin=begin is not None and tokenizer("a")["input_ids"][:1] == [begin])


def character_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of transformers with the tokens of :class:`CharacterTokenizer`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "<bos>", "<eos>")
    vocabulary = {token: i for i, token in enumerate((*special, *CHARACTERS))}
    made = Tokenizer(models.WordLevel(vocabulary))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    pad, begin, end = special
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, bos_token=begin, eos_token=end, clean_up_tokenization_spaces=False
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"expected a file with the config of a model, got {str(path)!r}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"expected {path} to be JSON, got {error}") from None
    if not isinstance(config, dict) or not {"model_type", "tokenizer"} <= set(config):
        raise ValueError(f'expected {path} to hold a config of transformers, with "model_type", and "tokenizer"')
    return config


def _made(config: dict[str, Any], seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model with random weights; the sizes of its vocabulary and its special tokens are the tokenizer's."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from ...huggingface import register, weights

    register()
    fields = dict(config)
    kind, named = fields.pop("model_type"), fields.pop("tokenizer")
    if named == CHARACTERS_NAME:
        tokenizer = character_tokenizer()
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(named, **weights.reach(named))
        except (OSError, ValueError) as error:
            raise ValueError(f"no tokenizer was found for {named!r}: {' '.join(str(error).split())}") from None
    fields.setdefault("vocab_size", len(tokenizer))
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        fields[token] = getattr(tokenizer, token)
    with _usable():
        made = AutoConfig.for_model(kind, **fields)
    if made.vocab_size < len(tokenizer):
        raise ValueError(f"expected a vocabulary of at least {len(tokenizer)} tokens, got {made.vocab_size}")
    with torch.random.fork_rng(devices=[]), _usable():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation="sharpmax"), tokenizer


@contextmanager
def _usable() -> Iterator[None]:
    """Around what reads a config: what is wrong with one comes as an exception of any kind."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"the config of the model cannot be used: {' '.join(str(error).split())}") from error


def save_model(network: Any, tokenizer: Any, tensors: dict[str, Any], folder: Path, dtype: str) -> None:
    """Write a model with the weights ``tensors`` and its tokenizer as ``from_pretrained`` reads them.

    The folder is there whole or not at all.
    """
    import torch

    from .checkpoints import disk_errors, written_folder

    kind = getattr(torch, dtype)
    cast = {k: v.to(kind) if v.is_floating_point() else v for k, v in tensors.items()}
    with written_folder(folder) as made, _quiet(), disk_errors(folder):
        network.save_pretrained(made, state_dict=cast)
        tokenizer.save_pretrained(made)
        config = json.loads((made / "config.json").read_text(encoding="utf-8"))
        write_text(made / "config.json", json.dumps(config | {"dtype": dtype}, indent=2) + "\n")


def check_dtype(name: str) -> None:
    """Raise ValueError unless weights can be saved in this type."""
    if name not in DTYPES:
        raise ValueError(f"expected the saved weights to be {' or '.join(DTYPES)}, got {name!r}")


def start_of(network: Any) -> str:
    """A digest of a model's weights and config: runs that began with the same have the same."""
    from ...diagnostics.fingerprint import fingerprint

    config = json.dumps(config_of(network), sort_keys=True)
    return hashlib.sha256(f"{fingerprint(network)}\0{config}".encode()).hexdigest()


def config_of(network: Any) -> dict[str, Any]:
    """What of a model's config tells it from other models, ready for JSON; its policy does not."""
    content = json.loads(network.config.to_json_string(use_diff=True))
    return {name: value for name, value in content.items() if name not in VOLATILE}


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers without its progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
