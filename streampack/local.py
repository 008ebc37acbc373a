"""The loader without daemons: ``streampack.local`` runs a broker and a producer in threads of this process.

What runs them is the services' (extra ``service``), loaded when it is called: the library itself never needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Protocol, Unpack, overload

from streampack.client.connect import ConnectOptions
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.errors import UserError
from streampack.packs.batch_type import BatchT
from streampack.packs.pack import Pack
from streampack.packs.step import Step
from streampack.views.formats import TorchFormat
from streampack.views.view import View


class LocalLoader(Protocol[BatchT]):
    """Loader returned by ``local``: a Client's interface, whose ``close`` also ends the broker and the producer."""

    http: str | None
    """Address of status and metrics; None unless ``http`` was given."""

    def __iter__(self) -> Iterator[BatchT]: ...
    def __next__(self) -> BatchT: ...
    def steps(self) -> Iterator[Step[BatchT]]: ...
    @property
    def rules(self) -> Rules: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def format(self) -> str: ...
    def state_dict(self, step: int | None = None) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def commit(self, step: int) -> None: ...
    def stats(self) -> dict[str, float]: ...
    def close(self) -> None: ...
    def __enter__(self) -> LocalLoader[BatchT]: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LocalOptions(ConnectOptions, total=False):
    """Arguments of ``local`` beside ``source`` and ``format``, for type checkers."""

    tokenizer: Any
    budget: int
    packs: int
    samples: int | None
    padded: bool
    window: int
    packer: str
    align: int
    shape: Any
    overlong: str
    poison: str
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
    http: str | None


@overload
def local(source: Any, *, format: Literal["numpy"], **options: Unpack[LocalOptions]) -> LocalLoader[Pack]: ...
@overload
def local(source: Any, *, format: TorchFormat | None = None, **options: Unpack[LocalOptions]) -> LocalLoader[View]: ...
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
    align: int = 1,
    shape: Any = "fixed",
    overlong: str = "error",
    poison: str = "error",
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
    http: str | None = None,
    **client: Any,
) -> LocalLoader[Any]:
    """The loader that ``connect`` gives, with no daemon: for notebooks, tests and training on one GPU.

    ``source``: files, as a path, a glob, a brace pattern or a list of these, the format being that of their
    extension, or the folder of a saved dataset; or rows in memory: any sequence or iterable of texts, of sequences of
    token ids, or of dicts with what a row of a file may have, such as a list or a ``datasets.Dataset``; or a dict of
    streams, each one of these or a dict of a stream's settings of broker.yaml and producer.yaml. A list of strings is
    one of files where each ends in a known extension, else of texts.
    ``tokenizer``: ``bytes``, a tokenizer.json or its folder, ``package.module:function``, its settings as a dict, or
    any callable (or object with ``encode``) from a text to ids, such as AutoTokenizer gives, which writes chats, too.
    Without one, texts become bytes, and chats are refused.
    ``fields``: what samples carry beside their tokens, as in broker.yaml; chats need ``{"loss_mask": {}}``.
    ``packs`` of ``budget`` tokens make a step, or so many ``samples``: packed by themselves, or, ``padded``, in
    micro-batches of rows of one length. ``weights`` are the streams' shares of the tokens. ``memory`` is raised to what
    the rest needs. ``http``: ``host:port`` to serve status and metrics on. The others, and their defaults, are those of
    broker.yaml; ``client``: arguments of ``connect``.

    Iterating again after the end begins again at step 0. Errors of any of its threads (a broken file, a sample that
    is too long) are raised where the packs are taken. Steps are those that a broker with the same settings serves.

    Raises UserError or ConfigError for arguments that cannot be, SourceError for files that are not there.

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
            f"got no module {error.name!r}, expected the extra 'service': pip install 'streampack[service]'"
        ) from None
    run = {
        "seed": seed,
        "tokens": tokens,
        "memory": memory,
        "fields": fields or {},
        "rules": {
            "packer": packer, "budget": budget, "window": {"samples": window}, "padded": padded,
            "step": {"samples": samples} if samples is not None else {"packs": packs},
            "align": {"sample": align, "pack": align}, "shape": shape, "overlong": overlong, "poison": poison,
            "tail": tail,
        },
    }  # fmt: skip
    stream = {"passes": passes, "repeat": repeat, "shuffle": shuffle, "text_key": text_key, "tokens_key": tokens_key}
    loader: LocalLoader[Any] = service.open_local(source, run, stream, weights or {}, tokenizer, http, client)
    return loader
