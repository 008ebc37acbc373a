"""Converts a row, a mapping from keys to values, to a sample, for all formats whose samples are rows.

Theory of operation. The sample is the value of one key of the row, or of a pair of keys. The settings name that key.
If they name none, the first of these keys that the row has, with a value that is not null, is taken::

    tokens, input_ids          token ids
    text                       a text
    messages                   a chat, by the tokenizer's template
    prompt + completion        a prompt, and the answer to learn; texts, or lists of messages
    prompt + response          the same

``tools`` and ``chat_template_kwargs`` beside messages are passed to the template.

Ids come first, because a row that has both was tokenized, and its masks are about the ids. Under the key ``tokens``, a
number or a list of texts is no ids.

Then the known keys are applied: labels, masks and boundaries (see ``row_keys``). Then the declared fields are read. A
field that the row lacks is left out. A value must have the declared shape, as many entries as there are tokens, and fit
the declared dtype. Else the whole sample is rejected, because a wrong advantage is worse than a missing sample.

This module knows rows. It does not know files.
"""

import json
from array import array as packed
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import LABELS, LOSS_MASK, PATCHES, Field
from streampack.core.model.samples import IGNORE_INDEX
from streampack.core.stats.sample_warnings import SEVERAL_KEYS
from streampack.errors import ConfigError
from streampack.sources.files.byte_source import ShardFile
from streampack.sources.files.listing import find
from streampack.sources.images import VIDEOS, ImageReader
from streampack.sources.records import NO_FIELDS, AnyShard, Format, Sample
from streampack.sources.row_keys import KNOWN, KnownKeys
from streampack.sources.settings import SourceSettings, rejects_unmasked
from streampack.sources.walk import one_shard_a_file
from streampack.tokenizers.base import Tokenizer
from streampack.tokenizers.token_ids import Because, Encoded, Tokens, as_tokens

