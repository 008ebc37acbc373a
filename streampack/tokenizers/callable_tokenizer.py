"""A callable of the user as a tokenizer, by its import path ``package.module:function``.

The callable is unknown code. So every id that it returns is checked (``as_encoded``), and an exception rejects that
sample and is logged, a limited number of times.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from streampack.errors import ConfigError
from streampack.tokenizers.chat import PairEncoder
from streampack.tokenizers.rejections import Rejections
from streampack.tokenizers.token_ids import Because, Encoded, Tokens, as_encoded, digest_of_words


class CallableTokenizer(PairEncoder):
    """A tokenizer that calls a user's function from a text to ids, or to another value that ``as_encoded`` accepts.

    The function is imported from ``path``. If ``function`` is given, ``path`` is only its name in messages.

    The function's attributes ``vocab_size`` (int) and ``digest`` (str) are read if it has them. The digest does not
    cover the function's code, so give the function a ``digest`` that changes with its vocabulary. Chats need the
    attribute ``encode_chat``, a callable of messages and tools. An exception rejects the sample with the reason
    ``tokenizer``, and is logged (see Rejections).
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
        self.special_ids = frozenset[int]()
        self._function, self.train_on = function, train_on
        self._rejections = Rejections()

    def encode(self, text: str) -> Encoded | str:
        """Return the ids that the callable makes of a text, or the reason why the sample is rejected."""
        return self._call(self._function, text) if text else "empty"

    def decode(self, tokens: Tokens) -> str:
        """Return the text by the callable's attribute ``decode``; without one, the ids as decimal numbers."""
        ids: list[int] = tokens.tolist()
        return "".join(f"{number} " for number in ids) if self._decode is None else self._decode(ids)

    def encode_chat(
        self, messages: object, tools: object = None, variables: Mapping[str, Any] | None = None
    ) -> Encoded | str:
        """Return the ids and loss mask of a chat, by the callable's attribute ``encode_chat``. Raises ConfigError.

        A chat with variables for a template is rejected, because the callable does not take them.
        """
        if self._encode_chat is None:
            raise ConfigError(
                f"tokenizer {self.name}: got a chat, expected texts. To read chats, give the callable an attribute "
                "encode_chat: a function (messages, tools) -> (ids, loss_mask)"
            )
        if variables:
            return Because("chat_template_kwargs", f"the callable {self.name} takes no variables of a chat template")
        return self._call(self._encode_chat, messages, tools)

    def _encode_texts(self, prompt: str, completion: str) -> Encoded | str:
        """Return the ids of ``prompt + completion`` and a loss mask that is 1 for the completion, or a reason.

        The completion begins at the first id that differs from the ids of the prompt alone. A token that spans the
        boundary belongs to the completion. A spanning token and an end-of-text id may change the last two
        ids of the prompt. If more ids change, the boundary is unclear, and the reason is ``pair``.
        """
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
        return both._replace(loss_mask=mask if both.loss_mask is None else mask & both.loss_mask)

    def _call(self, function: Callable[..., object], *args: object) -> Encoded | str:
        """Return the checked result of the user's function; if it raises, warn and return the reason ``tokenizer``."""
        try:
            return as_encoded(function(*args))
        except Exception as error:  # any exception rejects only this sample
            size = len(args[0]) if isinstance(args[0], str | list) else 0
            kind = "characters" if isinstance(args[0], str) else "messages"
            self._rejections.warn(f"the tokenizer {self.name} rejects an input of {size} {kind}", error)
            return "tokenizer"


def import_path(key: str, path: str) -> Any:
    """Return the object at ``package.module:thing``. Raises ConfigError, naming ``key``, if the import fails."""
    module_name, _, attribute = path.partition(":")
    try:
        thing: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{key}: {path!r} cannot be imported ({error}). Check the spelling of the path, and PYTHONPATH"
        ) from error
    except Exception as error:  # the module's own code
        text = f"{type(error).__name__}: {error}"[:200]
        raise ConfigError(f"{key}: {path!r} cannot be imported ({text}). Correct the module") from error
    return thing


def _import(path: str) -> Callable[[str], object]:
    """Import the callable at ``package.module:function``. Raises ConfigError."""
    if not all(path.partition(":")):
        raise ConfigError(
            f"tokenizer name: got {path!r}, expected 'bytes' or 'package.module:function'. For a model's "
            "tokenizer.json, set `file` to the path of the file or its folder. In streampack.local, you can also "
            f"pass AutoTokenizer.from_pretrained({path!r})"
        )
    function = import_path("tokenizer name", path)
    if not callable(function):
        kind = type(function).__name__
        raise ConfigError(
            f"tokenizer name: {path!r} is of type {kind}, expected a function that takes a str and returns a list of "
            "ints"
        )
    return function  # type: ignore[no-any-return]
