"""Tokenizers: text in, token ids out, and the rule of what token ids are.

Theory of operation. A tokenizer is found by name: ``bytes``, which needs no vocabulary, or any callable of the
user's own by its import path, ``package.module:function``. Whatever it returns, and whatever a file holds as
tokens, goes through ``as_tokens``: one sequence, not empty, of integers in 0..2**31-1. What does not pass
becomes a reason, a short word that is counted; never an exception, because one bad sample must not end a run.

This module knows text and ids: never files or orders.
"""

import hashlib
import importlib
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from streampack.errors import ConfigError

Tokens: TypeAlias = NDArray[np.int32]

EOS_OF_BYTES = 256

_log = logging.getLogger(__name__)


class TokenizerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tokenizer.

    ``name``: ``bytes``, or the import path of a callable ``str -> sequence of ints`` as ``package.module:function``.
    ``append_eos``: whether ``bytes`` ends each text with id 256. A callable appends what it likes by itself.
    """

    name: str = "bytes"
    append_eos: bool = True


class Tokenizer(Protocol):
    """Text to token ids.

    ``digest`` (hex) goes into the source's digest: two tokenizers that give other ids must differ in it.
    ``vocab_size`` is None where it is not known.
    """

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def vocab_size(self) -> int | None: ...

    def encode(self, text: str) -> Tokens | str:
        """Token ids [T] int32, T > 0; or, in a word, why there are none (``encoding``, ``range``, ...)."""


def open_tokenizer(settings: TokenizerSettings) -> Tokenizer:
    """The tokenizer that ``settings`` name.

    Raises ConfigError where there is no such module or attribute, or it cannot be called.

    >>> open_tokenizer(TokenizerSettings()).encode("hé")
    array([104, 195, 169, 256], dtype=int32)
    """
    if settings.name == "bytes":
        return BytesTokenizer(append_eos=settings.append_eos)
    return CallableTokenizer(settings.name)


class BytesTokenizer:
    """The UTF-8 bytes of a text as ids 0..255, then 256 at its end when ``append_eos``. vocab_size is always 257."""

    name = "bytes"
    vocab_size: int | None = EOS_OF_BYTES + 1

    def __init__(self, *, append_eos: bool = True) -> None:
        self._append_eos = append_eos
        self.digest = _digest("bytes", str(append_eos))

    def encode(self, text: str) -> Tokens | str:
        if not text:
            return "empty"
        try:
            raw = text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair: no UTF-8 holds it
            return "encoding"
        if not self._append_eos:
            return np.frombuffer(raw, np.uint8).astype(np.int32)
        ids = np.frombuffer(raw + b"\0", np.uint8).astype(np.int32)
        ids[-1] = EOS_OF_BYTES
        return ids


class CallableTokenizer:
    """A callable ``str -> sequence of ints``, by its import path.

    Its attributes ``vocab_size`` (int) and ``digest`` (str) are read when it has them. The digest of the code
    is not taken (a comment would change it): a callable whose vocabulary may change should carry one of its own.
    An exception that it raises rejects the sample (``tokenizer``) and is logged.
    """

    def __init__(self, path: str) -> None:
        function = _import(path)
        vocab_size, digest = getattr(function, "vocab_size", None), getattr(function, "digest", None)
        self.name = path
        self.vocab_size: int | None = vocab_size if isinstance(vocab_size, int) else None
        self.digest = _digest(path, str(self.vocab_size), digest if isinstance(digest, str) else "")
        self._function = function

    def encode(self, text: str) -> Tokens | str:
        if not text:
            return "empty"
        try:
            ids = self._function(text)
        except Exception as error:  # whatever it is, it is this sample's: the next one may do
            _log.warning("the tokenizer %s rejects a text of %d characters: %r", self.name, len(text), error)
            return "tokenizer"
        return as_tokens(ids)


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


def _import(path: str) -> Callable[[str], object]:
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"tokenizer name: got {path!r}, expected 'bytes' or 'package.module:function'")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"tokenizer name: {path!r} cannot be imported ({error}); check its spelling and PYTHONPATH"
        ) from error
    if not callable(found):
        kind = type(found).__name__
        raise ConfigError(f"tokenizer name: {path!r} is of type {kind}, expected a callable from str to a list of ints")
    return found  # type: ignore[no-any-return]


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(("streampack-tokenizer-1", *words)).encode()).hexdigest()
