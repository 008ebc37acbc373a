"""What must hold of a log once its run is over: conservation of samples, and that it tells of what was served.

Every sample of every stream is in exactly one recorded step, in a recorded tail, or recorded as rejected.
"""

from __future__ import annotations

import numpy as np

from streampack.core.journal.log_records import FeedEnded, SamplesRejected, StepFormed, TailDropped
from streampack.core.model.samples import MEDIA_ROW, ROW
from tests.simulation.data import Case, Id
from tests.simulation.offline import Reference
from tests.world.disk import Disk


def check_log(feed: str, case: Case, reference: Reference, disk: Disk) -> None:
    """The log of a feed that ended says what ``reference`` does."""
    steps: dict[int, StepFormed] = {}
    left: list[Id] = []
    rejected: set[tuple[int, int]] = set()
    ends: list[FeedEnded] = []
    for lsn in range(disk.safe_upto):
        record, _ = disk.decode(lsn)
        if isinstance(record, SamplesRejected) and record.stream in case.names:
            indices = np.frombuffer(record.indices_u64, "<u8").tolist()
            rejected |= {(case.names.index(record.stream), index) for index in indices}
        elif isinstance(record, StepFormed) and record.feed == feed:
            steps[record.step] = record
        elif isinstance(record, TailDropped) and record.feed == feed:
            left += _ids(record.rows)
        elif isinstance(record, FeedEnded) and record.feed == feed:
            ends.append(record)
    assert len(ends) == 1, f"R8: {len(ends)} ends are recorded"
    assert (ends[0].num_steps, ends[0].chain) == (len(reference.steps), reference.chain), "R8: another end is recorded"
    assert sorted(steps) == list(range(len(reference.steps))), "R2: the log has other steps than were served"
    for number, record in steps.items():
        assert record.chain == reference.steps[number].chain, f"immutability: step {number} is recorded otherwise"
        ids = [one for pack in reference.ids[number] for one in pack]
        assert _ids(record.rows) == ids, f"conservation: step {number} is recorded with other samples"
        media = [(*reference.media[one].counts, len(reference.media[one].data)) for one in ids if reference.media]
        recorded = np.frombuffer(record.media or b"", MEDIA_ROW)[["items", "patches", "extra_bytes"]].tolist()
        assert recorded == (media if record.media else []), f"step {number} is recorded with other media"
        assert record.media or not any(items for items, *_ in media), f"step {number} is recorded without its media"
    assert len(left) == len(set(left)) == len(reference.left), "conservation: a tail is recorded otherwise"
    assert set(left) == reference.left, "conservation: a tail is recorded otherwise"
    assert rejected >= reference.rejected, "conservation: a rejected sample is not recorded"
    used = {(stream, index) for number in steps for stream, index, _ in _ids(steps[number].rows)}
    assert not rejected & used, "conservation: a sample is rejected and in a step"


def _ids(rows: bytes) -> list[Id]:
    columns = np.frombuffer(rows, ROW)
    return list(zip(*(columns[name].tolist() for name in ("stream", "index", "part")), strict=True))
