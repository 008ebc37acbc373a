"""Megatron-Bridge: a dataset for ``finetune`` and ``pretrain``, in place of a recipe's own.

A micro-batch is a pack, and ``model.seq_length`` is the budget. An iteration is a step if ``train.global_batch_size``
is the number of packs of a step. Every rank reads, because Bridge's tensor ranks do not send batches to each other. For
context parallelism, Bridge shards whole packs by their boundaries.

The dataset says that it is packed offline. Bridge then gives boundaries to middle pipeline stages, whose attention
would otherwise let the samples of a pack see each other. Its virtual pipeline stages share one iterator.

A callback tells the dataset how far the run has come, and hands it the final configuration and the number of model
chunks. Bridge saves the loader's state beside its checkpoints. It would restore the file of each data-parallel rank.
All files are equal, so the dataset itself restores the first one, on any mesh.

The rules of a feed are checked as for Megatron-LM, with the arguments of the same meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from streampack.client.connect import Client, connect
from streampack.errors import MeshError, StateError, UserError
from streampack.integrations.checks.chunk_packs import ChunkPacks
from streampack.integrations.checks.fixed_steps import check_stages
from streampack.integrations.checks.megatron_checks import check_args, check_rampup, checker
from streampack.integrations.checks.tried_versions import Tried
from streampack.integrations.megatron.megatron_lm import TrainIterator, evaluations
from streampack.views.megatron import packed_seq_params

__all__ = ["attach"]

TRIED = Tried("megatron-bridge", "0.6.2")
ADVICE = "Set train.train_iters to that step, so that Bridge saves there"
STATES = "energon"
"""Folder beside Bridge's checkpoints in which it saves the states of loaders."""


def attach(config: Any, *, endpoint: str | None = None, feed: str = "train", valid_feed: str | None = None) -> Any:
    """Let a recipe read packs from a broker: replace ``config.dataset``.

    Args:
        config: The recipe's ``ConfigContainer``, with its own packing off.
        endpoint: Address of the broker, as for ``connect``.
        feed: Name of the feed to train on.
        valid_feed: Name of the feed to evaluate on; each evaluation takes its first ``eval_iters`` steps. Default: no
            evaluation.

    Returns:
        A callback, which must be among the ``callbacks`` of ``finetune`` or ``pretrain``.

    Raises:
        UserError: The recipe packs by itself, or another version of Bridge lacks what the dataset needs.

    Example:
        >>> callback = attach(config, endpoint="tcp://node0:7402")  # doctest: +SKIP
        >>> finetune(config, forward_step, callbacks=[callback])  # doctest: +SKIP
    """
    from megatron.bridge.data.base import DatasetProvider
    from megatron.bridge.data.packing.config import PackedSequenceSpecs
    from megatron.bridge.training import checkpointing
    from megatron.bridge.training.callbacks import Callback

    TRIED.check(checkpointing, "maybe_save_dataloader_state", "DATALOADER_STATE_SUBDIR")
    TRIED.check(Callback, "on_data_init_start")
    check_recipe(config)
    DatasetProvider.register(BridgeDataset)
    specs = PackedSequenceSpecs(packed_sequence_size=config.model.seq_length)
    dataset = config.dataset = BridgeDataset(endpoint, feed, valid_feed, config.model.seq_length, specs)

    class BeforeData(Callback):
        """Tells the dataset how far the run has come."""

        def on_data_init_start(self, context: Any) -> None:
            """Begin the dataset at the step of the checkpoint that Bridge has loaded."""
            dataset.begin(context.state, len(context.model))

    return BeforeData()


def check_recipe(config: Any) -> None:
    """Raise UserError if the recipe's own dataset packs."""
    for name in ("enable_offline_packing", "enable_in_batch_packing"):
        if getattr(config.dataset, name, False) and not isinstance(config.dataset, BridgeDataset):
            raise UserError(
                f"got a recipe with dataset.{name}=True, expected its own packing off, because the broker packs. Set "
                f"config.dataset.{name} to False before attach()"
            )


