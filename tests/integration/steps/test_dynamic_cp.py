"""A feed with ``cp: dynamic``: each rank gets its shard of the packs of its groups, and the steps stay as they are."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

import streampack as sp
from streampack.client.reading_stats import UsefulFlops
from streampack.config.typed_yaml import convert
from streampack.core.deal.dynamic_cp.cp_plan import CpCosts, plan_groups, plan_uniform
from streampack.core.model import mesh as mesh_module
from streampack.core.model.keys.planning_keys import Balance
from streampack.core.model.mesh import PLANNER, DynamicCp, Mesh
from streampack.errors import ConfigError, InvariantError, UserError
from streampack.packs.pack import Pack
from streampack.packs.step import Step
from streampack.sources import Source, SourceSettings, open_source
from tests.core.layout.transformer_engine import te_indices
from tests.integration.running import (
    PATIENCE_S,
    RunningBroker,
    folder,
    in_process,
    producing_here,
    running_broker,
    the_error,
    write,
    write_jsonl,
)
from tests.soak.job import fixed_listen

LENGTHS = [int(x) for x in np.random.default_rng(3).lognormal(3.5, 1.2, 400).clip(1, 500)]
RULES: dict[str, Any] = {"budget": 512, "step": {"packs": 6}, "shape": "exact", "window": {"samples": 64}}
DYNAMIC = {"cp": "dynamic", "rank_tokens": 64, "max_group": 8, "exchange": {"node": 0.05, "across": 0.2}}


def settings(feed: dict[str, Any], state_dir: Path | None = None, **planned: int) -> dict[str, Any]:
    return ({} if state_dir is None else {"state_dir": str(state_dir)}) | {
        "rules": RULES, "feeds": {"train": feed}, "planned_mesh": planned, "streams": {"web": {"partitions": 1}},
        "fields": {"weight": {"dtype": "float32"}, "whole": {"dtype": "int32", "cp": "replicate"}},
    }  # fmt: skip


def tokens_of(sample: int) -> list[int]:
    return [(sample * 7 + at * 3) % 60000 for at in range(LENGTHS[sample])]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The stream of producer.yaml."""
    rows = [
        {"tokens": tokens_of(i), "weight": [t / 2 for t in tokens_of(i)], "whole": tokens_of(i)}
        for i in range(len(LENGTHS))
    ]
    return {"source": "jsonl", "shards": str(write_jsonl(tmp_path_factory.mktemp("data") / "web.jsonl", rows))}


@pytest.fixture(scope="module")
def source(data: dict[str, str]) -> Source:
    return open_source(convert(data, SourceSettings))


