"""Checks an RL loop once it is over: its late values, the ages of its samples, and its results."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from streampack.core.journal.log_records import ChunkAdmitted, ChunkCompleted, ChunkStaged, StepFormed, ValuesReported
from streampack.core.model.samples import ROW, index_of
from tests.simulation.data import Case, Id
from tests.simulation.offline import samples_of
from tests.simulation.pushers import Births
from tests.simulation.rl.trainers import LIFE, loss_of
from tests.world.disk import Disk

if TYPE_CHECKING:
    from tests.simulation.job import Job
    from tests.simulation.rl.trainers import Kept

Key = tuple[str, int]


def check_staged(case: Case, disk: Disk) -> None:
    """Every sample in the log was admitted once, with all its late values; or dropped, in a run with a timeout."""
    sent: dict[Key, list[bytes]] = {}
    admitted: dict[Key, dict[int, bytes]] = {}
    for lsn in range(len(disk.records)):
        record, payload = disk.decode(lsn)
        if not isinstance(record, ChunkStaged | ChunkAdmitted) or record.stream not in case.pushed:
            continue
        key, samples = (record.stream, record.partition), [one.tobytes() for one in samples_of(case, record, payload)]
        if isinstance(record, ChunkStaged):
            mine = sent.setdefault(key, [])
            assert record.base_seq == len(mine)
            mine += samples
            continue
        assert isinstance(record, ChunkCompleted)
        dropped = bool(case.rules.late_timeout_s and "late_timeout" in record.rejected)
        assert dropped or set(record.rejected) <= {"empty"}, f"late values: samples were dropped: {record.rejected}"
        assert not record.stale, "pacing: a sample was dropped because of its age"
        known = admitted.setdefault(key, {})
        for seq, tokens in zip(np.frombuffer(record.sent_u64, "<u8").tolist(), samples, strict=True):
            assert seq not in known, f"late values: sample {seq} of {key} was admitted twice"
            known[seq] = sent[key][seq] if dropped else tokens
    for key, mine in sent.items():
        assert dict(enumerate(mine)) == admitted.get(key, {}), f"late values: samples of {key} are lost, or are others"


def _sent_as(case: Case, disk: Disk) -> dict[tuple[int, int], tuple[int, int, int, int]]:
    """Partition, number, sample and record of each (stream, index) that was admitted."""
    found: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    for lsn in range(len(disk.records)):
        record, payload = disk.decode(lsn)
        if not isinstance(record, ChunkAdmitted) or record.stream not in case.pushed:
            continue
        stream, seqs = case.names.index(record.stream), record.base_seq + np.arange(len(record.lengths_u32) // 4)
        count = case.rules.streams[stream].partitions
        numbers = np.frombuffer(record.sent_u64, "<u8") if isinstance(record, ChunkCompleted) else seqs
        made = case.made(stream, record.partition)
        births = [made.get(sample.tobytes(), -1) for sample in samples_of(case, record, payload)]
        indices = np.asarray(index_of(seqs, record.partition, count)).tolist()
        for index, number, birth in zip(indices, numbers.tolist(), births, strict=True):
            found[stream, index] = record.partition, number, birth, lsn
    return found


def check_ages(case: Case, births: dict[Key, Births], disk: Disk, most_at_once: int) -> int:
    """Policy ``n`` trains step ``n``. In a paced stream, no sample is older than it may be when it is trained.

    With a lag of 0, a group may be in two steps, where groups do not fill a step: nobody could go on else. Samples of
    which a broker did not know may be older. Each of them may take the place of another sample, or of a group.

    Returns:
        Number of the samples of which a broker did not know.
    """
    if not case.rules.paces or case.rules.max_policy_lag is None:
        return 0
    sent, lag, too_old = _sent_as(case, disk), case.rules.max_policy_lag, list[str]()
    most = 1 if lag == 0 and most_at_once > 1 else lag
    for lsn in range(len(disk.records)):
        record, _ = disk.decode(lsn)
        if not isinstance(record, StepFormed):
            continue
        for row in np.frombuffer(record.rows, ROW):
            partition, _, birth, _ = sent[int(row["stream"]), int(row["index"])]
            mine = births[case.names[int(row["stream"])], partition]
            age = record.step - mine.versions[birth]
            if age > most and birth not in mine.forgotten:
                too_old.append(f"step {record.step} has a sample of policy {mine.versions[birth]}")
    forgotten = sum(len(mine.forgotten) for mine in births.values())
    assert len(too_old) <= forgotten * most_at_once, f"pacing: {too_old}; {forgotten} samples were not known"
    return forgotten


def has_results(kept: Kept, oldest: Kept, num_steps: int, disk: Disk) -> bool:
    """Has a subscriber every step that it must get? ``oldest`` is one that reads from the oldest step on."""
    lacking = set(range(num_steps)) - {step for _, step in kept.steps}
    if not lacking:
        return True
    if kept.first is None:
        return False
    lost = _lost_steps(disk)
    for step in lacking - lost:
        known = oldest.steps.get((0, step))
        if known is None or known[0].cursor > kept.first:
            return False
    return True


def _lost_steps(disk: Disk) -> set[int]:
    """Steps with reported values in records that were deleted."""
    found = set[int]()
    for lsn in range(disk.first_lsn):
        record, _ = disk.decode(lsn)
        if isinstance(record, ValuesReported):
            found.add(record.step)
    return found


def check_results(job: Job, kept: Kept, disk: Disk) -> None:
    """A subscriber got the values of all samples of a step, as the ranks of one life of the job have reported them."""
    reference, sent = job.reference, _sent_as(job.case, disk)
    assert reference is not None
    cursors = Counter(message.cursor for message, _ in kept.steps.values())
    assert set(cursors.values()) <= {1}, "results: two steps have one cursor"
    for (lineage, step), (message, values) in kept.steps.items():
        assert lineage == 0
        expected: set[Id] = {one for pack in reference.ids[step] for one in pack}
        assert values.keys() == expected, f"results: step {step} has other samples"
        lives = {(value - loss_of(one, 0)) / LIFE for one, value in values.items()}
        assert lives <= {float(life) for life in range(job.life + 1)}, f"results: step {step} has other values"
        partitions = np.frombuffer(message.partitions_u32, "<u4").tolist()
        seqs = np.frombuffer(message.seqs_u64, "<i8").tolist()
        for one, partition, seq in zip(values, partitions, seqs, strict=True):
            where, number, _, lsn = sent[one[:2]]
            assert partition == where
            assert seq == number or (seq == -1 and lsn < disk.first_lsn), f"results: {one} has number {seq}"
