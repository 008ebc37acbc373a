"""Opens the tokenizer that settings describe: ``bytes``, a callable, a tokenizer.json or a processor."""

from __future__ import annotations

from streampack.errors import ConfigError
from streampack.tokenizers.base import Tokenizer, TokenizerSettings
from streampack.tokenizers.bytes_tokenizer import BytesTokenizer, UnnamedTokenizer
from streampack.tokenizers.callable_tokenizer import CallableTokenizer


def open_tokenizer(settings: TokenizerSettings) -> Tokenizer:
    """Open the tokenizer that ``settings`` describe.

    Raises ConfigError if settings contradict each other, an import fails, or a file is not a tokenizer.

    >>> open_tokenizer(TokenizerSettings()).encode("hé").tokens
    array([104, 195, 169, 256], dtype=int32)
    """
    if settings.processor is not None:
        if settings.name is not None or settings.file is not None:
            raise ConfigError(
                f"tokenizer: got processor {settings.processor!r} and {settings.name or settings.file!r}, expected "
                "only one of processor, name and file"
            )
        from streampack.tokenizers.processors.processor_tokenizer import ProcessorTokenizer  # needs optional packages

        return ProcessorTokenizer(settings)
    if settings.file is not None:
        if settings.name is not None:
            raise ConfigError(
                f"tokenizer: got name {settings.name!r} and file {settings.file!r}, expected only one of them"
            )
        from streampack.tokenizers.tokenizer_json import FileTokenizer  # needs an optional package

        return FileTokenizer(settings)
    for key in ("eos_token", "bos_token", "chat_template", "chat_template_kwargs", "date", "allow_special"):
        if getattr(settings, key):
            raise ConfigError(
                f"tokenizer.{key}: got {getattr(settings, key)!r} without tokenizer.file. Set both keys or neither"
            )
    if settings.name in (None, "bytes"):
        kind = UnnamedTokenizer if settings.name is None else BytesTokenizer
        return kind(append_eos=settings.append_eos, train_on=settings.train_on, roles=settings.roles)
    assert settings.name is not None
    if settings.roles:
        raise ConfigError(
            f"tokenizer.roles: got {settings.roles!r} for the callable {settings.name!r}, which reads roles itself. "
            "Remove the key"
        )
    return CallableTokenizer(settings.name, train_on=settings.train_on)
