"""The tokenizer of a tokenizer.json: texts, chats and pairs to ids, by the library ``tokenizers``.

Theory of operation. The library's post-processor puts ids before and after a text, such as a BOS. They are found once,
then the post-processor is removed, and ``_close`` adds the ids. So offsets always count the characters of the text.
Special tokens come from the template, the post-processor and ``append_eos``. The text of a special token *inside the
data* is split into ordinary tokens, unless ``allow_special`` is set. Else a web page on chat formats would teach a
model to end its turn. Added tokens that are not special (``<think>``) are always found.

A chat or pair is encoded once as a whole. A token is learned if any of its characters is learned.

This module reads only the tokenizer's files.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streampack.core.stats.sample_warnings import SPECIAL_TOKENS_AS_TEXT
from streampack.errors import ConfigError
from streampack.tokenizers.base import TokenizerSettings
from streampack.tokenizers.chat import (
    ChatMessage,
    PairEncoder,
    any_of,
    left_out,
    read_messages,
    split_markers,
    wrong_variables,
)  # fmt: skip
from streampack.tokenizers.chat_marks import SPLIT, TemplateError
from streampack.tokenizers.chat_spans import Rendered, render_chat
from streampack.tokenizers.folder_files import FolderFiles, read_text
from streampack.tokenizers.rejections import Rejections
from streampack.tokenizers.token_ids import Because, Encoded, Tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

    from streampack.tokenizers.chat_template import ChatTemplate


class FileTokenizer(PairEncoder):
    """The tokenizer of a tokenizer.json file, or of a folder with one: see TokenizerSettings.

    ``vocab_size`` is the largest id + 1. Raises ConfigError if the file is not a tokenizer, or lacks a given token.
    """

    def __init__(self, settings: TokenizerSettings, *, marks: Collection[str] = (), images: bool = False) -> None:
        """``marks``: further tokens that stay text in the data. ``images``: messages may have images."""
        assert settings.file is not None
        place = Path(settings.file).expanduser()
        path = place / "tokenizer.json" if place.is_dir() else place
        self._json = read_text(path)
        beside = FolderFiles(path.parent)
        self._plain = _library(self._json, path)
        self._rejections = Rejections()
        self._settings, self.train_on, self._images = settings, settings.train_on, images
        self.name = str(settings.file)
        self.vocab_size: int | None = max(self._plain.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._before, self._after = _ids_around(self._plain)
        self._plain.post_processor = None
        self._plain.encode_special_tokens = not settings.allow_special
        added = self._plain.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special or token.content in marks}
        self._ids = {token.content: number for number, token in self._plain.get_added_tokens_decoder().items()}
        self.special_ids = frozenset(self._ids.values())
        self._markers = None if settings.allow_special else any_of(self._special)
        self._ends = {token.content for token in added if token.content.strip()}

        self.eos_token = settings.eos_token or beside.token("eos_token")
        self.bos_token = settings.bos_token or beside.token("bos_token")
        self._eos = self._token_id("eos_token", self.eos_token) if settings.append_eos else None
        if settings.bos_token is not None:
            bos = self._token_id("bos_token", settings.bos_token)
            self._before = self._before if self._before[:1] == [bos] else [bos, *self._before]
        self._templates = beside.templates(settings.chat_template, processor=images)
        tokens = {key: token for key, token in (("bos_token", self.bos_token), ("eos_token", self.eos_token)) if token}
        self._variables = beside.tokens() | tokens | settings.chat_template_kwargs
        self._today = _date(settings.date)
        self.has_chat_template = bool(self._templates)
        if settings.chat_template is not None or settings.chat_template_kwargs:
            self._template(False)  # compile a given template now; one from the folder when it is needed
            self._check_variables()
        words = (self._json, *map(str, (self.eos_token, settings.bos_token, settings.append_eos)))
        words += tuple(map(str, (settings.allow_special, settings.train_on, settings.date)))
        words += (json.dumps([self._templates, self._variables, settings.roles], sort_keys=True),)
        version = 3 if self._templates else 1  # 3: chats are rendered as by transformers 5.23, with its aliases
        self.digest = hashlib.sha256("\0".join((f"streampack-tokenizer-file-{version}", *words)).encode()).hexdigest()

    def encode(self, text: str) -> Encoded | str:
        """Return the ids of a text, or the reason ``empty`` or ``encoding``."""
        try:
            (encoding,) = self._plain.encode_batch_fast([text], add_special_tokens=False)  # 1.4 times faster
        except TypeError:  # half of a surrogate pair
            return "encoding"
        if not encoding.ids:
            return "empty"
        before, after = self._around(encoding.ids)
        return Encoded(np.array([*before, *encoding.ids, *after], np.int32), warnings=self._warnings(text))

    def encode_chat(
        self, messages: object, tools: object = None, variables: Mapping[str, Any] | None = None
    ) -> Encoded | str:
        """Return the ids and loss mask of a chat, rendered by the chat template, or the reason it is rejected."""
        rendered = self._rendered_chat(messages, tools, variables)
        return rendered if isinstance(rendered, str) else self._encode_rendered(rendered)

    def _rendered_chat(self, messages: object, tools: object, variables: Mapping[str, Any] | None) -> Rendered | str:
        """Return a chat as the chat template writes it, or the reason it is rejected."""
        read = read_messages(messages, self._settings.roles, any_role=self.train_on == "all", images=self._images)
        if isinstance(read, str):
            return read
        if tools and not isinstance(tools, list | tuple):  # a template would iterate over the letters of a text
            return "tools"
        template = self._template(bool(tools))
        if wrong := wrong_variables(variables):
            return Because("chat_template_kwargs", wrong)
        try:
            rendered = self._render(template, read, tools, variables or {})
        except (TemplateError, RecursionError) as error:  # RecursionError: values nested too deeply
            why = " ".join(str(error).replace(SPLIT, "").split())[:400]
            self._rejections.warn(f"the chat template rejects a chat of {len(read)} messages", TemplateError(why))
            return Because("template", why)
        return rendered._replace(warnings=(*left_out(tools, variables, template.reads), *rendered.warnings))

    def _encode_texts(self, prompt: str, completion: str) -> Encoded | str:
        text = prompt + completion
        try:
            encoding = self._plain.encode(text, add_special_tokens=False)
        except TypeError:
            return "encoding"
        if not encoding.ids:
            return "empty"
        learned = np.zeros(len(text), np.uint8)
        learned[len(prompt) :] = 1
        before, after = self._around(encoding.ids)
        # Ids after the text end the completion, so they are learned.
        masks = [0] * len(before), _overlap(encoding.offsets, learned), [1] * len(after)
        encoded = self._encoded([*before, *encoding.ids, *after], np.concatenate(masks).astype(np.uint8))
        return encoded._replace(warnings=self._warnings(text))

    def decode(self, tokens: Tokens) -> str:
        """Return the text of ``tokens``, special tokens included."""
        return str(self._plain.decode(tokens.tolist(), skip_special_tokens=False))

    def _render(
        self, template: "ChatTemplate", read: list[ChatMessage], tools: object, variables: Mapping[str, Any]
    ) -> Rendered:
        """Render a chat whose marker tokens are text. Raises TemplateError."""
        markers, of_answers = self._markers, self._answer_markers[template]
        split = [
            message._replace(raw=split_markers(message.raw, of_answers if message.is_answer else markers))
            for message in read
        ]
        tools, variables = split_markers(tools, markers) or None, split_markers(variables, markers)
        if self.train_on == "all":
            text = template.render([message.raw for message in split], tools, variables)
            rendered = Rendered(text, [(0, len(text))])
        else:
            rendered = render_chat(template, split, tools, variables, self._ends)
        as_text = [SPECIAL_TOKENS_AS_TEXT] * (SPLIT in rendered.text)
        return rendered._replace(warnings=(*rendered.warnings, *as_text))

    def _warnings(self, text: str) -> tuple[str, ...]:
        """Return the warnings about an ordinary text."""
        return (SPECIAL_TOKENS_AS_TEXT,) if self._markers and self._markers.search(text) else ()

    @cached_property
    def _answer_markers(self) -> "dict[ChatTemplate, re.Pattern[str] | None]":
        """Patterns of the special tokens that stay text in answers: those that a template does not look for in them.

        For example, a template looks for ``</think>`` to leave out the reasoning of earlier turns. Then ``<think>``
        and ``</think>`` are tokens.
        """
        special, patterns = self._special if self._markers else (), {}
        for template in self._compiled.values():
            searched = {token.replace("/", "") for token in special if any(token in text for text in template.searched)}
            patterns[template] = any_of(token for token in special if token.replace("/", "") not in searched)
        return patterns

    def _check_variables(self) -> None:
        """Raise ConfigError for a variable in the settings that no chat template reads."""
        names_read = frozenset[str]().union(*(template.reads for template in self._compiled.values()))
        for name in self._settings.chat_template_kwargs:
            if wrong := wrong_variables({name: None}):
                raise ConfigError(f"tokenizer.{wrong}")
            if name not in names_read:
                names = ", ".join(sorted(names_read - {"messages", "tools", "add_generation_prompt"})) or "none"
                raise ConfigError(
                    f"tokenizer.chat_template_kwargs: got {name}, but the chat template reads no such variable. It "
                    f"reads: {names}. Correct or remove the name"
                )

    def _encode_rendered(self, rendered: Rendered) -> Encoded | str:
        """Return the ids and loss mask of a rendered chat, or a reason."""
        learned = np.zeros(len(rendered.text), np.uint8)
        for begin, end in rendered.learned:
            learned[begin:end] = 1
        try:
            if SPLIT not in rendered.text:
                encoding = self._marking.encode(rendered.text, add_special_tokens=False)
                ids, mask = encoding.ids, _overlap(encoding.offsets, learned)
            elif self._pieces_are_exact:
                ids, mask = self._encode_pieces(rendered.text, learned)
            else:
                return Because(
                    "special",
                    "the chat contains the text of a special token, which this tokenizer cannot encode as ordinary "
                    "text. Remove it, or set tokenizer: {allow_special: true}",
                )
        except (TypeError, UnicodeEncodeError):  # half of a surrogate pair: the library raises one, Python the other
            return "encoding"
        return self._encoded(ids, mask)._replace(warnings=rendered.warnings) if ids else "empty"

    def _encode_pieces(self, text: str, learned: NDArray[np.uint8]) -> tuple[list[int], NDArray[np.uint8]]:
        """Return (ids, loss mask) of a rendered chat that has marker tokens in its data.

        The text is encoded piece by piece between the template's markers. Markers in the data, which SPLIT breaks, are
        encoded as ordinary text. ``learned``: 1 for each character that is learned.
        """
        assert self._markers is not None
        ids: list[int] = []
        masks = [np.zeros(0, np.uint8)]

        def add(begin: int, end: int) -> None:
            """Encode the characters ``begin`` to ``end`` as ordinary text."""
            kept = np.frombuffer(text[begin:end].encode("utf-32-le"), np.uint32) != ord(SPLIT)
            encoding = self._plain.encode(text[begin:end].replace(SPLIT, ""), add_special_tokens=False)
            ids.extend(encoding.ids)
            masks.append(_overlap(encoding.offsets, learned[begin:end][kept]))

        place = 0
        for marker in self._markers.finditer(text):
            add(place, marker.start())
            ids.append(self._ids[marker[0]])
            masks.append(learned[marker.start() : marker.end()].max(keepdims=True))
            place = marker.end()
        add(place, len(text))
        return ids, np.concatenate(masks)

    @cached_property
    def _pieces_are_exact(self) -> bool:
        """True if encoding piece by piece gives the same ids as encoding the whole text; False for SentencePiece."""
        assert self._markers is not None
        for special in sorted(self._special):
            text = f"a{special}b c{special} d\n{special}\n"
            joint = self._marking.encode(text, add_special_tokens=False).ids
            if self._encode_pieces(text, np.zeros(len(text), np.uint8))[0] != joint:
                return False
        return True

    @cached_property
    def _marking(self) -> "Library":
        """A copy of the tokenizer that recognizes special tokens in a text, for the output of chat templates."""
        library = _library(self._json, Path(self.name))
        library.post_processor = None
        return library

    @cached_property
    def _compiled(self) -> "dict[str, ChatTemplate]":
        """The compiled chat templates by name. Raises ConfigError if jinja2 is missing or a template is invalid."""
        try:
            from streampack.tokenizers.chat_template import ChatTemplate
        except ImportError as error:
            raise _missing("jinja2", error) from error
        return {name: ChatTemplate(text, self._variables, self._today) for name, text in self._templates.items()}

    def _template(self, with_tools: bool) -> "ChatTemplate":
        """Return the chat template, or the one for tools if there is one. Raises ConfigError if there is none."""
        if not self._templates:
            raise ConfigError(
                f"tokenizer {self.name}: got a chat, but found no chat template in the tokenizer's folder. Set "
                "tokenizer.chat_template to a path or to the template's text"
            )
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        return self._compiled[name if name in self._compiled else next(iter(self._compiled))]

    def _around(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """Return the special ids that come before and after a text's ``ids``, without those that it has already."""
        before = [] if ids[: len(self._before)] == self._before else self._before
        after = [] if ids[-len(self._after) :] == self._after else self._after
        last = [*ids, *after][-1]
        return before, after if self._eos is None or last == self._eos else [*after, self._eos]

    def _encoded(self, ids: list[int], mask: NDArray[np.uint8]) -> Encoded:
        """Return ids and mask as Encoded; leave out the mask if every token is learned."""
        return Encoded(np.array(ids, np.int32), None if self._settings.train_on == "all" else mask)

    def _token_id(self, key: str, token: str | None) -> int:
        """Return the id of a token; ``key`` is its setting. Raises ConfigError if it is not in the vocabulary."""
        names = ", ".join(sorted(self._special)[:8]) or "none"
        if token is None:
            raise ConfigError(
                f"tokenizer {self.name}: found no {key} in the tokenizer's folder, expected a token. Set "
                f"tokenizer.{key} (special tokens: {names}), or set `append_eos: false`"
            )
        number = self._plain.token_to_id(token)
        if number is None:
            raise ConfigError(
                f"tokenizer {self.name}: got {key} {token!r}, expected a token of the vocabulary (special tokens: "
                f"{names})"
            )
        return int(number)


