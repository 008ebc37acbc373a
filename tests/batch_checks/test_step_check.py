"""verify: what the broker and the client build passes, and one changed value does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

import streampack
from streampack.batch_checks.step_check import follows
from streampack.core.model.fields import Field
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Align
from streampack.errors import InvariantError
from streampack.packs.pack import Pack
from streampack.packs.step import Step
from streampack.views.formats import Views
from tests.packs.cases import Case, attached, cases
from tests.views.shown import steps_of

PADDED = Case([[[5, 6, 7], [8, 9], [4]], [[3] * 8]], align=4, budget=16, cp=1)
"""A pack with alignment and tail padding, and one of both."""
SHARED = replace(PADDED, cp=2, packs=[[[5, 6, 7, 8, 9, 10], [1, 2, 3]]])


@given(cases())
def test_built_steps_pass_verify(case: Case) -> None:
    steps, rules = steps_of(case), attached(case).rules
    for format in ("numpy", "thd", *(("hf", "hf_shifted") if case.cp == 1 else ())):
        for rank, step in enumerate(steps_of(case)):
            mesh = Mesh(cp=case.cp, cp_rank=rank, pp=case.pp)
            shown = Views(format, mesh).make(step, rules)
            streampack.verify(shown, mesh, rules)
            for batch in shown:
                streampack.verify(batch, rules=rules)
    for micro_batch in range(len(case.packs)):
        streampack.verify([step[micro_batch] for step in steps], rules=rules)
    streampack.verify(steps, rules=rules)


def changed(pack: Pack) -> Iterator[tuple[str, Pack]]:
    """``pack`` with one value changed: every element of every array that has to be what it is."""
    for name in ("labels", "position_ids", "padding_mask", "cu_seqlens", "cu_seqlens_padded", "slices"):
        for i in range(pack[name].size):
            array = pack[name].copy()
            array.flat[i] = ~array.flat[i] if array.dtype == np.bool_ else array.flat[i] + 1
            yield f"{name}[{i}]", replace(pack, **{name: array})
    first = set(pack.cu_seqlens_padded[:-1].tolist()) - {int(pack.cu_seqlens_padded[-2])}
    for i in set(range(pack.input_ids.size)) - first:  # no label speaks of a sample's first token
        ids = pack.input_ids.copy()
        ids[i] += 1
        yield f"input_ids[{i}]", replace(pack, input_ids=ids)
    for name in ("max_seqlen", "num_samples", "num_segments", "num_loss_tokens"):
        for by in (-1, 1):
            yield f"{name} by {by}", replace(pack, **{name: pack[name] + by})
    yield "sample_ids", replace(pack, sample_ids=np.repeat(pack.sample_ids[:1], pack.num_samples, axis=0))


def caught(batch: Any) -> str:
    """What verify says of a batch; nothing if it passes."""
    try:
        streampack.verify(batch)
    except InvariantError as error:
        return str(error)
    return ""


def test_every_changed_value_of_a_pack_is_caught() -> None:
    step = steps_of(PADDED)[0]
    pack = step[0]
    broken = list(changed(pack))
    assert len(broken) > 4 * len(pack.input_ids)
    for what, bad in broken:
        assert re.match(r"[a-z_\-]+: step 3, pack 100", caught(bad)), f"{what}: {caught(bad)}"


@pytest.mark.parametrize(
    ("format", "rows"), [("thd", 4), ("hf_shifted", 4), ("megatron", 4), ("bshd", 3), ("torchtitan", 1)]
)
def test_every_changed_value_of_a_view_is_caught(format: str, rows: int) -> None:
    step, rules = steps_of(PADDED)[0], attached(PADDED).rules
    batch = Views(format, Mesh()).make(step, rules)[0]
    starts = batch.canonical.cu_seqlens_padded[:-2].tolist()
    count = 0
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or name == "sample_ids":
            continue
        for i in set(range(value.numel())) - set(starts if name in ("input_ids", "tokens", "input") else []):
            other = value.clone()
            other.view(-1)[i] = ~other.view(-1)[i] if other.dtype == torch.bool else other.view(-1)[i] + 1
            bad = type(batch)({**batch, name: other}, batch.canonical, batch.rest, rules)
            assert caught(bad), f"not caught: {name}[{i}]"
            count += 1
    assert count > rows * 16


@pytest.mark.parametrize("format", ["thd", "hf_shifted", "megatron", "bshd", "torchtitan"])
def test_every_array_of_another_shape_is_caught(format: str) -> None:
    step, rules = steps_of(PADDED)[0], attached(PADDED).rules
    batch = Views(format, Mesh()).make(step, rules)[0]
    arrays = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    for name, value in arrays.items():
        others = {"short": value[..., :-1], "none": value[..., :0], "nested": value[None], "flat": value.flatten()}
        for what, other in others.items():
            bad = type(batch)({**batch, name: other}, batch.canonical, batch.rest, rules)
            assert other.shape == value.shape or caught(bad), f"not caught: {name}, {what}"


@pytest.mark.parametrize("format", ["hf", "megatron", "bshd", "torchtitan"])
def test_a_mapping_of_a_views_keys_is_no_pack(format: str) -> None:
    rules = attached(PADDED).rules
    keys = dict(Views(format, Mesh()).make(steps_of(PADDED)[0], rules)[0])
    assert re.match("keys: got a batch without .*slices, expected a pack", caught(keys))


FIELDS = (
    Field(name="loss_mask", dtype="bool", align="target"),
    Field(name="advantages", dtype="bfloat16", align="target", pad=-1),
    Field(name="routes", dtype="uint8", shape=(2,), pad=255),
    Field(name="whole", dtype="float32", cp="replicate", pad=float("nan")),
    Field(name="reward", dtype="float32", axis="sample"),
    Field(name="position_ids", dtype="int32", shape=(3,), pad=9),
    Field(name="attention_mask", dtype="int32", shape=(2,)),  # which padded micro-batches alone have of their own
)


@pytest.mark.parametrize("case", [PADDED, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_declared_field_of_another_shape_or_padding_is_caught(case: Case, field: Field) -> None:
    case = replace(case, fields=FIELDS)
    rules = attached(case).rules
    for step in steps_of(case):
        batch = Views("thd", Mesh()).make(step, rules)[0]
        streampack.verify(batch)
        axis = batch[field.name].ndim - 1 if field.name == "position_ids" else 0
        values = batch[field.name].movedim(axis, 0)
        places = torch.arange(16) if field.cp == "replicate" else torch.as_tensor(batch.canonical.positions())
        broken = {"short": values[:-1], "long": torch.cat([values, values[:1]]), "wide": values[..., None]}
        for i, place in enumerate(places.tolist() if field.axis == "token" else []):
            if place >= int(batch.cu_seqlens_padded[-2]):  # the tail
                other = values.clone()
                other[i] = 1 - other[i].int() if field.dtype == "bool" else 3
                broken[f"padding at {place}"] = other
        assert field.axis == "sample" or len(broken) > 3
        for what, other in broken.items():
            shown = other.movedim(0, axis)
            assert caught(type(batch)({**batch, field.name: shown}, batch.canonical, {}, rules)), what
        gone = {name: value for name, value in batch.items() if name != field.name}
        assert caught(type(batch)(gone, batch.canonical, {}, rules))


def test_tokens_below_0_hide_no_label() -> None:
    pack = steps_of(PADDED)[0][0]
    pack.input_ids[1] = -1
    assert re.match("labels: .*, position 0: got 6, expected -1", caught(pack))


def test_the_message_names_invariant_sample_and_position() -> None:
    pack = steps_of(PADDED)[0][0]
    pack.labels[4] = 77
    with pytest.raises(InvariantError) as error:
        streampack.verify(pack)
    name = tuple(pack.sample_ids[1].tolist())
    assert str(error.value) == f"labels: step 3, pack 100, sample {name}, position 4: got 77, expected 9"
    pack.labels[4], pack.labels[15] = 9, 1
    with pytest.raises(InvariantError, match="tail padding, position 15: got 1, expected -100"):
        streampack.verify(pack)


def test_positions_begin_again_in_the_tail_of_a_forward_pack_and_nowhere_else() -> None:
    (step,) = steps_of(replace(PADDED, packs=[PADDED.packs[0], [], []]))
    (forward,) = step.regroup(3 * PADDED.budget)
    streampack.verify(forward)
    assert forward.position_ids.max() < PADDED.budget < len(forward.position_ids) - 12, "a tail of more than a pack"
    forward.position_ids[-1] += 1
    assert re.match("position_ids: .*, tail padding", caught(forward))
    forward.position_ids[-1] -= 1
    forward.position_ids[3] = 0
    assert re.match("position_ids: .*, sample .*, position 3: got 0, expected 3", caught(forward))


def test_a_pack_is_as_long_as_its_shape_says() -> None:
    case = replace(PADDED, budget=32, shape="exact")
    (step,), rules = steps_of(case), attached(case).rules
    assert [len(pack.input_ids) for pack in step] == [12, 8]
    streampack.verify(step, Mesh(), rules)
    with pytest.raises(
        InvariantError, match=r"^shape: step 3, number of different pack lengths in a pipeline: got 2, expected 1"
    ):
        streampack.verify(step, Mesh(pp=2), rules)
    (longer,) = steps_of(replace(case, pp=2))
    assert [len(pack.input_ids) for pack in longer] == [12, 12]
    streampack.verify(longer, Mesh(pp=2), rules)
    with pytest.raises(InvariantError, match=r"^shape: step 3, pack 101, its tokens: got 12, expected 8"):
        streampack.verify(longer, Mesh(), rules)
    with pytest.raises(
        InvariantError,
        match=r"^shape: .*: got 12 tokens, expected 24 tokens or a greater length that rules.shape allows",
    ):
        streampack.verify(step, rules=replace_rules(rules, align=Align(sample=4, pack=24), budget=48))


def test_the_rules_say_budget_alignment_and_what_was_sent() -> None:
    pack, rules = steps_of(PADDED)[0][0], attached(PADDED).rules
    streampack.verify(pack, rules=rules)
    with pytest.raises(InvariantError, match=r"^budget: .* got 16, expected 32"):
        streampack.verify(pack, rules=replace_rules(rules, budget=32))
    with pytest.raises(InvariantError, match=r"^alignment: .* got 4"):
        streampack.verify(pack, rules=replace_rules(rules, align=Align(sample=8, pack=8)))
    pack.labels[0] = 77
    with pytest.raises(InvariantError, match=r"^labels: "):
        streampack.verify(pack, rules=rules)
    sent = (Field(name="labels", dtype="int32", align="target", pad=-100),)
    streampack.verify(pack, rules=replace_rules(rules, fields=sent))


def replace_rules(rules: Any, **changes: Any) -> Any:
    return type(rules)(**{**{name: getattr(rules, name) for name in rules.__struct_fields__}, **changes})


STEP: list[tuple[str, Callable[[Step], Step]]] = [
    ("digest", lambda step: replace(step, digest="x" * 32)),
    ("micro_batch", lambda step: replace(step, packs=step.packs[::-1])),
    ("micro_batch", lambda step: replace(step, packs=[step[0], step[0]])),
    ("step", lambda step: replace(step, index=4)),
    ("num_samples", lambda step: replace(step, num_samples=step.num_samples + 1)),
    ("num_loss_tokens", lambda step: replace(step, num_loss_tokens=step.num_loss_tokens - 1)),
    ("num_samples", lambda step: replace(step, packs=step.packs[:1])),
    ("sample_ids", lambda step: replace(step, packs=(step[0], replace(step[0], micro_batch=1)))),
    ("num_micro_batches", lambda step: replace(step, packs=(replace(step[0], num_micro_batches=1), step[1]))),
    ("step_num_loss_tokens", lambda step: replace(step, packs=(step[0], replace(step[1], step_num_loss_tokens=0)))),
]


@pytest.mark.parametrize(("name", "change"), STEP)
def test_a_step_that_does_not_add_up_is_caught(name: str, change: Callable[[Step], Step]) -> None:
    step = steps_of(PADDED)[0]
    streampack.verify(step, Mesh())
    with pytest.raises(InvariantError, match=rf"^{name}: step"):
        streampack.verify(change(step), Mesh())


def test_a_chain_that_does_not_follow_is_caught() -> None:
    loader_steps = [replace(steps_of(PADDED)[0], index=0), replace(steps_of(PADDED)[0], index=1)]
    with pytest.raises(InvariantError, match=r"^chain: step 0: got"):
        follows(None, loader_steps[0])
    with pytest.raises(InvariantError, match=r"^chain: step 1: got"):
        follows(loader_steps[0], loader_steps[1])
    follows(loader_steps[1], loader_steps[0].__class__(5, (), 0, 0, 0, "0" * 32, "0" * 32))  # some were not seen


SHARDS: list[tuple[str, Callable[[Pack, Pack], list[Pack]]]] = [
    ("shards", lambda a, b: [a]),
    ("shards", lambda a, b: [b, b]),
    ("labels", lambda a, b: [a, with_label(b, 1)]),
    ("num_loss_tokens", lambda a, b: [replace(each, num_loss_tokens=each.num_loss_tokens + 1) for each in (a, b)]),
    ("pack", lambda a, b: [a, replace(b, pack=b.pack + 1)]),
    ("slices", lambda a, b: [a, replace(b, slices=a.slices)]),
    ("sample_ids", lambda a, b: [a, replace(b, sample_ids=b.sample_ids + 1)]),
]


def with_label(pack: Pack, by: int) -> Pack:
    """The label at the end of a slice, which speaks of a token that another rank holds, changed."""
    labels = pack.labels.copy()
    at = int(pack.slices[0, 1] - pack.slices[0, 0]) - 1
    assert labels[at] >= 0
    labels[at] += by
    return replace(pack, labels=labels)


@pytest.mark.parametrize(("name", "change"), SHARDS)
def test_shards_that_do_not_make_a_pack_up_are_caught(name: str, change: Callable[[Pack, Pack], list[Pack]]) -> None:
    one, two = (step[0] for step in steps_of(SHARED))
    streampack.verify([one, two])
    with pytest.raises(InvariantError, match=rf"^{name}: step 3, pack 10"):
        streampack.verify(change(one, two))


def test_ranks_that_disagree_on_a_step_are_caught() -> None:
    one, two = steps_of(SHARED)
    streampack.verify([one, two])
    for change in ({"digest": "0" * 32}, {"chain": "1" * 32}, {"num_loss_tokens": 99}):
        with pytest.raises(InvariantError, match=rf"^{next(iter(change))}: step 3 of another rank"):
            streampack.verify([one, replace(two, **change)])
    with pytest.raises(InvariantError, match=r"^shards: "):
        streampack.verify([one])


def test_verify_names_an_argument_that_is_no_batch() -> None:
    with pytest.raises(InvariantError, match=r"^keys: got a batch without cu_seqlens, .* expected a pack"):
        streampack.verify({"input_ids": np.zeros(4)})
    with pytest.raises(InvariantError, match=r"^shards: got no shards"):
        streampack.verify([])
