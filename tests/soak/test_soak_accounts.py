"""The reckoning of ``make soak`` finds what it is for: files of a run that went well, then damaged one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.soak import sample_media
from tests.soak.accounts import Account, settle
from tests.soak.arrived import broken_promises, pack_as_it_came
from tests.soak.broken_values import broken_values
from tests.soak.fire import Hit
from tests.soak.golden import Golden, pack_offline
from tests.soak.job import Job, make_job
from tests.soak.pusher import tokens_of
from tests.soak.values import loss_of, reward_of

Line = dict[str, Any]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return make_job(5, tmp_path_factory.mktemp("job"), number=4, rows=(20, 30))


@pytest.fixture(scope="module")
def golden(job: Job) -> Golden:
    return pack_offline(job)


def lines_of_a_good_run(job: Job, golden: Golden) -> list[list[Line]]:
    """By rank: as if each had every step once, a second apart; packs are dealt in their order."""
    found: list[list[Line]] = []
    for mesh in job.meshes:
        per_rank = golden.rules.packs // mesh["dp"]
        mine = range(mesh["dp_rank"] * per_rank, (mesh["dp_rank"] + 1) * per_rank)
        lines: list[Line] = [
            {
                "at": float(index), "kind": "step", "index": index, "digest": step.digest, "chain": step.chain,
                "loss": step.num_loss_tokens, "samples": step.num_samples,
                "packs": [
                    {"pack": pack, "micro_batch": i, "ids": [list(each) for each in step.packs[pack].ids],
                     "crcs": golden.crcs(index, pack, mesh["cp"], mesh["cp_rank"]).copy()}
                    for i, pack in enumerate(mine)
                ],
            }
            for index, step in enumerate(golden.steps)
        ]  # fmt: skip
        found.append([*lines, {"at": 1e9, "kind": "end"}])
    return found


def settled(job: Job, golden: Golden, lines: list[list[Line]], hits: list[Hit] | None = None) -> Account:
    for rank, of_rank in enumerate(lines):
        text = "".join(json.dumps(line) + "\n" for line in of_rank)
        (job.folder / f"trainer-{rank}.jsonl").write_text(text)
    return settle(job, golden, hits or [])


def test_a_good_run_is_found_to_be_good(job: Job, golden: Golden) -> None:
    account = settled(job, golden, lines_of_a_good_run(job, golden))
    assert not account.wrong
    assert (account.lost, account.duplicated, account.diverged, account.repeated) == (0, 0, 0, 0)
    assert account.compared == len(golden.steps) * len(job.meshes)


def another_token(lines: list[Line]) -> None:
    lines[3]["packs"][0]["crcs"]["input_ids"] ^= 1


def another_digest(lines: list[Line]) -> None:
    lines[2]["digest"] = lines[1]["digest"]


def a_repeated_step_that_differs(lines: list[Line]) -> None:
    lines.insert(3, json.loads(json.dumps(lines[2])))
    lines[3]["packs"][0]["crcs"]["labels"] ^= 1


def a_step_too_few(lines: list[Line]) -> None:
    del lines[4]


def no_end(lines: list[Line]) -> None:
    del lines[-1]


def the_same_pack_twice(lines: list[Line]) -> None:
    lines[0]["packs"][1] = lines[0]["packs"][0] | {"micro_batch": 1}


def a_state_that_diverged(lines: list[Line]) -> None:
    lines.insert(1, {"at": 0.0, "kind": "error", "type": "Rejected", "text": "diverged: other steps"})


@pytest.mark.parametrize(
    "damage",
    [another_token, another_digest, a_repeated_step_that_differs, a_step_too_few, no_end, the_same_pack_twice,
     a_state_that_diverged],
)  # fmt: skip
def test_the_soak_s_accounts_find_every_kind_of_fault(
    damage: Callable[[list[Line]], None], job: Job, golden: Golden
) -> None:
    lines = lines_of_a_good_run(job, golden)
    damage(lines[-1])
    assert settled(job, golden, lines).wrong


def test_other_media_are_found(tmp_path: Path) -> None:
    job = make_job(10, tmp_path, number=10, rows=(5, 9), media=True)
    golden = pack_offline(job)
    assert not settled(job, golden, lines_of_a_good_run(job, golden)).wrong
    for name in sample_media.ARRAYS:
        lines = lines_of_a_good_run(job, golden)
        pack = next(pack for pack in lines[0][0]["packs"] if "image" in pack["crcs"])
        pack["crcs"][name] ^= 1
        assert f"{name} of pack {pack['pack']} differs" in settled(job, golden, lines).wrong[0]


def test_a_lost_and_a_duplicated_sample_are_counted(job: Job, golden: Golden) -> None:
    lines = lines_of_a_good_run(job, golden)
    for of_rank in lines:
        if of_rank[1]["packs"][0]["ids"] != lines[0][1]["packs"][0]["ids"]:
            continue
        of_rank[1]["packs"][0]["ids"][0] = of_rank[2]["packs"][0]["ids"][0]
    account = settled(job, golden, lines)
    assert (account.lost, account.duplicated) == (1, 1)
    assert account.wrong


def test_a_recovery_is_timed_where_nothing_else_happened(job: Job, golden: Golden) -> None:
    lines = lines_of_a_good_run(job, golden)
    alone = settled(job, golden, lines, [Hit(2.5, "kill broker")])
    assert alone.recovered_s == [6.0 - 2.5]  # step 6 is the first that did not lie ready
    disturbed = settled(job, golden, lines, [Hit(2.5, "kill broker"), Hit(4.0, "kill trainer")])
    assert disturbed.recovered_s == []


def test_a_run_in_order_of_arrival_is_packed_again_from_what_came(tmp_path: Path) -> None:
    """Its digests are worked out from the samples: a line with another one is found."""
    job = make_job(5, tmp_path, number=0, rows=(2, 3), pushers=1)
    ids = [[2, seq, 0] for seq in range(job.pushed)]
    packs: list[Line] = [{"pack": 0, "micro_batch": 0, "ids": ids[:2], "crcs": {}}]
    packs += [{"pack": pack, "micro_batch": pack, "ids": [], "crcs": {}} for pack in range(1, 12)]
    line = {"at": 0.0, "kind": "step", "index": 0, "digest": "", "chain": "", "loss": 0, "samples": 2, "packs": packs}
    (tmp_path / "trainer-0.jsonl").write_text(json.dumps(line) + "\n")
    golden = pack_as_it_came(job)
    first = [tokens_of(job.seed, 0, seq, job.trees) for seq in range(2)]
    assert [tokens.tolist() for tokens in golden.steps[0].packs[0].tokens] == first
    assert golden.steps[0].num_loss_tokens == sum(map(len, first)) - 2
    assert {(2, seq, 0) for seq in range(job.pushed)} < golden.expected
    assert any("digest" in wrong for wrong in settle(job, golden, []).wrong)


def test_a_program_that_is_sent_back_before_what_was_safe_is_a_broken_promise(tmp_path: Path) -> None:
    job = make_job(5, tmp_path, number=0, rows=(2, 3), pushers=1)
    diary = [{"begun": 0, "known": 0}, {"safe": 16}, {"begun": 16, "known": 16}, {"safe": job.pushed}]
    (tmp_path / "pusher-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in diary))
    assert not broken_promises(job)
    diary[2]["begun"] = 15
    (tmp_path / "pusher-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in diary))
    assert broken_promises(job) == ["partition 0: begun at 15, where 16 were safe"]
    (tmp_path / "pusher-0.jsonl").write_text(json.dumps({"begun": 0, "known": 0}) + "\n")
    assert "are safe" in broken_promises(job)[0]


def late_run(folder: Path) -> tuple[Job, list[Line], list[Line]]:
    """A run with late values of one rank, whose samples were sent in the opposite order: its lines, and the results."""
    job = make_job(5, folder, number=0, rows=(2, 3), pushers=1, late=True)
    ids = [[2, index, 0] for index in range(job.pushed)]
    numbers = [job.pushed - 1 - index for index in range(job.pushed)]
    lines, results = list[Line](), list[Line]()
    for step, at in enumerate(range(0, job.pushed, 100)):
        rows, mine = ids[at : at + 100], numbers[at : at + 100]
        pack = {"pack": 0, "micro_batch": 0, "ids": rows, "numbers": mine, "crcs": {}}
        lines.append({"at": 0.0, "kind": "step", "index": step, "packs": [pack]})
        loss = [[*row, loss_of(*row)] for row in rows]
        sent = [["rollouts", 0, number] for number in mine]
        results.append({"step": step, "lineage": 0, "cursor": step + 1, "loss": loss, "sent": sent})
    return job, lines, results


def values_of(job: Job, lines: list[Line], results: list[Line]) -> list[str]:
    for name, rows in (("trainer-0", lines), ("subscriber", results)):
        (job.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return broken_values(job)


def test_late_values_and_results_of_a_good_run_are_found_to_be_good(tmp_path: Path) -> None:
    assert not values_of(*late_run(tmp_path))


def test_the_rewards_of_a_run_with_late_values_are_derived_from_the_numbers_of_its_samples(tmp_path: Path) -> None:
    job, lines, results = late_run(tmp_path)
    values_of(job, lines, results)
    values = pack_as_it_came(job).steps[0].packs[0].values
    assert values is not None
    assert values["reward"].tolist() == [reward_of(job.seed, 0, job.pushed - 1 - index) for index in range(100)]


def a_number_twice(lines: list[Line], results: list[Line]) -> None:
    lines[0]["packs"][0]["numbers"][0] = 0


def a_step_twice(lines: list[Line], results: list[Line]) -> None:
    results.append(results[3])


def a_step_without_results(lines: list[Line], results: list[Line]) -> None:
    del results[4]


def another_loss(lines: list[Line], results: list[Line]) -> None:
    results[2]["loss"][1][3] += 1.0


def a_sample_without_a_loss(lines: list[Line], results: list[Line]) -> None:
    del results[2]["loss"][1], results[2]["sent"][1]


def another_sample(lines: list[Line], results: list[Line]) -> None:
    results[2]["sent"][1][2] -= 1


@pytest.mark.parametrize(
    "damage",
    [a_number_twice, a_step_twice, a_step_without_results, another_loss, a_sample_without_a_loss, another_sample],
)
def test_the_soak_s_accounts_find_wrong_late_values_and_results(
    damage: Callable[[list[Line], list[Line]], None], tmp_path: Path
) -> None:
    job, lines, results = late_run(tmp_path)
    damage(lines, results)
    assert values_of(job, lines, results)
