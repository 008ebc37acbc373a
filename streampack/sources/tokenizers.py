"""Tokenizers: text in, token ids out, and the rule of what token ids are.

Theory of operation. A tokenizer is found by name: ``bytes``, which needs no vocabulary, or any callable of the
user's own by its import path, ``package.module:function``; or it is a tokenizer.json (``tokenizer_file``). Whatever
a callable returns, and whatever a file holds as tokens, goes through ``as_tokens``: one sequence, not empty, of
integers in 0..2**31-1. What does not pass becomes a reason, a short word that is counted; never an exception,
because one bad sample must not end a run.

This module knows text and ids: never files or orders.
"""

import hashlib
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.errors import ConfigError
from streampack.sources.chat import pair_messages, read_messages

Tokens: TypeAlias = NDArray[np.int32]

EOS_OF_BYTES = 256

_log = logging.getLogger(__name__)


class TokenizerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tokenizer: ``name`` or ``file``.

    ``name``: ``bytes`` (what there is without either), or the import path of a callable as
    ``package.module:function``: see CallableTokenizer. ``file``: a tokenizer.json, or a folder with one.
    ``append_eos``: whether each text and pair ends with the end-of-text token (id 256 for bytes). A chat ends as its
    template ends it, and a callable appends what it likes by itself.

    For a file: ``eos_token``, ``bos_token``: as in the tokenizer_config.json beside it where they are not given; a
    ``bos_token`` given here comes before each text. ``chat_template``: a path or the text, else chat_template.jinja
    or tokenizer_config.json beside it. ``allow_special``: whether the text of a special token in the data becomes
    that token; false makes it ordinary text, so that no web page or user can end a turn.
    ``train_on``: ``answers`` learns the assistant's messages of a chat and the completion of a pair, ``all`` the
    whole. ``date`` (YYYY-MM-DD): what a template that asks for today's date is told.
    """

    name: str | None = None
    append_eos: bool = True
    file: str | None = None
    eos_token: str | None = None
    bos_token: str | None = None
    chat_template: str | None = None
    allow_special: bool = False
    train_on: Literal["answers", "all"] = "answers"
    date: str | None = None


class Encoded(NamedTuple):
    """One sample: ``tokens`` [T] int32, T > 0, and ``loss_mask`` [T] uint8, 1 where the token is to be learned.

    Unshifted: ``loss_mask[t]`` speaks of ``tokens[t]``. None where all of them are.
    """

    tokens: Tokens
    loss_mask: NDArray[np.uint8] | None = None


class Tokenizer(Protocol):
    """Text, chats and pairs to token ids.

    What cannot be a sample is a word that says why. ``digest`` (hex) goes into the source's digest: two tokenizers
    that give other ids must differ in it.
    ``vocab_size`` is None where it is not known.
    """

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def has_chat_template(self) -> bool: ...
    @property
    def eos_token(self) -> str | None:
        """What ends a text, for people; None where that is not known."""

    def decode(self, tokens: Tokens) -> str:
        """The text of ``tokens``, with those that are special, for people."""

    def encode(self, text: str) -> Encoded | str:
        """A text. Reasons: ``empty``, ``encoding``, ``range``, ..."""

    def encode_chat(self, messages: object, tools: object = None) -> Encoded | str:
        """A list of messages ``{"role": ..., "content": ...}``, of which the assistant's are learned.

        ``tools``: what the chat template is told of, or None. Reasons: ``messages``, ``tools`` (no list), ``template``,
        and those of a text. Raises ConfigError when this tokenizer has no way to write a chat.
        """

    def encode_pair(self, prompt: object, completion: object) -> Encoded | str:
        """A prompt and its completion, which alone is learned: two texts, or two lists of messages."""


def open_tokenizer(settings: TokenizerSettings) -> Tokenizer:
    """The tokenizer that ``settings`` name.

    Raises ConfigError where there is no such module or attribute, or it cannot be called.

    >>> open_tokenizer(TokenizerSettings()).encode("hé").tokens
    array([104, 195, 169, 256], dtype=int32)
    """
    if settings.file is not None:
        if settings.name is not None:
            raise ConfigError(f"tokenizer: got name {settings.name!r} and file {settings.file!r}, expected one of them")
        from streampack.sources.tokenizer_file import FileTokenizer  # the library is wanted only here

        return FileTokenizer(settings)
    for key in ("eos_token", "bos_token", "chat_template", "date", "allow_special"):
        if getattr(settings, key):
            raise ConfigError(f"tokenizer.{key}: got {getattr(settings, key)!r} without file: give both or neither")
    if settings.name in (None, "bytes"):
        return BytesTokenizer(append_eos=settings.append_eos, train_on=settings.train_on)
    assert settings.name is not None
    return CallableTokenizer(settings.name, train_on=settings.train_on)


class BytesTokenizer:
    """The UTF-8 bytes of a text as ids 0..255, then 256 at its end when ``append_eos``. vocab_size is always 257.

    A chat is ``role: content`` line by line, and 256 at the end of every answer, whatever ``append_eos``.
    """

    name = "bytes"
    vocab_size: int | None = EOS_OF_BYTES + 1

    has_chat_template = True
    eos_token: str | None = "<256>"

    def __init__(self, *, append_eos: bool = True, train_on: Literal["answers", "all"] = "answers") -> None:
        self._append_eos, self._train_on = append_eos, train_on
        self.digest = _digest("bytes", str(append_eos), *[train_on] * (train_on != "answers"))

    def encode(self, text: str) -> Encoded | str:
        if not text:
            return "empty"
        try:
            raw = text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair: no UTF-8 holds it
            return "encoding"
        if not self._append_eos:
            return Encoded(np.frombuffer(raw, np.uint8).astype(np.int32))
        ids = np.frombuffer(raw + b"\0", np.uint8).astype(np.int32)
        ids[-1] = EOS_OF_BYTES
        return Encoded(ids)

    def encode_chat(self, messages: object, tools: object = None) -> Encoded | str:
        checked = read_messages(messages)
        if isinstance(checked, str):
            return checked
        parts: list[tuple[str, bool, bool]] = []
        for message in checked:
            answer = message.role == "assistant"
            parts.append((f"{message.role}: ", False, False))
            parts.append((message.text, answer and message.train, answer))
            parts.append(("" if answer else "\n", False, False))
        return self._join(parts)

    def encode_pair(self, prompt: object, completion: object) -> Encoded | str:
        messages = pair_messages(prompt, completion)
        if messages is not None:
            return self.encode_chat(messages)
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            return "dtype"
        if not prompt + completion:
            return "empty"
        return self._join([(prompt, False, False), (completion, True, self._append_eos)])

    def decode(self, tokens: Tokens) -> str:
        raw = b"".join(bytes([number]) if number < EOS_OF_BYTES else b"<%d>" % number for number in tokens.tolist())
        return raw.decode(errors="replace")

    def _join(self, parts: list[tuple[str, bool, bool]]) -> Encoded | str:
        """(text, whether it is learned, whether 256 follows and is treated alike) one after another."""
        try:
            raws = [text.encode() for text, _, _ in parts]
        except UnicodeEncodeError:
            return "encoding"
        ends = [end for _, _, end in parts]
        ids = np.concatenate(
            [
                np.append(np.frombuffer(raw, np.uint8), [EOS_OF_BYTES] * end).astype(np.int32)
                for raw, end in zip(raws, ends, strict=True)
            ]
        )
        if self._train_on == "all":
            return Encoded(ids)
        lengths = [len(raw) + end for raw, end in zip(raws, ends, strict=True)]
        return Encoded(ids, np.repeat(np.array([learned for _, learned, _ in parts], np.uint8), lengths))


class Rejections:
    """Warnings about rejected samples: each error once, and ``MOST`` at all, since millions may be rejected."""

    MOST = 20

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, what: str, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        if len(self._said) < self.MOST and text not in self._said:
            self._said.add(text)
            last = "; more are counted, and not said" if len(self._said) == self.MOST else ""
            _log.warning("%s: %r%s", what, error, last)


class CallableTokenizer:
    """A callable ``str -> sequence of ints``, by its import path; or ``function``, for which ``path`` is but a name.

    See ``as_encoded`` for what else it may return.

    Its attributes ``vocab_size`` (int) and ``digest`` (str) are read when it has them. The digest of the code
    is not taken (a comment would change it): a callable whose vocabulary may change should carry one of its own.
    An exception that it raises rejects the sample (``tokenizer``) and is logged: see Rejections.
    Pairs: see ``encode_pair``. Chats need an attribute ``encode_chat`` of it: a callable of messages and tools.
    """

    def __init__(
        self,
        path: str,
        function: Callable[..., object] | None = None,
        *,
        train_on: Literal["answers", "all"] = "answers",
    ) -> None:
        function = function or _import(path)
        vocab_size, digest = getattr(function, "vocab_size", None), getattr(function, "digest", None)
        self.name = path
        self.vocab_size: int | None = vocab_size if isinstance(vocab_size, int) else None
        words = (path, str(self.vocab_size), digest if isinstance(digest, str) else "")
        self.digest = _digest(*words, *[train_on] * (train_on != "answers"))
        self._encode_chat: Callable[..., object] | None = getattr(function, "encode_chat", None)
        self._decode: Callable[[list[int]], str] | None = getattr(function, "decode", None)
        self.has_chat_template = self._encode_chat is not None
        self.eos_token: str | None = None
        self._function, self._train_on = function, train_on
        self._rejections = Rejections()

    def encode(self, text: str) -> Encoded | str:
        return self._call(self._function, text) if text else "empty"

    def decode(self, tokens: Tokens) -> str:
        """By the callable's own attribute ``decode``, else the ids in words."""
        ids: list[int] = tokens.tolist()
        return "".join(f"{number} " for number in ids) if self._decode is None else self._decode(ids)

    def encode_chat(self, messages: object, tools: object = None) -> Encoded | str:
        if self._encode_chat is None:
            raise ConfigError(
                f"tokenizer {self.name}: got a chat, expected texts: give the callable an attribute encode_chat "
                "(messages, tools) -> (ids, loss_mask)"
            )
        return self._call(self._encode_chat, messages, tools)

    def encode_pair(self, prompt: object, completion: object) -> Encoded | str:
        """The ids of ``prompt + completion``; learned is what differs from the ids of the prompt alone.

        Where tokens join over the boundary, that one counts as completion. ``pair`` when more than the last two
        ids of the prompt (one such, and an end-of-text id) change: which tokens to learn would be a guess.
        """
        messages = pair_messages(prompt, completion)
        if messages is not None:
            return self.encode_chat(messages)
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            return "dtype"
        both = self.encode(prompt + completion)
        if isinstance(both, str):
            return both
        first = self.encode(prompt) if prompt else Encoded(np.empty(0, np.int32))
        if isinstance(first, str):
            return first
        size = min(len(first.tokens), len(both.tokens))
        differs = np.flatnonzero(first.tokens[:size] != both.tokens[:size])
        start = int(differs[0]) if differs.size else size
        if start < len(first.tokens) - 2:
            return "pair"
        if self._train_on == "all":
            return both
        mask = np.ones(len(both.tokens), np.uint8)
        mask[:start] = 0
        return Encoded(both.tokens, mask if both.loss_mask is None else mask & both.loss_mask)

    def _call(self, function: Callable[..., object], *what: object) -> Encoded | str:
        try:
            return as_encoded(function(*what))
        except Exception as error:  # whatever it is, it is this sample's: the next one may do
            size = len(what[0]) if isinstance(what[0], str | list) else 0
            kind = "characters" if isinstance(what[0], str) else "messages"
            self._rejections.warn(f"the tokenizer {self.name} rejects a text of {size} {kind}", error)
            return "tokenizer"