@dataclass
class BridgeDataset:
    """The feeds of a broker, as Megatron-Bridge's ``dataset``. Call ``attach`` to make one.

    Args:
        endpoint: Address of the broker, as for ``connect``.
        feed: Name of the feed to train on.
        valid_feed: Name of the feed to evaluate on, or None.
        seq_length: Tokens of a pack.
        offline_packing_specs: Bridge's ``PackedSequenceSpecs``, which say that micro-batches are packs.

    Raises:
        UserError: While Bridge builds it, the configuration does not match the feeds.

    Example:
        >>> attach(config)  # doctest: +SKIP
        >>> config.dataset.dataloader_save = "/states"  # doctest: +SKIP
    """

    endpoint: str | None
    feed: str
    valid_feed: str | None
    seq_length: int
    offline_packing_specs: Any
    enable_offline_packing: bool = True
    pad_to_max_length: bool = True
    """True: all packs have the same length."""
    dataloader_type: str = "external"
    dataloader_save: str | None = None
    """Folder for the loader's states; by default ``energon`` in ``checkpoint.save``."""
    dataloader_load: str | None = None
    """Folder of the loader's states to resume from; by default ``energon`` in the checkpoint's folder."""
    num_workers: int = 0
    data_sharding: bool = True
    drop_last: bool = True
    pin_memory: bool = False
    persistent_workers: bool = False

    def __post_init__(self) -> None:
        self._begun: tuple[Any, int, int] | None = None  # no field: Bridge writes fields into its checkpoints

    def begin(self, state: Any, num_chunks: int) -> None:
        """Note Bridge's ``GlobalState`` and the number of model chunks of this rank, before ``build_datasets``."""
        self._begun = state.cfg, state.train_state.step, num_chunks

    def finalize(self) -> None:
        """Do nothing; Bridge calls it before a run."""

    def build_datasets(self, context: Any) -> tuple[Any, Any, None]:
        """Connect, and return (train, validation, None) iterators of micro-batches.

        Args:
            context: Bridge's ``DatasetBuildContext``.

        Returns:
            The iterators. Without a ``valid_feed``, the second is None.

        Raises:
            UserError: The configuration does not match the feeds, or the callback of ``attach`` is not in use.
            MeshError: Groups of ranks do not match the configuration.
            StateError: The checkpoint's folder holds no state of the loader.
        """
        if self._begun is None:
            raise UserError(
                "got no callback of attach(), expected it among the callbacks. Write callback = attach(config, ...) "
                "and finetune(config, forward_step, callbacks=[callback])"
            )
        config, step, num_chunks = self._begun
        args = arguments(config)
        check_config(config, args, self.valid_feed, num_chunks)
        mesh = mesh_of_groups(context.pg_collection, config.model, torch.distributed.get_world_size())
        train = self._connect(self.feed, mesh, args, "global_batch_size")
        if step:
            train.load_state_dict(saved_state(self, config.checkpoint, step))
        valid = None
        if self.valid_feed is not None:
            loader = self._connect(self.valid_feed, mesh, args, "eval_global_batch_size")
            packs = ChunkPacks(evaluations(loader, args.eval_iters)).iterator(0)
            valid = map(micro_batch, packs)
        return BridgeIterator(train, args, step), valid, None

    def _connect(self, feed: str, mesh: dict[str, int], args: Any, batch: str) -> Client:
        """Connect and check the feed's rules; ``batch`` as for ``checker``. Raises UserError."""
        loader = connect(self.endpoint, feed=feed, mesh=mesh, format="megatron")
        try:
            if batch == "global_batch_size" and args.rampup_batch_size:
                check_rampup(loader.rules, args)
            check_stages(loader, checker(args, loader.mesh.cp, batch), ADVICE)
        except UserError:
            loader.close()
            raise
        return loader


class BridgeIterator(TrainIterator):
    """Iterator of the training feed's micro-batches, which begins at ``iteration``; Bridge saves its state."""

    def __init__(self, loader: Client, args: Any, iteration: int) -> None:
        super().__init__(loader, args)
        self._iteration = iteration

    def __next__(self) -> dict[str, torch.Tensor | None]:
        """Return the next micro-batch. Raises UserError at the end of the feed, and StageEnds as TrainIterator does."""
        return micro_batch(super().__next__())


def micro_batch(pack: Any) -> dict[str, torch.Tensor | None]:
    """Return a pack in the format ``megatron`` with the keys of Bridge; a stage without tokens has None for them."""
    params = packed_seq_params(pack)
    return {
        **{name: pack.get(name) for name in ("tokens", "labels", "loss_mask", "position_ids")},
        **{name: bounds[None] for name, bounds in params.items() if name.startswith("cu_seqlens")},
        **{name: torch.tensor(params[name], dtype=torch.int32) for name in ("max_seqlen_q", "max_seqlen_kv")},
    }


