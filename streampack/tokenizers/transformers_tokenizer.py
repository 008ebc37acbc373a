"""A tokenizer object of transformers, given to ``streampack.local``."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

from streampack.errors import ConfigError
from streampack.tokenizers.base import Tokenizer, TokenizerSettings
from streampack.tokenizers.callable_tokenizer import CallableTokenizer
from streampack.tokenizers.token_ids import Encoded, Tokens, digest_of_words


def from_transformers(source: Any) -> Tokenizer:
    """Return the tokenizer for an object of transformers, such as AutoTokenizer returns.

    A fast tokenizer is saved to a temporary folder, and read as the tokenizer of that folder. So the object gives the
    same ids as its folder. Raises ConfigError if it cannot be read back, or is a processor.
    """
    if not hasattr(source, "encode"):
        kind = type(source).__qualname__
        raise ConfigError(
            f"tokenizer: got a {kind}, expected a tokenizer. Pass its attribute tokenizer, or "
            "tokenizer={'processor': FOLDER} for chats with images"
        )
    if not getattr(source, "is_fast", False):
        return _SlowTokenizer(source)
    from streampack.tokenizers.tokenizer_json import FileTokenizer  # needs an optional package

    with tempfile.TemporaryDirectory(prefix="streampack-") as folder:
        source.save_pretrained(folder)
        tokenizer = FileTokenizer(TokenizerSettings(file=folder, append_eos=source.eos_token is not None))
    tokenizer.name = type(source).__qualname__
    return tokenizer


class _SlowTokenizer(CallableTokenizer):
    """A tokenizer of transformers that is written in Python: its ``encode`` gives the ids of texts, without chats."""

    def __init__(self, tokenizer: Any) -> None:
        def encode(text: str) -> list[int]:
            """Return the ids of a text, which end with the end-of-text token if the tokenizer has one."""
            ids: list[int] = tokenizer.encode(text)
            eos = tokenizer.eos_token_id
            return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]

        encode.vocab_size = len(tokenizer)  # type: ignore[attr-defined]
        encode.digest = digest_of_words(str(tokenizer.eos_token_id))  # type: ignore[attr-defined]
        super().__init__(type(tokenizer).__qualname__, encode)
        self._given = tokenizer
        self.has_chat_template = tokenizer.chat_template is not None

    def encode_chat(
        self, messages: object, tools: object = None, variables: Mapping[str, Any] | None = None
    ) -> Encoded | str:
        """Raise ConfigError: chats need a fast tokenizer."""
        raise ConfigError(
            f"tokenizer: got a chat with the slow tokenizer {self.name}, expected a fast tokenizer. Load the tokenizer "
            "with use_fast=True"
        )

    def decode(self, tokens: Tokens) -> str:
        """Return the text of ``tokens``, special tokens included."""
        return str(self._given.decode(tokens.tolist()))
