"""Tokens, packed sequences and batches: what they hold, and that a state goes on to the bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from sharpmax.tasks.clrs_text import (
    CHARACTERS,
    IGNORED,
    CharacterTokenizer,
    Document,
    Encoder,
    Generated,
    Packer,
    Samples,
    check_tokenizer,
    generate,
    generate_samples,
    pack,
    split_answer,
    training,
)
from tests.processes import members, needs_proc

SPLIT = training().only(["minimum", "bfs", "segments_intersect"], [4, 8], samples=40)
LENGTH = 256


def packer(source: Any = None, **options: Any) -> Packer:
    samples = Samples(Generated(SPLIT) if source is None else source, epochs=options.pop("epochs", None))
    return Packer(samples, Encoder(CharacterTokenizer()), length=LENGTH, waiting=8, **options)


def documents(sequence: Any) -> list[np.ndarray]:
    starts = np.flatnonzero(sequence.position_ids == 0)
    return np.split(sequence.input_ids, starts[1:])


def test_characters_go_there_and_back():
    tokenizer = CharacterTokenizer()
    check_tokenizer(tokenizer)
    ids = tokenizer(CHARACTERS)["input_ids"]
    assert sorted(ids) == list(range(3, len(tokenizer)))
    assert tokenizer.decode([1, *ids, 2, 0]) == CHARACTERS
    assert tokenizer.decode([1, 3, 2], skip_special_tokens=False) == "<1>\n<2>"
    assert tokenizer.batch_decode(tokenizer(["ab", "c"])["input_ids"]) == ["ab", "c"]
    with pytest.raises(ValueError, match="expected characters of CLRS-Text, got 'é'"):
        tokenizer("café")


class Lossy(CharacterTokenizer):
    name_or_path = "lossy"
    unk_token_id = 0

    def __init__(self, lost: str) -> None:
        super().__init__()
        self.lost = lost

    def _encode(self, text: str, special: bool) -> list[int]:
        return [0 if c in self.lost else i for c, i in zip(text, super()._encode(text, special), strict=True)]


def test_a_tokenizer_without_the_characters_is_refused():
    with pytest.raises(ValueError, match=r"all characters of CLRS-Text, got 'lossy', which loses '\[', '\|'"):
        Encoder(Lossy("[|"))

    class Spaced(CharacterTokenizer):
        def decode(self, ids, skip_special_tokens=True, **options):
            return super().decode(ids, skip_special_tokens, **options).replace(" [", "[")

    with pytest.raises(ValueError, match="gives back text as it was, got 'characters', which makes "):
        check_tokenizer(Spaced())

    class Endless(CharacterTokenizer):
        eos_token_id = None

    with pytest.raises(ValueError, match="a token that ends texts, got one whose eos_token_id is None"):
        Encoder(Endless())


def test_documents_are_question_and_answer():
    sample = next(generate_samples("minimum", 4))
    encoder = Encoder(CharacterTokenizer(), begin=True)
    ((ids, question),) = encoder([sample])
    assert (ids[0], ids[-1]) == (1, 2)
    assert encoder.tokenizer.decode(ids) == sample.question + sample.answer
    assert encoder.prompts([sample]) == [ids[:question].tolist()]
    assert encoder([]) == encoder.prompts([]) == []


def test_pack():
    given = [Document(np.array([5, 6, 7, 8], np.int32), 2), Document(np.array([9, 4, 3], np.int32), 1)]
    ids, positions, labels = pack(given, 10, pad=0)
    assert ids.tolist() == [5, 6, 7, 8, 9, 4, 3, 0, 0, 0]
    assert positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2]
    assert labels.tolist() == [IGNORED, IGNORED, 7, 8, IGNORED, 4, 3, IGNORED, IGNORED, IGNORED]
    everything = pack(given, 10, answers_only=False).labels
    assert everything.tolist() == [IGNORED, 6, 7, 8, IGNORED, 4, 3, IGNORED, IGNORED, IGNORED]
    with pytest.raises(ValueError, match="at most 6 tokens together, got at least 7"):
        pack(given, 6)


def test_every_sample_is_packed_once_or_dropped_and_counted():
    made = packer(epochs=1)
    samples = list(Samples(Generated(SPLIT), epochs=1))
    texts = [s.question + s.answer for s in samples]
    found = [made.encoder.tokenizer.decode(d) for sequence in made for d in documents(sequence)]
    fitting = sorted(text for text in texts if len(text) + 1 <= LENGTH)
    assert sorted(text for text in found if text) == fitting
    dropped = [(s.algorithm, str(s.size)) for s, text in zip(samples, texts, strict=True) if len(text) + 1 > LENGTH]
    assert dropped
    assert {(a, n): c for a, sizes in made.dropped.items() for n, c in sizes.items()} == {
        pair: dropped.count(pair) for pair in set(dropped)
    }
    assert made.documents == len(fitting)
    assert made.tokens == sum(len(text) + 1 for text in fitting)
    assert made.tokens / (made.sequences * LENGTH) > 0.75  # most documents are longer than half a sequence


def test_labels_are_the_answers():
    made = packer(epochs=1)
    answers = {split_answer(s.answer) for s in Samples(Generated(SPLIT), epochs=1)}
    for sequence in made:
        text = made.encoder.tokenizer.decode(sequence.labels[sequence.labels != IGNORED])
        assert {split_answer(part) for part in text.split("\n\n") if part} <= answers


@pytest.mark.parametrize("stored", [False, True])
def test_a_state_goes_on_to_the_bit(stored, tmp_path):
    if stored:
        generate(tmp_path, split=SPLIT, processes=1, shard=7)
    source = tmp_path if stored else None
    whole = packer(source)
    expected = [next(whole) for _ in range(40)]
    for stop in (0, 1, 17):
        first = packer(source)
        for _ in range(stop):
            next(first)
        state = json.loads(json.dumps(first.state()))
        second = packer()  # a state of stored samples serves generated ones
        second.restore(state)
        for sequence in expected[stop : stop + 12]:
            for ours, theirs in zip(next(second), sequence, strict=True):
                np.testing.assert_array_equal(ours, theirs)
    second = packer(source)
    second.restore(whole.state())
    assert second.state() == whole.state()


def test_a_state_of_something_else_is_refused():
    state = packer().state()
    for other in (packer(answers_only=False), packer(Generated(SPLIT.only(samples=41)))):
        with pytest.raises(ValueError, match="the state of a packer with the same samples, order, tokenizer"):
            other.restore(state)


def test_samples_of_which_none_fits_end_in_a_sentence():
    samples = Samples(Generated(SPLIT.only(["segments_intersect"])))
    with pytest.raises(ValueError, match="expected samples that fit into 16 tokens, got only longer ones"):
        next(Packer(samples, Encoder(CharacterTokenizer()), length=16))
    with pytest.raises(ValueError, match="at least 2 tokens"):
        Packer(samples, Encoder(CharacterTokenizer()), length=1)


def test_batches_are_the_packers_sequences():
    torch = pytest.importorskip("torch")
    from sharpmax.tasks.clrs_text import Loader, PackedDataset

    plain = packer()
    sequences = [next(plain) for _ in range(12)]
    loader = Loader(packer(), 4)
    for i, batch in zip(range(3), loader, strict=False):
        for name, tensor in batch.items():
            rows = np.stack([getattr(s, name) for s in sequences[4 * i : 4 * i + 4]])
            assert torch.equal(tensor, torch.from_numpy(rows))
    assert loader.counts["sequences"] == 12
    assert (loader.counts["dropped"], loader.counts["packed"]) == (plain.dropped, plain.packed)
    assert sum(sum(sizes.values()) for sizes in plain.packed.values()) == plain.documents
    again = Loader(packer(), 4)
    again.restore(loader.state())
    assert torch.equal(next(iter(again))["input_ids"], torch.from_numpy(np.stack([next(plain)[0] for _ in range(4)])))
    assert len(list(PackedDataset(packer(epochs=1)))) == len(list(packer(epochs=1)))
    old = {key: value for key, value in plain.state().items() if key != "packed"}  # of an earlier version
    with pytest.raises(ValueError, match="expected the state of a packer with the same samples"):
        packer().restore(old)
    with pytest.raises(ValueError, match="a loader with batch 4, got 2"):
        again.restore(Loader(packer(), 2).state())
    with pytest.raises(ValueError, match="at least 1 and at least 0 workers"):
        Loader(packer(), 0)


def test_workers_go_on_to_the_bit():
    torch = pytest.importorskip("torch")
    from sharpmax.tasks.clrs_text import Loader

    def batch(part: Packer) -> Any:
        return np.stack([next(part).input_ids for _ in range(2)])

    parts = [packer().part(i, 2) for i in range(2)]
    for i in (0, 1, 0):  # what three batches of two workers take
        batch(parts[i])
    state = {"batch": 2, "workers": 2, "turn": 1, "states": [part.state() for part in parts]}
    loader = Loader(packer(), 2, workers=2)
    assert loader.state()["states"] == [packer().part(i, 2).state() for i in range(2)]
    loader.restore(json.loads(json.dumps(state)))
    for i, found in zip((1, 0, 1, 0), loader, strict=False):
        assert torch.equal(found["input_ids"], torch.from_numpy(batch(parts[i])))
        assert loader.state()["states"] == [part.state() for part in parts]
    assert loader.state()["turn"] == 1
    with pytest.raises(ValueError, match="a loader with workers 0, got 2"):
        Loader(packer(), 2).restore(state)
    with pytest.raises(ValueError, match="expected a packer at its beginning"):
        Loader(parts[0], 2, workers=2)


KILLED = """
import os, signal
from sharpmax.tasks.clrs_text import CharacterTokenizer, Encoder, Generated, Loader, Packer, Samples, training
if __name__ == "__main__":
    samples = Samples(Generated(training().only(["minimum"], [4])))
    for _ in Loader(Packer(samples, Encoder(CharacterTokenizer()), length=256), 2, workers=2):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_proc
