"""ROLL: plan its micro-batches, and train on steps of a feed, within its Megatron strategies.

``install`` replaces two functions in this process. ``dynamic_batching_shard`` orders a padded batch for all
data-parallel ranks. ``make_micro_batch_iter_for_sequence_packing`` splits a mini-batch of one rank into packs. Each
sample stays in its update, and ROLL restores the order of results. So losses and log-probs stay as they are.

``batch_of`` makes a ``DataProto`` of a step, for ``train_step`` and ``forward_step`` of a strategy. It says which rows
share a micro-batch. For padded rows, it has ROLL's ``micro_batch_indices``. For packs, it has the number of each row's
pack, which the function of ``install`` reads. ``rows_back`` puts results of forward packs in the order of the step's
rows.

ROLL has no version: ``install`` warns if the sources of the two modules differ from those that were read.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import lcm
from types import ModuleType
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

from streampack.core.model.fields import LABELS, POSITION_IDS, Field
from streampack.core.model.mesh import Mesh
from streampack.core.model.samples import IGNORE_INDEX
from streampack.errors import SampleError, UserError
from streampack.packs.forward_packs import ForwardPacks
from streampack.packs.pack import Pack
from streampack.packs.step import Step
from streampack.planning import plan_step

__all__ = [
    "batch_of", "dynamic_batching_shard", "install", "make_micro_batch_iter_for_sequence_packing", "mesh_of",
    "rows_back",
]  # fmt: skip

log = logging.getLogger("streampack")
COMMIT = "8eb27cc"
"""The commit of ROLL that was read and run."""
PACKS = "streampack_packs"
"""Name of the column with the number of each row's pack; in ``meta_info``, the number of rows of the step."""
SOURCES = {"roll.utils.dynamic_batching": 0x48D66787, "roll.utils.sequence_packing": 0x45A415E2}
"""Checksums of the modules that were read."""


def install() -> None:
    """Make ROLL in this process plan micro-batches with streampack. Call it in the driver and in each worker.

    Raises:
        UserError: This ROLL does not have the functions that are replaced.

    Example:
        >>> streampack.integrations.roll.install()  # doctest: +SKIP
    """
    from roll.utils import dynamic_batching, sequence_packing

    replaced: tuple[tuple[ModuleType, Callable[..., Any]], ...] = (
        (dynamic_batching, dynamic_batching_shard),
        (sequence_packing, make_micro_batch_iter_for_sequence_packing),
    )
    for module, ours in replaced:
        name, theirs = ours.__name__, getattr(module, ours.__name__, None)
        if theirs is ours:
            continue
        expected = list(inspect.signature(ours).parameters)
        if theirs is None or list(inspect.signature(theirs).parameters) != expected:
            raise UserError(
                f"got a ROLL whose {module.__name__} has no {name}({', '.join(expected)}), expected one as at commit "
                f"{COMMIT}. Use that commit, or plan batches with streampack.plan_step"
            )
        if crc32(inspect.getsource(module).encode()) != SOURCES[module.__name__]:
            log.warning("%s differs from ROLL at commit %s, with which streampack was tested", module.__name__, COMMIT)
        for user in [each for key, each in sys.modules.items() if key.startswith("roll.")]:
            if vars(user).get(name) is theirs:
                setattr(user, name, ours)


