"""CLRS-Text (Section 4.2): thirty algorithms as questions and answers in text, to train on and to evaluate with.

benchmark (what there is)  ->  text (samples, made by upstream's code)  ->  shards (files)
                           ->  stream (an order)  ->  tokens  ->  packing  ->  loader (PyTorch);   scoring of answers
models, settings           ->  fine_tuning (loss, checkpoints, journal)    ->  a model's folder  ->  accuracy
"""

import importlib
from typing import TYPE_CHECKING, Any

from .benchmark import ALGORITHMS, EVALUATION_SIZES, TRAINING_SIZES, UNTRACED, Split, evaluation, training
from .lengths import token_lengths
from .packing import IGNORED, LENGTH, Packed, Packer, pack
from .scoring import Answer, Score, score, split_answer
from .settings import Settings as TrainingSettings
from .shards import CorruptShardError, generate, load_manifest, verify
from .stream import Generated, Samples, Stored
from .text import Generator, Sample, generate_samples
from .tokens import CHARACTERS, CharacterTokenizer, Document, Encoder, check_tokenizer

if TYPE_CHECKING:
    from .fine_tuning import train
    from .loader import Loader, PackedDataset
    from .models import encoder_for, find_model

__all__ = [
    "ALGORITHMS",
    "TRAINING_SIZES",
    "EVALUATION_SIZES",
    "UNTRACED",
    "Split",
    "training",
    "evaluation",
    "Sample",
    "Generator",
    "generate_samples",
    "generate",
    "verify",
    "load_manifest",
    "CorruptShardError",
    "Samples",
    "Generated",
    "Stored",
    "CHARACTERS",
    "CharacterTokenizer",
    "check_tokenizer",
    "Encoder",
    "Document",
    "token_lengths",
    "LENGTH",
    "IGNORED",
    "pack",
    "Packed",
    "Packer",
    "PackedDataset",
    "Loader",
    "find_model",
    "encoder_for",
    "TrainingSettings",
    "train",
    "Answer",
    "split_answer",
    "Score",
    "score",
]


_LATER = {
    "Loader": "loader",
    "PackedDataset": "loader",
    "find_model": "models",
    "encoder_for": "models",
    "train": "fine_tuning",
}
"""What needs PyTorch, and the module that it is in."""


def __getattr__(name: str) -> Any:
    """What needs PyTorch is imported when it is asked for."""
    if name in _LATER:
        return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