_TEXT, _TOKENS, _CHAT, _PAIR = "text", "tokens", "chat", "pair"
_DETECTED = (
    (_TOKENS, "tokens", ""),
    (_TOKENS, "input_ids", ""),
    (_TEXT, "text", ""),
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


def open_rows(
    settings: SourceSettings, tokenizer: Tokenizer, shard_of: Callable[[ShardFile, "RowReader"], AnyShard],
    paths: Sequence[str] | None = None, *, from_start: bool = False,
) -> Format:  # fmt: skip
    """Return the Format of files of rows, each a shard: ``shard_of`` indexes an open file.

    ``paths``: the files; by default those of the settings. ``from_start``: as for ``one_shard_a_file``.
    """

    def index(fields: Sequence[Field]) -> Callable[[ShardFile], AnyShard]:
        """Return a function that indexes an open file as a shard, for the ``fields`` of a run."""
        reader = RowReader(settings, tokenizer, fields)
        return lambda file: shard_of(file, reader)

    files = find(settings.shards, settings.path) if paths is None else paths
    return one_shard_a_file(files, index, from_start=from_start)


class RowReader:
    """Converts rows: ``reader(row)`` is a Sample, or the reason why the row is rejected.

    - ``sample_keys``: keys that may hold the sample.
    - ``keys``: all keys that are read, those of the fields included.
    - ``images``: reads the images of chats; None if the tokenizer has no processor.
    """

    def __init__(self, settings: SourceSettings, tokenizer: Tokenizer, fields: Sequence[Field] = ()) -> None:
        self._tokenizer, self._encode = tokenizer, tokenizer.encode
        self._candidates = _candidate_keys(settings)
        self.fields = FieldReader(settings, fields, rejects_unmasked(settings, tokenizer))
        keys = [key for _, *pair in self._candidates for key in pair if key]
        chats = any(kind in (_CHAT, _PAIR) for kind, *_ in self._candidates)
        tools = [_TOOLS, _VARIABLES] if chats else []
        self.images = ImageReader(settings) if chats and tokenizer.image_fields else None
        tools += (*self.images.keys, VIDEOS) if self.images else ()
        self.sample_keys = tuple(dict.fromkeys(keys))
        of_fields = [key for _, key in (*self.fields.keys, *self.fields.media_keys)]
        present = [key for key in KNOWN if key in self.fields.known.names]
        self.keys = tuple(dict.fromkeys([*keys, *tools, *of_fields, *present]))

    def __call__(self, row: Mapping[str, Any]) -> Sample | str:
        encoded = self.encode(row)
        return encoded if isinstance(encoded, str) else self.fields.add(encoded, row)

    def only_ids(self, names: Collection[str]) -> str | None:
        """Return the key that holds the ids in rows with the keys ``names``; None if the sample may be a text."""
        kind, name = next(((kind, key) for kind, key, _ in self._candidates if key in names), ("", ""))
        return name if kind == _TOKENS else None

    def has_several(self, names: Collection[str]) -> bool:
        """Return whether several of the keys ``names`` may hold the sample."""
        return sum(key in names and (not second or second in names) for _, key, second in self._candidates) > 1

    def encode(self, row: Mapping[str, Any]) -> Encoded | str:
        """Return the token ids and loss mask of a row, without its fields, or the reason why it is rejected."""
        reason: str = MISSING
        for place, (kind, key, second) in enumerate(self._candidates):
            value = row.get(key)
            if value is None:
                continue
            if kind == _PAIR and row.get(second) is None:
                continue
            encoded = self._encode_value(kind, key, second, row)
            if kind == _TOKENS and isinstance(encoded, str) and self._candidates is _DETECTED and _is_metadata(value):
                reason = encoded
                continue
            if not isinstance(encoded, str) and self._has_sample(row, place + 1):
                return encoded._replace(warnings=(*encoded.warnings, SEVERAL_KEYS))
            return encoded
        return reason

    def _has_sample(self, row: Mapping[str, Any], place: int) -> bool:
        """Return whether a row also has a candidate from ``place`` on."""
        return any(
            row.get(key) is not None and (not second or row.get(second) is not None)
            for _, key, second in self._candidates[place:]
        )

    def _encode_value(self, kind: str, key: str, second: str, row: Mapping[str, Any]) -> Encoded | str:
        """Return the ids and loss mask of one candidate, ``key`` with ``second`` for a pair, or a reason."""
        value = row[key]
        if kind == _TEXT:
            return self._encode(value) if isinstance(value, str) else no_text(key, value)
        if kind == _TOKENS:
            ids = ids_of(value)
            return no_ids(key, value, ids) if isinstance(ids, str) else Encoded(ids, given=True)
        tools, variables = _tools(row.get(_TOOLS)), _variables(row.get(_VARIABLES))
        answer = row[second] if kind == _PAIR else None
        if self.images is not None:
            placed = self.images([value, answer], row)
            if isinstance(placed, Because):
                return placed
            value, answer = placed
        if kind == _PAIR:
            return self._tokenizer.encode_pair(value, answer, tools, variables)
        encoded = self._tokenizer.encode_chat(value, tools, variables)
        return no_chat(key, value) if encoded == "messages" and not isinstance(encoded, Because) else encoded


class FieldReader:
    """Reads the fields that a run declares from rows.

    - ``keys``: pairs (field, key that holds it), for fields with values for tokens or samples.
    - ``media_keys``: pairs (name, key that holds it) for the values of media, which are passed on as they are.
    - ``reference_keys``: the keys among them that hold references.
    - ``known``: applies the known keys that no field reads.
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
        self.known = KnownKeys([key for _, key in keys])
        self.needs_mask = reject_unmasked and any(field.name == LOSS_MASK and field.default is None for field in fields)

    def add(self, encoded: Encoded, row: Mapping[str, Any]) -> Sample | str:
        """Return the sample with its fields from ``row``, or the reason why a key of the row is rejected.

        A value in ``row`` may be a reason (str) instead: the value could not be read.
        """
        applied = self.known(row, encoded)
        if isinstance(applied, str):
            return applied
        if encoded.values:
            keys = {field.name: key for field, key in self.keys} | dict(self.media_keys)
            row = {**row, **{keys.get(name, name): value for name, value in encoded.values.items()}}
        mask = encoded.loss_mask if applied.mask is None else applied.mask
        kept = applied.kept or slice(None)
        tokens = encoded.tokens[kept]
        if not self.keys and not self.media_keys and mask is None:
            return Sample(tokens, warnings=encoded.warnings)
        values: dict[str, Any] = {name: row[key] for name, key in self.media_keys if row.get(key) is not None}
        for field, key in self.keys:
            value = row.get(key)
            if value is None:
                if field.name == LOSS_MASK and self.needs_mask and mask is None:
                    return NO_MASK
                continue
            array = as_field(value, field, len(encoded.tokens))
            if isinstance(array, str):
                return f"{field.name}: {array}"
            values[field.name] = array[kept] if field.axis == "token" else array
        if mask is not None:
            self._apply_mask(mask, tokens, values)
        return Sample(tokens, values or NO_FIELDS, encoded.warnings)

    def _apply_mask(self, mask: NDArray[np.uint8], tokens: Tokens, values: dict[str, Any]) -> None:
        """Apply a mask of the tokens to learn to the declared field ``loss_mask``, or to ``labels``.

        If neither is declared, the mask becomes a field, about which the producer raises. A mask of ones says nothing.
        """
        declared = {field.name: field for field, _ in self.keys}
        if LOSS_MASK in declared:
            own = values.get(LOSS_MASK, mask.astype(declared[LOSS_MASK].storage))
            values[LOSS_MASK] = own if own is mask else np.where(mask != 0, own, own.dtype.type(0))
        elif LABELS in declared:
            labels = values.get(LABELS, tokens)
            values[LABELS] = np.where(mask != 0, labels, labels.dtype.type(IGNORE_INDEX))
        elif not mask.all():
            values[LOSS_MASK] = mask


def missing_from(keys: Iterable[str], keys_text: str = "the keys") -> Because:
    """Return the reason ``missing`` for a row without a sample, with the keys that the row has."""
    names = ", ".join(keys) or "none"
    return Because(MISSING, f"has {keys_text} {names[:200]}")


def keys_of(row: Mapping[str, Any]) -> list[str]:
    """Return the keys of a row whose values are not null."""
    return [str(key) for key, value in row.items() if value is not None]


def no_chat(key: str, messages: Any) -> str:
    """Return the reason ``messages``, with a detail for a text, and for parts that are not text, such as images."""
    if isinstance(messages, str):
        return Because("messages", f"{key} is a text, not a list. If it holds JSON, parse it with json.loads")
    for message in messages if isinstance(messages, list) else ():
        parts = message.get("content") if isinstance(message, Mapping) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, Mapping) and part.get("type") != "text":
                return Because(
                    "messages",
                    f"{key} has a part of the type {part.get('type')!r}. For images, set tokenizer: {{processor: "
                    "FOLDER}, with the folder of your model",
                )
    return "messages"


def no_text(key: str, value: object) -> Because:
    """Return the reason ``dtype`` for a value that is not a text; ``key`` names it in the detail."""
    if isinstance(value, float) and value != value:
        return Because("dtype", f"{key} is NaN, which stands for a missing value. Remove such rows")
    if isinstance(value, bytes | bytearray):
        return Because("dtype", f"{key} is bytes. Decode them, such as with .decode('utf-8')")
    if isinstance(value, list | tuple | np.ndarray):
        return Because("dtype", f"{key} is a {type(value).__name__}. A row has one text, not a batch of texts")
    return Because("dtype", f"{key} is a {type(value).__name__}")


def no_ids(key: str, value: object, reason: str) -> str:
    """Return the reason why a value is not token ids, with a detail that names ``key`` where one helps."""
    if isinstance(value, str):
        return Because(reason, f"{key} is a text. If it holds a list as JSON, parse it with json.loads")
    if reason == "ragged" and getattr(value, "ndim", 1) == 0:
        return Because(reason, f"{key} is a single number. A row has a list of ids")
    if reason == "ragged" and isinstance(value, tuple):
        return Because(reason, f"{key} is a tuple of several values. Write {{'input_ids': ids, 'labels': labels}}")
    if reason == "ragged":
        return Because(reason, f"{key} is nested. A row has the ids of one sample, not of a batch")
    if reason == "dtype" and getattr(value, "ndim", 0) > 0:  # an array, or a tensor, whose comparison has many values
        return Because(reason, f"{key} has values of the dtype {getattr(value, 'dtype', '')}. Ids are integers")
    if reason == "dtype" and not isinstance(value, list | tuple):
        return Because(
            reason, f"{key} is {'NaN' if value != value else f'a {type(value).__name__}'}, not a list of ids"
        )
    return reason


def _is_metadata(value: object) -> bool:
    """Return whether a value under a usual key of ids is a number, a text or a list of texts: not meant as ids."""
    if isinstance(value, list | tuple):
        return bool(value) and isinstance(value[0], str)
    return isinstance(value, str | int | float) or getattr(getattr(value, "dtype", None), "kind", "") == "U"


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