def as_encoded(values: object) -> Encoded | str:
    """What a callable may return: ids; ``(ids, loss_mask)``; or a mapping with ``input_ids``, ``loss_mask``.

    A mask is one 0 or 1 (or bool) for each id. Reasons: those of ``as_tokens``, and ``mask``.

    >>> as_encoded(([1, 2], [0, 1]))
    Encoded(tokens=array([1, 2], dtype=int32), loss_mask=array([0, 1], dtype=uint8))
    """
    ids, mask = values, None
    if isinstance(values, Mapping):
        if "input_ids" not in values:
            return "missing"
        ids, mask = values["input_ids"], values.get("loss_mask")
    elif isinstance(values, tuple) and len(values) == 2 and not isinstance(values[0], int | np.integer):
        ids, mask = values
    tokens = as_tokens(ids)
    if isinstance(tokens, str) or mask is None:
        return tokens if isinstance(tokens, str) else Encoded(tokens)
    try:
        given: NDArray[Any] = np.asarray(mask)
    except Exception:  # ragged, or an object that cannot be one
        return "mask"
    if given.dtype.kind not in "biu" or given.shape != tokens.shape or ((given != 0) & (given != 1)).any():
        return "mask"
    return Encoded(tokens, given.astype(np.uint8))


def as_tokens(values: object) -> Tokens | str:
    """``values`` as token ids [T] int32 (a copy, unless it is an int32 array already), or the reason why not.

    Reasons: ``empty``; ``dtype`` (not integers: bool, float, NaN, text, objects); ``ragged`` (not one sequence:
    nested, 2-D, or a single number); ``range`` (an id below 0, or 2**31 and above).

    >>> as_tokens([1, 2, 3])
    array([1, 2, 3], dtype=int32)
    >>> as_tokens([1.0, float("nan")]), as_tokens([[1], [2, 3]]), as_tokens([-1]), as_tokens([])
    ('dtype', 'ragged', 'range', 'empty')
    """
    try:
        ids: NDArray[Any] = np.asarray(values)
    except ValueError:  # sequences of unequal lengths
        return "ragged"
    except Exception:  # an object whose __array__ or __len__ fails
        return "dtype"
    if ids.size == 0:
        return "empty"
    if ids.dtype.kind not in "iu":
        # Python ints that no 64 bits hold are the only objects that are ids, if bad ones.
        huge = ids.dtype == object and ids.ndim == 1 and all(type(value) is int for value in ids.tolist())
        return "range" if huge else "dtype"
    if ids.ndim != 1:
        return "ragged"
    signed, size = ids.dtype.kind == "i", ids.dtype.itemsize
    if (signed and ids.min() < 0) or (size + (not signed) > 4 and ids.max() >= 2**31):  # int32 needs the first only
        return "range"
    return ids.astype(np.int32, order="C", copy=False)


def import_path(key: str, path: str) -> Any:
    """What ``package.module:thing`` names. Raises ConfigError for ``key`` where the import fails, in whatever way."""
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}: {path!r} cannot be imported ({error}); check its spelling and PYTHONPATH") from error
    except Exception as error:  # the module's own code
        text = f"{type(error).__name__}: {error}"[:200]
        raise ConfigError(f"{key}: {path!r} cannot be imported ({text}); mend the module") from error
    return found


def _import(path: str) -> Callable[[str], object]:
    if not all(path.partition(":")):
        raise ConfigError(
            f"tokenizer name: got {path!r}, expected 'bytes' or 'package.module:function'; a file's key is `file`"
        )
    found = import_path("tokenizer name", path)
    if not callable(found):
        kind = type(found).__name__
        raise ConfigError(f"tokenizer name: {path!r} is of type {kind}, expected a callable from str to a list of ints")
    return found  # type: ignore[no-any-return]


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(("streampack-tokenizer-1", *words)).encode()).hexdigest()
