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
    """A fast tokenizer of transformers, such as AutoTokenizer gives: texts by its ``encode``, chats by its template.

    Chats are written by its files, as with ``tokenizer.file``: it is saved to a temporary folder when the first comes.
    """

    def __init__(self, given: Any) -> None:
        def encode(text: str) -> object:
            return given.encode(text)

        template = given.chat_template
        encode.vocab_size = len(given)  # type: ignore[attr-defined]
        encode.digest = "" if template is None else digest_of_words(str(template))  # type: ignore[attr-defined]
        super().__init__(type(given).__qualname__, encode)
        self._given = given
        self.has_chat_template = template is not None

    def encode_chat(self, messages: object, tools: object = None) -> Encoded | str:
        return self._of_file.encode_chat(messages, tools)

    def decode(self, tokens: Tokens) -> str:
        return str(self._given.decode(tokens.tolist()))

    @cached_property
    def _of_file(self) -> FileTokenizer:
        from streampack.tokenizers.base import TokenizerSettings
        from streampack.tokenizers.tokenizer_json import FileTokenizer

        if not getattr(self._given, "is_fast", False):
            raise ConfigError(f"tokenizer: got a slow {self.name} and a chat, expected a fast one: use_fast=True")
        with tempfile.TemporaryDirectory(prefix="streampack-") as folder:
            self._given.save_pretrained(folder)
            return FileTokenizer(TokenizerSettings(file=folder, append_eos=False))
