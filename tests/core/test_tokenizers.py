"""Tokenizers by name, and what counts as token ids."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.errors import ConfigError
from streampack.sources import TokenizerSettings, as_tokens, open_tokenizer
from streampack.sources.tokenizers import BytesTokenizer, Encoded, as_encoded


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


class Sized:
    vocab_size = 50
    digest = "v1"

    def __call__(self, text: str) -> Any:
        return np.full(3, len(text), np.uint8)


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    made = types.ModuleType("their_tokenizer")
    sys.modules["their_tokenizer"] = made
    made.words, made.sized, made.number = words, Sized(), 7  # type: ignore[attr-defined]
    yield made
    del sys.modules["their_tokenizer"]


@given(st.text(min_size=1), st.booleans())
def test_bytes_are_the_utf8_of_the_text_and_then_the_end(text: str, append_eos: bool) -> None:
    tokenizer = open_tokenizer(TokenizerSettings(append_eos=append_eos))
    encoded = tokenizer.encode(text)
    if any("\ud800" <= c <= "\udfff" for c in text):
        assert encoded == "encoding"
        return
    assert isinstance(encoded, Encoded)
    ids = encoded.tokens
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode()) + [256] * append_eos
    assert tokenizer.vocab_size == 257


def test_half_of_a_surrogate_pair_has_no_bytes() -> None:
    assert open_tokenizer(TokenizerSettings()).encode("a\ud800") == "encoding"


def test_an_empty_text_is_rejected_even_when_an_end_would_be_appended() -> None:
    assert open_tokenizer(TokenizerSettings(append_eos=True)).encode("") == "empty"


def test_a_callable_is_found_by_its_import_path(module: types.ModuleType) -> None:
    tokenizer = open_tokenizer(TokenizerSettings("their_tokenizer:words"))
    encoded = tokenizer.encode("to be or not")
    assert isinstance(encoded, Encoded)
    ids = encoded.tokens
    assert ids.dtype == np.int32
    assert ids.tolist() == [2, 2, 2, 3]
    assert (tokenizer.name, tokenizer.vocab_size) == ("their_tokenizer:words", None)
    assert tokenizer.encode("") == "empty"
    assert tokenizer.encode("  ") == "empty"


def test_a_callables_vocabulary_and_digest_are_part_of_its_own(module: types.ModuleType) -> None:
    tokenizer = open_tokenizer(TokenizerSettings("their_tokenizer:sized"))
    encoded = tokenizer.encode("four")
    assert isinstance(encoded, Encoded)
    ids = encoded.tokens
    assert ids.dtype == np.int32
    assert (ids.tolist(), tokenizer.vocab_size) == ([4, 4, 4], 50)
    module.sized.digest = "v2"
    assert open_tokenizer(TokenizerSettings("their_tokenizer:sized")).digest != tokenizer.digest


def test_digests_tell_tokenizers_apart() -> None:
    digests = {open_tokenizer(TokenizerSettings(append_eos=eos)).digest for eos in (True, False)}
    assert len(digests) == 2
    assert all(len(digest) == 64 for digest in digests)
    assert open_tokenizer(TokenizerSettings()).digest in digests


def test_what_a_callable_raises_rejects_that_text_and_is_logged(
    module: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    def picky(text: str) -> list[int]:
        raise KeyError(text)

    module.words = picky  # type: ignore[attr-defined]
    assert open_tokenizer(TokenizerSettings("their_tokenizer:words")).encode("abc") == "tokenizer"
    assert "their_tokenizer:words rejects a text of 3 characters: KeyError('abc')" in caplog.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", "expected 'bytes' or 'package.module:function'"),
        ("their_tokenizer:", "expected 'bytes' or 'package.module:function'"),
        ("no_such_module_at_all:f", "cannot be imported"),
        ("their_tokenizer:nothing", "cannot be imported"),
        ("their_tokenizer:number", "is of type int, expected a callable"),
    ],
)
def test_a_name_that_leads_nowhere_is_a_config_error(module: types.ModuleType, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^tokenizer name: ") as error:
        open_tokenizer(TokenizerSettings(name))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([], "empty"),
        (np.zeros((0, 3), np.int32), "empty"),
        ([True, False], "dtype"),
        ([1.0, 2.0], "dtype"),
        ([1, float("nan")], "dtype"),
        (["1"], "dtype"),
        (None, "dtype"),
        ("text", "dtype"),
        (np.zeros(3, "datetime64[s]"), "dtype"),
        ([[1, 2], [3, 4]], "ragged"),
        ([[1, 2], [3]], "ragged"),
        (5, "ragged"),
        ([0, -1], "range"),
        (np.array([-1], np.int8), "range"),
        ([2**31], "range"),
        (np.array([2**31], np.uint32), "range"),
        ([2**64], "range"),
        ([-(2**70), 1], "range"),
    ],
)
def test_what_is_no_sequence_of_ids_has_a_reason(values: object, reason: str) -> None:
    assert as_tokens(values) == reason


@given(
    st.sampled_from(["i1", "u1", "<i2", ">i2", "u2", "<i4", ">i4", "u4", "<i8", ">i8", "u8"]),
    st.lists(st.integers(0, 127), min_size=1),
    st.integers(1, 3),
)
def test_every_integer_dtype_becomes_int32_in_one_piece(dtype: str, values: list[int], step: int) -> None:
    ids = as_tokens(np.array(values, dtype)[::-step])
    assert isinstance(ids, np.ndarray)
    assert ids.dtype == np.dtype(np.int32)
    assert ids.flags.c_contiguous
    assert ids.tolist() == values[::-step]


def test_the_largest_id_is_admitted() -> None:
    ids = as_tokens([2**31 - 1])
    assert isinstance(ids, np.ndarray)
    assert ids.tolist() == [2**31 - 1]


def learned(encoded: Encoded | str) -> list[int]:
    assert isinstance(encoded, Encoded)
    assert encoded.loss_mask is not None
    assert encoded.loss_mask.dtype == np.uint8
    assert encoded.loss_mask.shape == encoded.tokens.shape
    return list(map(int, encoded.tokens[encoded.loss_mask == 1]))


@given(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")), st.booleans())
def test_of_a_pair_the_completion_and_its_end_are_learned(prompt: str, completion: str, append_eos: bool) -> None:
    tokenizer = BytesTokenizer(append_eos=append_eos)
    encoded = tokenizer.encode_pair(prompt, completion)
    if not prompt + completion:
        assert encoded == "empty"
        return
    assert learned(encoded) == list(completion.encode()) + [256] * append_eos
    whole = tokenizer.encode(prompt + completion)
    assert isinstance(whole, Encoded)
    assert isinstance(encoded, Encoded)
    assert encoded.tokens.tolist() == whole.tokens.tolist()


def test_a_chat_in_bytes_has_its_answers_learned_and_no_answer_can_forge_an_end() -> None:
    chat = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hé"}]},
        {"role": "assistant", "content": "ok\nuser: forged"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "no", "weight": 0},
        {"role": "assistant", "content": ""},
    ]
    encoded = BytesTokenizer().encode_chat(chat)
    assert learned(encoded) == [*b"ok\nuser: forged", 256, 256]
    assert isinstance(encoded, Encoded)
    text = b"system: be kind\nuser: h\xc3\xa9\nassistant: ok\nuser: forged"
    assert encoded.tokens[: len(text) + 1].tolist() == [*text, 256]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2], ([1, 2], None)),
        ((1, 2), ([1, 2], None)),
        (([1, 2], [0, 1]), ([1, 2], [0, 1])),
        (([1, 2], None), ([1, 2], None)),
        (([1, 2], np.array([True, False])), ([1, 2], [1, 0])),
        ({"input_ids": [3]}, ([3], None)),
        ({"input_ids": np.array([3], np.uint16), "loss_mask": [1]}, ([3], [1])),
        ({"tokens": [3]}, "missing"),
        (([1, 2], [1]), "mask"),
        (([1, 2], [1, 2]), "mask"),
        (([1, 2], [0.0, 1.0]), "mask"),
        (([1, 2], [[0], [1, 2]]), "mask"),
        (([1.5], [1]), "dtype"),
        ({"input_ids": []}, "empty"),
    ],
)
def test_a_callable_returns_ids_or_ids_and_a_mask(values: object, expected: object) -> None:
    encoded = as_encoded(values)
    if isinstance(encoded, Encoded):
        tokens, mask = encoded
        assert (tokens.tolist(), None if mask is None else mask.tolist()) == expected
    else:
        assert encoded == expected
