"""Megatron-LM: a provider of data iterators for ``--dataloader-type external``.

Megatron requests one micro-batch after another from its iterator. A micro-batch is a pack, and ``seq_length`` is the
budget. An iteration is a step if ``global_batch_size`` is the number of packs of a step.

The first tensor-parallel rank reads on every pipeline stage, since middle stages need the boundaries of samples.
Megatron's ``get_batch`` sends packs to the other tensor ranks and shards packs for context parallelism. Each
context-parallel rank therefore reads whole packs.

With virtual pipeline stages, Megatron calls the provider once for each model chunk of a rank. The chunks share one
loader, and each takes every pack (``checks.chunk_packs``). Without ``sft``, ``get_batch`` shards rows instead of
samples, so packs are arranged in advance.

Megatron calls ``save_state`` on the ranks that write the loader's state into ``dataloader_save``. The script
``pretrain_gpt.py`` has no option for this folder, so the provider sets it to ``save``. Megatron does not restore the
state; the provider does. States are equal on all ranks, so one file suffices, on any mesh. The tracker file, which
Megatron writes last, names the newest durable iteration. That iteration is committed when the next one is saved.

Megatron cannot change ``seq_length`` or ``global_batch_size`` while it trains. A stage with other packs ends training
with StageEnds. With ``rampup_batch_size``, the stages of broker.yaml must have the same sizes at the same iterations;
``check_rampup`` says the lines to write.

The module uses Megatron-LM's arguments (``get_args()``) and the ranks of ``megatron.core.parallel_state``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from streampack.client.connect import Client, connect
from streampack.errors import StateError, UserError
from streampack.integrations.checks.chunk_packs import ChunkPacks
from streampack.integrations.checks.fixed_steps import FixedSteps, check_stages
from streampack.integrations.checks.megatron_checks import check_args, check_rampup, checker
from streampack.integrations.checks.tried_versions import Tried
from streampack.views.megatron import arranged

__all__ = ["TrainIterator", "datasets_provider"]

TRIED = Tried("megatron-core", "0.16.1", also=("0.19.2",))
USED = tuple(
    f"get_{part}_{what}"
    for part in ("data_parallel", "context_parallel", "tensor_model_parallel", "pipeline_model_parallel")
    for what in ("world_size", "rank")
)
"""Functions of Megatron's ``parallel_state`` that this module calls."""

SAVE = "maybe_save_dataloader_state"
"""Function of Megatron-LM's ``checkpointing`` that saves a loader's state."""

Iterators = tuple["Iterator[Any] | None", "Iterator[Any] | None", None]


def datasets_provider(
    get_args: Callable[[], Any], *, endpoint: str | None = None, feed: str = "train", valid_feed: str | None = None
) -> Callable[..., Iterators]:
    """Return the ``train_valid_test_datasets_provider`` for Megatron's ``pretrain``.

    The provider returns (train iterator, validation iterator, None), or (None, None, None) on ranks that do not read.
    It raises UserError if Megatron's arguments do not match the feed, and what ``connect`` raises.

    Args:
        get_args: Megatron's ``get_args``.
        endpoint: Address of the broker, as for ``connect``.
        feed: Name of the feed to train on.
        valid_feed: Name of the feed to evaluate on; each evaluation takes its first ``eval_iters`` steps. Default: no
            evaluation.

    Returns:
        The provider.

    Example:
        >>> from megatron.training import get_args, pretrain  # doctest: +SKIP
        >>> provider = datasets_provider(get_args)  # doctest: +SKIP
        >>> pretrain(config, provider, ModelType.encoder_or_decoder, forward_step)  # doctest: +SKIP
    """
    chunks: list[Iterators] = []

    def provider(train_val_test_num_samples: Any = None, vp_stage: int | None = None) -> Iterators:
        """Return (train, validation, None) iterators, or (None, None, None) on a rank that does not read."""
        if not vp_stage:
            chunks[:] = _chunks(get_args(), endpoint, feed, valid_feed)
        elif vp_stage >= len(chunks):
            raise UserError(
                f"got vp_stage={vp_stage} with {len(chunks)} model chunks, expected chunks in order from 0. Set "
                f"virtual_pipeline_model_parallel_size before the first call"
            )
        return chunks[vp_stage or 0]

    provider.is_distributed = True  # type: ignore[attr-defined]
    return provider


