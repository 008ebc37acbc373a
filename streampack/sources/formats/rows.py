"""Rows: a mapping from keys to values, as JSON lines, Parquet, datasets and Python give them, made a sample.

Theory of operation. One key of the row is the sample, or one pair of keys. It is the one that the settings name;
when they name none, the first of these that is there and not null:

    text                       a text
    tokens, input_ids          token ids
    messages (with tools)      a chat, by the tokenizer's template
    prompt + completion        a prompt, and the answer to learn
    prompt + response          the same

Then come the fields that the run declares. What the row does not have is left out; what it has must be of the
declared shape, as long as the tokens, and of values that the declared dtype holds, or the whole sample is
rejected: a wrong advantage is worse than a missing sample.

This module knows rows, never where they lie.
"""

import json
from array import array as packed
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import LOSS_MASK, Field
from streampack.errors import ConfigError
from streampack.sources.records import NO_FIELDS, Because, Sample
from streampack.sources.settings import SourceSettings, rejects_unmasked
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.token_ids import Encoded, Tokens, as_tokens

_TEXT, _TOKENS, _CHAT, _PAIR = "text", "tokens", "chat", "pair"
_DETECTED = (
    (_TEXT, "text", ""),
    (_TOKENS, "tokens", ""),
    (_TOKENS, "input_ids", ""),
    (_CHAT, "messages", ""),
    (_PAIR, "prompt", "completion"),
    (_PAIR, "prompt", "response"),
)
_TOOLS = "tools"
NO_MASK = f"{LOSS_MASK}: missing"
"""The reason of a sample that comes without its loss mask."""
MISSING = "missing"
"""The reason of a row that has none of the keys that may hold the sample."""
_UNREAD = ("npy", "json", "encoding")
"""Words that stand for a field's value that could not be read."""


class RowReader:
    """``reader(row)`` is a Sample, or the word that says why there is none. ``keys``: all that it may look at."""

    def __init__(self, settings: SourceSettings, tokenizer: Tokenizer, fields: Sequence[Field] = ()) -> None:
        self._tokenizer, self._encode = tokenizer, tokenizer.encode
        self._looks = _looks(settings)
        self.fields = FieldReader(settings, fields, rejects_unmasked(settings, tokenizer))
        keys = [key for _, *pair in self._looks for key in pair if key]
        tools = [_TOOLS] if any(kind == _CHAT for kind, *_ in self._looks) else []
        self.sample_keys = tuple(dict.fromkeys(keys))
        self.keys = tuple(dict.fromkeys([*keys, *tools, *(key for _, key in self.fields.keys)]))

    def __call__(self, row: Mapping[str, Any]) -> Sample | str:
        encoded = self.encode(row)
        return encoded if isinstance(encoded, str) else self.fields.add(encoded, row)

    def only_ids(self, names: Collection[str]) -> str | None:
        """The key of the ids of rows with these keys; None where anything else in them may be the sample."""
        found = [(kind, key) for kind, key, _ in self._looks if key in names]
        return found[0][1] if len(found) == 1 and found[0][0] == _TOKENS else None

    def encode(self, row: Mapping[str, Any]) -> Encoded | str:
        """The sample without its fields."""
        for kind, key, second in self._looks:
            value = row.get(key)
            if value is None:
                continue
            if kind == _TEXT:
                return self._encode(value) if isinstance(value, str) else "dtype"
            if kind == _TOKENS:
                ids = ids_of(value)
                return ids if isinstance(ids, str) else Encoded(ids)
            if kind == _CHAT:
                return self._tokenizer.encode_chat(value, _tools(row.get(_TOOLS)))
            if (completion := row.get(second)) is not None:
                return self._tokenizer.encode_pair(value, completion)
        return MISSING


class FieldReader:
    """What a run declares, found under a source's keys. ``keys``: (field, key) of each.

    ``needs_mask``: a sample without a ``loss_mask`` is rejected, where the run declares one and no default for it.
    Raises ConfigError for a field that the settings map and the run does not declare.
    """

    def __init__(self, settings: SourceSettings, fields: Sequence[Field], reject_unmasked: bool = False) -> None:
        unknown = sorted(set(settings.fields) - {field.name for field in fields})
        if unknown:
            names = ", ".join(field.name for field in fields) or "none"
            raise ConfigError(
                f"fields: got {unknown[0]}, expected of those that the run declares ({names}): add it to "
                "broker.yaml's fields, or remove it here"
            )
        self.keys = tuple((field, settings.fields.get(field.name, field.name)) for field in fields)
        self.needs_mask = reject_unmasked and any(each.name == LOSS_MASK and each.default is None for each in fields)

    def add(self, encoded: Encoded, row: Mapping[str, Any]) -> Sample | str:
        """The sample with its fields from ``row``, where a value may be a str: why it could not be read."""
        tokens, mask = encoded
        if not self.keys and mask is None:
            return Sample(tokens)
        found: dict[str, NDArray[Any]] = {}
        for field, key in self.keys:
            value = mask if field.name == LOSS_MASK and mask is not None else row.get(key)
            if value is None:
                if field.name == LOSS_MASK and self.needs_mask:
                    return NO_MASK
                continue
            array = as_field(value, field, len(tokens))
            if isinstance(array, str):
                return f"{field.name}: {array}"
            found[field.name] = array
        if mask is not None:
            found.setdefault(LOSS_MASK, mask)  # not declared: the producer says so
        return Sample(tokens, found or NO_FIELDS)


