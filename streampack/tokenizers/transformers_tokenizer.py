"""A tokenizer object of transformers, given to ``streampack.local``."""

from __future__ import annotations

import tempfile
from functools import cached_property
from typing import TYPE_CHECKING, Any

from streampack.errors import ConfigError
from streampack.tokenizers.callable_tokenizer import CallableTokenizer
from streampack.tokenizers.token_ids import Encoded, Tokens, digest_of_words

if TYPE_CHECKING:
    from streampack.tokenizers.tokenizer_json import FileTokenizer


class TransformersTokenizer(CallableTokenizer):
    """A tokenizer object of transformers, such as AutoTokenizer returns: it encodes texts by its method ``encode``.

    For chats it must be a fast tokenizer. It is saved to a temporary folder at the first chat, and read back as a
    FileTokenizer.
    """

    def __init__(self, given: Any) -> None:
        def encode(text: str) -> object:
            """Return the ids of a text by the tokenizer of transformers."""
            return given.encode(text)

        template = given.chat_template
        encode.vocab_size = len(given)  # type: ignore[attr-defined]
        encode.digest = "" if template is None else digest_of_words(str(template))  # type: ignore[attr-defined]
        super().__init__(type(given).__qualname__, encode)
        self._given = given
        self.has_chat_template = template is not None

    def encode_chat(self, messages: object, tools: object = None) -> Encoded | str:
        """Return the ids and loss mask of a chat by the tokenizer's chat template, or a reason."""
        return self._of_file.encode_chat(messages, tools)

    def decode(self, tokens: Tokens) -> str:
        """Return the text of ``tokens``, special tokens included."""
        return str(self._given.decode(tokens.tolist()))

    @cached_property
    def _of_file(self) -> FileTokenizer:
        """The same tokenizer as a FileTokenizer. Raises ConfigError if it is not a fast tokenizer."""
        from streampack.tokenizers.base import TokenizerSettings
        from streampack.tokenizers.tokenizer_json import FileTokenizer

        if not getattr(self._given, "is_fast", False):
            raise ConfigError(
                f"tokenizer: got a chat with the slow tokenizer {self.name}, expected a fast tokenizer. Load the "
                "tokenizer with use_fast=True"
            )
        with tempfile.TemporaryDirectory(prefix="streampack-") as folder:
            self._given.save_pretrained(folder)
            return FileTokenizer(TokenizerSettings(file=folder, append_eos=False))
