"""Packs are made a few at a time, when they are asked for: the same ones, once, in memory that is used again."""

import copy
import gc
import multiprocessing
import pickle
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import streampack
from streampack.core.model.mesh import Mesh
from streampack.errors import InternalError, PeerError, UserError
from streampack.packs import lazy
from streampack.packs.build import build_step
from streampack.packs.kernel_loader import kernels
from streampack.packs.pack import Pack
from streampack.packs.slabs import Slabs
from streampack.packs.step import Step, uncounted
from streampack.views.formats import Views
from streampack.views.view import View
from tests.packs.cases import Case, attached, cases, equal, parts

MANY = Case([[[number + 1] * 5, [number + 2] * 2] for number in range(10)], align=4, budget=16, cp=1)


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "GROUP_TOKENS", 1)


def step_of(case: Case, sizes: list[int] | None = None, slabs: Slabs | None = None) -> Step:
    messages = parts(case, 0, sizes or [len(case.packs)])
    return build_step(messages, attached(case), Mesh(cp=case.cp), slabs or Slabs())


@given(cases(), st.integers(1, 200), st.data())
def test_however_many_are_made_at_once_they_are_the_same(case: Case, tokens: int, data: st.DataObject) -> None:
    split = data.draw(st.integers(1, len(case.packs)))
    sizes = [split, len(case.packs) - split] if split < len(case.packs) else [split]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy, "GROUP_TOKENS", 1 << 40)
        together = step_of(case, sizes)
        patch.setattr(lazy, "GROUP_TOKENS", tokens)
        apart = step_of(case, sizes)
        assert [len(step.packs) for step in (together, apart)] == [len(case.packs)] * 2
        taken: Any = step_of(case, sizes).packs
        in_turn = [pack for number in range(taken.num_groups) for pack in taken.take(number)]
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


def test_lazy_packs_are_a_sequence_of_packs_that_are_kept() -> None:
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


def test_one_pass_over_lazy_packs_needs_the_memory_of_two_groups() -> None:
    slabs = Slabs()
    packs: Any = step_of(MANY, slabs=slabs).packs
    places, held = list[int](), None
    for number in range(packs.num_groups):
        held = packs.take(number)[-1]  # as a trainer has the last one while the next are made
        places.append(held.input_ids.__array_interface__["data"][0])
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
    assert "before the fork, expected packs that are already made" in said.get()
    child.join()
    with step.packs._making:  # type: ignore[attr-defined]  # as the client's thread may while the trainer forks
        child = fork.Process(target=look)
        child.start()
    assert "before the fork, expected packs that are already made" in said.get()
    child.join()
    assert np.array_equal(step[3].input_ids[:5], [4] * 5), "the parent goes on"


@pytest.mark.parametrize("taken", [True, False])
def test_the_next_packs_are_made_while_a_slow_trainer_works(taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread that is woken; a trainer that is fast would only wait for it, and makes it itself."""
    now, woken = [100.0], list[float]()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    ahead = lazy.Ahead(lambda: woken.append(now[0]))
    packs: Any = step_of(MANY).packs
    packs.ahead = ahead
    number = iter(range(packs.num_groups))
    made_by, who, make = list[str](), "trainer", packs._make

    def by_whom(number: int) -> Any:
        made_by.append(who)
        return make(number)

    monkeypatch.setattr(packs, "_make", by_whom)

    def ask() -> None:
        packs.take(next(number)) if taken else packs[next(number)]

    def step_in(passed_s: float) -> None:
        nonlocal who
        now[0] += passed_s
        who = "trainer"
        ask()
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
    for _ in range(5):
        ask()
        ahead.make()
    assert len(made_by) == len(packs)
    ahead.stop()
    ahead.note_handed_out(packs, 0)
    assert len(woken) == 3, "nobody is woken who has ended"


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
            made: Any = uncounted(step.packs)
            assert made._made[0] is not None
            assert len(list(step)) == 8


def test_a_message_is_let_go_with_its_last_pack() -> None:
    """A step that is kept holds its packs, not the memory of the broker that they came in."""
    step = step_of(MANY, [4, 6])
    packs: Any = step.packs
    came = [weakref.ref(group[0].tokens.input_ids) for group in (packs._groups[0], packs._groups[9])]
    packs[:4]
    gc.collect()
    assert [content() is None for content in came] == [True, False]
    for number in range(4, 10):
        packs.take(number)
    assert [content() is None for content in came] == [True, True]
    assert [pack.micro_batch for pack in packs[:4]] == [0, 1, 2, 3]
    with pytest.raises(InternalError, match="second request for group 5 of a step's packs"):
        packs[5]


def test_an_interrupted_caller_may_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And has missed nothing; nor does a group that could not be made ahead end anything."""
    texts = [f"text number {number} " * 3 for number in range(40)]
    with streampack.local(texts, budget=64, packs=8, format="numpy", repeat=True) as loader:
        whole = [pack.sample_ids.tolist() for pack, _ in zip(loader, range(40), strict=False)]
    failing, make = [KeyboardInterrupt, MemoryError], lazy.LazyPacks._make

    def breaks(packs: Any, number: int) -> Any:
        if failing and threading.current_thread() is threading.main_thread():
            raise failing.pop()
        if number == 3 and threading.current_thread() is not threading.main_thread():
            raise MemoryError("none for what is made ahead")
        return make(packs, number)

    monkeypatch.setattr(lazy.LazyPacks, "_make", breaks)
    monkeypatch.setattr(lazy, "SLOW_S", 0.0)
    kernels.load()
    kernels.wait()
    found = list[Any]()
    with streampack.local(texts, budget=64, packs=8, format="numpy", repeat=True) as loader:
        while len(found) < 40:
            try:
                found.append(next(loader).sample_ids.tolist())
            except (KeyboardInterrupt, MemoryError):
                continue
    assert found == whole
    assert not failing


def test_packs_that_are_asked_for_in_inference_mode_may_be_trained_on() -> None:
    rules, embedding = attached(MANY).rules, torch.nn.Embedding(32, 4)
    for format in ("thd", "hf", "megatron", "bshd", "torchtitan"):
        step = Views(format, Mesh()).make(step_of(MANY), rules)
        with torch.inference_mode(), torch.device("meta"):
            first = step[0]
        assert not any(tensor.is_inference() or tensor.is_meta for tensor in first.tensors().values()), format
        embedding(first.input_ids).sum().backward()


def test_lazy_packs_compare_as_tuples_do() -> None:
    packs = step_of(MANY).packs
    whole = tuple(packs)
    assert packs == whole
    assert whole == packs
    assert hash(packs) == hash(whole)
    assert packs != whole[1:]
    with pytest.raises(UserError, match=r"Use tuple\(step\)"):
        type(packs)(list(packs))