def test_workers_end_with_a_process_that_was_killed(tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    with subprocess.Popen([sys.executable, script], start_new_session=True, stderr=subprocess.DEVNULL) as run:
        assert run.wait(60) == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while (alive := members(run.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive


def test_models_see_each_document_alone():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from sharpmax.huggingface import register
    from tests.huggingface import families

    register()
    model = families.causal("llama")
    sequence = next(packer())
    alone = documents(sequence)
    assert len(alone) > 2
    ids, positions = (torch.from_numpy(getattr(sequence, name))[None] for name in ("input_ids", "position_ids"))
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits[0]
        expected = torch.cat([model(torch.from_numpy(d)[None]).logits[0] for d in alone])
    torch.testing.assert_close(packed, expected, rtol=1e-9, atol=1e-9)


def test_the_tokenizer_of_smollm2_is_accepted():
    weights = pytest.importorskip("sharpmax.huggingface.weights")
    if weights._converted("smollm2-135m-instruct") is None:
        pytest.skip("smollm2-135m-instruct is not converted")
    from transformers import AutoTokenizer

    encoder = Encoder(AutoTokenizer.from_pretrained(weights.directory("smollm2-135m-instruct")))
    for sample in generate_samples("graham_scan", 6, count=3):
        ((ids, question),) = encoder([sample])
        assert encoder.tokenizer.decode(ids[:question]) == sample.question
        assert encoder.tokenizer.decode(ids[question:-1]) == sample.answer
