"""``Media``: how a trainer fetches and decodes the media that samples refer to."""

from __future__ import annotations

import operator
from importlib import import_module
from typing import Any

from streampack.config.typed_yaml import parse_size
from streampack.errors import UserError
from streampack.media.fetcher import Decode, Fetcher


class Media:
    """Options for media by reference, for the argument ``media`` of ``connect`` and ``local``.

    The client fetches only what its own rank trains on, in threads, while the trainer works on the steps before. An
    item that several samples of these steps refer to is fetched once.

    Args:
        decode: Function, or its name as ``"package.module:function"``, from the bytes of an item and its ``Reference``
            to an array [patches, ...]. All items have the same dtype and trailing shape. It runs in several threads.
        threads: Number of threads that fetch and decode.
        timeout_s: Seconds that a trainer waits for the items of a pack. Failed requests are repeated meanwhile.
        memory: Decoded bytes that may wait for the trainer, such as ``"1GiB"``.

    Raises:
        UserError: An argument is invalid, or the function cannot be imported.

    Example:
        >>> def decode(data, reference):
        ...     return patches_of(PIL.Image.open(io.BytesIO(data)))
        >>> streampack.connect("tcp://node0:7402", media=Media(decode))  # doctest: +SKIP
    """

    def __init__(
        self, decode: Decode | str, *, threads: int = 8, timeout_s: float = 60.0, memory: str | int = "1GiB"
    ) -> None:
        if operator.index(threads) < 1:
            raise UserError(f"got threads={threads!r}, expected at least 1")
        if not timeout_s > 0:
            raise UserError(f"got timeout_s={timeout_s!r}, expected seconds, more than 0")
        self.decode: Decode = _imported(decode) if isinstance(decode, str) else decode
        if not callable(self.decode):
            raise UserError(
                f"got decode={decode!r}, expected a function or its name, such as 'package.module:function'"
            )
        self._options = operator.index(threads), float(timeout_s), parse_size(memory, "memory of Media")

    def open(self) -> Fetcher:
        """Start the threads of one loader; several loaders may have the same ``Media``.

        Returns:
            What fetches, for the client, which ends it.
        """
        return Fetcher(self.decode, *self._options)


def _imported(name: str) -> Any:
    """Return the function with this name. Raises UserError."""
    module, _, function = name.partition(":")
    try:
        return operator.attrgetter(function)(import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"got decode={name!r}, expected 'package.module:function' ({error})") from None