def arguments(config: Any) -> SimpleNamespace:
    """Return a configuration as the arguments of Megatron-LM that the checks of feeds know."""
    train, valid, model = config.train, config.validation, config.model
    transformer = getattr(model, "transformer", model)
    return SimpleNamespace(
        dataloader_type=config.dataset.dataloader_type, sft=True, dataloader_inter_document_masking=True,
        micro_batch_size=train.micro_batch_size, global_batch_size=train.global_batch_size,
        rampup_batch_size=getattr(train, "rampup_batch_size", None), seq_length=model.seq_length,
        eval_iters=valid.eval_iters, eval_micro_batch_size=valid.eval_micro_batch_size or train.micro_batch_size,
        eval_global_batch_size=valid.eval_global_batch_size or train.global_batch_size,
        calculate_per_token_loss=transformer.calculate_per_token_loss,
        overlap_moe_expert_parallel_comm=getattr(transformer, "overlap_moe_expert_parallel_comm", False),
        hybrid_context_parallel=getattr(transformer, "hybrid_context_parallel", False)
        or getattr(transformer, "dynamic_context_parallel", False),
        iteration=0, save=config.checkpoint.save, load=None, dataloader_save=None,
    )  # fmt: skip


def check_config(config: Any, args: SimpleNamespace, valid_feed: str | None, num_chunks: int) -> None:
    """Raise UserError for settings that packs do not support, or for model chunks that no configuration asks for."""
    check_args(args, valid_feed)
    expected = config.model.virtual_pipeline_model_parallel_size or 1
    if num_chunks != expected:
        raise UserError(
            f"got {num_chunks} model chunks with model.virtual_pipeline_model_parallel_size={expected}, expected equal "
            f"numbers, because all chunks of a rank take the same micro-batches. Set it before the model is built"
        )
    if getattr(config.train, "iterations_to_skip", None):
        raise UserError(
            f"got train.iterations_to_skip={config.train.iterations_to_skip}, expected none, because Bridge's middle "
            f"pipeline stages would not skip. Skip the steps for all ranks: streampack skip"
        )
    if config.model.seq_length != config.dataset.seq_length:
        raise UserError(
            f"got model.seq_length={config.model.seq_length} and {config.dataset.seq_length} when attach() was called, "
            f"expected one length. Set model.seq_length before attach()"
        )
    if valid_feed is not None and getattr(config.dist, "eval_context_parallel_size", None):
        raise UserError(
            "got dist.eval_context_parallel_size with valid_feed, expected one mesh for training and evaluation. Unset "
            "one of them"
        )


def mesh_of_groups(groups: Any, model: Any, world: int) -> dict[str, int]:
    """Return the mesh for ``connect`` from Bridge's process groups. Raises MeshError if sizes disagree.

    The order in which Bridge numbers its ranks does not matter. If any pipeline stage may predict tokens, stages count
    as tensor ranks, which all get tokens.
    """
    sizes = {axis: getattr(groups, axis).size() for axis in ("dp", "cp", "tp", "pp")}
    mesh = sizes | {f"{axis}_rank": getattr(groups, axis).rank() for axis in sizes}
    asked = {
        "cp": model.context_parallel_size, "tp": model.tensor_model_parallel_size,
        "pp": model.pipeline_model_parallel_size,
    }  # fmt: skip
    got = {axis: sizes[axis] for axis in asked}
    product = sizes["dp"] * sizes["cp"] * sizes["tp"] * sizes["pp"]
    if got != asked or product != world:
        raise MeshError(
            f"got groups of {sizes} for {world} ranks with {asked} in the model's configuration, expected equal sizes, "
            f"whose product is the number of ranks. Build the process groups from this configuration"
        )
    if getattr(model, "mtp_num_layers", None) and getattr(model, "pipeline_model_parallel_layout", None):
        rank = mesh["tp_rank"] + mesh["tp"] * mesh["pp_rank"]
        mesh |= {"tp": mesh["tp"] * mesh["pp"], "tp_rank": rank, "pp": 1, "pp_rank": 0}
    return mesh


def saved_state(dataset: BridgeDataset, checkpoint: Any, step: int) -> dict[str, Any]:
    """Return the loader's state of a checkpoint, which is equal on all ranks. Raises StateError without a file."""
    loaded = [Path(folder) for folder in (checkpoint.load, checkpoint.save) if folder]
    places = [Path(dataset.dataloader_load)] if dataset.dataloader_load else []
    places += [folder / STATES for root in loaded for folder in (root, root.parent)]
    name = f"iter_{step:07d}/train_dataloader_dprank000.pt"
    for place in places:
        if (place / name).exists():
            state: dict[str, Any] = torch.load(place / name, weights_only=True)["dataloader_state_dict"]
            return state
    raise StateError(
        f"got no file {name} in {' or '.join(map(str, places)) or 'any folder'}, expected the loader's state of the "
        f"checkpoint. Set dataset.dataloader_load to the folder, or checkpoint.finetune to restart the data"
    )
