"""The texts of ``streampack status`` and ``streampack top`` for one status, whole: a change of a word shows as a line.

Where a text changes on purpose, write it anew:

    python -m tests.services.watch.test_command_texts
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from streampack_services.broker.status import BrokerStatus
from streampack_services.watch.status_report import show_standby, show_status
from streampack_services.watch.top_view import PageOptions, page
from streampack_services.watch.view_model import BrokerView, Watch, as_tree

from tests.services.full_status import full_status

FIXTURES = Path(__file__).parents[2] / "fixtures"
EVENT = {"seq": 1, "time": 1.8e9, "level": "error", "text": "producer n:1:\n\x1b[2Jthe 数据 file is gone " * 9}
SIZES = ((80, 24), (120, 40), (200, 70))
STANDBY = {"run": "sft", "standby": {"name": "b", "waits_for": "copies the log", "is_member": True, "records": 5,
                                     "unsafe_records": 2}}  # fmt: skip


def later(status: BrokerStatus) -> BrokerStatus:
    """Return a serving status 10 s later: with 40 ranks, without late fields, media, log, standby and warnings."""
    tree = copy.deepcopy(msgspec.to_builtins(status))
    tree |= {"state": "serving", "stalled_s": None, "log": None, "standby": None}
    for key in ("uptime_s", "taken_at"):
        tree[key] += 10.0
    for row in tree["streams"]:
        row |= {"late": None, "warnings": {}, "rejected": {}, "tokens": row["tokens"] + 5000}
    feed = tree["feeds"]["one"]
    feed |= {"media": None, "state": "serving", "stalled_s": None, "waiting_for": None, "steps_left": None,
             "committed": None, "dynamic_batching": None, "all_ranks_attached": False}  # fmt: skip
    feed["totals"]["tokens"] += 5000
    rank = feed["readers"][0]
    feed["readers"] = [
        rank | {"dp_rank": n, "where": f"node{n // 8}:{n}", "cost": [1.0 + (n == 5)], "cp_rank": 0, "tp_rank": 0,
                "pp_rank": 0, "work_s": 0.1 if n % 7 else 1.0, "data_wait": 0.9 - n / 1000 if n % 7 else 0.01,
                "cause": "peers" if n % 7 else "stream", "stream": None if n % 7 else "web"}
        for n in range(40)
    ]  # fmt: skip
    slow = {"name": "dp=7", "dp_rank": 7, "cp_rank": 0, "tp_rank": 0, "pp_rank": 0, "host": "node0", "count": 6,
            "step_s": 1.0, "others_step_s": 0.1}  # fmt: skip
    feed["ranks"] |= {
        "attached": 40, "recent_waits": {"peers": 0.8, "stream": 0.01}, "recent_streams": {"web": 0.01},
        "recent_s": 45.0, "slow": slow, "starved_s": {"peers": 30.0, "stream": 10.0}, "trainer_s": 60.0,
    }  # fmt: skip
    del tree["feeds"]["two"]
    return msgspec.convert(tree, BrokerStatus)


def everything() -> BrokerStatus:
    """Return a status with something in every field, whose streams are those of the feed with few ranks."""
    tree = msgspec.to_builtins(full_status())
    for n, row in enumerate(tree["streams"]):
        row |= {"stream": f"s{n}", "feed": "one"}
    tree["streams"][0]["rejected"]["late_timeout"] = 5
    tree["feeds"]["one"]["media"]["bound_by"] = {"tokens": 30, "patches": 10}
    nodes = tree["feeds"]["two"]["ranks"]["nodes"]
    nodes[0] |= {"ranks": 8, "attached": 7, "cause": "peers", "data_wait": 0.01}
    nodes[1] |= {"ranks": 8, "attached": 8, "cause": "stream", "stream": "web", "data_wait": 0.5}
    return msgspec.convert(tree, BrokerStatus)


def views() -> Iterator[BrokerView]:
    """Yield the view of a status with everything, and of one 10 s later with little."""
    watch = Watch()
    status = everything()
    for each in (status, later(status)):
        watch.add(each, [EVENT])
        yield watch.view()


@contextlib.contextmanager
def in_utc(width: int) -> Iterator[None]:
    """Show times in UTC, on a terminal that is ``width`` characters wide."""
    before = dict(os.environ)
    os.environ |= {"TZ": "UTC", "COLUMNS": str(width)}
    time.tzset()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
        time.tzset()


def status_text() -> str:
    """Return what ``streampack status`` prints, for a standby too."""
    with in_utc(100), contextlib.redirect_stdout(io.StringIO()) as shown:
        for view in views():
            show_status(view.status)
        show_standby(STANDBY)
    return "".join(f"{line.rstrip()}\n" for line in shown.getvalue().splitlines())


def top_text() -> str:
    """Return pages of ``streampack top`` for each feed and several sizes, and without a height."""
    lines = []
    with in_utc(100):
        for view in views():
            for number in range(len(view.feeds)):
                for size in (*SIZES, (100, None)):
                    options = PageOptions(feed=number, keys=True, measure="cost" if size[0] == 120 else "waits")
                    shown = page(view, options, *size)
                    assert max(line.cell_len for line in shown) <= size[0]
                    assert size[1] in (None, len(shown))
                    lines += [f"== {size}", *(line.plain.rstrip() for line in shown)]
        lines += [line.plain for line in page(view, PageOptions(trouble="no answer"), 80, 5)]
    return "\n".join([*lines, ""])


def top_json() -> str:
    """Return what ``streampack top --json`` prints, indented."""
    return "".join(json.dumps(as_tree(view), indent=1) + "\n" for view in views())


TEXTS: dict[str, Any] = {"status.txt": status_text, "top.txt": top_text, "top.json": top_json}


@pytest.mark.parametrize("name", TEXTS)
def test_a_command_shows_a_status_as_before(name: str) -> None:
    assert TEXTS[name]().splitlines() == (FIXTURES / "texts" / name).read_text().splitlines()


if __name__ == "__main__":
    for name, text in TEXTS.items():
        (FIXTURES / "texts" / name).write_text(text())