def dynamic_batching_shard(
    origin_batch: Any,
    dp_size: int,
    max_tokens_per_microbatch: int,
    sequence_length_round: int,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    log_prefix: str | None = None,
) -> tuple[Any, dict[str, float]]:
    """Order a batch for padded micro-batches, as ROLL's function of this name does.

    Args:
        origin_batch: Batch with ``attention_mask`` [B, S].
        dp_size: Number of data-parallel ranks.
        max_tokens_per_microbatch: Most tokens of a micro-batch of one rank, padding included.
        sequence_length_round: Rows of a micro-batch are padded to a multiple of this.
        pipeline_model_parallel_size: Number of pipeline stages.
        virtual_pipeline_model_parallel_size: If given, the number of micro-batches is a multiple of the stages.
        log_prefix: Word in the names of the metrics.

    Returns:
        The batch, rank after rank, whose ``meta_info`` says the rows of each micro-batch; and ROLL's metrics.

    Raises:
        SampleError: A row does not fit, or the batch cannot be dealt evenly.

    Example:
        >>> batch, metrics = dynamic_batching_shard(batch, 8, 16384, 128)  # doctest: +SKIP
    """
    mask = origin_batch.batch["attention_mask"]
    if len(mask) % dp_size:
        raise SampleError(f"got {len(mask)} samples, expected a multiple of {dp_size}, the data-parallel ranks of ROLL")
    lengths = mask.reshape(len(mask), -1).sum(1).cpu().numpy()
    virtual = pipeline_model_parallel_size > 1 and virtual_pipeline_model_parallel_size
    plan = plan_step(
        np.maximum(lengths, 1), budget=max_tokens_per_microbatch, dp=dp_size, mode="padded", order="packer",
        align=sequence_length_round, micro_batch_multiple=pipeline_model_parallel_size if virtual else 1,
        empty="error",
    )  # fmt: skip
    batch = origin_batch.slice()
    batch.reorder(torch.from_numpy(plan.order()))
    meta = padded_meta([len(pack) for pack in plan.packs[0]], [length for _, length in plan.shapes])
    batch.meta_info = dict(origin_batch.meta_info) | meta
    before, after = mask.numel(), dp_size * sum(rows * length for rows, length in plan.shapes)
    counted = {
        "valid_tokens": plan.num_tokens, "actual_tokens_origin": before, "actual_tokens": after,
        "removed_padding_tokens": before - after, "removed_padding_ratio": (before - after) / before,
    }  # fmt: skip
    prefix = f"dynamic_batching/{log_prefix}" if log_prefix else "dynamic_batching"
    return batch, {f"{prefix}/{name}": value for name, value in counted.items()}