def missing_from(keys: Iterable[str], what: str = "the keys") -> Because:
    """The reason of a row in which the sample is missing, with the keys that it has."""
    names = ", ".join(keys) or "none"
    return Because(MISSING, f"has {what} {names[:200]}")


def keys_of(row: Mapping[str, Any]) -> list[str]:
    """The keys of a row that are not null."""
    return [str(key) for key, value in row.items() if value is not None]


def ids_of(value: object) -> Tokens | str:
    """A row's ids as [T] int32, or the reason why there are none; bools are no ids, nor in a list of ints."""
    if isinstance(value, list | tuple):
        ids = _packed(value)
        if ids is not None and ids.min() > 1:  # none was a bool: looking at the types of all costs as much again
            return ids
        kinds = set(map(type, value))
        if kinds == {int}:
            return "range" if ids is None or ids.min() < 0 else ids
        if list in kinds or tuple in kinds:
            return "ragged"
        if bool in kinds:
            return "dtype"
    elif not hasattr(value, "__array__"):
        return "dtype"
    return as_tokens(value)


def _packed(value: Sequence[Any]) -> Tokens | None:
    """Numbers as int32 in half of numpy's time; None where there are none, or one that is not of int32."""
    try:
        return np.frombuffer(packed("i", value), np.int32) if value else None
    except (TypeError, OverflowError):
        return None


def as_field(value: object, field: Field, num_tokens: int) -> NDArray[Any] | str:
    """``value`` as the field's dtype (float32 for bfloat16): [num_tokens, *shape], or [*shape] for axis sample.

    Else the reason: ``ragged``; ``shape``; ``length`` (not as many as tokens); ``dtype`` (a float, NaN or null for
    integers; no number at all); ``range`` (the dtype does not hold it). A float may lose digits, nothing else may.

    >>> as_field([1, 0, 1], Field(name="loss_mask", dtype="uint8", align="target"), 3)
    array([1, 0, 1], dtype=uint8)
    >>> as_field([1.0, 0.5], Field(name="seen", dtype="int32"), 2), as_field([1], Field(name="seen", dtype="int32"), 2)
    ('dtype', 'length')
    """
    if isinstance(value, str):
        return value if value in _UNREAD else "dtype"
    try:
        array: NDArray[Any] = np.asarray(value)
    except ValueError:
        return "ragged"
    except Exception:  # an object whose __array__ or __len__ fails
        return "dtype"
    wanted = (num_tokens, *field.shape) if field.axis == "token" else field.shape
    dtype: np.dtype[Any] = np.dtype(np.float32) if field.dtype == "bfloat16" else field.storage
    if array.shape != wanted:
        if array.ndim == len(wanted) and field.axis == "token" and array.shape[1:] == wanted[1:]:
            return "length"
        return "shape"
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f") > (dtype.kind == "f"):
        return "dtype"
    if array.dtype == dtype:
        return array
    if dtype.kind in "biu":
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        if array.size and (int(array.min()) < low or int(array.max()) > high):
            return "range"
        return array.astype(dtype)
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    return "range" if np.any(np.isinf(converted) & np.isfinite(array)) else converted


def _looks(settings: SourceSettings) -> tuple[tuple[str, str, str], ...]:
    """(kind, key, second key) of what may be the sample, in the order of looking."""
    if settings.text_key is not None:
        return ((_TEXT, settings.text_key, ""),)
    if settings.tokens_key is not None:
        return ((_TOKENS, settings.tokens_key, ""),)
    if settings.messages_key is not None:
        return ((_CHAT, settings.messages_key, ""),)
    if settings.prompt_key is None and settings.completion_key is None:
        return _DETECTED
    prompt = settings.prompt_key or "prompt"
    answers = ("completion", "response") if settings.completion_key is None else (settings.completion_key,)
    return tuple((_PAIR, prompt, answer) for answer in answers)


def _tools(value: object) -> object:
    """A row's tools; tables often hold them as a JSON text, since their shape differs from row to row."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value  # the tokenizer says what it is not
