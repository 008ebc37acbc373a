"""``streampack.local``: a loader whose broker and producer run in threads of this process.

The services package (extra ``service``) runs these threads. ``local`` imports it when called; the rest of the library
does not need it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import weakref
from collections.abc import Mapping
from typing import Any, Literal, Unpack, overload

from streampack.client.connect import Client, ConnectOptions
from streampack.errors import UserError
from streampack.packs.batch_type import BatchT
from streampack.packs.pack import Pack
from streampack.views.formats import TorchFormat
from streampack.views.view import View


class LocalLoader(Client[BatchT]):
    """Loader returned by ``local``: a ``Client`` whose broker and producer are threads of this process.

    Args:
        client: The client of the broker in this process.
        threads: The exit stack that ends the threads and removes their files.
        http: URL of the status page and the metrics, or None.

    Example:
        >>> loader = streampack.local("corpus/*.jsonl", tokenizer="tokenizer.json")  # doctest: +SKIP
        >>> for step in loader.steps():  # doctest: +SKIP
        ...     train(step)
    """

    def __init__(self, client: Client[BatchT], threads: contextlib.ExitStack, http: str | None) -> None:
        super().__init__(client._reading)
        self.http = http
        """URL of the status page and the metrics; None unless ``local`` was given ``http``."""
        self._end_threads = weakref.finalize(self, _close_here, os.getpid(), threads)

    def close(self) -> None:
        """End the threads of the client, the broker and the producer; further calls have no effect."""
        self._end_threads()


def _close_here(pid: int, stack: contextlib.ExitStack) -> None:
    """Close ``stack`` in the process ``pid``; do nothing in its forks, which have no threads and own no files."""
    if os.getpid() == pid:
        stack.close()


class LocalOptions(ConnectOptions, total=False):
    """Keyword arguments of ``local`` except ``source`` and ``format``, for type checkers."""

    tokenizer: Any
    budget: int
    packs: int
    samples: int | None
    padded: bool
    window: int
    packer: str
    max_samples_per_pack: int | None
    limits: Mapping[str, int] | None
    align: int
    shape: Any
    overlong: str
    poison: str
    no_loss_tokens: str
    tail: str
    seed: int
    shuffle: bool
    passes: int
    repeat: bool
    weights: Mapping[str, float] | None
    text_key: str | None
    tokens_key: str | None
    fields: Mapping[str, Mapping[str, Any]] | None
    tokens: str
    memory: str | int
    chunk: str | int
    http: str | None


# With format="numpy", the loader yields packs.
@overload
def local(source: Any, *, format: Literal["numpy"], **options: Unpack[LocalOptions]) -> LocalLoader[Pack]: ...
# The overload without ``format`` assumes that torch is installed.
@overload
def local(source: Any, *, format: TorchFormat | None = None, **options: Unpack[LocalOptions]) -> LocalLoader[View]: ...
# For a format that is known only at run time, the type is the union.
@overload
def local(source: Any, *, format: str | None, **options: Unpack[LocalOptions]) -> LocalLoader[Pack | View]: ...
def local(
    source: Any,
    *,
    tokenizer: Any = None,
    budget: int = 8192,
    packs: int = 1,
    samples: int | None = None,
    padded: bool = False,
    window: int = 1024,
    packer: str = "exact_fill",
    max_samples_per_pack: int | None = None,
    limits: Mapping[str, int] | None = None,
    align: int = 1,
    shape: Any = "fixed",
    overlong: str = "error",
    poison: str = "error",
    no_loss_tokens: str = "train",
    tail: str = "pad",
    seed: int = 0,
    shuffle: bool = True,
    passes: int = 1,
    repeat: bool = False,
    weights: Mapping[str, float] | None = None,
    text_key: str | None = None,
    tokens_key: str | None = None,
    fields: Mapping[str, Mapping[str, Any]] | None = None,
    tokens: str = "int32",
    memory: str | int = "1GiB",
    chunk: str | int = "2MiB",
    http: str | None = None,
    **client: Any,
) -> LocalLoader[Any]:
    """Return a loader over ``source`` without daemons: for notebooks, tests and training on one GPU.

    A broker and a producer run in threads of this process. The steps are those that a broker with the same settings
    serves. Errors of these threads, such as a broken file, are raised where packs are taken. A new iteration after the
    end begins at step 0.

    Args:
        source: The data, in one of three forms:

            - Files: a path, a glob, a brace pattern, or a list of these; or the folder of a saved dataset. The
              extension gives the format. A list of strings counts as files if each ends in a known extension.
            - Rows in memory: a sequence or iterable, such as a list or a ``datasets.Dataset``. Each row is a text, a
              sequence of token ids, or a dict with the keys of a row of a file.
            - A dict of streams by name. Each value is one of the above, or a dict of the stream's settings in
              broker.yaml and producer.yaml. A dict of columns is an error: pass rows.
        tokenizer: ``"bytes"``, the path of a tokenizer.json or its folder, ``"package.module:function"``, or a dict of
            settings. Or a callable, or an object with ``encode``, from a text to token ids; a tokenizer of transformers
            also formats chats. Default: texts become their bytes, and chats are rejected.
        budget: Tokens of a pack; with ``padded``, tokens of a micro-batch.
        packs: Packs of a step.
        samples: Samples of a step, in place of ``packs``. Each step is packed by itself.
        padded: True for micro-batches of padded rows in place of packs; requires ``samples``.
        window: Number of samples from which the packer chooses.
        packer: Name of the packer, as for ``pack_lengths``.
        max_samples_per_pack: Maximum number of samples of a pack. Default: only the budget limits a pack.
        limits: Most ``patches`` and ``items`` of a pack, for samples with media, as in broker.yaml.
        align: Multiple of tokens to which samples and packs are padded.
        shape: Length of a pack: ``"fixed"`` (the budget), ``"exact"`` (its samples), ``{"multiple": n}`` or
            ``{"buckets": [n, ...]}``, in tokens.
        overlong: Policy for samples over the budget: ``"error"``, ``"drop"``, ``"truncate"`` or ``"split"``.
        poison: Policy for samples that cannot be used: ``"error"`` or ``"drop"``.
        no_loss_tokens: Policy for samples of which no token counts in the loss: ``"train"``, ``"drop"`` or ``"error"``.
        tail: Policy for packs that do not fill the last step: ``"pad"`` adds empty packs, ``"drop"`` drops them.
        seed: Seed of all shuffles, at least 0.
        shuffle: True to read files and samples in another order in each pass. With False, each stream keeps the order
            of its files.
        passes: Number of passes over the data.
        repeat: True for passes without end.
        weights: Shares of the tokens by stream name. Default: equal shares.
        text_key: Key of the text in a row. Default: detected.
        tokens_key: Key of the token ids in a row. Default: detected.
        fields: Fields that samples carry beside their tokens, as in broker.yaml. ``loss_mask`` is added if one of the
            first rows says which tokens are learned, as chats, pairs and rows with labels do.
        tokens: dtype in which the broker keeps token ids: ``"int32"`` or ``"uint16"``.
        memory: Size of the broker's arena, such as ``"1GiB"`` or a number of bytes; raised if the settings need more.
        chunk: Most bytes of samples in one message of the producer, such as ``"8MiB"``; ``limits.chunk`` in
            broker.yaml. The media of a sample must fit one chunk. A chunk takes at most a quarter of a partition's
            share of ``memory``.
        http: ``host:port`` at which to serve status and metrics. Default: no server.
        client: Further keyword arguments of ``connect``, such as ``format``, ``device`` or ``prefetch``.

    Returns:
        A loader with the interface of ``Client``. Its ``close`` also ends the broker and the producer.

    Raises:
        UserError: An argument is invalid, or the extra ``service`` is not installed.
        ConfigError: A setting is invalid; the message names the key.
        SourceError: Files are missing or broken.
        SampleError: While iterating, a sample is too long or cannot be used, and its policy is ``"error"``.

    Example:
        >>> with local(["one text", "another"], budget=16) as loader:  # doctest: +SKIP
        ...     for pack in loader:
        ...         train(pack.input_ids, pack.labels, pack.position_ids)
    """
    try:
        service = importlib.import_module("streampack_services.run.local")
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("streampack", "streampack_services"):
            raise
        raise UserError(
            f"got no module {error.name!r}, which the extra 'service' installs. Run pip install 'streampack[service]'"
        ) from None
    run = {
        "seed": seed,
        "tokens": tokens,
        "memory": memory,
        "limits": {"chunk": chunk},
        "fields": fields or {},
        "rules": {
            "packer": packer, "budget": budget, "window": {"samples": window}, "padded": padded,
            "max_samples_per_pack": max_samples_per_pack, **({"limits": dict(limits)} if limits else {}),
            "step": {"samples": samples} if samples is not None else {"packs": packs},
            "align": {"sample": align, "pack": align}, "shape": shape, "overlong": overlong, "poison": poison,
            "no_loss_tokens": no_loss_tokens, "tail": tail,
        },
    }  # fmt: skip
    stream = {"passes": passes, "repeat": repeat, "shuffle": shuffle, "text_key": text_key, "tokens_key": tokens_key}
    loader: LocalLoader[Any] = service.open_local(source, run, stream, weights or {}, tokenizer, http, client)
    return loader
