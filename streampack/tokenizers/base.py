"""Tokenizers: text in, token ids out; what names one, and what each can do.

Theory of operation. A tokenizer is found by name: ``bytes``, which needs no vocabulary, or any callable of the
user's own by its import path, ``package.module:function``; or it is a tokenizer.json (``tokenizer_json``). What token
ids are, and what becomes of those that are none, says ``token_ids``.

This module knows text and ids: never files or orders.
"""

from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from streampack.errors import ConfigError
from streampack.tokenizers.bytes_tokenizer import BytesTokenizer, UnnamedTokenizer
from streampack.tokenizers.callable_tokenizer import CallableTokenizer
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


def open_tokenizer(settings: TokenizerSettings) -> Tokenizer:
    """The tokenizer that ``settings`` name.

    Raises ConfigError where there is no such module or attribute, or it cannot be called.

    >>> open_tokenizer(TokenizerSettings()).encode("hé").tokens
    array([104, 195, 169, 256], dtype=int32)
    """
    if settings.file is not None:
        if settings.name is not None:
            raise ConfigError(f"tokenizer: got name {settings.name!r} and file {settings.file!r}, expected one of them")
        from streampack.tokenizers.tokenizer_json import FileTokenizer  # the library is wanted only here

        return FileTokenizer(settings)
    for key in ("eos_token", "bos_token", "chat_template", "date", "allow_special"):
        if getattr(settings, key):
            raise ConfigError(f"tokenizer.{key}: got {getattr(settings, key)!r} without file: give both or neither")
    if settings.name in (None, "bytes"):
        kind = UnnamedTokenizer if settings.name is None else BytesTokenizer
        return kind(append_eos=settings.append_eos, train_on=settings.train_on)
    assert settings.name is not None
    return CallableTokenizer(settings.name, train_on=settings.train_on)
