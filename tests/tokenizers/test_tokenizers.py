"""Tokenizers by name, and what counts as token ids."""

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors, trainers

from streampack.errors import ConfigError
from streampack.sources import SourceSettings, TokenizerSettings, as_tokens, open_source, open_tokenizer
from streampack.tokenizers.bytes_tokenizer import BytesTokenizer
from streampack.tokenizers.token_ids import Encoded, as_encoded


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


def test_an_exception_of_a_callable_rejects_that_text_and_is_logged(
    module: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    def picky(text: str) -> list[int]:
        raise KeyError(text)

    module.words = picky  # type: ignore[attr-defined]
    assert open_tokenizer(TokenizerSettings("their_tokenizer:words")).encode("abc") == "tokenizer"
    assert "their_tokenizer:words rejects an input of 3 characters: KeyError('abc')" in caplog.text


def test_repeated_rejections_of_a_tokenizer_do_not_fill_the_log(
    module: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    def picky(text: str) -> list[int]:
        raise KeyError(text)

    module.words = picky  # type: ignore[attr-defined]
    tokenizer = open_tokenizer(TokenizerSettings("their_tokenizer:words"))
    for text in ["abc"] * 5 + [str(number) for number in range(50)]:
        assert tokenizer.encode(text) == "tokenizer"
    assert len(caplog.records) == 20
    assert caplog.text.count("KeyError('abc')") == 1
    assert caplog.records[-1].message.endswith("; further errors are counted but not logged")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", "expected 'bytes' or 'package.module:function'"),
        ("their_tokenizer:", "expected 'bytes' or 'package.module:function'"),
        ("no_such_module_at_all:f", "cannot be imported"),
        ("their_tokenizer:nothing", "cannot be imported"),
        ("their_tokenizer:number", "is of type int, expected a function"),
    ],
)
def test_a_name_that_leads_nowhere_is_a_config_error(module: types.ModuleType, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^tokenizer name: ") as error:
        open_tokenizer(TokenizerSettings(name))
    assert message in str(error.value)


@pytest.mark.parametrize("key", ["tokenizer name", "path"])
def test_a_module_that_fails_when_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    (tmp_path / "their_broken_module.py").write_text("open('/no/such/file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "their_broken_module:f"
    said = rf"^{key}: '{name}' cannot be imported \(FileNotFoundError.*Correct the module"
    with pytest.raises(ConfigError, match=said):
        _ = (
            open_source(SourceSettings("python", path=name))
            if key == "path"
            else open_tokenizer(TokenizerSettings(name))
        )


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
def test_a_value_that_is_no_sequence_of_ids_is_rejected_with_a_reason(values: object, reason: str) -> None:
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
def test_the_completion_of_a_pair_and_its_end_are_learned(prompt: str, completion: str, append_eos: bool) -> None:
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
        tokens, mask = encoded.tokens, encoded.loss_mask
        assert (tokens.tolist(), None if mask is None else mask.tolist()) == expected
    else:
        assert encoded == expected


# tokenizer.json


def train(folder: Path, *, bos: bool = False) -> Library:
    """A tokenizer of bytes and some words, in ``folder``."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    library.train_from_iterator(["to be or not to be"] * 5, trainer)
    if bos:
        library.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    library.enable_truncation(4)  # must not shorten any text
    library.enable_padding(length=16)
    library.save(str(folder / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    return library


def file(path: Path, **more: Any) -> Any:
    return open_tokenizer(TokenizerSettings(file=str(path), **more))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Library]:
    folder = tmp_path_factory.mktemp("trained")
    return folder, train(folder)


@given(st.text(min_size=1))
def test_a_files_ids_are_those_of_the_library_and_then_the_end(trained: tuple[Path, Library], text: str) -> None:
    folder, library = trained
    for path in (folder, folder / "tokenizer.json"):
        if path not in _FILES:
            _FILES[path] = file(path, eos_token="</s>")
        encoded = _FILES[path].encode(text)
        if any("\ud800" <= c <= "\udfff" for c in text):
            assert encoded == "encoding"
            return
        assert encoded.tokens.dtype == np.int32
        assert encoded.tokens.tolist() == [*library.encode(text).ids, 1]
        assert encoded.loss_mask is None


_FILES: dict[Path, Any] = {}


def test_tokens_that_the_tokenizer_file_adds_around_a_text_are_there_once(tmp_path: Path) -> None:
    library = train(tmp_path, bos=True)
    ids = library.encode("to be").ids
    assert (ids[0], ids[-1]) == (0, 1)
    for settings_ in ({"eos_token": "</s>"}, {"append_eos": False}, {"eos_token": "</s>", "bos_token": "<s>"}):
        assert file(tmp_path, **settings_).encode("to be").tokens.tolist() == ids
    encoded = file(tmp_path, eos_token="</s>").encode_pair("to ", "be or")
    assert encoded.tokens.tolist() == library.encode("to be or").ids
    assert encoded.loss_mask.tolist()[0] == 0
    assert encoded.loss_mask.tolist()[-1] == 1


def test_a_begin_that_is_asked_for_comes_first(trained: tuple[Path, Library]) -> None:
    folder, library = trained
    encoded = file(folder, append_eos=False, bos_token="<s>").encode("be")
    assert encoded.tokens.tolist() == [0, *library.encode("be").ids]


def test_the_text_of_a_special_token_is_text_unless_allowed(trained: tuple[Path, Library]) -> None:
    folder, library = trained
    ids = file(folder, eos_token="</s>").encode("be</s>be").tokens.tolist()
    assert ids.count(1) == 1
    assert ids[-1] == 1
    assert library.decode(ids, skip_special_tokens=False).endswith("</s>")
    assert file(folder, eos_token="</s>", allow_special=True).encode("be</s>be").tokens.tolist().count(1) == 2


@given(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))
def test_every_token_with_a_character_of_the_completion_is_learned(
    trained: tuple[Path, Library], prompt: str, completion: str
) -> None:
    folder, library = trained
    path = folder / "tokenizer.json"
    if path not in _FILES:
        _FILES[path] = file(path, eos_token="</s>")
    encoded = _FILES[path].encode_pair(prompt, completion)
    if not prompt + completion:
        assert encoded == "empty"
        return
    whole = library.encode(prompt + completion)
    assert encoded.tokens.tolist() == [*whole.ids, 1]
    expected = [int(end > len(prompt)) for _, end in whole.offsets]
    assert encoded.loss_mask.tolist() == [*expected, 1]


def test_a_token_over_the_boundary_of_a_pair_is_learned(trained: tuple[Path, Library]) -> None:
    folder, library = trained
    assert len(library.encode("be").ids) == 1
    encoded = file(folder, eos_token="</s>").encode_pair("b", "e")
    assert (len(encoded.tokens), encoded.loss_mask.tolist()) == (2, [1, 1])


def test_the_end_is_read_beside_the_file(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(ConfigError, match=r"found no eos_token in the tokenizer's folder.*special tokens: </s>, <s>"):
        file(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert file(tmp_path).encode("be").tokens.tolist()[-1] == 1
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<s>"}))
    assert file(tmp_path).encode("be").tokens.tolist()[-1] == 0
    assert file(tmp_path, eos_token="</s>").encode("be").tokens.tolist()[-1] == 1
    assert (
        file(tmp_path).vocab_size == max(Library.from_file(str(tmp_path / "tokenizer.json")).get_vocab().values()) + 1
    )


def test_a_files_digest_covers_what_changes_its_ids(tmp_path: Path) -> None:
    train(tmp_path)
    kinds: list[dict[str, Any]] = [
        {"eos_token": "</s>"},
        {"eos_token": "<s>"},
        {"append_eos": False},
        {"append_eos": False, "bos_token": "<s>"},
        {"append_eos": False, "allow_special": True},
        {"append_eos": False, "chat_template": "{{ 1 }}"},
        {"append_eos": False, "train_on": "all"},
    ]
    digests = {file(tmp_path, **kind).digest for kind in kinds}
    assert len(digests) == len(kinds)
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "renamed.json").write_bytes((tmp_path / "tokenizer.json").read_bytes())
    assert file(tmp_path / "moved" / "renamed.json", **kinds[0]).digest in digests
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text + "\n")
    assert file(tmp_path, **kinds[0]).digest not in digests


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"file": "nowhere"}, r"nowhere: cannot be read: No such file"),
        ({"file": "."}, r"tokenizer.json: cannot be read: No such file"),
        ({"file": "bad.json"}, r"bad.json: got a file that is not a valid tokenizer.json "),
        ({"file": "t/tokenizer.json", "eos_token": "<none>"}, r"got eos_token '<none>', expected a token of the"),
        ({"file": "t", "append_eos": False, "date": "today"}, r"tokenizer.date: got 'today', expected a date"),
        ({"file": "t", "append_eos": False, "chat_template": "no.jinja"}, r"no.jinja: cannot be read"),
        ({"file": "t", "name": "bytes"}, r"got name 'bytes' and file 't', expected only one of them"),
        ({"eos_token": "</s>"}, r"tokenizer.eos_token: got '</s>' without tokenizer.file"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings_: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "t").mkdir()
    train(tmp_path / "t")
    with pytest.raises(ConfigError, match=message):
        open_tokenizer(TokenizerSettings(**settings_))


def test_a_callable_may_give_masks_and_chats(module: types.ModuleType) -> None:
    class Masked:
        def __call__(self, text: str) -> Any:
            return {"input_ids": list(text.encode()), "loss_mask": [c.isupper() for c in text]}

        def encode_chat(self, messages: list[Any], tools: Any) -> Any:
            return [len(message["content"]) for message in messages], [0] * (len(messages) - 1) + [1]

    module.words = Masked()  # type: ignore[attr-defined]
    tokenizer = open_tokenizer(TokenizerSettings("their_tokenizer:words"))
    assert learned(tokenizer.encode("aBc")) == [ord("B")]
    assert learned(tokenizer.encode_pair("aB", "Cd")) == [ord("C")]
    assert learned(tokenizer.encode_chat([{"content": "abc"}, {"content": "de"}])) == [2]
    assert tokenizer.has_chat_template
    plain = open_tokenizer(TokenizerSettings("their_tokenizer:sized"))
    with pytest.raises(ConfigError, match="got a chat, expected texts"):
        plain.encode_chat([])


def test_a_callables_pair_that_would_be_a_guess_is_rejected(module: types.ModuleType) -> None:
    def eager(text: str) -> list[int]:
        return [len(text)] * len(text)

    module.words = eager  # type: ignore[attr-defined]
    tokenizer = open_tokenizer(TokenizerSettings("their_tokenizer:words"))
    assert tokenizer.encode_pair("abc", "d") == "pair"
    assert learned(tokenizer.encode_pair("ab", "cd")) == [4, 4, 4, 4]
    assert tokenizer.encode_pair("", "") == "empty"
    assert tokenizer.encode_pair(1, "a") == "dtype"