class TrainIterator:
    """Iterator of the training feed's packs, in the format ``megatron``.

    The iterator begins after the checkpoint that Megatron has loaded, if ``args.iteration`` is not 0.

    Args:
        loader: Loader of the training feed.
        args: Megatron's arguments.

    Raises:
        StateError: The checkpoint's folder holds no state of the loader.

    Example:
        >>> train, valid, _ = datasets_provider(get_args)()  # doctest: +SKIP
        >>> pack = next(train)  # doctest: +SKIP
        >>> pack = train.take(chunk=0)  # of the first virtual pipeline stage  # doctest: +SKIP
        >>> state = train.save_state()  # as Megatron-LM does for a checkpoint  # doctest: +SKIP
        >>> train.close()  # doctest: +SKIP
    """

    def __init__(self, loader: Client, args: Any) -> None:
        self._loader, self._tracker = loader, None
        self._iteration, self._step = args.iteration, -1
        self._saved: dict[int, int] = {}  # saved iteration -> index of the last step before
        if args.save and loader.mesh.dp_rank == loader.mesh.cp_rank == 0:
            self._tracker = Path(args.save) / "latest_checkpointed_iteration.txt"
        if args.iteration:
            loader.load_state_dict(saved_state([args.dataloader_save, getattr(args, "load", None)], args.iteration))
        steps = FixedSteps(loader, checker(args, loader.mesh.cp))
        self._packs = ChunkPacks(steps, _num_chunks(args), _arrangement(args, loader.mesh.cp))
        self._num_chunks = _num_chunks(args)

    @property
    def chunks(self) -> list[Iterator[Any]]:
        """An iterator for each model chunk of this rank; this one is the first."""
        return [self, *(_Chunk(self, chunk) for chunk in range(1, self._num_chunks))]

    def __iter__(self) -> TrainIterator:
        return self

    def __next__(self) -> Any:
        """Return the next pack. Raises UserError at the end of the feed, where Megatron could not stop.

        Raises StageEnds, at each call, if a stage has other packs than Megatron's arguments say.
        """
        return self.take(0)

    def take(self, chunk: int) -> Any:
        """Return the next pack of a model chunk, as ``__next__`` does.

        Args:
            chunk: Number of the model chunk on this rank.
        """
        try:
            pack = self._packs.take(chunk)
        except StopIteration:
            raise UserError(
                f"got the end of the feed after iteration {self._iteration}, expected packs for all iterations. Set "
                f"train_iters to {self._iteration}, or set passes or repeat of the streams"
            ) from None
        if chunk == 0 and pack.micro_batch + 1 == pack.num_micro_batches:
            self._iteration, self._step = self._iteration + 1, pack.step
        return pack

    def save_state(self) -> dict[str, Any]:
        """Return the loader's state for a new checkpoint, and commit the newest durable checkpoint.

        Returns:
            A dict that holds only what JSON can hold.
        """
        self._packs.check()
        state = self._loader.state_dict()
        if self._tracker is not None:
            durable = self._tracker.read_text().strip() if self._tracker.exists() else ""
            if durable.isdecimal() and int(durable) in self._saved:
                self._loader.commit(self._saved[int(durable)])
                self._saved = {iteration: step for iteration, step in self._saved.items() if iteration > int(durable)}
            if self._step >= 0:
                self._saved[self._iteration] = self._step
        return state

    def close(self) -> None:
        """Close the loader and release the rank."""
        self._loader.close()


class _Chunk:
    """Iterator of the packs of a further model chunk."""

    def __init__(self, first: TrainIterator, chunk: int) -> None:
        self._first, self._chunk = first, chunk

    def __iter__(self) -> _Chunk:
        return self

    def __next__(self) -> Any:
        return self._first.take(self._chunk)


def _chunks(args: Any, endpoint: str | None, feed: str, valid_feed: str | None) -> list[Iterators]:
    """Connect, and return the iterators of each model chunk of this rank."""
    TRIED.check(parallel_state, *USED)
    check_args(args, valid_feed)
    args.dataloader_save = getattr(args, "dataloader_save", None) or args.save
    if _num_chunks(args) > 1:
        _save_for_the_first_chunk()
    if parallel_state.get_tensor_model_parallel_rank():
        return [(None, None, None)] * _num_chunks(args)
    train = TrainIterator(_connect(endpoint, feed, args, "global_batch_size"), args)
    if valid_feed is None:
        return [(chunk, None, None) for chunk in train.chunks]
    valid = _connect(endpoint, valid_feed, args, "eval_global_batch_size")
    packs = ChunkPacks(evaluations(valid, args.eval_iters), _num_chunks(args), _arrangement(args, valid.mesh.cp))
    return [(chunk, packs.iterator(number), None) for number, chunk in enumerate(train.chunks)]


