"""Converts a row, a mapping from keys to values, to a sample, for all formats whose samples are rows.

Theory of operation. The sample is the value of one key of the row, or of a pair of keys. The settings name that key.
If they name none, the first of these keys that the row has, with a value that is not null, is taken::

    text                       a text
    tokens, input_ids          token ids
    messages                   a chat, by the tokenizer's template
    prompt + completion        a prompt, and the answer to learn; texts, or lists of messages
    prompt + response          the same

``tools`` and ``chat_template_kwargs`` beside messages are passed to the template.

Then the declared fields are read. A field that the row lacks is left out. A value must have the declared shape, as
many entries as there are tokens, and fit the declared dtype. Else the whole sample is rejected, because a wrong
advantage is worse than a missing sample.

This module knows rows. It does not know files.
"""

import json
from array import array as packed
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import LOSS_MASK, PATCHES, Field
from streampack.errors import ConfigError
from streampack.sources.records import NO_FIELDS, Sample
from streampack.sources.settings import SourceSettings, rejects_unmasked
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.token_ids import Because, Encoded, Tokens, as_tokens

_TEXT, _TOKENS, _CHAT, _PAIR = "text", "tokens", "chat", "pair"
_DETECTED = (
    (_TEXT, "text", ""),
    (_TOKENS, "tokens", ""),
    (_TOKENS, "input_ids", ""),
    (_CHAT, "messages", ""),
    (_PAIR, "prompt", "completion"),
    (_PAIR, "prompt", "response"),
)
_TOOLS, _VARIABLES = "tools", "chat_template_kwargs"
NO_MASK = f"{LOSS_MASK}: missing"
"""Reason of a sample that lacks its loss mask."""
MISSING = "missing"
"""Reason of a row that has none of the keys that may hold the sample."""
_UNREAD = ("npy", "json", "encoding")
"""Reasons that take the place of a field's value that could not be read."""


class RowReader:
    """Converts rows: ``reader(row)`` is a Sample, or the reason why the row is rejected.

    - ``sample_keys``: keys that may hold the sample.
    - ``keys``: all keys that are read, those of the fields included.
    """

    def __init__(self, settings: SourceSettings, tokenizer: Tokenizer, fields: Sequence[Field] = ()) -> None:
        self._tokenizer, self._encode = tokenizer, tokenizer.encode
        self._candidates = _candidate_keys(settings)
        self.fields = FieldReader(settings, fields, rejects_unmasked(settings, tokenizer))
        keys = [key for _, *pair in self._candidates for key in pair if key]
        chats = any(kind in (_CHAT, _PAIR) for kind, *_ in self._candidates)
        tools = [_TOOLS, _VARIABLES] if chats else []
        self.sample_keys = tuple(dict.fromkeys(keys))
        of_fields = [key for _, key in (*self.fields.keys, *self.fields.media_keys)]
        self.keys = tuple(dict.fromkeys([*keys, *tools, *of_fields]))

    def __call__(self, row: Mapping[str, Any]) -> Sample | str:
        encoded = self.encode(row)
        return encoded if isinstance(encoded, str) else self.fields.add(encoded, row)

    def only_ids(self, names: Collection[str]) -> str | None:
        """Return the key that holds the ids in rows with the keys ``names``; None if another key may be the sample."""
        found = [(kind, key) for kind, key, _ in self._candidates if key in names]
        return found[0][1] if len(found) == 1 and found[0][0] == _TOKENS else None

    def encode(self, row: Mapping[str, Any]) -> Encoded | str:
        """Return the token ids and loss mask of a row, without its fields, or the reason why it is rejected."""
        for kind, key, second in self._candidates:
            value = row.get(key)
            if value is None:
                continue
            if kind == _TEXT:
                return self._encode(value) if isinstance(value, str) else "dtype"
            if kind == _TOKENS:
                ids = ids_of(value)
                return ids if isinstance(ids, str) else Encoded(ids)
            if kind == _CHAT:
                return self._tokenizer.encode_chat(value, _tools(row.get(_TOOLS)), _variables(row.get(_VARIABLES)))
            if (completion := row.get(second)) is not None:
                tools, variables = _tools(row.get(_TOOLS)), _variables(row.get(_VARIABLES))
                return self._tokenizer.encode_pair(value, completion, tools, variables)
        return MISSING


