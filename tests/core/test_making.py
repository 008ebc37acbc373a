"""Packs are made a few at a time, when they are asked for: the same ones, once, in memory that is used again."""

import copy
import multiprocessing
import pickle
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streampack
from streampack import making
from streampack.building import build_step
from streampack.core.messages import Mesh
from streampack.errors import PeerError
from streampack.formats import View, Views
from streampack.packs import Pack, Step
from streampack.slabs import Slabs
from tests.core.test_packs import Case, attached, cases, equal, parts

MANY = Case([[[number + 1] * 5, [number + 2] * 2] for number in range(10)], align=4, budget=16, cp=1)


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "GROUP_TOKENS", 1)


def step_of(case: Case, sizes: list[int] | None = None, slabs: Slabs | None = None) -> Step:
    messages = parts(case, 0, sizes or [len(case.packs)])
    return build_step(messages, attached(case), Mesh(cp=case.cp), slabs or Slabs())


@given(cases(), st.integers(1, 200), st.data())
def test_however_many_are_made_at_once_they_are_the_same(case: Case, tokens: int, data: st.DataObject) -> None:
    split = data.draw(st.integers(1, len(case.packs)))
    sizes = [split, len(case.packs) - split] if split < len(case.packs) else [split]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "GROUP_TOKENS", 1 << 40)
        together = step_of(case, sizes)
        patch.setattr(making, "GROUP_TOKENS", tokens)
        apart = step_of(case, sizes)
        assert [len(step.packs) for step in (together, apart)] == [len(case.packs)] * 2
        in_turn = [pack for group in step_of(case, sizes).packs.groups() for pack in group]  # type: ignore[attr-defined]
        for pack, other, third in zip(together, apart, in_turn, strict=True):
            assert equal(pack, other)
            assert equal(pack, third)
        assert together.num_tokens == sum(int(pack.cu_seqlens[-1]) for pack in together)


@pytest.mark.parametrize("format", ["thd", "hf", "megatron", "bshd", "torchtitan"])
def test_views_are_made_with_their_packs(format: str) -> None:
    rules = attached(MANY).rules
    found = Views(format, Mesh()).make(step_of(MANY), rules)
    views: list[View] = list(found)
    assert [view.pack for view in views] == [pack.pack for pack in step_of(MANY)]
    for view, pack in zip(views, step_of(MANY), strict=True):
        assert view.canonical is not None
        assert equal(view.canonical, pack)
        assert view.input_ids.flatten().tolist() == pack.input_ids.tolist()


def test_they_are_a_sequence_of_packs_that_are_kept() -> None:
    step = step_of(MANY, [3, 7])
    last = step[-1]
    packs: list[Pack] = list(step)
    assert [pack.micro_batch for pack in packs] == list(range(10))
    assert packs[9] is last is step.packs[9]
    assert all(step[i] is pack for i, pack in enumerate(packs))
    assert step.packs[2:9:3] == (packs[2], packs[5], packs[8])
    assert step.packs[::-1] == tuple(reversed(packs)) == tuple(reversed(step.packs))
    assert packs[4] in step.packs
    assert step.packs.index(packs[4]) == 4
    assert repr(step.packs) == "<10 packs>"
    for outside in (10, -11):
        with pytest.raises(IndexError):
            step[outside]
    packs[3].labels[:] = 7
    assert (step[3].labels == 7).all(), "who changes a pack finds it changed"


def test_a_step_is_pickled_and_copied_with_its_packs_made() -> None:
    step = step_of(MANY)
    for other in (pickle.loads(pickle.dumps(step)), copy.deepcopy(step)):
        assert isinstance(other.packs, tuple)
        assert all(equal(a, b) for a, b in zip(step, other, strict=True))


def test_who_goes_through_them_once_needs_the_memory_of_two_groups() -> None:
    slabs = Slabs()
    packs: Any = step_of(MANY, slabs=slabs).packs
    groups, places, held = packs.groups(), list[int](), None
    while (group := next(groups, None)) is not None:
        held = group[-1]  # as a trainer has the last one while the next are made
        places.append(held.input_ids.__array_interface__["data"][0])
        del group
    del held
    assert len(places) == 10
    assert len(set(places)) == 2
    assert slabs.num_idle == 2


def test_threads_get_the_same_packs() -> None:
    step, found = step_of(MANY), list[list[Pack]]()
    threads = [threading.Thread(target=lambda: found.append(list(step))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(a is b for each in found for a, b in zip(each, found[0], strict=True))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_has_those_that_were_made() -> None:
    """The memory in which the others came is lent to the parent, which gives it back when it is done."""
    step = step_of(MANY)
    made = step[2]
    fork = multiprocessing.get_context("fork")
    said = fork.SimpleQueue()

    def look() -> None:
        try:
            assert step[2] is made
            said.put(step[3])
        except PeerError as error:
            said.put(str(error))

    child = fork.Process(target=look)
    child.start()
    assert "before the fork, expected made ones" in said.get()
    child.join()
    assert np.array_equal(step[3].input_ids[:5], [4] * 5), "the parent goes on"


def test_what_a_slow_trainer_asks_for_next_is_made_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread that is woken; a trainer that is fast would only wait for it, and makes it itself."""
    now, woken = [100.0], list[float]()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    ahead = making.Ahead(lambda: woken.append(now[0]))
    packs: Any = step_of(MANY).packs
    packs.ahead = ahead
    groups = packs.groups()
    made_by, who, make = list[str](), "trainer", packs._make

    def by_whom(number: int) -> Any:
        made_by.append(who)
        return make(number)

    monkeypatch.setattr(packs, "_make", by_whom)

    def step_in(passed_s: float) -> None:
        nonlocal who
        now[0] += passed_s
        who = "trainer"
        next(groups)
        who = "client"
        ahead.make()

    step_in(1.0)  # the first: nothing was known of its pace but that it has not asked for long
    assert (made_by, woken) == (["trainer", "client"], [101.0])
    step_in(0.5)
    assert made_by == ["trainer", "client", "client"], "it found the second made, and the third is"
    step_in(0.001)
    step_in(0.001)
    assert made_by == ["trainer", "client", "client", "trainer"]
    assert not ahead.slow
    step_in(0.5)
    assert made_by[4:] == ["trainer", "client"]
    packs.make_group(0)
    assert len(made_by) == 6, "what was handed out is not made again"
    while next(groups, None) is not None:
        ahead.make()
    assert len(made_by) == len(packs)


def test_steps_of_a_slow_trainer_come_with_their_first_packs_made() -> None:
    """And all of them where there is no kernel: a client as a trainer has it, in threads."""
    texts = [f"text number {number} " * 3 for number in range(40)]
    with streampack.local(texts, budget=64, packs=8, format="numpy", repeat=True) as loader:
        steps = loader.steps()
        first = next(steps)
        for expected in (1, 2):
            time.sleep(0.3)
            step = next(steps)
            assert step.index == first.index + expected
            made: Any = step.packs
            assert made._made[0] is not None
            assert len(list(step)) == 8
