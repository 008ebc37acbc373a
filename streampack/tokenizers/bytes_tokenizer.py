"""A tokenizer whose ids are UTF-8 bytes: it needs no vocabulary, and writes chats as ``role: content`` lines."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from streampack.core.stats.sample_warnings import REASONING_LEFT_OUT, TOOL_CALLS_LEFT_OUT
from streampack.errors import ConfigError
from streampack.tokenizers.chat import REASONING, PairEncoder, left_out, read_messages
from streampack.tokenizers.token_ids import Encoded, Tokens, digest_of_words

EOS_OF_BYTES = 256
NO_ROLES: Mapping[str, str] = MappingProxyType({})


class BytesTokenizer(PairEncoder):
    """A tokenizer whose ids are UTF-8 bytes (0..255), with id 256 as the end of text.

    The end-of-text id follows each text if ``append_eos`` is set. A chat is written as ``role: content`` lines, and the
    end-of-text id always follows each answer.
    """

    name = "bytes"
    vocab_size: int | None = EOS_OF_BYTES + 1

    has_chat_template = True
    eos_token: str | None = "<256>"
    special_ids = frozenset({EOS_OF_BYTES})

    def __init__(
        self,
        *,
        append_eos: bool = True,
        train_on: Literal["answers", "all"] = "answers",
        roles: Mapping[str, str] = NO_ROLES,
    ) -> None:
        self._append_eos, self.train_on, self._roles = append_eos, train_on, roles
        words = [train_on] * (train_on != "answers") + [f"{role}: {name}" for role, name in sorted(roles.items())]
        self.digest = digest_of_words("bytes", str(append_eos), *words)

    def encode(self, text: str) -> Encoded | str:
        """Return the bytes of a text as ids, or the reason ``empty`` or ``encoding``."""
        if not text:
            return "empty"
        try:
            raw = text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair has no UTF-8
            return "encoding"
        if not self._append_eos:
            return Encoded(np.frombuffer(raw, np.uint8).astype(np.int32))
        ids = np.frombuffer(raw + b"\0", np.uint8).astype(np.int32)
        ids[-1] = EOS_OF_BYTES
        return Encoded(ids)

    def encode_chat(
        self, messages: object, tools: object = None, variables: Mapping[str, Any] | None = None
    ) -> Encoded | str:
        """Return the ids and loss mask of a chat, written as ``role: content`` lines without tools and reasoning."""
        checked = read_messages(messages, self._roles, any_role=self.train_on == "all")
        if isinstance(checked, str):
            return checked
        parts: list[tuple[str, bool, bool]] = []
        for message in checked:
            answer = message.role == "assistant"
            parts.append((f"{message.role}: ", False, False))
            parts.append((message.text, answer and message.train, answer))
            parts.append(("" if answer else "\n", False, False))
        joined = self._join(parts)
        if isinstance(joined, str):
            return joined
        calls = [TOOL_CALLS_LEFT_OUT] * any(message.raw.get("tool_calls") for message in checked)
        thoughts = [REASONING_LEFT_OUT] * any(REASONING[0] in message.raw for message in checked)
        return joined._replace(warnings=(*left_out(tools, variables), *calls, *thoughts))

    def _encode_texts(self, prompt: str, completion: str) -> Encoded | str:
        if not prompt + completion:
            return "empty"
        return self._join([(prompt, False, False), (completion, True, self._append_eos)])

    def decode(self, tokens: Tokens) -> str:
        """Return the text of the bytes, with ``<256>`` for the end of text."""
        raw = b"".join(bytes([number]) if number < EOS_OF_BYTES else b"<%d>" % number for number in tokens.tolist())
        return raw.decode(errors="replace")

    def _join(self, parts: list[tuple[str, bool, bool]]) -> Encoded | str:
        """Return the ids and loss mask of ``parts`` in order.

        A part is (text, whether it is learned, whether the end-of-text id follows it); that id is learned like the
        text.
        """
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
        if self.train_on == "all":
            return Encoded(ids)
        lengths = [len(raw) + end for raw, end in zip(raws, ends, strict=True)]
        return Encoded(ids, np.repeat(np.array([learned for _, learned, _ in parts], np.uint8), lengths))


class UnnamedTokenizer(BytesTokenizer):
    """The default if no tokenizer is named: bytes for texts and pairs of texts; a chat raises ConfigError.

    Otherwise a chat would be trained, without a warning, in a format that no model knows.
    """

    has_chat_template = False

    def encode_chat(
        self, messages: object, tools: object = None, variables: Mapping[str, Any] | None = None
    ) -> Encoded | str:
        """Raise ConfigError: chats need a named tokenizer."""
        raise ConfigError(
            "tokenizer: got chats without a tokenizer, expected a tokenizer with a chat template. Set `tokenizer: "
            "{file: FOLDER}` to the folder of your model's tokenizer.json; in streampack.local, pass "
            "tokenizer='FOLDER'. To encode chats as bytes of 'role: content' lines, set `tokenizer: {name: "
            "bytes}`, or pass tokenizer='bytes'"
        )
