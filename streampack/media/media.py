"""``Media``: how a trainer fetches and decodes the media that samples refer to."""

from __future__ import annotations

import operator
import os
from importlib import import_module
from typing import Any, Literal

from streampack.config.typed_yaml import parse_size
from streampack.core.model.mesh import Mesh
from streampack.errors import UserError
from streampack.media.fetcher import Decode, Fetcher
from streampack.media.processor import ProcessorDecoder


class Media:
    """Options for media by reference, for the argument ``media`` of ``connect`` and ``local``.

    The client fetches only what its own rank trains on, in threads, while the trainer works on the steps before. An
    item that several samples of these steps refer to is fetched once.

    Args:
        decode: Function, or its name as ``"package.module:function"``, from the bytes of an item and its ``Reference``
            to an array [patches, ...]. All items have the same dtype and trailing shape. It runs in several threads.
        processor: Folder of a processor of transformers, in place of ``decode``: images become what the processor makes
            of them. Give the folder that producers have in ``tokenizer: {processor: ...}``.
        threads: Number of threads that fetch and decode.
        timeout_s: Seconds that a trainer waits for the items of a pack. Failed requests are repeated meanwhile,
            after as long as the store asks to wait.
        memory: Decoded bytes that may wait for the trainer, such as ``"1GiB"``.
        largest: Bytes that an item may have as it is stored, such as ``"256MiB"``. A larger one is an error.
        on_error: ``"error"`` ends the trainer if an item cannot be fetched or decoded. ``"drop"`` puts zeros in its
            place, and takes the labels of its sample from the loss. ``Client.stats`` counts such items by reason, and
            the log names them. Before an item of the field was decoded, nothing says the shape of the zeros, and the
            trainer ends. ``"drop"`` needs a mesh whose cp, tp and pp are 1: other ranks of a pack would go on
            with the sample.

    Raises:
        UserError: An argument is invalid, or the function cannot be imported.

    Example:
        >>> def decode(data, reference):
        ...     return patches_of(PIL.Image.open(io.BytesIO(data)))
        >>> streampack.connect("tcp://node0:7402", media=Media(decode))  # doctest: +SKIP
    """

    def __init__(
        self, decode: Decode | str | None = None, *, processor: str | os.PathLike[str] | None = None, threads: int = 8,
        timeout_s: float = 60.0, memory: str | int = "1GiB", largest: str | int = "256MiB",
        on_error: Literal["error", "drop"] = "error",
    ) -> None:  # fmt: skip
        if operator.index(threads) < 1:
            raise UserError(f"got threads={threads!r}, expected at least 1")
        if not timeout_s > 0:
            raise UserError(f"got timeout_s={timeout_s!r}, expected seconds, more than 0")
        if on_error not in ("error", "drop"):
            raise UserError(f"got on_error={on_error!r}, expected 'error' or 'drop'")
        if (decode is None) == (processor is None):
            both = "neither" if decode is None else "both"
            raise UserError(f"got {both} of decode and processor, expected one of them. Media(processor='FOLDER')")
        self.decode: Decode
        if processor is not None:
            self.decode = ProcessorDecoder(os.fspath(processor))
        else:
            self.decode = _imported(decode) if isinstance(decode, str) else decode  # type: ignore[assignment]
        if not callable(self.decode):
            raise UserError(
                f"got decode={decode!r}, expected a function or its name, such as 'package.module:function'"
            )
        self.drops = on_error == "drop"
        self._options = (
            operator.index(threads), float(timeout_s), parse_size(memory, "memory of Media"),
            parse_size(largest, "largest of Media"), self.drops,
        )  # fmt: skip

    def open(self, mesh: Mesh) -> Fetcher:
        """Start the threads of one loader; several loaders may have the same ``Media``.

        Args:
            mesh: The place of the loader's rank.

        Returns:
            The fetcher; the client closes it.

        Raises:
            UserError: Several ranks hold a pack, and items are to be dropped.
        """
        if self.drops and mesh.cp * mesh.tp * mesh.pp > 1:
            raise UserError(
                f"got Media(on_error='drop') on a mesh with cp={mesh.cp}, tp={mesh.tp} and pp={mesh.pp}, expected 1 of "
                f"each. The other ranks of a pack would train on the sample. Use on_error='error'"
            )
        return Fetcher(self.decode, *self._options)


def _imported(name: str) -> Any:
    """Return the function with this name. Raises UserError."""
    module, _, function = name.partition(":")
    try:
        return operator.attrgetter(function)(import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"got decode={name!r}, expected 'package.module:function' ({error})") from None
