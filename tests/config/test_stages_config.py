"""Stages in broker.yaml: a mistake names the stage, the key and the line to write; memory suits the largest stage."""

import json
import re
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from streampack_services.broker.memory_plan import plan

from streampack.client.state import Origin, load, save
from streampack.config.config_validation import checked
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.stage_settings import other_stages, written
from streampack.config.typed_yaml import convert, parse_amount
from streampack.core.model.capacity import needed_tokens
from streampack.core.model.keys.planning_keys import Balance, Warmup
from streampack.core.model.keys.stage_keys import Stage, StageBegin, StageRules
from streampack.core.model.rule_changes import rules_of_stages
from streampack.core.model.rules import Align, Rules
from streampack.core.protocol.trainer_messages import State
from streampack.core.sessions.client_events import Begin
from streampack.errors import ConfigError, StateError

RUN = """
rules: {budget: 8192, step: {packs: 64}, overlong: split}
planned_mesh: {dp: 16}
streams: {web: {}, books: {}, math: {}}
"""


def read(text: str, run: str = RUN) -> BrokerConfig:
    """Return the checked configuration of a run with more keys."""
    return checked(convert(yaml.safe_load(run + text), BrokerConfig, "broker.yaml"))


def refusal(text: str, run: str = RUN) -> str:
    with pytest.raises(ConfigError) as error:
        read(text, run)
    return str(error.value).removeprefix("broker.yaml: ")


def test_stages_become_rules_that_name_only_what_they_change() -> None:
    rules = read("""
stages:
  - {name: ramp, at: {step: 0}, rules: {step: {packs: {from: 32, to: 64, over: 2000}}}}
  - {name: long, at: {tokens: 2T}, rules: {budget: 32768, step: {packs: 16}, window: {samples: 99}, tail: drop},
     weights: {books: 0.5, web: 0.5}}
  - {name: anneal, at: {tokens: 2.8T}, weights: {math: 1}, over: 1000}
""").plan()
    ramp, long, anneal = rules.stages
    assert ramp.rules == StageRules(packs=64, packs_ramp=Warmup(32, 2000))
    assert long.rules == StageRules(budget=32768, packs=16, window=99, tail="drop")
    assert (long.at, anneal.at) == (StageBegin(tokens=2 * 10**12), StageBegin(tokens=28 * 10**11))
    assert (anneal.rules, anneal.weights, anneal.over) == (StageRules(), {"math": 1.0}, 1000)
    first, ramped, _, last = rules_of_stages(rules)
    assert [first.packs_at(0), ramped.packs_at(0), ramped.packs_at(1000), ramped.packs_at(2000)] == [64, 32, 32, 64]
    assert [stream.name for stream in last.streams if stream.gives] == ["math"]


def test_a_run_without_stages_keeps_its_digest() -> None:
    assert read("stages: []").plan().digest == read("").plan().digest
    assert read("stages: [{name: a, at: {step: 3}, rules: {tail: drop}}]").plan().digest != read("").plan().digest
    assert b"stages" not in msgspec.json.encode(read("").plan())


def test_a_planned_mesh_decides_the_alignment_and_the_groups_of_a_stage() -> None:
    run = RUN.replace("overlong: split", "overlong: split, balance: {kind: joint}")
    rules = read("""
stages:
  - {name: long, at: {step: 9}, rules: {budget: 32768, step: {packs: 24}}, planned_mesh: {dp: 8, cp: 2}}
  - {name: even, at: {step: 19}, rules: {balance: {order: packer}}}
  - {name: deal, at: {step: 29}, rules: {balance: {kind: deal}, align: {pack: 32}}}
""", run).plan()  # fmt: skip
    after = rules_of_stages(rules)
    assert [each.align for each in after] == [Align(), Align(4, 4), Align(4, 4), Align(4, 32)]
    assert [each.balance.group for each in after] == [16, 8, 8, None]
    assert after[2].balance == Balance("joint", group=8, order="packer")
    assert after[3].balance == Balance("deal", order="packer")