class FieldReader:
    """Reads the fields that a run declares from rows.

    - ``keys``: pairs (field, key that holds it), for fields with values for tokens or samples.
    - ``media_keys``: pairs (name, key that holds it) for the values of media, which are passed on as they are.
    - ``reference_keys``: the keys among them that hold references.
    - ``needs_mask``: samples without a ``loss_mask`` are rejected, because the run declares one without a default.

    Raises ConfigError for a field that the settings map but the run does not declare.
    """

    def __init__(self, settings: SourceSettings, fields: Sequence[Field], reject_unmasked: bool = False) -> None:
        unknown = sorted(set(settings.fields) - {field.name for field in fields})
        if unknown:
            names = ", ".join(field.name for field in fields) or "none"
            raise ConfigError(
                f"fields: got {unknown[0]}, expected one of the fields that the run declares ({names}). Add the field "
                "to `fields` in broker.yaml, or remove it from `fields` in producer.yaml"
            )
        keys = tuple((field, settings.fields.get(field.name, field.name)) for field in fields)
        self.keys = tuple((field, key) for field, key in keys if not field.of_media)
        media = [(field.name, key) for field, key in keys if field.of_media]
        self.media_keys = (*media, (PATCHES, PATCHES)) if media else ()
        self.reference_keys = frozenset(key for field, key in keys if field.is_reference)
        self.needs_mask = reject_unmasked and any(each.name == LOSS_MASK and each.default is None for each in fields)

    def add(self, encoded: Encoded, row: Mapping[str, Any]) -> Sample | str:
        """Return the sample with its fields from ``row``, or the reason why a field is rejected.

        A value in ``row`` may be a reason (str) instead: the value could not be read.
        """
        tokens, mask, warnings = encoded
        if not self.keys and not self.media_keys and mask is None:
            return Sample(tokens, warnings=warnings)
        found: dict[str, Any] = {name: row[key] for name, key in self.media_keys if row.get(key) is not None}
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
            found.setdefault(LOSS_MASK, mask)  # not declared: the producer reports that
        return Sample(tokens, found or NO_FIELDS, warnings)


def missing_from(keys: Iterable[str], what: str = "the keys") -> Because:
    """Return the reason ``missing`` for a row without a sample, with the keys that the row has."""
    names = ", ".join(keys) or "none"
    return Because(MISSING, f"has {what} {names[:200]}")


def keys_of(row: Mapping[str, Any]) -> list[str]:
    """Return the keys of a row whose values are not null."""
    return [str(key) for key, value in row.items() if value is not None]


def ids_of(value: object) -> Tokens | str:
    """Return a row's token ids as [T] int32, or the reason why they are rejected. Bools are rejected, also in lists."""
    if isinstance(value, list | tuple):
        ids = _pack_int32(value)
        if ids is not None and ids.min() > 1:  # ids above 1 cannot be bools, which saves the check of types
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


def _pack_int32(value: Sequence[Any]) -> Tokens | None:
    """Convert Python ints to an int32 array, twice as fast as numpy; None if empty, or if one does not fit."""
    try:
        return np.frombuffer(packed("i", value), np.int32) if value else None
    except (TypeError, OverflowError):
        return None


def as_field(value: object, field: Field, num_tokens: int) -> NDArray[Any] | str:
    """Convert a field's value to its dtype, or return the reason why the value is rejected.

    The array is [num_tokens, *shape], or [*shape] for axis ``sample``; its dtype is float32 for bfloat16. Only floats
    may lose precision. The reasons:

    - ``ragged``, ``shape``: the value has another shape than declared.
    - ``length``: the value does not have one entry per token.
    - ``dtype``: the value is not a number, or is a float, NaN or null for an integer field.
    - ``range``: the dtype cannot hold a value.

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


def _candidate_keys(settings: SourceSettings) -> tuple[tuple[str, str, str], ...]:
    """Return the keys that may hold the sample, as (kind, key, second key of a pair), in the order they are tried."""
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
    """Return a row's tools, decoded if they are JSON text, as tables often hold them; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value  # the tokenizer rejects it with its reason


def _variables(value: object) -> Any:
    """Return a row's variables for the chat template without nulls, which tables write for every key that a row lacks.

    Text is decoded from JSON. Values of another type are returned as they are, for the tokenizer to reject.
    """
    value = _tools(value)
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, Mapping) else value
