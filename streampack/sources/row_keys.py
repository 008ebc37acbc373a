"""Keys of a row that say which tokens are learned or real, or where packed samples begin.

Theory of operation. Tokenizers and training libraries write such keys beside token ids. ``KNOWN`` lists them with what
each one means. A key that a declared field reads is the field's. All other known keys are applied, or the row is
rejected with a reason that names the key. So no mask and no boundary is lost silently. Keys with other names are not
looked at. A single number or a text under a known key is no statement about tokens, and is ignored.

A token is learned only if the loss mask, the labels and all masks say so. Labels other than the token itself are not a
mask: they need the declared field ``labels``. Padding at both ends, by ``attention_mask``, is cut off.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streampack.core.model.fields import LABELS, LOSS_MASK, POSITION_IDS
from streampack.core.model.samples import IGNORE_INDEX
from streampack.tokenizers.token_ids import Encoded

ATTENTION_MASK = "attention_mask"
Kind = Literal["labels", "learned", "real", "positions", "segments", "starts", "lengths", "ones", "constant", "never"]
KNOWN: dict[str, Kind] = {
    LABELS: "labels",
    **dict.fromkeys(
        (
            LOSS_MASK, "completion_mask", "assistant_masks", "assistant_mask", "response_mask", "token_mask",
            "label_mask",
        ),
        "learned",
    ),
    ATTENTION_MASK: "real",
    **dict.fromkeys((POSITION_IDS, "input_pos"), "positions"),
    **dict.fromkeys(
        (
            "seq_idx", "sequence_id", "sequence_ids", "segment_id", "segment_ids", "document_id", "document_ids",
            "doc_ids", "inputs_segmentation",
        ),
        "segments",
    ),
    **dict.fromkeys(
        ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_start_id", "seq_boundaries"), "starts"
    ),
    **dict.fromkeys(("seq_lengths", "seq_lens", "seqlens", "doc_lens"), "lengths"),
    **dict.fromkeys(
        (
            "loss_masks", "loss_weight", "loss_weights", "action_mask", "answer_mask", "target_mask", "tool_mask",
            "env_mask",
        ),
        "ones",
    ),
    **dict.fromkeys(
        ("token_type_ids", "mm_token_type_ids", "prompt_mask", "mask", "padding_mask", "pad_mask"), "constant"
    ),
    **dict.fromkeys(("shift_labels", "decoder_input_ids"), "never"),
}  # fmt: skip
"""The known keys, in the order in which they are applied, and the kind of each."""
MEANINGS: dict[Kind, str] = {
    "labels": "Label of each token, not shifted: -100 for a token that is not learned, else the token itself. Other "
    "labels need the declared field `labels`",
    "learned": "1 for a token that counts in the loss, 0 for another one",
    "real": "0 for padding at the beginning or the end, which is cut off; 1 for all other tokens",
    "positions": "Not read: the row is rejected unless the values are 0, 1, 2 and so on",
    "segments": "Not read: the row is rejected unless all values are equal, because it holds several samples",
    "starts": "Not read: the row is rejected unless the values are 0 and its length, because it holds several samples",
    "lengths": "Not read: the row is rejected unless this is its own length, because it holds several samples",
    "ones": "Not read, because its meaning differs between libraries: the row is rejected unless all values are 1",
    "constant": "Not read, because its meaning differs between libraries: the row is rejected unless values are equal",
    "never": "Not read: the row is rejected",
}
"""The meaning of each kind of key, and the treatment of a row that has it."""
BY_TOKEN = ("labels", "learned", "real")
"""Kinds of keys with a value for each token, which are applied to the sample."""


class Applied(NamedTuple):
    """The statement of the known keys of a row about its sample.

    - ``mask``: uint8, 1 for a token to learn, for each token that is kept; None if no key says which are learned.
    - ``kept``: the tokens between the padding at both ends; None for all tokens.
    """

    mask: NDArray[np.uint8] | None = None
    kept: slice | None = None


NOTHING = Applied()


class KnownKeys:
    """Applies the known keys of rows, except those that declared fields read (``read_by_fields``).

    ``names``: the keys that are looked at.
    """

    def __init__(self, read_by_fields: Collection[str] = ()) -> None:
        self.names = frozenset(KNOWN) - frozenset(read_by_fields)

    def __call__(self, row: Mapping[str, Any], encoded: Encoded) -> Applied | str:
        """Return what the keys of ``row`` say about its sample, or the reason why the row is rejected."""
        present = self.names & row.keys()
        if not present:
            return NOTHING
        values: dict[str, NDArray[Any]] = {}
        for key in (key for key in KNOWN if key in present):
            array = _array(row[key])
            if isinstance(array, np.ndarray):
                values[key] = array
            elif array is not None and KNOWN[key] != "constant":
                return f"{key}: {array}"
        if not values:
            return NOTHING
        if not encoded.given:
            return _of_text(values) or NOTHING
        return of_ids(encoded.tokens, values)


def of_ids(tokens: NDArray[Any], values: Mapping[str, NDArray[Any]]) -> Applied | str:
    """Return what arrays under known keys say about ids, or the reason why the row is rejected."""
    by_token = [key for key in values if KNOWN[key] in BY_TOKEN]
    for key in by_token:
        if values[key].shape != tokens.shape:
            return f"{key}: {'length' if values[key].ndim == 1 else 'shape'}"
    kept = _real(values[ATTENTION_MASK]) if ATTENTION_MASK in values else None
    if isinstance(kept, str):
        return f"{ATTENTION_MASK}: {kept}"
    place, mask = kept or slice(None), None
    for key in by_token:
        if key == ATTENTION_MASK:
            continue
        array = values[key][place]
        learned = _labeled(array, tokens[place]) if key == LABELS else _zero_or_one(array)
        if isinstance(learned, str):
            return f"{key}: {learned}"
        mask = learned if mask is None else mask & learned
    for key, array in values.items():
        if KNOWN[key] not in BY_TOKEN and (reason := _one_sample(KNOWN[key], array, len(tokens), kept)):
            return f"{key}: {reason}"
    return Applied(None if mask is None else mask.astype(np.uint8), kept)


def _of_text(values: Mapping[str, NDArray[Any]]) -> str:
    """Return the reason why keys about tokens reject a row whose sample is a text; empty if they say nothing."""
    for key, array in values.items():
        if KNOWN[key] in (*BY_TOKEN, "ones"):
            reason = "" if KNOWN[key] != "labels" and (array == 1).all() else "text"
        else:
            reason = _one_sample(KNOWN[key], array, array.shape[-1], None)
        if reason and array.size:
            return f"{key}: {reason}"
    return ""


def _array(value: object) -> NDArray[Any] | str | None:
    """Return the numbers of a list or an array; None if the value says nothing about tokens; else a reason."""
    if value is None or isinstance(value, str | bytes | int | Mapping):
        return None
    try:
        array: NDArray[Any] = np.asarray(value)
    except ValueError:
        return "ragged"
    except Exception:  # an object whose __array__ or __len__ fails
        return "dtype"
    if array.dtype.kind in "biuf":
        return array if array.ndim else None
    return "dtype" if any(isinstance(value, int | float) for value in array.flat) else None


def _zero_or_one(array: NDArray[Any]) -> NDArray[np.bool_] | str:
    """Return a mask of zeros and ones as bool, or the reason ``range``."""
    learned: NDArray[np.bool_] = array != 0
    return learned if ((array == 1) == learned).all() else "range"


def _labeled(labels: NDArray[Any], tokens: NDArray[Any]) -> NDArray[np.bool_] | str:
    """Return where labels are not -100, bool [T], or a reason if a label is not its own token."""
    learned: NDArray[np.bool_] = labels != IGNORE_INDEX
    if ((labels == tokens) | ~learned).all():
        return learned
    return "shifted" if ((labels[:-1] == tokens[1:]) | ~learned[:-1]).all() else "other"


def _real(array: NDArray[Any]) -> slice | str | None:
    """Return the slice of the real tokens, None if that is all of them, or the reason why there is none."""
    real = np.flatnonzero(array)
    if len(real) == 0:
        return "empty"
    begin, end = int(real[0]), int(real[-1]) + 1
    inside = array[begin:end]
    if (inside == 0).any():
        return "gaps"
    if (inside != 1).any():
        return "packed" if (inside != inside[0]).any() else "range"
    return None if end - begin == len(array) else slice(begin, end)


def _one_sample(kind: Kind, array: NDArray[Any], num_tokens: int, kept: slice | None) -> str:
    """Return the reason why a key that is not applied rejects a row of ``num_tokens`` tokens; empty if it does not."""
    sizes = {num_tokens, num_tokens if kept is None else kept.stop - kept.start}
    if kind == "never":
        return "unread"
    if kind == "lengths":
        return "packed" if array.size > 1 else "" if set(array.flat) <= sizes else "length"
    if kind == "starts":
        return "" if set(array.flat) <= {0, *sizes} else "packed"
    if kind == "ones":
        return "" if array.shape == (num_tokens,) and (array[kept or slice(None)] == 1).all() else "unread"
    if kind == "positions":
        return _in_order(array, num_tokens, kept)
    if kind == "constant" and array.shape != (num_tokens,):
        return ""  # not about tokens
    array = array[kept] if kept is not None and array.shape == (num_tokens,) else array
    equal = array.size == 0 or (array == array.flat[0]).all()
    return "" if equal else "packed" if kind == "segments" else "unread"


def _in_order(positions: NDArray[Any], num_tokens: int, kept: slice | None) -> str:
    """Return the reason why positions are not 0, 1, 2 and so on along each axis; empty if they are."""
    axes = [axis for axis, size in enumerate(positions.shape) if size == num_tokens]
    if not axes:
        return "length"
    rows = [np.moveaxis(positions, axis, -1)[..., kept or slice(None)] for axis in axes]
    if any((row == np.arange(row.shape[-1])).all() for row in rows):
        return ""
    return "packed" if (rows[0][..., 1:] == 0).any() else "unread"