def test_a_feed_has_stages_of_its_own_in_place_of_the_run_s() -> None:
    config = read("""
stages: [{name: all, at: {step: 5}, rules: {tail: drop}}]
feeds:
  a: {streams: [web, books]}
  b: {streams: [math], stages: [{name: own, at: {step: 3}, rules: {budget: 4096}}]}
  c: {streams: [news], stages: []}
""", RUN.replace("math: {}", "math: {}, news: {}"))  # fmt: skip
    assert [[stage.name for stage in config.plan(feed).stages] for feed in "abc"] == [["all"], ["own"], []]


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("at: {step: 1}, rules: {tail: drop}", "stages[0]: got no key 'name', which is required. Write, for example,"),
        ("name: a, rules: {tail: drop}", "stages.a: got no key 'at', which is required. Write, for example, `at: {s"),
        ("name: a, at: {}, rules: {tail: drop}", "stages.a: got a begin of a stage with neither of the keys step and"),
        ("name: a, at: {step: 1, tokens: 1}, rules: {tail: drop}", "stages.a: got a begin of a stage with both of"),
        ("name: a, at: {tokens: 2X}, rules: {tail: drop}", "stages.a.at.tokens: got '2X', expected a whole number, or"),
        ("name: a, at: {step: 1}", "stages.a: got a stage that changes nothing, expected the key rules, weights or"),
        ("name: a, at: {step: 1}, over: 4, rules: {tail: drop}", "stages.a: got `over: 4` without `weights`, expected"),
        # keys that a stage cannot change
        ("name: a, at: {step: 1}, rules: {seed: 3}", "stages.a.rules: got the unknown key 'seed', expected one of: "),
        ("name: a, at: {step: 1}, rules: {step: {samples: 3}}", "stages.a.rules.step: got the unknown key 'samples', "),
        ("name: a, at: {step: 1}, rules: {budgt: 3}", "stages.a.rules: got the unknown key 'budgt', expected one of:"),
        ("name: a, at: {step: 1}, step: {packs: 3}", "stages.a: got the unknown key 'step', expected one of: name, at"),
        # values
        ("name: a, at: {step: 1}, rules: {budget: big}", "stages.a.rules.budget: got 'big', expected a whole number"),
        ("name: a, at: {step: 1}, rules: {budget: 1026}, planned_mesh: {dp: 2, cp: 2}",
         "stages.a.rules.budget: got 1026, expected a multiple of 4, the alignment of packs. Use 1024"),
        ("name: a, at: {step: 1}, rules: {budget: {from: 2, to: 1024, over: 3}}, planned_mesh: {dp: 2, cp: 2}",
         "stages.a.rules.budget: got 2, expected a multiple of 4"),
        ("name: a, at: {step: 1}, rules: {budget: {from: 9, to: 4, over: 3}}",
         "stages.a.rules.budget: got a ramp from 9 to 4, expected one that rises. Write `budget: 4`"),
        ("name: a, at: {step: 1}, rules: {packer: concatenative, balance: {kind: joint}}",
         "stages.a: got `balance.kind: joint` with `packer: concatenative`, expected `packer: exact_fill`"),
        ("name: a, at: {step: 1}, rules: {limits: {items: 4}}", "stages.a: got `limits` without fields of axis item "),
        ("name: a, at: {step: 1}, rules: {align: {lcm: 4}}",
         "stages.a.rules.align: got `lcm: 4` without `planned_mesh`, expected a planned mesh in the stage"),
        ("name: a, at: {step: 1}, rules: {staleness: {max_policy_lag: 1}}",
         "stages.a.rules: got the unknown key 'staleness', expected"),
        # the mixture
        ("name: a, at: {step: 1}, weights: {web: x}", "stages.a.weights.web: got 'x', expected a number"),
        ("name: a, at: {step: 1}, weights: {math: 1, web: -1}", "stages.a.weights.web: got -1, expected a number >= 0"),
        ("name: a, at: {step: 1}, weights: {news: 1}", "stages.a: got stream 'news', expected one of: web, books, m"),
        ("name: a, at: {step: 1}, weights: {web: 0}",
         "stages.a: stream 'web': got weight 0 in a stage, expected a weight above 0. Leave the stream out to pause"),
        ("name: a, at: {step: 1}, weights: {web: 9999, math: 1}", "stages.a: stream 'math': got weight 1, expected "),
        # several stages
        ("name: a, at: {step: 5}, rules: {tail: drop}}, {name: b, at: {step: 3}, rules: {budget: 4096}",
         "stages.b: got `at: {step: 3}` after stage 'a', which begins at step 5, expected stages in the order"),
        ("name: a, at: {tokens: 5}, rules: {tail: drop}}, {name: b, at: {tokens: 3}, rules: {budget: 4096}",
         "stages.b: got `at: {tokens: 3}` after stage 'a', which begins at 5 tokens, expected stages in the order"),
        ("name: a, at: {step: 5}, rules: {tail: drop}}, {name: b, at: {step: 5}, rules: {tail: pad}",
         "stages.b: got tail at step 5, where stage 'a' changes it, too, expected one value. Remove it from one"),
        ("name: a, at: {step: 5}, rules: {tail: drop}}, {name: a, at: {step: 6}, rules: {tail: pad}",
         "stages.a: got a second stage with this name, expected a name of its own, such as a_2"),
        # meshes
        ("name: a, at: {step: 1}, rules: {step: {packs: 24}}",
         "stages.a: no planned mesh can read this stage: got dp=16, expected a divisor of the 24 packs of a step (1"),
        ("name: a, at: {step: 1}, rules: {step: {packs: {from: 24, to: 48, over: 9}}}",
         "stages.a: no planned mesh can read this stage: got dp=16, expected a divisor of the 24 packs by which"),
        ("name: a, at: {step: 1}, planned_mesh: {dp: 8}}, {name: b, at: {step: 2}, rules: {step: {packs: 12}}",
         "stages.b: no planned mesh can read this stage: got dp=8, expected a divisor of the 12 packs of a step (1,"),
    ],
)  # fmt: skip
def test_a_mistake_names_the_stage_and_what_was_expected(stage: str, said: str) -> None:
    assert refusal(f"stages: [{{{stage}}}]").startswith(said)


