"""Checks steps, the shards of a pack, and the same step of all ranks; ``pack_check`` checks each pack of them.

Expected values are computed from boundaries, slices and tokens alone, in another way than the batch was built.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from streampack.batch_checks.expectations import equal, expect, expect_once
from streampack.batch_checks.pack_check import PackCheck, check_labels
from streampack.batch_checks.tree_check import has_trees
from streampack.batch_checks.view_keys import check_keys
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.core.model.samples import I64
from streampack.packs.step import Step, uncounted


def verify(batch: Any, mesh: Mesh | None = None, rules: Rules | None = None) -> None:
    """Check every invariant of a batch, and raise if one does not hold.

    The check computes labels, positions, masks and boundaries again, token by token. It takes about ten times as long
    as building the batch.

    Args:
        batch: A pack in any format, a ``Step``, or a list. A list has the shards of one pack from all cp
            ranks, or the same step from all ranks.
        mesh: The rank's place, for checks of its part of a pack. Default: the pack's slices give the size of cp.
        rules: The run's rules, ``loader.rules``, for checks of budget, alignment, and labels or positions that came
            with the samples. Default: the rules that a ``View`` holds; without rules, each label must be the next
            token.

    Raises:
        InvariantError: An invariant does not hold; the message names the invariant, the sample and the position.

    Example:
        >>> for batch in loader:  # doctest: +SKIP
        ...     streampack.verify(batch)
    """
    if isinstance(batch, Step):
        check_step(batch, mesh, rules)
    elif not isinstance(batch, Mapping):
        many = list(batch)
        if many and all(isinstance(step, Step) for step in many):
            _check_ranks(many, rules)
        else:
            _check_shards(many, rules)
    else:
        _check_pack(batch, mesh, rules)


def _check_pack(batch: Any, mesh: Mesh | None, rules: Rules | None) -> PackCheck:
    """Check a pack, or a shard of one, and the keys of its framework. Raises InvariantError."""
    check = PackCheck(batch, mesh, rules)
    check.run()
    check_keys(batch, check)
    return check


def check_step(step: Step, mesh: Mesh | None = None, rules: Rules | None = None) -> None:
    """Check every pack of a step, and that the step's totals agree with its packs. Raises InvariantError."""
    subject, step = f"step {step.index}", _uncounted(step)
    expect(
        len(step.digest) == len(step.chain) == 32 and not set(step.digest + step.chain) - set("0123456789abcdef"),
        "digest", f"{subject}: got digest {step.digest!r} and chain {step.chain!r}, expected 32 hex digits for each",
    )  # fmt: skip
    equal("step", subject, [batch.step for batch in step], [step.index] * len(step))
    equal("micro_batch", subject, [batch.micro_batch for batch in step], list(range(len(step))))
    checked = [_check_pack(batch, mesh, rules) for batch in step]
    if mesh is not None and mesh.pp > 1 and not (rules is not None and rules.padded):
        lengths = {check.total for check in checked}
        equal("shape", f"{subject}, number of different pack lengths in a pipeline", len(lengths), 1)
    in_groups = any("cp_size" in check.pack for check in checked)
    _check_totals(subject, step, checked, whole=mesh is not None and mesh.dp == 1 and not in_groups)
    for name, expected in (("num_micro_batches", len(step)), ("step_num_loss_tokens", step.num_loss_tokens)):
        equal(name, subject, [int(check.pack[name]) for check in checked], [expected] * len(step))
    packs = rules.packs_at(step.index) if rules is not None and rules.batch is None and not in_groups else 0
    if packs and mesh is not None and packs % mesh.dp == 0:
        equal("micro-batches", subject, len(step), packs // mesh.dp)


def _uncounted(step: Step) -> Step:
    """Return ``step`` for a check, which does not count as taking its packs."""
    return replace(step, packs=uncounted(step.packs))


def follows(last: Step | None, step: Step) -> None:
    """Check that the chain of ``step`` is the hash of the previous step's chain and its own digest.

    Step 0 needs no ``last``; other steps are checked only if ``last`` is the step before. Raises InvariantError.
    """
    before = bytes(16) if step.index == 0 else None
    if last is not None and step.index == last.index + 1:
        before = bytes.fromhex(last.chain)
    if before is not None:
        chain = hashlib.blake2b(before + bytes.fromhex(step.digest), digest_size=16).hexdigest()
        equal("chain", f"step {step.index}", step.chain, chain)


def _check_totals(subject: str, step: Step, checked: Sequence[PackCheck], whole: bool) -> None:
    """Check that no sample occurs twice, and that the step's totals are the sums over ``checked`` packs.

    ``whole``: the packs are all packs of the step; else they are a part, with sums of at most the totals.
    """
    ids = np.concatenate([check.pack["sample_ids"] for check in checked]) if checked else np.zeros((0, 3), np.int64)
    expect_once(ids, subject)
    sums = {"num_samples": len(ids), "num_loss_tokens": sum(int(check.pack["num_loss_tokens"]) for check in checked)}
    sums["num_loss_tokens"] = max(sums["num_loss_tokens"], 1) if whole else sums["num_loss_tokens"]
    for name, total in sums.items():
        figure = getattr(step, name)
        fits = figure == total if whole else figure >= total
        expect(
            fits,
            name,
            f"{subject}: got {figure}, expected {'' if whole else 'at least '}{total}, the sum over its packs",
        )


def _check_ranks(steps: Sequence[Step], rules: Rules | None) -> None:
    """Check the same step of all ranks: ranks agree, shards make up whole packs, and totals are right."""
    steps = [_uncounted(step) for step in steps]
    first = steps[0]
    subject = f"step {first.index}"
    for name in ("index", "digest", "chain", "num_samples", "num_loss_tokens"):
        for other in steps:
            equal(name, f"{subject} of another rank", getattr(other, name), getattr(first, name))
    packs: dict[int, list[Any]] = {}
    for step in steps:
        check_step(step, None, rules)
        equal("micro-batches", f"{subject} of another rank", len(step), len(first))
        if rules is not None and rules.padded:
            equal("shape", f"{subject} of another rank", _shapes_of(step), _shapes_of(first))
        for batch in step:
            is_numbered = batch.num_samples or getattr(batch, "cp_size", None)
            packs.setdefault(batch.pack if is_numbered else (-1 - batch.dp_rank), []).append(batch)
    for shards in packs.values():
        if shards[0].num_samples:
            _check_shards(shards, rules)
    _check_totals(subject, first, [PackCheck(shards[0], None, rules) for shards in packs.values()], whole=True)


def _shapes_of(step: Step) -> list[tuple[int, int]]:
    """Return (tokens, tokens of a row) of each padded micro-batch of a step."""
    return [(int(batch.cu_seqlens_padded[-1]), int(batch.max_seqlen)) for batch in step]


def _check_shards(shards: Sequence[Any], rules: Rules | None) -> None:
    """Check that the shards of all context-parallel ranks cover a pack exactly once.

    Ranks that hold the same slices must have the same tokens.
    """
    expect(len(shards) > 0, "shards", "got no shards, expected the shards of all context-parallel ranks of a pack")
    checked: dict[bytes, PackCheck] = {}
    for shard in shards:
        check = _check_pack(shard, None, rules)
        same = checked.setdefault(check.pack["slices"].tobytes(), check)
        for name in ("input_ids", "labels", "position_ids"):
            if name in check.pack and name in same.pack:
                equal(name, f"{check.what}, two ranks with the same slices", check.pack[name], same.pack[name])
    first, *others = checked.values()
    for other in others:
        for name in ("step", "pack", "cu_seqlens", "cu_seqlens_padded", "sample_ids", "num_loss_tokens"):
            equal(name, f"{other.what}, another shard", other.pack[name], first.pack[name])
    places = np.concatenate([check.places for check in checked.values()])
    times = np.bincount(places, minlength=first.total)
    wrong = times != 1
    first.agree("shards", times, np.ones_like(times), wrong, np.arange(len(times)))
    checks = list(checked.values())
    if all("labels" in check.pack and not has_trees(check.pack) for check in checks):
        ids, labels = (_joined(checks, [check.pack[name] for check in checks]) for name in ("input_ids", "labels"))
        masks = [check.loss_mask for check in checks]
        mask = None if any(part is None for part in masks) else _joined(checks, masks)
        check_labels(first, np.arange(first.total), ids, labels, mask)


def _joined(shards: Sequence[PackCheck], arrays: Sequence[Any]) -> I64:
    """Return one array of the whole pack, int64 [T], from the array [T'] of each shard, which has T' tokens."""
    whole = np.zeros(shards[0].total, np.int64)
    for shard, array in zip(shards, arrays, strict=True):
        whole[shard.places] = array
    return whole
