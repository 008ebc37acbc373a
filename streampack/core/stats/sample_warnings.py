"""Warnings about samples: the words that are counted, and what each one means for a person.

A sample with a warning is delivered. The producer that reads it adds the word, or the broker does on admission. The
producer logs the first sample of each word. Every view of a run counts the samples by word.
"""

from __future__ import annotations

NO_LOSS_TOKENS = "no_loss_tokens"
NO_LOSS_MASK = "no_loss_mask"

WARNINGS = {
    NO_LOSS_TOKENS: "no token of the sample counts in the loss, so nothing is learned from it. Check its labels and "
    "masks, and whether truncation cuts off its answer",
    NO_LOSS_MASK: "the sample has no loss_mask, although the run declares one, so all its tokens count in the loss. "
    "Add the mask, or set `missing_mask: reject` in producer.yaml",
}
"""Word to sentence: the fact, and the line that changes it."""


def advice(word: str) -> str:
    """Return the sentence of a warning; the word itself if another version of streampack counted it."""
    return WARNINGS.get(word, word)