def test_a_mistake_in_a_feed_names_the_feed_the_stage_and_the_stream() -> None:
    text = "feeds: {train: {stages: [{name: a, at: {step: 1}, weights: {math: 1, web: x}}]}}"
    assert refusal(text) == "feeds.train.stages.a.weights.web: got 'x', expected a number"
    text = "feeds: {train: {stages: [{name: a, at: {step: 1}, weights: {math: 1, news: 2}}]}}"
    assert refusal(text) == "feeds.train.stages.a: got stream 'news', expected one of: web, books, math"


def test_a_key_that_stays_is_told_so_and_one_in_another_place_too() -> None:
    stays = "It stays for the whole run. Start a new run to change it"
    for keys in (
        "seed: 1",
        "step: {end_of_batch: true}",
        "staleness: {on_exceed: wait}",
        "share: prefix",
        "in_turn: true",
    ):
        assert refusal(f"stages: [{{name: a, at: {{step: 1}}, rules: {{{keys}}}}}]").endswith(stays)
    assert refusal("stages: [{name: a, at: {step: 1}, budget: 4}]").endswith("Write it under `rules`")
    text = refusal("stages: [{name: a, at: {step: 1}, rules: {warmup: {init: 8, steps: 4}}}]")
    assert text.endswith("Write `budget: {from: 2048, to: 8192, over: 1000}`")


@pytest.mark.parametrize(
    ("run", "keys", "said"),
    [
        ("merge: arrival\n", "weights: {web: 1}", "stages.a: got `weights` with `merge: arrival`, expected no weights"),
        ("state_dir: x\nmerge: arrival\nrules: {share: prefix}\nstreams: {web: {pushed: true}}", "rules: {budget: 64}",
         "stages.a: got `rules.budget` in a feed with `share: prefix`, expected no budget, because the samples of a"),
        ("rules: {step: {samples: 8}}\nstreams: {web: {}}", "rules: {step: {packs: 8}}",
         "stages.a: got `rules.step` in a feed whose step is a batch" ),
        ("rules: {step: {samples: 8}}\nstreams: {web: {}}", "rules: {window: auto}", "stages.a: got `rules.window` in"),
    ],
)  # fmt: skip
def test_a_feed_that_cannot_change_refuses_the_stage(run: str, keys: str, said: str) -> None:
    run = run if "streams" in run else run + "streams: {web: {}}"
    assert refusal(f"\nstages: [{{name: a, at: {{step: 1}}, {keys}}}]", run).startswith(said)


def test_memory_is_planned_for_the_largest_stage_and_the_error_names_it() -> None:
    small = "rules: {budget: 1024, step: {packs: 8}, window: {samples: 64}}\nstreams: {web: {}}\n"
    long = (
        "stages: [{name: long, at: {step: 9}, rules: {budget: 8192}}, {name: end, at: {step: 19}, rules: {budget: 64}}]"
    )
    config = read(long, "memory: 64MiB\nlimits: {sample_tokens: 9000}\n" + small)
    whole, staged = plan(read(small, "memory: 64MiB\nlimits: {sample_tokens: 9000}\n")), plan(config)
    assert staged.block_tokens >= 8 * 8192 > 8 * 1024
    assert needed_tokens(staged.rules, 9) == needed_tokens(Rules(budget=8192, packs=8, window=64), 9)
    assert needed_tokens(staged.rules, 9) > needed_tokens(whole.rules, 9)
    with pytest.raises(ConfigError, match=r"memory: got 2MiB, .* 8 packs of 8192 tokens in each step in stage 'long'"):
        plan(msgspec.structs.replace(config, memory="2MiB"))


