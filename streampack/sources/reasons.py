"""Sentences for the reasons why samples are rejected: what is expected, and what to do.

A reason is one word, or ``KEY: WORD`` for a field or a known key of a row. Statuses and metrics count by reason.
"""

from streampack.sources.records import RawSample

EXPECTED = {
    "empty": "at least one token id. Remove empty samples",
    "dtype": "a 1-D array of ids, or a text under the key of a text. Correct the value's type",
    "ragged": "a 1-D array of ids. Give each sample its own row",
    "range": "a 1-D array of ids within {dtype}. Use the tokenizer of your model, or set `tokens: int32`",
    "encoding": "text in UTF-8. Convert the file, or remove the bytes that are not UTF-8",
    "json": "one JSON object in each line or member. Correct the line",
    "npy": "a .npy file as numpy.save writes it. Write the member again",
    "missing": "a key that holds the sample. {advice}",
    "duplicate": "each extension once in a sample of a tar file. Give each sample another name",
    "mask": "a loss_mask with a 0 or 1 for each id from the tokenizer. Correct the tokenizer",
    "tokenizer": "ids from the tokenizer, which raised an exception. Correct the tokenizer, or the text",
    "pair": "two texts or two lists of messages as prompt and completion. Correct the row",
    "messages": 'a list of messages such as {{"role": "user", "content": "hi"}}. Correct the row',
    "tools": "a list of tools, each a JSON object. Correct the row",
    "roles": "messages with known roles. Map the others with `tokenizer: {{roles: {{...}}}}`",
    "chat_template_kwargs": "variables for the chat template, as a mapping. Correct the row",
    "special": "text without the text of special tokens. Correct the row",
    "image_missing": "an image that the producer can read. Correct the path, or set image_folder",
    "image_unreadable": "an image file. Write the image again, or remove the sample",
    "image_too_large": "a smaller image. Scale it down, or remove the sample",
    "image_depth": "an image of 8 bits for each value. Convert it",
    "image_animated": "an image of one frame. Give the frame that is meant",
    "image_size": "an image that the processor accepts. Cut it, or remove the sample",
    "image_count": "one image for each place in the messages. Correct the row",
    "video_missing": "a video that the producer can read. Correct the path, or set image_folder",
    "video_unreadable": "a video file. Write the video again, or remove the sample",
    "video_frames": "a header with the number and the rate of frames. Convert it to mp4, or remove the sample",
    "video_size": "a video that the processor accepts. Cut it, or remove the sample",
    "video_count": "one video for each place in the messages. Correct the row",
    "video_family": "no video for this processor. Remove the sample, or use the processor of another model",
    "template": "messages that the chat template can write. Correct the row, or set another template",
}
"""The expected data in place of a rejected sample, and the next action, by reason."""
OWN_WORDS = (
    "dtype",
    "ragged",
    "messages",
    "roles",
    "chat_template_kwargs",
    "special",
    "template",
    *(
        "image_missing",
        "image_unreadable",
        "image_too_large",
        "image_depth",
        "image_animated",
        "image_size",
        "image_count",
        "video_missing",
        "video_unreadable",
        "video_frames",
        "video_size",
        "video_count",
        "video_family",
    ),
)
"""Reasons whose detail, if there is one, says what to do."""
EXPECTED_OF_KEY = {
    "missing": "every declared field. Add {key} to the rows, or give the field a `default` in its declaration",
    "length": "one value of {key} for each token id. Correct {key}, or remove it",
    "shape": "{key} in its declared shape, or a list of one number for each token. Correct {key}, or remove it",
    "ragged": "{key} as lists of equal lengths. Correct {key}, or remove it",
    "dtype": "numbers of the declared dtype in {key}. Correct the values, or declare another dtype",
    "range": "values that the dtype of {key} can hold; in a mask, only 0 and 1. Correct the values",
    "empty": "a 1 in {key} for at least one token. Remove samples that are only padding",
    "gaps": "{key} with 0 only at the beginning or the end, for padding. Remove the padding, or remove {key}",
    "packed": "one sample in each row, but {key} says that this row holds several. Give the samples before they are "
    "packed (`packing=False`), or split the rows. Streampack packs them",
    "unread": "no {key}, which streampack does not read, because libraries do not agree on its meaning. If it says "
    "which tokens count in the loss, write `loss_mask`, with 1 for these. Else declare a field with the name {key}, or "
    "remove {key}",
    "text": "no {key} beside a text, because it is about token ids, which the sample does not have. Give the ids in "
    "`input_ids`, or remove {key}",
    "shifted": "labels that are not shifted: the label of a token is the token itself, or -100. Shift them back by one",
    "other": "labels that are the tokens themselves, or -100. For other labels, declare the field `labels`: "
    "`fields: {{labels: {{}}}}` in broker.yaml, or fields={{'labels': {{}}}} of streampack.local",
}
"""The same for reasons of a field or a key, by the word after the key."""
_USUAL = (
    "Rename the key to text, input_ids or messages, or set text_key, tokens_key, messages_key, or prompt_key and "
    "completion_key"
)
_ADVICE = (
    ({"conversations"}, "Set messages_key: conversations, or rename the key to messages"),
    ({"instruction", "output"}, "Write `prompt` (instruction and input) and `completion` (output)"),
    (
        {"prompt_ids", "completion_ids"},
        "Write `input_ids` (prompt_ids + completion_ids) and `completion_mask` (0 for the ids of the prompt, else 1)",
    ),
    (
        {"chosen", "rejected"},
        "A row of preferences holds two samples. Send them as a group with streampack.Producer.send_group",
    ),
    ({"question", "answer"}, "Set prompt_key: question and completion_key: answer, or rename the keys"),
)
"""Advice for rows with these keys."""


def advice_on(keys: str, usual: str = _USUAL) -> str:
    """Return what to do about rows without a sample: ``usual``, unless ``keys`` (a text) has keys with own advice."""
    names = set(keys.replace(",", " ").split())
    return next((text for wanted, text in _ADVICE if wanted <= names), usual)


def describe(record: RawSample, reason: str, dtype: str) -> str:
    """Return the place of a rejected sample, its reason, what is expected instead, and what to do.

    ``dtype``: the type of the run's token ids.
    """
    key, _, word = reason.partition(": ")
    place = record.place
    if word in EXPECTED_OF_KEY:
        text = EXPECTED_OF_KEY[word].format(key=key)
    elif reason in EXPECTED:
        text = EXPECTED[reason].format(dtype=dtype, advice=advice_on(record.why))
    else:
        text = f"a 1-D array of ids within {dtype}, and every declared field. Correct the sample"
    if reason in OWN_WORDS and record.why:
        place, text = record.where, f"{text.partition('. ')[0]}, but {record.why}"
    return f"{place}: got a sample that cannot be used ({reason}), expected {text}"
