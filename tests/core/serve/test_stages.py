"""Steps of a run whose rules change: each brings its stage to the ranks, and a mesh that it does not fit ends there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from streampack.core.deal.mesh_validation import mesh_refusal
from streampack.core.model.keys.planning_keys import Balance, Warmup
from streampack.core.model.keys.stage_keys import Stage, StageBegin, StageRules
from streampack.core.model.mesh import Mesh
from streampack.core.model.rule_changes import Reweigh
from streampack.core.model.rules import Rules, StreamRules
from streampack.core.protocol.effects import Change
from streampack.core.protocol.message import Bye, Reject
from streampack.core.protocol.step_part import StepPart
from streampack.core.protocol.trainer_messages import AskState, Attached, Commit, Committed, EndForMesh, State
from streampack.core.serve.served_steps import ServedSteps
from streampack.errors import StageEnds
from tests.core.sessions.bench import Bench, attach, fill, get, hello

FEWER = Stage(name="fewer", at=StageBegin(step=2), rules=StageRules(packs=3))
"""Steps of 4 packs, then of 3."""
SHORTER = Stage(at=StageBegin(step=2), rules=StageRules(budget=8))


def running(*stages: Stage) -> Bench:
    """A run with samples for a few steps of each stage."""
    bench = Bench(merged=1024, stages=stages)
    bench.produce(b"p", hello("p", "a", "b"))
    fill(bench)
    return bench


def ranks(bench: Bench, name: str, dp: int, **more: Any) -> list[bytes]:
    """The peers of all ranks of a mesh, each attached and asking for all steps."""
    peers = [f"{name}{rank}".encode() for rank in range(dp)]
    for rank, peer in enumerate(peers):
        bench.read(peer, attach(peer.decode(), dp=dp, dp_rank=rank, **{"knows_stages": True, **more}), fence=0)
    for peer in peers:
        step = more.get("next_step", 0)
        bench.read(peer, get(64, start=step, done=step))
    return peers


def parts(bench: Bench, peer: bytes) -> dict[int, StepPart]:
    return {part.step: part for part in bench.heard(peer, StepPart)}


def test_each_part_brings_the_stage_of_its_step_and_the_rules_that_its_packs_are_built_by() -> None:
    bench = running(FEWER, msgspec.structs.replace(SHORTER, at=StageBegin(step=3)))
    [peer] = ranks(bench, "r", 1)
    stages = {step: part.stage for step, part in parts(bench, peer).items()}
    first = bench.heard(peer, Attached)[0].rules
    assert stages[0] is stages[1] is UNSET
    assert stages[2] is not UNSET
    assert (stages[2].number, stages[2].text) == (1, "fewer")
    assert isinstance(stages[2].rules, Rules)
    assert (stages[2].rules.packs, stages[2].rules.streams, stages[2].rules.stages) == (3, (), ())
    assert parts(bench, peer)[0].rules_of(first) is first
    last = stages[max(stages)]
    assert last is not UNSET
    assert (last.number, last.text) == (2, "2")
    assert isinstance(last.rules, Rules)
    assert (last.rules.packs, last.rules.budget) == (3, 8)
    assert [len(part.counts_u32) // 4 for _, part in sorted(parts(bench, peer).items())][:4] == [4, 4, 3, 3]


def test_a_change_of_weights_begins_a_stage_but_brings_no_rules() -> None:
    bench = Bench(merged=1024)
    bench.handle(Change(1, "train", Reweigh({"a": 0.5}), 2))
    bench.produce(b"p", hello("p", "a", "b"))
    fill(bench)
    [peer] = ranks(bench, "r", 1, knows_stages=UNSET)
    stages = [part.stage for _, part in sorted(parts(bench, peer).items())]
    assert stages[0] is stages[1] is UNSET
    assert all(stage is not UNSET and (stage.number, stage.rules) == (1, UNSET) for stage in stages[2:])
    assert not bench.heard(peer, Reject)


def test_a_client_that_does_not_know_stages_ends_with_a_text_where_the_rules_change() -> None:
    bench = Bench(merged=1024)
    bench.handle(Change(1, "train", FEWER, 2))
    bench.produce(b"p", hello("p", "a", "b"))
    fill(bench)
    [peer] = ranks(bench, "old", 1, knows_stages=UNSET)
    assert sorted(parts(bench, peer)) == [0, 1]
    assert "Install version 0.2 or later" in bench.heard(peer, Reject)[-1].detail
    assert not bench.heard(peer, EndForMesh)


@pytest.mark.parametrize(
    ("rules", "key"),
    [
        ({"window": "auto"}, "window"), ({"in_turn": True}, "in_turn"), ({"stages": (FEWER,)}, "stages"),
        ({"balance": Balance(sliding=(8, 1))}, "balance.sliding"), ({"warmup": Warmup(8, 1, 4)}, "warmup.begin"),
        ({"streams": (StreamRules("a", no_loss_tokens="drop"),)}, "no_loss_tokens"),
    ],
)  # fmt: skip
def test_a_client_that_cannot_read_a_key_of_the_rules_is_told_so_when_it_attaches(rules: Any, key: str) -> None:
    bench = Bench(merged=1024, rules=rules)
    [peer] = ranks(bench, "old", 1, knows_stages=UNSET)
    refusal = bench.heard(peer, Reject)[-1]
    assert refusal.code == "version"
    assert f"cannot read the key {key} of this run's rules. Install version 0.2" in refusal.detail
    assert not bench.heard(peer, Attached)
    [peer] = ranks(bench, "new", 1)
    assert bench.heard(peer, Attached)


def test_a_mesh_that_a_stage_does_not_fit_gets_no_part_of_it_and_hears_so_at_each_request() -> None:
    bench = running(FEWER)
    peers = ranks(bench, "two", 2)
    for peer in peers:
        assert sorted(parts(bench, peer)) == [0, 1]
        end = bench.heard(peer, EndForMesh)[-1]
        assert (end.num_steps, end.name) == (2, "fewer")
        assert end.chain == parts(bench, peer)[1].chain
        assert "got dp=2, expected a divisor of the 3 packs of a step (1, 3)" in end.detail
        heard = len(bench.heard(peer, EndForMesh))
        bench.read(peer, get(64, start=2, done=1, request=1))
        assert len(bench.heard(peer, EndForMesh)) > heard
        assert bench.heard(peer, EndForMesh)[-1].request == 1
    assert bench.feed.readers.steps.released_upto == 1, "the last step in hand may be read again"


def test_without_an_end_for_the_mesh_its_part_of_the_stage_is_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServedSteps, "end_for", lambda self, number, mesh: None)
    bench = running(FEWER)
    with pytest.raises(ValueError, match="got dp=2 for a step of 3 packs"):
        ranks(bench, "two", 2)


def test_the_trainer_saves_and_comes_back_on_another_mesh_at_that_step() -> None:
    whole, bench = running(FEWER), running(FEWER)
    [alone] = ranks(whole, "one", 1)
    peers = ranks(bench, "two", 2)
    for peer in peers:
        bench.read(peer, get(64, start=2, done=2))
    bench.read(peers[0], AskState(feed="train", step=2))
    [state] = bench.heard(peers[0], State)
    bench.read(peers[0], Commit(feed="train", step=2))
    assert bench.heard(peers[0], Committed)
    for peer in peers:
        bench.read(peer, Bye())
    refused = attach("as before", next_step=2, chain=state.chain, dp=2, knows_stages=True)
    bench.read(b"as before", refused, fence=0)
    refusal = bench.heard(b"as before", Reject)[-1]
    assert refusal.code == "mesh"
    end = bench.heard(peers[0], EndForMesh)[-1]
    assert refusal.detail == str(StageEnds(2, "fewer", end.detail))
    three = ranks(bench, "three", 3, next_step=2, chain=state.chain)
    for peer in three:
        got, expected = parts(bench, peer), parts(whole, alone)
        assert sorted(got) == [step for step in sorted(expected) if step >= 2]
        assert all(part.digest == expected[step].digest for step, part in got.items())


def test_a_mesh_that_fits_only_a_later_stage_attaches_there_and_is_refused_at_the_begin() -> None:
    bench = running(FEWER)
    [peer] = ranks(bench, "r", 1)
    chain = parts(bench, peer)[1].chain
    bench.read(peer, get(64, start=2, done=2))
    bench.read(peer, Bye())
    bench.read(b"never", attach("never", dp=5, ready=False, knows_stages=True), fence=0)
    assert bench.heard(b"never", Reject)[-1].code == "mesh"
    bench.read(b"claims", attach("claims", dp=3, ready=False, knows_stages=True), fence=0)
    assert not bench.heard(b"claims", Reject)
    bench.read(b"claims", Bye())
    assert all(2 in parts(bench, each) for each in ranks(bench, "three", 3, next_step=2, chain=chain))


def test_a_mesh_of_a_later_stage_ends_at_once_at_a_step_that_was_not_formed_when_it_came() -> None:
    bench = Bench(merged=1024, stages=(FEWER,))
    peers = ranks(bench, "three", 3)
    assert not any(bench.heard(peer, Reject) for peer in peers)
    bench.produce(b"p", hello("p", "a", "b"))
    fill(bench)
    for peer in peers:
        assert not parts(bench, peer)
        assert (bench.heard(peer, EndForMesh)[-1].num_steps, bench.heard(peer, EndForMesh)[-1].name) == (0, "0")


@pytest.mark.parametrize(("step", "dp", "fits"), [(0, 4, True), (0, 8, False), (99, 8, False), (100, 8, True)])
def test_a_mesh_must_divide_every_number_of_packs_to_which_steps_grow(step: int, dp: int, fits: bool) -> None:
    rules = Rules(packs=24, packs_ramp=Warmup(init=4, steps=100))
    assert (mesh_refusal(Mesh(dp=dp), rules, "zigzag", step=step) == "") == fits
    for at in range(step, 110, 3):
        assert not fits or rules.packs_at(at) % dp == 0