def test_memory_is_planned_for_the_first_packs_of_a_ramp_that_falls() -> None:
    fall = "stages: [{name: a, at: {step: 9}, rules: {step: {packs: {from: 512, to: 16, over: 4}}}}]"
    assert needed_tokens(read(fall).plan(), 9) == needed_tokens(
        msgspec.structs.replace(read("").plan(), packs=512), 9
    )  # fmt: skip


@given(st.integers(0, 2**61))
def test_amounts_of_tokens_are_exact(number: int) -> None:
    assert parse_amount(number, "at") == parse_amount(str(number), "at") == number
    assert parse_amount(f"{number % 10**6}M", "at") == number % 10**6 * 10**6


@pytest.mark.parametrize("text", ["2X", "-1", "1.5", "", "T", True, 1.5, "0.0000001k", 2**62, "1e99", "nan"])
def test_what_is_no_amount_is_refused(text: str | float) -> None:
    with pytest.raises(ConfigError, match=r"at: got .*, expected a whole number, or text such as 500M, 20B or 2\.8T"):
        parse_amount(text, "at")
    assert parse_amount("1e12", "at") == parse_amount(1e12, "at") == 10**12


@given(
    st.sampled_from([{"step": 4}, {"tokens": "2T"}]),
    st.none() | st.sampled_from([{"web": 1.0}, {"web": 0.5, "math": 2}]),
    st.fixed_dictionaries({}, optional={
        "budget": st.sampled_from([4096, {"from": 64, "to": 8192, "over": 9}]), "tail": st.just("drop"),
        "step": st.sampled_from([{"packs": 16}, {"packs": {"from": 64, "to": 16, "over": 3}}]),
        "window": st.sampled_from(["auto", {"samples": 7}]), "overlong": st.just("drop"),
        "packer": st.just("concatenative"), "max_samples_per_pack": st.sampled_from([3, None]),
        "align": st.sampled_from([{"pack": 2}, {"sample": 2, "pack": 4}]),
        "balance": st.sampled_from([{"kind": "none"}, {"hidden_size": 64, "order": "packer"}]),
    }),
)  # fmt: skip
def test_a_stage_is_written_as_it_is_read(at: dict[str, Any], weights: dict[str, float] | None, rules: Any) -> None:
    tree = {"name": "a", "at": at, "rules": rules, "weights": weights or {"web": 1.0}, "over": 5}
    [stage] = read(f"stages: {json.dumps([tree])}").plan().stages
    assert read(f"stages: {json.dumps([written(stage)])}").plan().stages == (stage,)


def test_differences_of_stages_are_named() -> None:
    def stages(text: str) -> tuple[Stage, ...]:
        return read(f"stages: [{text}]").plan().stages

    a, b = "{name: a, at: {step: 5}, rules: {tail: drop}}", "{name: b, at: {step: 5}, rules: {budget: 64}}"
    assert other_stages(stages(f"{a}, {b}"), stages(f"{a}, {b}")) == ""
    assert other_stages(stages(f"{b}, {a}"), stages(f"{a}, {b}")) == "the order differs"
    assert other_stages(stages(f"{a}, {b}"), stages(a.replace("5", "6"))) == "a (differs), b (is new)"
    assert other_stages((), stages(b)) == "b (is missing)"


def test_a_state_of_a_run_with_other_stages_says_the_stages_to_write() -> None:
    ours, theirs = read(""), read("stages: [{name: a, at: {step: 5}, rules: {budget: 64}}]")
    begin = State(feed="train", lineage=0, step=7, chain=b"", snapshot=None)
    saved = save(Origin(1, "train", theirs.plan()), 0, begin)
    with pytest.raises(StateError) as error:
        load(saved, Origin(1, "train", ours.plan()))
    said = "rules.stages: got a state of a run with other stages: a (is missing). To go on from the state, write its"
    assert str(error.value).startswith(said)
    line = re.search("`(stages: .*)`", str(error.value))
    assert line is not None
    assert load(saved, Origin(1, "train", read(line[1]).plan())) == Begin(7, b"", 0, 0, None)
