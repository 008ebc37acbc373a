"""The headline of a feed: the right cause by its name, and none where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from streampack_services.broker.causes.headline import CALM, HeadlineFacts, headline_of
from streampack_services.broker.causes.waiting_for import WaitingFor
from streampack_services.broker.ranks.rank_status import SlowRank

SLOW = SlowRank(
    name="dp=2", dp_rank=2, cp_rank=0, tp_rank=0, pp_rank=0, host="gpu7", count=1, step_s=1.0, others_step_s=0.1
)
LATE = "Messages come late to rank dp=1 on gpu7."
HEALTHY = HeadlineFacts(
    state="serving", faults=(), waiting=None, still_s=0.3, stalled_s=None, returned=50, end=None, all_attached=True,
    silent={}, slow=None, recent_waits={"peers": 0.2, "stream": 0.04}, recent_streams={"web": 0.04}, recent_s=45.0,
    late="",
)  # fmt: skip


def waiting(reason: str, detail: str = "it", **more: Any) -> WaitingFor:
    return WaitingFor(reason=reason, detail=detail, stream=None, **{"batch": False, **more})


GOES_ON = "Training goes on with the samples received before."
PEERS, NONE = waiting("peers", "rank dp=1 at gpu1:7 has returned 50 steps"), waiting("stream", "none of 'web'")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"waiting": PEERS}, ("good", "", CALM)),
        ({"waiting": NONE}, ("good", "", CALM)),
        ({"waiting": waiting("forming")}, ("good", "", CALM)),
        ({"waiting": PEERS, "still_s": 47.0}, ("good", "",
         "Data is ready. The ranks have been training for 45 s: rank dp=1 at gpu1:7 has returned 50 steps.")),
        ({"waiting": PEERS, "slow": SLOW}, ("waiting", "slow_rank",
         "Rank dp=2 takes 1.0 s a step, the others 0.10 s (on gpu7).")),
        ({"waiting": waiting("peers", "rank dp=1 is silent", lost=True), "slow": SLOW, "still_s": 12.0},
         ("waiting", "lost_rank", "Waiting for trainers for 10 s: rank dp=1 is silent.")),
        ({"waiting": waiting("peers", "no rank is attached"), "all_attached": False},
         ("waiting", "peers", "Waiting for trainers: no rank is attached.")),
        ({"waiting": waiting("join", "dp=1 is not there"), "all_attached": False, "still_s": 90.0},
         ("waiting", "join", "Waiting for ranks for 1 min: dp=1 is not there.")),
        ({"waiting": NONE, "stalled_s": 17.0, "slow": SLOW},
         ("waiting", "stream", "Waiting for samples for 15 s: none of 'web'.")),
        ({"waiting": waiting("stream", "no producer", lost=True)},
         ("waiting", "stream", "Waiting for samples: no producer.")),
        ({"waiting": waiting("stream", "the end of the batch", batch=True), "stalled_s": 40.0},
         ("waiting", "stream", "Waiting for 40 s for the end of the batch.")),
        ({"waiting": PEERS, "recent_waits": {"peers": 0.1, "stream": 0.55, "log": 0.03},
          "recent_streams": {"web": 0.5, "code": 0.05}}, ("waiting", "stream",
         "The ranks wait for data 58% of their time in the last 45 s: stream web 50%, stream code 5%, log 3%.")),
        ({"waiting": PEERS, "recent_waits": {"peers": 0.5, "network": 0.3}, "late": "rank dp=1 on gpu7"},
         ("waiting", "network", f"The ranks wait for data 30% of their time in the last 45 s: network 30%. {LATE}")),
        ({"waiting": PEERS, "recent_waits": {"stream": 0.3}, "late": "rank dp=1 on gpu7"},
         ("waiting", "stream", "The ranks wait for data 30% of their time in the last 45 s: stream web 4%.")),
        ({"waiting": PEERS, "recent_waits": {"stream": 0.9}, "recent_s": 2.0}, ("good", "", CALM)),
        ({"waiting": PEERS, "silent": {"code": 25.0}}, ("waiting", "stream",
         f"The broker has heard no producer of stream 'code' for 25 s. {GOES_ON}")),
        ({"waiting": PEERS, "faults": (("log", "It is full."),), "slow": SLOW}, ("bad", "log", "It is full.")),
        ({"waiting": waiting("failed", "The data have changed.")}, ("bad", "failed", "The data have changed.")),
        ({"waiting": PEERS, "end": 52, "all_attached": False}, ("good", "",
         "All steps were formed. The ranks train the last 2 steps.")),
        ({"end": 1050, "returned": 1050}, ("good", "", "Done. All 1,050 steps were returned.")),
        ({}, ("waiting", "draining",
              "The broker is draining. It serves the steps that are already formed, then stops.")),
        ({"state": "starting"}, ("waiting", "starting",
                                 "The broker is starting. It loads its kernels and reads its log.")),
    ],
)  # fmt: skip
def test_a_headline_names_what_delays_training(facts: dict[str, Any], expected: tuple[str, str, str]) -> None:
    found = headline_of(replace(HEALTHY, **facts))
    assert (found.kind, found.cause, found.text) == expected


def test_several_slow_ranks_are_counted() -> None:
    several = SlowRank(
        name="dp=2 tp=1", dp_rank=2, cp_rank=0, tp_rank=1, pp_rank=0, host="gpu7", count=8, step_s=12.3,
        others_step_s=0.0123,
    )  # fmt: skip
    assert several.text == "rank dp=2 tp=1 and 7 other ranks take 12 s a step, the others 0.012 s (on gpu7)"
