"""What users give on the command line: numbers, names of policies, folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sharpmax import PAPER, Constant
from sharpmax.inputs import InputError, find_policy, parse_numbers, token_ids, user_input


def test_numbers() -> None:
    assert parse_numbers("16, 4,64,4", "lengths") == [4, 16, 64]
    assert parse_numbers("0-2,5", "layers") == [0, 1, 2, 5]


@pytest.mark.parametrize("text", ["", "12,x", "3-1", "-1", "4,,5", "1.5"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected sizes to be whole numbers or ranges with commas between them"):
        parse_numbers(text, "sizes")


def test_too_many_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="expected at most 10,000 sizes, got '1-20000'"):
        parse_numbers("1-20000", "sizes")


def test_policies_by_name_and_by_file(tmp_path: Path) -> None:
    named = {"none": None, "paper": PAPER}
    assert find_policy("none", named) is None
    assert find_policy("paper", named) == PAPER
    Constant(2.0).save(tmp_path / "policy.json")
    assert find_policy(str(tmp_path / "policy.json"), named) == Constant(2.0)
    content = (tmp_path / "policy.json").read_text()
    (tmp_path / "marked.json").write_text(content, encoding="utf-8-sig")  # as some editors begin a file
    assert find_policy(str(tmp_path / "marked.json"), named) == Constant(2.0)
    with pytest.raises(InputError, match="expected the policy to be none, paper or a policy file, got 'best'"):
        find_policy("best", named)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(InputError, match=r"broken\.json is not a policy file"):
        find_policy(str(tmp_path / "broken.json"), named)


def test_what_is_caught_becomes_one_sentence() -> None:
    with pytest.raises(InputError, match=r"^two lines$"), user_input():
        raise ValueError("two\nlines")
    with pytest.raises(TypeError), user_input():
        raise TypeError("a mistake of ours")
    with pytest.raises(InputError, match=r"^given$"), user_input(TypeError):
        raise TypeError("given")


def test_a_text_that_a_tokenizer_has_no_tokens_for() -> None:
    few = Tokenizer(models.WordLevel({"a": 0, "b": 1}))
    few.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=few)
    assert token_ids(tokenizer, "abba") == [0, 1, 1, 0]
    with pytest.raises(InputError, match="expected a text that the model's tokenizer can read, and it says: WordLevel"):
        token_ids(tokenizer, "abc")