def _num_chunks(args: Any) -> int:
    """Return the number of model chunks of a rank."""
    return getattr(args, "virtual_pipeline_model_parallel_size", None) or 1


def saved_state(folders: Iterable[Any], iteration: int) -> dict[str, Any]:
    """Return the loader's state that data-parallel rank 0 saved at ``iteration``; valid for all ranks.

    The first of ``folders`` with such a file counts; a folder may be None. Raises StateError without a file.
    """
    name = f"iter_{iteration:07d}/mp_rank_*/train_dataloader_dprank000.pt"
    places = [Path(folder) for folder in folders if folder is not None]
    files = [file for folder in places for file in sorted(folder.glob(name))]
    if not files:
        raise StateError(
            f"got no file {name} in {' or '.join(map(str, places)) or 'any folder'}, expected the loader's state of "
            f"the checkpoint. Copy the file there, or set finetune to restart the data"
        )
    state: dict[str, Any] = torch.load(files[0], weights_only=True)["dataloader_state_dict"]
    return state


def _arrangement(args: Any, cp: int) -> Callable[[Any], Any] | None:
    """Return the function that arranges packs if ``get_batch`` shards rows instead of samples."""
    return partial(arranged, cp=cp) if cp > 1 and not getattr(args, "sft", False) else None


def _connect(endpoint: str | None, feed: str, args: Any, batch: str) -> Client:
    """Connect with Megatron's mesh and check the feed's rules; ``batch`` as for ``check_rules``. Raises UserError."""
    ranks = parallel_state
    tp, pp = ranks.get_tensor_model_parallel_world_size(), ranks.get_pipeline_model_parallel_world_size()
    mesh = {
        "dp": ranks.get_data_parallel_world_size(), "dp_rank": ranks.get_data_parallel_rank(),
        "cp": ranks.get_context_parallel_world_size(), "cp_rank": ranks.get_context_parallel_rank(),
        "tp": tp, "tp_rank": 0,  # the only one that reads
        "pp": pp, "pp_rank": ranks.get_pipeline_model_parallel_rank(),
    }  # fmt: skip
    readers = {"tp": [0]}
    if getattr(args, "mtp_num_layers", None) and getattr(args, "pipeline_model_parallel_layout", None):
        # A middle stage may predict tokens. A stage that is a tensor rank gets tokens.
        mesh |= {"tp": tp * pp, "tp_rank": tp * mesh["pp_rank"], "pp": 1, "pp_rank": 0}
        readers = {"tp": [tp * stage for stage in range(pp)]}
    loader = connect(endpoint, feed=feed, mesh=mesh, readers=readers, format="megatron")
    try:
        if batch == "global_batch_size" and getattr(args, "rampup_batch_size", None):
            check_rampup(loader.rules, args)
        advice = "Set train_iters or exit_interval to that step, so that Megatron saves there"
        check_stages(loader, checker(args, loader.mesh.cp, batch), advice)
    except UserError:
        loader.close()
        raise
    return loader


def evaluations(loader: Any, num_steps: int) -> Iterator[Any]:
    """Yield steps without end: for each evaluation the first ``num_steps`` steps, or an infinite feed's next steps."""
    while True:
        yield from islice(loader.steps(), num_steps)


def _save_for_the_first_chunk() -> None:
    """Let Megatron-LM save the state of the first model chunk's iterator; it asks the list of all chunks for it."""
    try:
        from megatron.training import checkpointing
    except ModuleNotFoundError:  # a loop on megatron-core, which saves the state itself
        return
    TRIED.check(checkpointing, SAVE)
    save = getattr(checkpointing, SAVE)
    if not hasattr(save, "of_chunks"):

        @wraps(save)
        def save_first(train_iterator: Any, *args: Any, **kwargs: Any) -> Any:
            """Save the state of the first chunk's iterator."""
            first = train_iterator[0] if isinstance(train_iterator, list) else train_iterator
            return save(first, *args, **kwargs)

        save_first.of_chunks = True  # type: ignore[attr-defined]
        setattr(checkpointing, SAVE, save_first)
