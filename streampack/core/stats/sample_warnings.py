"""Warnings about samples: the words that are counted, and what each one means for a person.

A sample with a warning is delivered. The producer that reads it adds the word, or the broker does on admission. The
producer logs the first sample of each word. Every view of a run counts the samples by word.
"""

from __future__ import annotations

NO_LOSS_TOKENS = "no_loss_tokens"
NO_LOSS_MASK = "no_loss_mask"
NO_END_TOKEN = "no_end_token"
TOOLS_LEFT_OUT = "tools_left_out"
TOOL_CALLS_LEFT_OUT = "tool_calls_left_out"
REASONING_LEFT_OUT = "reasoning_left_out"
TEMPLATE_KWARGS_LEFT_OUT = "template_kwargs_left_out"
SPECIAL_TOKENS_AS_TEXT = "special_tokens_as_text"
SEVERAL_KEYS = "several_keys"
VIDEO_AT_OTHER_RATE = "video_at_other_rate"

WARNINGS = {
    NO_LOSS_TOKENS: "no token of the sample counts in the loss, so nothing is learned from it. Check its labels and "
    "masks, and whether truncation cuts off its answer. To drop such samples, set `no_loss_tokens: drop` in `rules`",
    NO_LOSS_MASK: "the sample has no loss_mask, although the run declares one, so all its tokens count in the loss. "
    "Add the mask, or set `missing_mask: reject` in producer.yaml",
    NO_END_TOKEN: "an answer of the chat ends without a token, so the model does not learn where to stop. Set "
    "`tokenizer: {chat_template: PATH}` to a template that ends answers with a token",
    TOOLS_LEFT_OUT: "the row has `tools`, but its text is written without them. Set `tokenizer: {chat_template: PATH}` "
    "to a template that writes tools, or remove the key from the row",
    TOOL_CALLS_LEFT_OUT: "the chat template does not write the `tool_calls` of a message. Set `tokenizer: "
    "{chat_template: PATH}` to a template that writes them",
    REASONING_LEFT_OUT: "the chat template does not write the reasoning of the last answer. Set `tokenizer: "
    "{chat_template: PATH}` to a template that writes it, or remove it from the row",
    TEMPLATE_KWARGS_LEFT_OUT: "the row has `chat_template_kwargs`, but nothing reads one of them. Correct its name, or "
    "remove it from the row",
    SPECIAL_TOKENS_AS_TEXT: "the data contains the text of a special token, such as `<|im_end|>`. It stays ordinary "
    "text. If the data is the output of a chat template, set `tokenizer: {allow_special: true, append_eos: false}`",
    SEVERAL_KEYS: "the row has several keys that may hold the sample. Token ids are taken first, then text, messages, "
    "and prompt with completion. To choose, set text_key, tokens_key, messages_key or prompt_key",
    VIDEO_AT_OTHER_RATE: "a video gives fewer frames than the rate of the processor asks for, because of `max_frames` "
    "or of the video's own rate. Cut the video, or set `fps` or `max_frames` in the processor's folder",
}
"""Word to sentence: the fact, and the line that changes it."""


def advice(word: str) -> str:
    """Return the sentence of a warning; the word itself if another version of streampack counted it."""
    return WARNINGS.get(word, word)