def _date(text: str | None) -> date | None:
    """Parse the setting ``date``. Raises ConfigError."""
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"tokenizer.date: got {text!r}, expected a date such as 2025-01-31") from error


def _library(text: str, path: Path) -> "Library":
    """Return the library's tokenizer for the text of a tokenizer.json, without truncation and padding.

    Raises ConfigError if the library is missing, or the text is not a tokenizer; ``path`` is for the message.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise _missing("tokenizers", error) from error
    try:
        library = Tokenizer.from_str(text)
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(
            f"tokenizer {path}: got a file that is not a valid tokenizer.json ({error}). Give another file"
        ) from error
    library.no_truncation()
    library.no_padding()
    return library


def _missing(module: str, error: ImportError) -> ConfigError:
    """Return the error for a package that is not installed."""
    return ConfigError(
        f"tokenizer: the package {module} cannot be imported ({error}). Run `pip install 'streampack[tokenizers]'`"
    )


def _ids_around(library: "Library") -> tuple[list[int], list[int]]:
    """Return the ids that the post-processor puts before and after a text."""
    for text in ("a", *sorted(library.get_vocab(with_added_tokens=False))[:100]):
        encoding = library.encode(text)
        own = [number for number, special in enumerate(encoding.special_tokens_mask) if not special]
        if own:
            return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]
    return [], []


def _overlap(offsets: Iterable[tuple[int, int]], learned: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a loss mask [T] uint8, 1 for each token with a learned character.

    ``offsets``: (begin, end) of each token in characters. ``learned``: 1 for each learned character. A token without
    characters counts like the character that follows it.
    """
    sums = np.concatenate(([0], np.cumsum(learned, dtype=np.int64)))
    spans = np.array(list(offsets), np.int64).reshape(-1, 2)
    ends = np.minimum(np.maximum(spans[:, 1], spans[:, 0] + 1), len(learned))
    return (sums[ends] > sums[np.minimum(spans[:, 0], ends)]).astype(np.uint8)