def read_ranks(broker: Any, source: Source, dp: int, cp: int, **options: Any) -> list[list[Step[Pack]]]:
    def read(rank: int) -> list[Step[Pack]]:
        mesh = {"dp": dp, "cp": cp, "dp_rank": rank // cp, "cp_rank": rank % cp}
        with sp.connect(broker.trainers, mesh=mesh, format="numpy", **options) as loader:
            steps = list(loader.steps())
            for step in steps:
                tuple(step)  # made while the client lives
            if "verify" in options:
                steps[2].report({"third": steps[2].sample_ids[:, 1] / 3}, reduce="same")
                steps[2].report({"ranks": np.ones(len(steps[2].sample_ids))})
            return steps

    with producing_here(broker.producers, {"web": source}), ThreadPoolExecutor(dp * cp) as pool:
        return list(pool.map(read, range(dp * cp), timeout=PATIENCE_S))


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "state"


@pytest.fixture(scope="module")
def broker(state: Path) -> Iterator[RunningBroker]:
    with running_broker(settings(DYNAMIC, state, dp=2, cp=4)) as found:
        yield found


@pytest.fixture(scope="module")
def dynamic(source: Source, broker: RunningBroker) -> list[list[Step[Pack]]]:
    return read_ranks(broker, source, 2, 4, verify=True)


def test_values_that_all_ranks_of_a_group_report_count_once_or_are_added(
    broker: RunningBroker, dynamic: list[list[Step[Pack]]]
) -> None:
    values, ids = dict[str, list[float]](), list[int]()
    with sp.results(broker.trainers, start="oldest", timeout_s=PATIENCE_S) as results:
        for found in results:
            values |= {name: column.tolist() for name, column in found.values.items()}
            ids = found.sample_ids[:, 1].tolist()
            if values.keys() == {"third", "ranks"}:
                break
    sizes = dict[int, int]()
    for steps in dynamic:
        for pack in tuple(steps[2]):
            sizes |= dict.fromkeys(pack.sample_ids[:, 1].tolist(), pack.cp_size or 0)
    assert dict(zip(ids, values["ranks"], strict=True)) == sizes
    assert values["third"] == [sample / 3 for sample in ids]
    assert {1, 2, 4, 8} <= {*sizes.values()}


def test_steps_are_those_of_static_cp_on_any_mesh(source: Source, dynamic: list[list[Step[Pack]]]) -> None:
    digests = [step.digest for step in dynamic[0]]
    assert len(digests) > 3
    assert all([step.digest for step in steps] == digests for steps in dynamic)
    with running_broker(settings({})) as broker:
        assert [step.digest for step in read_ranks(broker, source, 1, 1)[0]] == digests
    with running_broker(settings(DYNAMIC | {"rank_tokens": 256}, dp=2)) as broker:
        assert [step.digest for step in read_ranks(broker, source, 2, 1)[0]] == digests


def test_the_shards_of_a_group_are_its_pack_and_every_sample_is_in_one_pack(dynamic: list[list[Step[Pack]]]) -> None:
    sizes = set()
    seen: list[int] = []
    for steps in zip(*dynamic, strict=True):
        ids = []
        for packs in zip(*map(tuple, steps), strict=True):
            covered: list[int] = []
            while len(covered) < 8:
                first = len(covered)
                lead = packs[first]
                assert lead.cp_ranks is not None
                assert lead.cp_ranks[0] == first
                group = packs[first : first + lead.cp_ranks[1]]
                covered += range(first, first + len(group))
                sizes.add(len(group))
                check_group(group)
                ids += lead.sample_ids[:, 1].tolist()
        assert len(ids) == steps[0].num_samples
        seen += ids
    assert sorted(seen) == list(range(len(LENGTHS)))
    assert {1, 8} < sizes


def test_the_shards_of_each_group_hold_what_transformer_engine_would_take(dynamic: list[list[Step[Pack]]]) -> None:
    """``whole`` has the tokens of the whole pack, in its order."""
    sizes = set[int]()
    for steps in dynamic:
        for pack in (pack for step in steps for pack in tuple(step)):
            size, bounds = pack.cp_size or 0, pack.cu_seqlens_padded.tolist()
            at = te_indices(bounds, size, pack.cp_rank)
            assert pack.input_ids.tolist() == pack.fields["whole"][at].tolist()
            sizes.add(size)
    assert sizes >= {1, 2, 4, 8}


def test_the_costliest_ranks_of_the_served_parts_cost_what_the_plan_says(dynamic: list[list[Step[Pack]]]) -> None:
    """Costs are computed from the boundaries of the packs that ranks got, and compared with static groups."""
    costs, in_all = CpCosts(*Balance().factors, 0.05, 0.2, 8), [0.0, 0.0]
    for number in range(len(dynamic[0])):
        ranks = [tuple(steps[number]) for steps in dynamic]
        lengths = dict[int, int]()
        critical = 0.0
        for micro_batch in zip(*ranks, strict=True):
            critical += max(cost_of_pack(pack, costs) for pack in micro_batch)
            for pack in micro_batch:
                lengths |= zip(pack.sample_ids[:, 1].tolist(), np.diff(pack.cu_seqlens).tolist(), strict=False)
        column = np.array(list(lengths.values()), np.int64)
        plan, static = plan_groups(column, 8, 64, 8, costs), plan_uniform(column, 8, 64, 8, costs)
        assert critical == pytest.approx(plan.critical_path, rel=1e-3)
        in_all = [in_all[0] + critical, in_all[1] + static.critical_path]
    assert in_all[0] < 0.9 * in_all[1]


def cost_of_pack(pack: Pack, costs: CpCosts) -> float:
    """The cost of a pack for one rank of its group, by the boundaries of its samples with padding."""
    size, slots = pack.cp_size or 1, np.diff(pack.cu_seqlens_padded)[: pack.num_samples].astype(np.float64)
    link = costs.node if size <= costs.ranks_of_node else costs.across
    return float((costs.a * slots + costs.b * slots**2 + link * costs.a * slots * (size - 1)).sum()) / size


def test_the_useful_flops_of_all_ranks_are_those_of_the_samples(dynamic: list[list[Step[Pack]]]) -> None:
    model = sp.ModelFlops(token=5, pair=7, window_pair=3, window=16)
    useful = UsefulFlops(model, 4, 1, 0.0)
    for number in range(len(dynamic[0])):
        steps = [of_rank[number] for of_rank in dynamic]
        samples = {tuple(pack.sample_ids[at]): size for step in steps for pack in step for at, size in _lengths(pack)}
        assert sum(map(useful.of, steps)) == pytest.approx(model.samples(np.array(list(samples.values()))), rel=1e-9)


def _lengths(pack: Pack) -> list[tuple[int, int]]:
    return list(enumerate(np.diff(pack.cu_seqlens)[: pack.num_samples].tolist()))


Read = tuple[str, list[tuple[Any, ...]]]


def contents(step: Step[Pack]) -> Read:
    """The digest of a step, and of each pack its ranks and the bytes of its arrays."""
    arrays = ("input_ids", "labels", "position_ids", "cu_seqlens_padded", "sample_ids")
    return step.digest, [(pack.cp_ranks, *(getattr(pack, name).tobytes() for name in arrays)) for pack in step]


def test_ranks_get_the_same_bytes_when_brokers_and_ranks_are_killed(
    source: Source, dynamic: list[list[Step[Pack]]]
) -> None:
    """The broker is killed twice. The first time ranks go on in place, the second time they begin at a checkpoint."""
    with folder() as path, ExitStack() as ends:
        conf = settings(DYNAMIC, path / "state", dp=2, cp=4) | {"listen": fixed_listen(path)}
        brokers = [RunningBroker(path, conf)]
        ends.callback(lambda: brokers[-1].kill())
        ends.enter_context(producing_here(brokers[0].producers, {"web": source}))
        reached = Barrier(9)

        def read(rank: int, state: Any, until: int) -> tuple[list[Read], Any]:
            mesh = {"dp": 2, "cp": 4, "dp_rank": rank // 4, "cp_rank": rank % 4}
            found: list[Read] = []
            with sp.connect(brokers[-1].trainers, mesh=mesh, format="numpy", prefetch=1) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for step in loader.steps():
                    found.append(contents(step))
                    if state is None and len(found) == 2:
                        reached.wait(PATIENCE_S)
                        reached.wait(PATIENCE_S)
                    if len(found) == until:
                        return found, loader.state_dict(step=3)
            return found, None

        with ThreadPoolExecutor(8) as pool:
            reading = [pool.submit(read, rank, None, 5) for rank in range(8)]
            reached.wait(PATIENCE_S)
            brokers[-1].kill()
            brokers.append(RunningBroker(path, conf))
            reached.wait(PATIENCE_S)
            first, states = zip(*(each.result(PATIENCE_S) for each in reading), strict=True)
            brokers[-1].kill()
            brokers.append(RunningBroker(path, conf))
            again, _ = zip(*pool.map(read, range(8), states, [-1] * 8, timeout=PATIENCE_S), strict=True)
    calm = [[contents(step) for step in steps] for steps in dynamic]
    assert [list(steps) for steps in first] == [steps[:5] for steps in calm]
    assert [list(steps) for steps in again] == [steps[4:] for steps in calm]


def check_group(group: tuple[Pack, ...]) -> None:
    """Check that the shards of a group make up its pack, with the labels and fields that the pack has."""
    total = int(group[0].cu_seqlens_padded[-1])
    ids, labels, positions = np.full((3, total), -1)
    weights = np.zeros(total)
    for rank, pack in enumerate(group):
        assert (pack.cp_size, pack.cp, pack.cp_rank) == (len(group), len(group), rank)
        assert len(pack.input_ids) == total // len(group) <= 64
        assert pack.sample_ids.tolist() == group[0].sample_ids.tolist()
        at = pack.positions()
        assert (ids[at] == -1).all()
        ids[at], labels[at], positions[at] = pack.input_ids, pack.labels, pack.position_ids
        weights[at] = pack.fields["weight"]
    for begin in group[0].cu_seqlens_padded[: group[0].num_samples].tolist():
        sample = int(ids[begin]) // 7  # by its first token
        end, tokens = begin + LENGTHS[sample], tokens_of(sample)
        assert ids[begin:end].tolist() == tokens
        assert labels[begin:end].tolist() == [*tokens[1:], -100]
        assert positions[begin:end].tolist() == list(range(len(tokens)))
        assert weights[begin:end].tolist() == [token / 2 for token in tokens]
        assert group[-1].fields["whole"][begin:end].tolist() == tokens


def test_verify_knows_the_groups_of_all_ranks(dynamic: list[list[Step[Pack]]]) -> None:
    steps = [steps[0] for steps in dynamic]
    sp.verify(steps)
    pack = next(pack for pack in steps[1] if pack.cp_size == 2)
    assert pack.cp_ranks == (0, 2)
    with pytest.raises(InvariantError, match=r"cp_rank: step 0, pack \d+: got 1, expected 3"):
        sp.verify(pack, mesh=Mesh(dp=2, cp=4, cp_rank=3))
    broken = replace(pack, cp_ranks=(1, 2))
    with pytest.raises(
        InvariantError, match=r"cp_ranks: .* got 2 ranks from 1 on and cp_rank 1, expected a power of two"
    ):
        sp.verify(broken)


def why(state: Path, *words: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(in_process("why", "--state-dir", state, *words, "--json").stdout)
    return answer


def test_why_names_the_ranks_that_shared_each_sample(dynamic: list[list[Step[Pack]]], state: Path) -> None:
    mesh = ("--dp-size", "2", "--cp-size", "4")
    for step in range(3):
        shown = {}
        for pack in (answer := why(state, "--step", str(step), *mesh))["packs"]:
            place = pack["micro_batch"], pack["first_rank"], pack["num_ranks"]
            shown[place] = pack["length"], [(s["index"], s["offset"]) for s in pack["samples"]]
        served = {}
        for rank in range(8):
            for number, pack in enumerate(tuple(dynamic[rank][step])):
                assert pack.cp_ranks is not None
                offsets = pack.cu_seqlens_padded[: pack.num_samples].tolist()
                length = int(pack.cu_seqlens_padded[-1])
                served[number, *pack.cp_ranks] = length, list(zip(pack.sample_ids[:, 1].tolist(), offsets, strict=True))
        assert shown == served
        assert answer["dealt_by"]["rank_tokens"] == 64
        assert answer["dealt_later_by"] == []
    of_rank = why(state, "--step", "0", *mesh, "--dp", "1")["packs"]
    assert {pack["first_rank"] for pack in of_rank if pack["num_ranks"] < 8} <= {4, 5, 6, 7}
    assert len({pack["micro_batch"] for pack in of_rank}) == len(dynamic[0][0])
    text = in_process("why", "--state-dir", state, "--step", "0", *mesh).stdout
    assert "groups of up to 8 ranks of 64 tokens, exchange 0.05 and 0.2" in text
    assert re.search(r"\n +\d+ +0-7 +\d+", text), text


def test_why_says_that_the_pack_of_a_sample_is_that_of_form(dynamic: list[list[Step[Pack]]], state: Path) -> None:
    text = in_process("why", "--state-dir", state, "--sample", "web:5").stdout
    assert "pack: number of FORM's pack. Groups of ranks shared the sample: streampack why --step" in " ".join(
        text.split()
    )


def test_a_replay_has_the_packs_of_groups_and_needs_the_mesh(
    dynamic: list[list[Step[Pack]]], state: Path, data: dict[str, str], tmp_path: Path
) -> None:
    config = write(tmp_path / "broker.yaml", settings(DYNAMIC, state, dp=2, cp=4))
    producer = write(tmp_path / "producer.yaml", {"broker": "tcp://127.0.0.1:1", "streams": {"web": data}})
    words = ("replay", "--step", "1", "-c", config, "-p", producer, "--json")
    assert "Pass the mesh of the run as --dp and --cp." in the_error(in_process(*words), 2)
    report = json.loads(in_process(*words, "--dp", "2", "--cp", "4").stdout)
    assert report["equal"]
    assert report["dealt_by"]["max_group"] == 8
    served = {(pack.micro_batch, *(pack.cp_ranks or ())) for rank in dynamic for pack in tuple(rank[1])}
    assert {(pack["micro_batch"], pack["first_rank"], pack["num_ranks"]) for pack in report["packs"]} == served


def test_a_plan_for_a_run_with_groups_takes_its_broker_yaml(
    dynamic: list[list[Step[Pack]]], state: Path, tmp_path: Path
) -> None:
    line = "has `cp: dynamic`, whose settings are in broker.yaml. Pass this file, too, as -c broker.yaml"
    assert line in the_error(in_process("plan", state), 2)
    config = write(tmp_path / "broker.yaml", settings(DYNAMIC, state, dp=2, cp=4))
    plan = json.loads(in_process("plan", state, "-c", config, "--json").stdout)
    planned, groups = plan["layouts"][0], Counter[str]()
    of_ranks = [[pack for step in steps for pack in tuple(step)] for steps in dynamic]
    for rank, packs in enumerate(of_ranks):
        groups.update(str(pack.cp_size) for pack in packs if pack.num_samples and (pack.cp_ranks or (-1, 0))[0] == rank)
    assert plan["steps"] == len(dynamic[0])
    assert planned["micro_batches"] * plan["steps"] == pytest.approx(len(of_ranks[0]))
    assert planned["groups"] == groups
    delivered = sum(len(pack.input_ids) for packs in of_ranks for pack in packs)
    assert planned["padding"] == pytest.approx(1 - sum(LENGTHS) / delivered)


def test_why_shows_steps_of_another_planner_and_refuses_to_guess_their_groups(
    dynamic: list[list[Step[Pack]]], state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_module, "PLANNER", PLANNER + 1)
    DynamicCp.of.cache_clear()
    try:
        assert why(state, "--step", "0")["dealt_by"]["planner"] == PLANNER
        where = ("why", "--state-dir", state, "--step", "0")
        assert f"exchange 0.05 and 0.2, planner {PLANNER}" in " ".join(in_process(*where).stdout.split())
        line = the_error(in_process(*where, "--dp-size", "2", "--cp-size", "4"), 2)
        assert (
            f"version {PLANNER} of the planner, expected version {PLANNER + 1}, which makes other groups. Use" in line
        )
    finally:
        DynamicCp.of.cache_clear()


def test_why_refuses_to_guess_a_mesh(dynamic: list[list[Step[Pack]]], state: Path) -> None:
    where = ("why", "--state-dir", state, "--step", "0", "--dp-size")
    assert "Pass the number of context-parallel ranks of the mesh as --cp-size" in the_error(in_process(*where, "8"), 2)
    assert "got a budget of 512 tokens with 4 dp x cp ranks" in the_error(in_process(*where, "4", "--cp-size", "1"), 2)


# Bad input


@pytest.mark.parametrize(
    ("feed", "planned", "line"),
    [
        ({"cp": "dynamic"}, {}, "got `cp: dynamic` without rank_tokens"),
        (DYNAMIC | {"cp_layout": "whole"}, {"dp": 8}, "got `cp: dynamic` with `cp_layout: whole`"),
        ({"rank_tokens": 64}, {}, "got rank_tokens without `cp: dynamic`"),
        (
            DYNAMIC | {"max_group": 4},
            {"dp": 8},
            "got a budget of 512 tokens with 8 dp x cp ranks, expected at most 256",
        ),
        (DYNAMIC, {"dp": 6}, "got a budget of 512 tokens with 6 dp x cp ranks, expected at most 256"),
        (DYNAMIC | {"rank_tokens": 65}, {"dp": 8}, "got rank_tokens=65, expected a multiple of 2"),
        (
            DYNAMIC | {"rules": {"step": {"samples": 8, "min_micro_batches": 2}}},
            {"dp": 8},
            "got `cp: dynamic` with step.min_micro_batches",
        ),
        (
            DYNAMIC | {"stages": [{"name": "long", "at": {"step": 9}, "rules": {"budget": 1024}}]},
            {"dp": 8},
            "feeds.train.stages.long: no planned mesh can read this stage: got a budget of 1024 tokens",
        ),
    ],
)
def test_a_feed_that_no_group_can_serve_is_refused_at_start(
    feed: dict[str, Any], planned: dict[str, int], line: str, tmp_path: Path
) -> None:
    from streampack.config.config_validation import checked
    from streampack.config.daemon_settings import BrokerConfig

    with pytest.raises((ConfigError, ValueError), match=line):
        checked(convert(settings(feed, None, **planned), BrokerConfig))


def test_windows_in_the_cost_are_refused_with_groups() -> None:
    from streampack.config.config_validation import checked
    from streampack.config.daemon_settings import BrokerConfig

    config = settings(DYNAMIC, None, dp=8)
    config["rules"] = RULES | {"balance": {"a": 9, "b": 0, "sliding": [16, 1]}}
    with pytest.raises(ConfigError, match=r"got `cp: dynamic` with balance\.sliding, expected a feed"):
        checked(convert(config, BrokerConfig))


def test_a_mesh_or_a_live_stage_that_groups_cannot_serve_is_refused(source: Source, tmp_path: Path) -> None:
    with folder(), running_broker(settings(DYNAMIC, dp=2, cp=4)) as broker:
        why = "the trainers cannot read this stage: got a budget of 1024 tokens with 8 dp x cp ranks, expected at most"
        stage = write(tmp_path / "stage.yaml", {"name": "long", "at": {"step": 900}, "rules": {"budget": 1024}})
        for words in (("stage", stage), ("rules", "budget=1024", "--at-step", "900")):
            assert why in the_error(in_process("set", *words, "-e", broker.http), 1)
        stage = write(tmp_path / "stage.yaml", {"name": "other", "at": {"step": 900}, "rules": {"step": {"packs": 12}}})
        assert "stage other, from step 900 on" in in_process("set", "stage", stage, "-e", broker.http).stdout
        with pytest.raises(UserError, match="got `cp: dynamic` with pp=2, expected a feed without it"):
            sp.connect(broker.trainers, mesh={"dp": 8, "dp_rank": 0, "pp": 2, "pp_rank": 0}, format="numpy")
        with pytest.raises(UserError, match="with 4 dp x cp ranks, expected at most 256"):
            sp.connect(broker.trainers, mesh={"dp": 4, "dp_rank": 0}, format="numpy")
        with pytest.raises(UserError, match="got format 'hf' for a feed with `cp: dynamic`, expected format='thd'"):
            sp.connect(broker.trainers, mesh={"dp": 8, "dp_rank": 0}, format="hf")
