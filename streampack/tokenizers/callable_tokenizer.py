"""A callable of the user's own as a tokenizer, by its import path ``package.module:function``.

It is code that nobody here has seen: what it returns is checked id by id (``as_encoded``), and what it raises rejects
that sample and is said, but not millions of times.
"""

import importlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from streampack.errors import ConfigError
from streampack.tokenizers.chat import pair_messages
from streampack.tokenizers.rejections import Rejections
from streampack.tokenizers.token_ids import Encoded, Tokens, as_encoded, digest_of_words


class CallableTokenizer:
    """A callable ``str -> sequence of ints``, by its import path; or ``function``, for which ``path`` is but a name.

    See ``as_encoded`` for what else it may return.

    Its attributes ``vocab_size`` (int) and ``digest`` (str) are read when it has them. The digest of the code
    is not taken (a comment would change it): a callable whose vocabulary may change should carry one of its own.
    An exception that it raises rejects the sample (``tokenizer``) and is logged: see Rejections.
    Pairs: see ``encode_pair``. Chats need an attribute ``encode_chat`` of it: a callable of messages and tools.
    """

    def __init__(
        self,
        path: str,
        function: Callable[..., object] | None = None,
        *,
        train_on: Literal["answers", "all"] = "answers",
    ) -> None:
        function = function or _import(path)
        vocab_size, digest = getattr(function, "vocab_size", None), getattr(function, "digest", None)
        self.name = path
        self.vocab_size: int | None = vocab_size if isinstance(vocab_size, int) else None
        words = (path, str(self.vocab_size), digest if isinstance(digest, str) else "")
        self.digest = digest_of_words(*words, *[train_on] * (train_on != "answers"))
        self._encode_chat: Callable[..., object] | None = getattr(function, "encode_chat", None)
        self._decode: Callable[[list[int]], str] | None = getattr(function, "decode", None)
        self.has_chat_template = self._encode_chat is not None
        self.eos_token: str | None = None
        self._function, self.train_on = function, train_on
        self._rejections = Rejections()

    def encode(self, text: str) -> Encoded | str:
        return self._call(self._function, text) if text else "empty"

    def decode(self, tokens: Tokens) -> str:
        """By the callable's own attribute ``decode``, else the ids in words."""
        ids: list[int] = tokens.tolist()
        return "".join(f"{number} " for number in ids) if self._decode is None else self._decode(ids)

    def encode_chat(self, messages: object, tools: object = None) -> Encoded | str:
        if self._encode_chat is None:
            raise ConfigError(
                f"tokenizer {self.name}: got a chat, expected texts: give the callable an attribute encode_chat "
                "(messages, tools) -> (ids, loss_mask)"
            )
        return self._call(self._encode_chat, messages, tools)

    def encode_pair(self, prompt: object, completion: object) -> Encoded | str:
        """The ids of ``prompt + completion``; learned is what differs from the ids of the prompt alone.

        Where tokens join over the boundary, that one counts as completion. ``pair`` when more than the last two
        ids of the prompt (one such, and an end-of-text id) change: which tokens to learn would be a guess.
        """
        messages = pair_messages(prompt, completion)
        if messages is not None:
            return self.encode_chat(messages)
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            return "dtype"
        both = self.encode(prompt + completion)
        if isinstance(both, str):
            return both
        first = self.encode(prompt) if prompt else Encoded(np.empty(0, np.int32))
        if isinstance(first, str):
            return first
        size = min(len(first.tokens), len(both.tokens))
        differs = np.flatnonzero(first.tokens[:size] != both.tokens[:size])
        start = int(differs[0]) if differs.size else size
        if start < len(first.tokens) - 2:
            return "pair"
        if self.train_on == "all":
            return both
        mask = np.ones(len(both.tokens), np.uint8)
        mask[:start] = 0
        return Encoded(both.tokens, mask if both.loss_mask is None else mask & both.loss_mask)

    def _call(self, function: Callable[..., object], *what: object) -> Encoded | str:
        try:
            return as_encoded(function(*what))
        except Exception as error:  # whatever it is, it is this sample's: the next one may do
            size = len(what[0]) if isinstance(what[0], str | list) else 0
            kind = "characters" if isinstance(what[0], str) else "messages"
            self._rejections.warn(f"the tokenizer {self.name} rejects a text of {size} {kind}", error)
            return "tokenizer"


def import_path(key: str, path: str) -> Any:
    """What ``package.module:thing`` names. Raises ConfigError for ``key`` where the import fails, in whatever way."""
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}: {path!r} cannot be imported ({error}); check its spelling and PYTHONPATH") from error
    except Exception as error:  # the module's own code
        text = f"{type(error).__name__}: {error}"[:200]
        raise ConfigError(f"{key}: {path!r} cannot be imported ({text}); mend the module") from error
    return found


def _import(path: str) -> Callable[[str], object]:
    if not all(path.partition(":")):
        raise ConfigError(
            f"tokenizer name: got {path!r}, expected 'bytes' or 'package.module:function'. Give a model's "
            f"tokenizer.json, or its folder, as `file`; streampack.local takes AutoTokenizer.from_pretrained({path!r})"
        )
    found = import_path("tokenizer name", path)
    if not callable(found):
        kind = type(found).__name__
        raise ConfigError(f"tokenizer name: {path!r} is of type {kind}, expected a callable from str to a list of ints")
    return found  # type: ignore[no-any-return]
