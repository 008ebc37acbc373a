"""What a tokenizer is: text, chats and pairs in, token ids out; and the settings that name one.

This module knows text and ids: never files or orders. ``token_ids`` says what token ids are, and what becomes of those
that are none.
"""

from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from streampack.tokenizers.token_ids import Encoded, Tokens


class TokenizerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tokenizer: ``name`` or ``file``.

    ``name``: ``bytes``, or the import path of a callable as ``package.module:function``: see CallableTokenizer. Without
    name and file, texts become bytes, and chats are refused. ``file``: a tokenizer.json, or a folder with one.
    ``append_eos``: whether each text and pair ends with the end-of-text token (id 256 for bytes). A chat ends as its
    template ends it, and a callable appends what it likes by itself.

    For a file: ``eos_token``, ``bos_token``: as in the tokenizer_config.json beside it where they are not given; a
    ``bos_token`` given here comes before each text. ``chat_template``: a path or the text, else chat_template.jinja
    or tokenizer_config.json beside it. ``allow_special``: whether the text of a special token in the data becomes
    that token; false makes it ordinary text, so that no web page or user can end a turn.
    ``train_on``: ``answers`` learns the assistant's messages of a chat and the completion of a pair, ``all`` the
    whole. ``date`` (YYYY-MM-DD): what a template that asks for today's date is told.
    """

    name: Annotated[str | None, Meta(description="bytes, or a callable as package.module:function")] = None
    append_eos: Annotated[bool, Meta(description="each text ends with the end-of-text token")] = True
    file: Annotated[
        str | None, Meta(description="a tokenizer.json, or a folder with one and the files that belong to it")
    ] = None
    eos_token: Annotated[
        str | None, Meta(description="token that ends a text; default: from the tokenizer_config.json beside the file")
    ] = None
    bos_token: Annotated[
        str | None, Meta(description="token that begins a text; chat templates use the one beside the file")
    ] = None
    chat_template: Annotated[
        str | None, Meta(description="path or text of a chat template; default: the one beside the file")
    ] = None
    allow_special: Annotated[bool, Meta(description="text of a special token in the data becomes that token")] = False
    train_on: Annotated[
        Literal["answers", "all"], Meta(description="tokens of chats and pairs that are learned: the answers', or all")
    ] = "answers"
    date: Annotated[str | None, Meta(description="date for a chat template that asks for today's")] = None


class Tokenizer(Protocol):
    """Text, chats and pairs to token ids.

    What cannot be a sample is a word that says why. ``digest`` (hex) goes into the source's digest: two tokenizers
    that give other ids must differ in it.
    ``vocab_size`` is None where it is not known.
    """

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def has_chat_template(self) -> bool: ...
    @property
    def train_on(self) -> Literal["answers", "all"]: ...
    @property
    def eos_token(self) -> str | None:
        """What ends a text, for people; None where that is not known."""

    def decode(self, tokens: Tokens) -> str:
        """The text of ``tokens``, with those that are special, for people."""

    def encode(self, text: str) -> Encoded | str:
        """A text. Reasons: ``empty``, ``encoding``, ``range``, ..."""

    def encode_chat(self, messages: object, tools: object = None) -> Encoded | str:
        """A list of messages ``{"role": ..., "content": ...}``, of which the assistant's are learned.

        ``tools``: what the chat template is told of, or None. Reasons: ``messages``, ``tools`` (no list), ``template``,
        and those of a text. Raises ConfigError when this tokenizer has no way to write a chat.
        """

    def encode_pair(self, prompt: object, completion: object) -> Encoded | str:
        """A prompt and its completion, which alone is learned: two texts, or two lists of messages."""