def make_micro_batch_iter_for_sequence_packing(
    mini_batch: Any, tp_size: int, cp_size: int, vp_size: int, is_train: bool = False, dp_group: Any = None,
    micro_batch_size: int | None = None, config: Any = None,
) -> Iterator[Any]:  # fmt: skip
    """Split a mini-batch of one rank into packs, as ROLL's function of this name does.

    A batch of ``batch_of`` keeps the packs of its step. Another batch is planned if ``config.algorithm`` is
    ``load_balance``; with ``none``, micro-batches of a fixed number of samples stay as they are.

    Args:
        mini_batch: Batch with ``attention_mask`` [B, S].
        tp_size: Number of tensor-parallel ranks.
        cp_size: Number of context-parallel ranks.
        vp_size: The number of micro-batches is a multiple of this.
        is_train: True for the limits of training in ``config``, False for those of passes without gradients.
        dp_group: Process group whose ranks must have the same number of micro-batches.
        micro_batch_size: Samples of a micro-batch, for the algorithm ``none``.
        config: ROLL's ``sequence_packing_args``.

    Returns:
        Iterator of the micro-batches.

    Raises:
        SampleError: A sample does not fit, or there are too few for all micro-batches.
        UserError: The packs of a step do not suit the limits of ``config`` or the stages.

    Example:
        >>> list(make_micro_batch_iter_for_sequence_packing(batch, 1, 1, 1, config=args))  # doctest: +SKIP
    """
    phase = "train" if is_train else "forward"
    most = getattr(config, f"max_packed_sequence_length_{phase}", None)
    align = lcm(16, 2 * cp_size * tp_size if cp_size > 1 else tp_size)
    lengths = mini_batch.batch["attention_mask"].sum(1).cpu().numpy()
    if PACKS in mini_batch.meta_info:
        packs = _packs_of(mini_batch)
        tokens = max(int((-(-lengths[rows] // align) * align).sum()) for rows in packs)
        if most is not None and tokens > most:
            raise UserError(
                f"got a pack of {tokens} tokens, as ROLL aligns samples to {align}, expected at most {most}, the "
                f"max_packed_sequence_length_{phase}. Set `align.sample: {align}` in the rules, or raise the length"
            )
        if len(packs) % vp_size:
            raise UserError(
                f"got {len(packs)} packs, expected a multiple of {vp_size}, the virtual pipeline stages. Set "
                f"`micro_batch_multiple` of the feed, or `min_packs` of regroup"
            )
    elif config is None or config.algorithm != "load_balance":
        from roll.utils import sequence_packing

        theirs = sequence_packing.get_sequence_packing_packer(config)
        return theirs.make_micro_batch_iter_for_sequence_packing(  # type: ignore[no-any-return]
            mini_batch, tp_size, cp_size, vp_size, is_train, dp_group, micro_batch_size
        )
    else:
        least = getattr(config, f"min_num_micro_batches_{phase}")
        packs = _planned(mini_batch, most, align, vp_size, least, dp_group)
    return _micro_batches(mini_batch, packs)


def batch_of(
    step: Step[Any], strategy: Any, fields: Sequence[str] = (), *, forward: ForwardPacks[Any] | None = None,
    pad_token_id: int = 0,
) -> Any:  # fmt: skip
    """Return this rank's samples of a step as a batch for a strategy of ROLL, one row a sample.

    Args:
        step: A step of a loader with ``format="numpy"``.
        strategy: ROLL's ``megatron_train`` or ``megatron_infer``, initialized.
        fields: Names of declared fields that the loss reads, such as ``advantages``. A field with ``align: target`` has
            rows of S - 1 values, as ROLL's log-probs have.
        forward: Forward packs of the step, ``step.regroup(...)``. Then the batch is for ``forward_step``.
        pad_token_id: Token id at padding.

    Returns:
        A batch on ROLL's device, with ``input_ids``, ``attention_mask``, ``position_ids`` and ``response_mask`` [B, S],
        and the fields. S is the strategy's ``seq_length``. A micro-batch without a sample gets a row of one token
        without a response.

    Raises:
        UserError: The strategy's settings do not suit the feed, or packs have what rows cannot have.

    Example:
        >>> metrics = strategy.train_step(batch_of(step, strategy, ["advantages"]), loss_func)  # doctest: +SKIP
    """
    from roll.distributed.scheduler.protocol import DataProto
    from roll.platforms import current_platform

    packs: tuple[Any, ...] = tuple(step if forward is None else forward)
    rules = step.rules
    if rules is None or not all(isinstance(pack, Pack) for pack in packs):
        raise UserError('got packs of another format, expected a step of a loader with format="numpy"')
    _check_strategy(strategy, rules.padded, "train" if forward is None else "infer")
    declared = {field.name: field for field in rules.fields}
    if strange := [name for name in fields if name not in declared]:
        raise UserError(f"got no field {strange[0]!r}, expected one of {sorted(declared)}, the declared fields")
    for pack in packs:
        _check_pack(pack, declared)
    size = strategy.seq_length
    rows = _Rows(size, pad_token_id, tuple(declared[name] for name in fields))
    for pack in packs:
        rows.add(pack)
    columns = rows.tensors()
    counts = [max(pack.num_samples, 1) for pack in packs]
    meta: dict[str, Any] = {"loss_mask_keys": ["response_mask"], "global_step": step.index}
    if rules.padded:
        if (most := max(pack.max_seqlen for pack in packs)) > size:
            raise UserError(
                f"got rows of {most} tokens, expected at most {size}, the sequence_length of ROLL. Raise it to {most}, "
                f"or lower `align.pack` or `round`"
            )
        meta |= padded_meta(counts, [pack.max_seqlen for pack in packs])
    else:
        columns[PACKS] = torch.from_numpy(np.repeat(np.arange(len(packs)), counts))
        meta[PACKS] = sum(counts)
    meta |= {"micro_batch_size": strategy.worker_config.infer_batch_size, "output_on_all_tp_cp_ranks": True}
    return DataProto.from_single_dict(columns, meta_info=meta).to(current_platform.device_type)


def rows_back(forward: ForwardPacks[Any], results: torch.Tensor) -> torch.Tensor:
    """Return results of forward packs in the order of the rows of ``batch_of(step, ...)``.

    Args:
        forward: Forward packs of the step.
        results: [R, ...] with a result for each row of ``batch_of(step, ..., forward=forward)``, such as ``log_probs``
            of ``forward_step``.

    Returns:
        [B, ...]; 0 in rows without a sample.

    Raises:
        UserError: There is not one result for each row.

    Example:
        >>> old = rows_back(forward, results["log_probs"])  # doctest: +SKIP
    """
    rows = [max(pack.num_samples, 1) for pack in forward]
    if len(results) != sum(rows):
        raise UserError(f"got {len(results)} results, expected {sum(rows)}, one for each row of the forward batch")
    parts = zip(torch.split(results, rows), forward, strict=True)
    back = forward.samples_back([part[: pack.num_samples] for part, pack in parts])
    return torch.cat([part if len(part) else results.new_zeros(1, *results.shape[1:]) for part in back])


def mesh_of(strategy: Any) -> Mesh:
    """Return the place of a strategy's worker in the mesh, for ``connect``.

    Args:
        strategy: A strategy of ROLL, initialized.

    Returns:
        The sizes and ranks along dp, cp, tp and pp.

    Example:
        >>> loader = streampack.connect(mesh=mesh_of(worker.strategy), format="numpy")  # doctest: +SKIP
    """
    info = strategy.worker.rank_info
    axes = ("dp", "cp", "tp", "pp")
    sizes = {axis: getattr(info, f"{axis}_size") for axis in axes}
    return Mesh(**sizes, **{f"{axis}_rank": getattr(info, f"{axis}_rank") for axis in axes})


def padded_meta(counts: Sequence[int], lengths: Sequence[int]) -> dict[str, Any]:
    """Return ROLL's words for padded micro-batches that have ``counts`` rows of ``lengths`` tokens."""
    spans = [list(span) for span in pairwise(accumulate(counts, initial=0))]
    return {
        "global_micro_batch_indices": spans, "global_micro_batch_lengths": list(lengths), "micro_batch_indices": spans,
        "micro_batch_lengths": list(lengths), "num_micro_batchs": len(spans),
    }  # fmt: skip


def _packs_of(mini_batch: Any) -> list[list[int]]:
    """Return the rows of each pack of a step."""
    if len(mini_batch) != mini_batch.meta_info[PACKS]:
        raise UserError(
            f"got {len(mini_batch)} rows of a step with {mini_batch.meta_info[PACKS]}, expected all of them. Pass the "
            f"batch to train_step of the strategy, not of the worker, which splits it"
        )
    numbers = mini_batch.batch[PACKS].tolist()
    packs = [list[int]() for _ in range(max(numbers) + 1)]
    for row, number in enumerate(numbers):
        packs[number].append(row)
    return packs


def _planned(mini_batch: Any, most: int | None, align: int, multiple: int, least: int, group: Any) -> list[list[int]]:
    """Return the rows of each pack, as many packs on all ranks of the group."""
    if most is None:
        raise UserError("got no max_packed_sequence_length, expected one in sequence_packing_args")
    mask = mini_batch.batch["attention_mask"]
    lengths, budget = np.maximum(mask.sum(1).cpu().numpy(), 1), most // align * align

    def planned(least: int) -> list[list[int]]:
        """Return the samples of each pack, at least ``least`` packs."""
        plan = plan_step(
            lengths, budget=budget, align=align, micro_batch_multiple=multiple, min_micro_batches=least,
            order="small_at_edges", empty="error",
        )  # fmt: skip
        return plan.packs[0]

    packs = planned(least)
    if distributed.is_initialized() and group is not None:
        agreed = torch.tensor([len(packs), -len(lengths)], device=mask.device)
        distributed.all_reduce(agreed, op=distributed.ReduceOp.MAX, group=group)
        number, fewest = int(agreed[0]), -int(agreed[1])
        if number > fewest:
            raise SampleError(f"got a rank with {fewest} samples, expected {number}, one for each micro-batch")
        packs = packs if len(packs) == number else planned(number)
    return packs


def _micro_batches(mini_batch: Any, packs: list[list[int]]) -> Iterator[Any]:
    """Yield the micro-batch of each pack, with what ROLL notes in it."""
    mini_batch.meta_info |= {"partition_indices_list": packs}
    for number, rows in enumerate(packs):
        micro_batch = mini_batch.select_idxs(rows)
        micro_batch.meta_info = mini_batch.meta_info | {
            "micro_batch_idx": number, "is_padding_batch": False, "partition_indices": rows,
            "num_micro_batchs": len(packs), "mini_batch_size": len(mini_batch),
        }  # fmt: skip
        yield micro_batch


def _check_strategy(strategy: Any, padded: bool, phase: str) -> None:
    """Raise UserError if a strategy would split the batch in another way than the feed does."""
    name, config = strategy.strategy_name, strategy.worker_config
    if not name.startswith("megatron"):
        raise UserError(
            f"got strategy {name}, expected megatron_train or megatron_infer, because {name} always takes a fixed "
            f"number of samples in a micro-batch"
        )
    dynamic = getattr(config, f"use_dynamic_batching_in_{phase}")
    if padded and not dynamic:
        raise UserError(f"got a feed with `padded: true`, expected use_dynamic_batching_in_{phase}: true in ROLL")
    if not padded and (dynamic or not strategy.use_sequence_packing):
        raise UserError(
            f"got a feed of packs, expected use_sequence_packing: true and use_dynamic_batching_in_{phase}: false in "
            f"ROLL, or `padded: true` in the rules"
        )
    used = sys.modules[type(strategy).__module__]
    ours = make_micro_batch_iter_for_sequence_packing
    if not padded and getattr(used, ours.__name__, ours) is not ours:
        raise UserError("got a ROLL that forms packs by itself. Call streampack.integrations.roll.install() first")


def _check_pack(pack: Pack, declared: Mapping[str, Field]) -> None:
    """Raise UserError for a pack whose samples are not whole rows of tokens here."""
    media = any(field.of_media for field in declared.values())
    for wrong, got, wanted in (
        (pack.input_ids is None, "a middle stage of a pipeline", "at most 2 stages, because ROLL reads tokens in each"),
        (pack.cp > 1 and pack.layout != "whole", f"`cp_layout: {pack.layout}`", "`cp_layout: whole`: ROLL cuts itself"),
        (pack.path_index is not None, "samples that share tokens", "a run without `share`"),
        (media, "samples with media", "samples of tokens alone"),
        (POSITION_IDS in declared, "declared position_ids", "none, because ROLL's positions begin at 0 in each sample"),
        (LABELS in declared, "declared labels", "none, because ROLL's log-probs are of the next token"),
    ):
        if wrong:
            raise UserError(f"got {got}, expected {wanted}")


class _Rows:
    """The rows of a batch, filled pack by pack."""

    def __init__(self, size: int, pad_token_id: int, fields: tuple[Field, ...]) -> None:
        self._size, self._pad, self._fields = size, pad_token_id, fields
        self._rows: dict[str, list[torch.Tensor]] = {}

    def add(self, pack: Pack) -> None:
        """Add the samples of a pack, or a row of one token if it has none."""
        for at in range(pack.num_samples):
            begin = int(pack.cu_seqlens_padded[at])
            self._add(pack, at, slice(begin, begin + int(pack.cu_seqlens[at + 1] - pack.cu_seqlens[at])))
        if not pack.num_samples:
            self._add(pack, None, slice(0, 0))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the rows by name."""
        return {name: torch.stack(rows) for name, rows in self._rows.items()}

    def _add(self, pack: Pack, at: int | None, span: slice) -> None:
        """Add sample ``at`` of a pack, with its tokens; None adds a row without a sample."""
        size = span.stop - span.start
        if size > self._size:
            raise UserError(
                f"got a sample of {size} tokens, expected at most {self._size}, the sequence_length of ROLL. Raise "
                f"it, or set `overlong` in the rules"
            )
        real = torch.arange(self._size) < max(size, 1)
        trained = pack.labels[span] != IGNORE_INDEX
        row = {
            "input_ids": self._row(pack.input_ids[span], self._pad),
            "attention_mask": real.long(),
            "position_ids": torch.arange(self._size) * real,
            "response_mask": self._row(trained.astype(np.int64), 0).roll(1),  # a label is the next token
        }
        for field in self._fields:
            values = pack.fields[field.name]
            if field.axis == "sample":
                row[field.name] = torch.from_numpy(
                    np.array(values[at] if at is not None else np.zeros_like(values[:1])[0])
                )
            else:
                row[field.name] = self._row(values[span], field.pad)[: -1 if field.align == "target" else None]
        for name, values in row.items():
            self._rows.setdefault(name, []).append(values)

    def _row(self, values: NDArray[Any], pad: float) -> torch.Tensor:
        """Return values padded to the length of a row."""
        row = np.full((self._size, *values.shape[1:]), pad, values.dtype)
        row[: len(values)] = values
        return torch.from_numpy(row)
