"""``streampack.local``: a loader whose broker and producer run in threads of this process.

The services package (extra ``service``) runs these threads. ``local`` imports it when called; the rest of the library
does not need it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict, Unpack, overload

from streampack.client.connect import Client, ConnectOptions
from streampack.config.service_settings import Limits
from streampack.config.stream_settings import StreamSettings
from streampack.core.model.keys.keyword_arguments import documented
from streampack.core.model.keys.planning_keys import BatchKeys, PlanningKeys, RunKeys, Window
from streampack.core.model.keys.stream_keys import SamplePolicies
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
        >>> loader.close()  # doctest: +SKIP
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


class LocalArguments(TypedDict, total=False):
    """Type and default of each keyword argument of ``local`` that ``connect`` does not have.

    A struct in the place of a default has the configuration key of this name, with its default and its text.
    """

    tokenizer: Annotated[Any, None]
    packs: Annotated[int, 1]
    window: Annotated[Window, "auto"]
    in_turn: Annotated[bool, True]
    align: Annotated[int, 1]
    shuffle: Annotated[bool, True]
    weights: Annotated[Mapping[str, float] | None, None]
    text_key: Annotated[str | None, None]
    tokens_key: Annotated[str | None, None]
    fields: Annotated[Mapping[str, Mapping[str, Any]] | None, None]
    stages: Annotated[Sequence[Mapping[str, Any]] | None, None]
    memory: Annotated[str | int, "1GiB"]
    http: Annotated[str | None, None]
    budget: Annotated[int, PlanningKeys]
    samples: Annotated[int | None, BatchKeys]
    padded: Annotated[bool, PlanningKeys]
    packer: Annotated[str, PlanningKeys]
    max_samples_per_pack: Annotated[int | None, PlanningKeys]
    limits: Annotated[Mapping[str, int] | None, PlanningKeys]
    shape: Annotated[Any, PlanningKeys]
    overlong: Annotated[str, SamplePolicies]
    poison: Annotated[str, SamplePolicies]
    no_loss_tokens: Annotated[str, SamplePolicies]
    tail: Annotated[str, PlanningKeys]
    seed: Annotated[int, RunKeys]
    passes: Annotated[int, StreamSettings]
    repeat: Annotated[bool, StreamSettings]
    tokens: Annotated[str, RunKeys]
    chunk: Annotated[str | int, Limits]


class LocalOptions(LocalArguments, ConnectOptions, total=False):
    """Keyword arguments of ``local`` except ``format``, for type checkers."""


# With format="numpy", the loader yields packs.
@overload
def local(source: Any, *, format: Literal["numpy"], **options: Unpack[LocalOptions]) -> LocalLoader[Pack]: ...
# The overload without ``format`` assumes that torch is installed.
@overload
def local(source: Any, *, format: TorchFormat | None = None, **options: Unpack[LocalOptions]) -> LocalLoader[View]: ...
# For a format that is known only at run time, the type is the union.
@overload
def local(source: Any, *, format: str | None, **options: Unpack[LocalOptions]) -> LocalLoader[Pack | View]: ...
@documented(LocalArguments, "client")
def local(source: Any, **options: Any) -> LocalLoader[Any]:
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
        packs: Number of packs of a step.
        window: Number of samples from which the packer chooses, or ``"auto"``: as many as 4 steps have, from 128 to
            1,024.
        in_turn: Let samples as long as the budget leave in their turn, and the end leave in order of age. False only to
            go on from a state of a version before 0.2.
        align: Multiple of tokens to which samples and packs are padded.
        shuffle: True to read files and samples in another order in each pass. With False, each stream keeps the order
            of its files.
        weights: Shares of the tokens by stream name. Default: equal shares.
        text_key: Key of the text in a row. Default: detected.
        tokens_key: Key of the token ids in a row. Default: detected.
        fields: Fields that samples carry beside their tokens, as in broker.yaml. ``loss_mask`` is added if one of the
            first rows says which tokens are learned, as chats, pairs and rows with labels do.
        stages: Stages of the run, as in broker.yaml: each changes rules or the mixture from a step on.
        memory: Size of the broker's arena, such as ``"1GiB"`` or a number of bytes; raised if the settings need more.
        http: ``host:port`` at which to serve status and metrics. Default: no server.
        options: Configuration keys, with the texts of ``streampack.core.model.keys``.
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
    loader: LocalLoader[Any] = service.open_local(source, options)
    return loader
