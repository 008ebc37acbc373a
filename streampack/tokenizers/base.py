"""The protocol of tokenizers (texts, chats and pairs in, token ids out), and the settings of a tokenizer."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from streampack.tokenizers.token_ids import Encoded, Tokens


class TokenizerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a tokenizer: ``name`` or ``file`` names it. Without both, texts become bytes, and a chat is an error.

    The keys from ``eos_token`` on are for a file. A callable appends its own end of text. In ``train_on: answers``, the
    assistant's messages of a chat and the completion of a pair are learned.
    """

    name: Annotated[
        str | None,
        Meta(
            description="Name of the tokenizer: `bytes`, which uses UTF-8 bytes as ids, or your own function as "
            "`package.module:function`. Set either `name` or `file`"
        ),
    ] = None
    append_eos: Annotated[
        bool,
        Meta(
            description="End each text and each pair with the end-of-text token. Set `false` if the data already "
            "contains this token. Chats end as the chat template defines"
        ),
    ] = True
    file: Annotated[
        str | None,
        Meta(
            description="Path of a tokenizer.json file, or of the model's folder that contains this file. Set either "
            "`name` or `file`"
        ),
    ] = None
    processor: Annotated[
        str | None,
        Meta(
            description="Folder of a processor of transformers, whose tokenizer reads chats with images. Set it in "
            "place of `name` and `file`"
        ),
    ] = None
    eos_token: Annotated[
        str | None,
        Meta(
            description="Token that ends a text, for the tokenizer in `file`. Default: the token in "
            "tokenizer_config.json in the tokenizer's folder"
        ),
    ] = None
    bos_token: Annotated[
        str | None,
        Meta(
            description="Token to put before each text, for the tokenizer in `file`. Default: none, unless "
            "tokenizer.json adds a token. Chat templates use the token in tokenizer_config.json"
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Meta(
            description="Chat template for the tokenizer in `file`: a path, or the template's text. Default: the "
            "template in the tokenizer's folder, from chat_template.jinja or tokenizer_config.json"
        ),
    ] = None
    allow_special: Annotated[
        bool,
        Meta(
            description="Turn the text of a special token in the data, such as `</s>`, into that token. By default, "
            "such text stays ordinary text, so that data cannot end a turn"
        ),
    ] = False
    train_on: Annotated[
        Literal["answers", "all"],
        Meta(
            description="Tokens of chats and pairs that the model is trained on: only the assistant's messages and "
            "the completions (`answers`), or all tokens (`all`)"
        ),
    ] = "answers"
    chat_template_kwargs: Annotated[
        dict[str, Any],
        Meta(
            description="Variables of the chat template, such as `{enable_thinking: false}`, for all chats. A "
            "row's key `chat_template_kwargs` overrides them"
        ),
    ] = {}
    roles: Annotated[
        dict[str, str],
        Meta(
            description="Roles in the data and the role that the chat template gets for each, such as `{model: "
            "assistant}`. Only messages of the `assistant` count in the loss"
        ),
    ] = {}
    date: Annotated[
        str | None,
        Meta(
            description="Date (YYYY-MM-DD) for chat templates that ask for today's date. With a fixed date, the same "
            "data gives the same tokens on every day"
        ),
    ] = None


class Tokenizer(Protocol):
    """Converts texts, chats and pairs to token ids.

    For a sample that cannot be encoded, the methods return a reason: one word, which is counted.
    """

    @property
    def name(self) -> str:
        """Name for messages: ``bytes``, an import path, or a file."""

    @property
    def digest(self) -> str:
        """Hex digest, part of the source's digest. Tokenizers that give different ids must have different digests."""

    @property
    def vocab_size(self) -> int | None:
        """Largest id + 1; None if it is unknown."""

    @property
    def has_chat_template(self) -> bool:
        """True if ``encode_chat`` can write a chat."""

    @property
    def train_on(self) -> Literal["answers", "all"]:
        """Tokens of chats and pairs that are learned: see TokenizerSettings."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for added tokens, such as ``<|im_end|>``; empty if they are unknown."""

    @property
    def image_fields(self) -> Mapping[str, Mapping[str, Any]]:
        """Fields that a run declares for chats with images, as in broker.yaml; empty if chats cannot have images."""

    @property
    def eos_token(self) -> str | None:
        """Text of the token that ends a text, for messages; None if it is unknown."""

    def decode(self, tokens: Tokens) -> str:
        """Return the text of ``tokens``, special tokens included, for people to read."""

    def encode(self, text: str) -> Encoded | str:
        """Return the ids of a text, or a reason such as ``empty``, ``encoding`` or ``range``."""

    def encode_chat(
        self, messages: object, tools: object = None, variables: Mapping[str, Any] | None = None
    ) -> Encoded | str:
        """Return the ids and loss mask of a chat, a list of messages ``{"role": ..., "content": ...}``, or a reason.

        The assistant's messages are learned. ``tools``: list of tools for the chat template, or None. ``variables``:
        variables for the template. The reasons are ``messages``, ``roles`` (an unknown one), ``tools`` (not a list),
        ``chat_template_kwargs`` (variables that cannot be used), ``template``, and those of a text. Raises ConfigError
        if this tokenizer has no chat template.
        """

    def encode_pair(
        self,
        prompt: object,
        completion: object,
        tools: object = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Encoded | str:
        """Return the ids and loss mask of a prompt and its completion, or a reason. Only the completion is learned.

        Both are texts, or both are lists of messages; the completion of a list may be a text. ``tools`` and
        ``variables`` are for messages.
        """
