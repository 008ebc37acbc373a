"""Runs in which one thing is wrong, or none, beside a Prometheus with the alerts: who is told what, and by which words.

Each run is a real broker. Its ranks are the clients' state machines (``many_ranks``), and its producers threads or
processes. ``provoked`` starts all runs at once. Then ``broken_promises`` reads ``streampack status``, ``streampack top
--once``, the data of the page, the metrics and the alerts of a run, and returns what is wrong with them.

The times of the alert rules are divided by ``hurry``, so that an alert of ten minutes fires after seconds. With a
``hurry`` of 1 it takes half an hour: ``make soak ARGS=--provocations``.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from streampack.core.protocol.producer_messages import Lease
from streampack.producer.chunk import TokenChunk
from streampack.sources import Cursor
from tests.integration.many_ranks import ManyRanks, many_ranks
from tests.integration.programs import program
from tests.integration.running import (
    PATIENCE_S,
    Daemon,
    folder,
    in_process,
    producing_here,
    running,
    until,
    write,
    write_jsonl,
)
from tests.integration.watched import Watched, watched

RULES = Path(__file__).parents[2] / "deploy/prometheus/alerts.yaml"
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
HURRY = 40.0
"""The times of the alerts are divided by this in a test.

With 120, an answer that came half a second late on a busy machine was a broker that is down.
"""
LEAST_FOR_S = 5
"""No alert fires sooner than this many seconds, however large ``hurry`` is."""


@dataclass
class Provoked:
    """A run, and what everybody is to be told about it.

    Attributes:
        name: Name of the run.
        broker: Its broker.
        cause: The cause in the headline and in the metric; empty if training goes on.
        words: Regular expressions that the headline matches.
        rows: Regular expressions that ``status`` and ``top`` match.
        alerts: Alerts that fire, with regular expressions that their annotations match.
        others: Other alerts that may fire, since they follow from the same fault.
        act: Makes it go wrong, once some steps were returned; None if it is wrong from the start.
    """

    name: str
    broker: Watched
    cause: str = ""
    words: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    alerts: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    act: Callable[[], None] | None = None


class Rows:
    """Samples of these lengths again and again, a chunk of them every ``pause_s`` seconds."""

    def __init__(self, lengths: Sequence[int], pause_s: float = 0.0) -> None:
        self.digest = f"rows {lengths}"
        self._lengths, self._pause_s = np.array(lengths, np.uint32), pause_s

    def batches(self, lease: Lease) -> Iterator[TokenChunk]:
        """The same chunk again and again."""
        tokens = np.arange(int(self._lengths.sum()), dtype=np.int32)
        while True:
            time.sleep(self._pause_s)
            yield TokenChunk(tokens, self._lengths, Cursor(0, 0, 0), {})


def feed_of(broker: Watched) -> dict[str, Any]:
    """Return the only feed in the JSON of ``/status``, which the page shows."""
    found: dict[str, Any] = json.loads(fetched(f"{broker.url}/status"))["feeds"]["train"]
    return found


def fetched(url: str) -> bytes:
    """Return the answer of an HTTP server."""
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        found: bytes = answer.read()
        return found


MIXED = [1 + 37 * row % 97 for row in range(40)]


class Runs:
    """Starts runs; all end with the ``stack``."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def broker(self, name: str, streams: Mapping[str, Any], **settings: Any) -> Watched:
        """Return a broker for these streams, in a run of this name."""
        rules = {"budget": 256, "window": {"samples": 64}, "step": {"packs": 6}, **settings.pop("rules", {})}
        each = {"partitions": 1, "repeat": True}
        tree = {"run": name, "rules": rules, "streams": {stream: each | more for stream, more in streams.items()}}
        return self._stack.enter_context(watched({**tree, **settings}))

    def producing(self, broker: Watched, **sources: Rows) -> None:
        """Start a producer of these streams in a thread."""
        self._stack.enter_context(producing_here(broker.endpoints["producers"], sources))

    def producer(self, broker: Watched, stream: str) -> Daemon:
        """Start a producer of a stream as a process."""
        path = self._stack.enter_context(folder())
        shards = str(write_jsonl(path / "a.jsonl", [{"tokens": [7] * length} for length in MIXED]))
        tree = {"broker": broker.endpoints["producers"], "streams": {stream: {"source": "jsonl", "shards": shards}}}
        return self._stack.enter_context(running("produce", "produce", "-c", write(path / "producer.yaml", tree)))

    def training(self, broker: Watched, *step_s: float) -> ManyRanks:
        """Start a rank for each of these seconds, which it takes for a step."""
        return self._stack.enter_context(
            many_ranks(broker.endpoints["trainers"], {"dp": len(step_s)}, step_s.__getitem__)
        )

    def state_dir(self) -> Path:
        """Return a folder that is deleted in the end."""
        return self._stack.enter_context(folder())


def healthy(runs: Runs) -> Provoked:
    """Ranks with ordinary jitter, for which the broker waits."""
    broker = runs.broker("healthy", {"web": {}, "code": {}})
    runs.producing(broker, web=Rows(MIXED), code=Rows(MIXED))
    runs.training(broker, 0.50, 0.53, 0.47)
    return Provoked("healthy", broker, words=("Steps are formed and delivered without long waits",))


def slow_producer(runs: Runs) -> Provoked:
    """A stream that brings a third of the samples that the ranks could train on."""
    broker = runs.broker("slow-producer", {"web": {}, "code": {}})
    runs.producing(broker, web=Rows(MIXED, pause_s=1.0), code=Rows(MIXED))
    runs.training(broker, 0.1, 0.1)
    return Provoked(
        "slow-producer", broker, "stream", ("wait for data [0-9]+% of their time in the last [0-9]+ s: stream web",),
        ("stream web [0-9.]+%",), {"TrainerStarved": "for stream web.*cause: stream"},
    )  # fmt: skip


def dead_producer(runs: Runs) -> Provoked:
    """A stream whose only producer is killed."""
    broker = runs.broker("dead-producer", {"web": {}, "code": {}})
    runs.producing(broker, web=Rows(MIXED))
    producer = runs.producer(broker, "code")
    runs.training(broker, 0.1, 0.1)
    return Provoked(
        "dead-producer", broker, "stream",
        ("no producer of stream 'code' for [0-9]+ s|stream 'code' .*no producer offers it",),
        alerts={"StreamSilent": "no producer of stream code"}, others=("TrainerStarved",),
        act=lambda: producer.signal(signal.SIGKILL),
    )  # fmt: skip


def slow_rank(runs: Runs) -> Provoked:
    """A rank that takes ten times as long for a step."""
    broker = runs.broker("slow-rank", {"web": {}})
    runs.producing(broker, web=Rows(MIXED))
    runs.training(broker, 0.1, 0.1, 1.0)
    words = r"rank dp=2 takes (0\.9\d|1\.[0-2]\d?) s a step, the others 0\.1\d s"
    return Provoked(
        "slow-rank", broker, "slow_rank", (f"(?i){words}",), (r"slow: (0\.9\d|1\.\d) s a step",),
        {"RankSlow": r"Rank dp=2 cp=0 tp=0 pp=0 on node00 takes [\d.]+ s a step, the others 0\.1\d? s"},
    )  # fmt: skip


def dead_rank(runs: Runs) -> Provoked:
    """A rank that is not heard any more."""
    broker = runs.broker("dead-rank", {"web": {}})
    runs.producing(broker, web=Rows(MIXED))
    ranks = runs.training(broker, 0.1, 0.1)
    return Provoked(
        "dead-rank", broker, "lost_rank", (r"rank dp=1\S* .*at node00:1001 has been silent for [0-9]+ s, after",),
        ("peers [0-9.]+%",), {"RankMissing": "Rank dp=1 .*was on node00.*1 ranks of the mesh are not attached"},
        act=lambda: ranks.kill(1),
    )  # fmt: skip


def full_log(runs: Runs) -> Provoked:
    """A log that takes no more records, since no checkpoint is committed."""
    broker = runs.broker("full-log", {"web": {}}, state_dir=str(runs.state_dir()))
    runs.producing(broker, web=Rows(MIXED))
    runs.training(broker, 0.1, 0.1)
    keeper = broker.service.keeper
    assert keeper is not None
    return Provoked(
        "full-log", broker, "log", ("The log has stopped accepting records. Cause: .*retain.bytes",),
        alerts={"LogStalled": "takes no more records"}, others=("TrainerStarved",),
        act=lambda: setattr(keeper, "_retain", 0),  # bytes, instead of 200 GiB
    )  # fmt: skip


def bad_budget(runs: Runs) -> Provoked:
    """A budget into which one sample fits, and not two."""
    broker = runs.broker("bad-budget", {"web": {}}, rules={"budget": 300})
    runs.producing(broker, web=Rows([200] * 8))
    runs.training(broker, 0.5, 0.5)
    return Provoked(
        "bad-budget",
        broker,
        rows=("end of pack (3[0-9]|[0-9]{3,}|[0-9.]+[kM])",),
        alerts={"WasteHigh": "Main cause: pack_tail"},
    )


def imbalance(runs: Runs) -> Provoked:
    """Packs of one long sample beside packs of many short ones, whose cost is that of attention."""
    rules = {"balance": {"a": 0, "b": 1}, "step": {"packs": 2}, "packer": "concatenative"}
    broker = runs.broker("imbalance", {"web": {}}, rules=rules)
    runs.producing(broker, web=Rows([256, *[16] * 16]))
    runs.training(broker, 0.5, 0.5)
    return Provoked(
        "imbalance", broker, rows=(r"load imbalance +1\.[2-9]",), alerts={"CostImbalance": r"costs 1\.[2-9]\d* times"}
    )


CASES = (healthy, slow_producer, dead_producer, slow_rank, dead_rank, full_log, bad_budget, imbalance)


@dataclass
class Provocations:
    """All runs, and the address of the Prometheus that watches them."""

    runs: dict[str, Provoked]
    prometheus: str

    def asked(self, expression: str) -> list[Any]:
        """Return the series that an expression has now."""
        url = f"{self.prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        found: list[Any] = json.loads(fetched(url))["data"]["result"]
        return found

    def firing(self, run: str) -> dict[str, str]:
        """Return the alerts of a run that fire, with their annotations as text."""
        alerts = json.loads(fetched(f"{self.prometheus}/api/v1/alerts"))["data"]["alerts"]
        return {
            alert["labels"]["alertname"]: " ".join(alert["annotations"].values())
            for alert in alerts
            if alert["labels"].get("run") == run and alert["state"] == "firing"
        }

    def ever_fired(self, run: str, over: str = "1h") -> set[str]:
        """Return the names of the alerts of a run that have fired."""
        series = self.asked(f'last_over_time(ALERTS{{run="{run}",alertstate="firing"}}[{over}])')
        return {each["metric"]["alertname"] for each in series}


@contextmanager
def provoked(hurry: float = HURRY) -> Iterator[Provocations]:
    """Start every run, and a Prometheus that watches them; ``hurry``: divides the times of the alerts."""
    with ExitStack() as stack, folder() as path:
        runs = [case(Runs(stack)) for case in CASES]
        for run in runs:
            if run.act is not None:
                until(lambda broker=run.broker: bool(feed_of(broker)["steps"]["returned"] > 5))  # type: ignore[misc]
                run.act()
        targets = [run.broker.url.removeprefix("http://") for run in runs]
        yield Provocations({run.name: run for run in runs}, stack.enter_context(_prometheus(path, targets, hurry)))


@contextmanager
def _prometheus(path: Path, targets: list[str], hurry: float) -> Iterator[str]:
    """Start a Prometheus that asks these addresses; yield its own."""
    (path / "alerts.yaml").write_text(hastened(RULES.read_text(), hurry))
    every = f"{max(int(15_000 / hurry), 500)}ms"
    tree = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [{"job_name": "streampack", "static_configs": [{"targets": targets}]}],
    }
    config = write(path / "prometheus.json", tree)
    words = [
        program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={path}/data",
        "--web.listen-address=127.0.0.1:0",
    ]  # fmt: skip
    with (path / "prometheus.log").open("w") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out)
    try:
        listening = re.compile(r"Listening on.*address=(127\.0\.0\.1:[1-9]\d*)")
        until(lambda: bool(listening.search((path / "prometheus.log").read_text())) or process.poll() is not None)
        found = listening.search((path / "prometheus.log").read_text())
        assert found is not None, (path / "prometheus.log").read_text()
        yield f"http://{found[1]}"
    finally:
        process.kill()
        process.wait()


def hastened(rules: str, hurry: float) -> str:
    """Return alert rules whose times are divided by ``hurry``: the ranges, ``for``, and the silence of a stream."""

    def divided(match: re.Match[str]) -> str:
        before, number, unit, after = match.groups()
        seconds = int(number) * UNITS_S[unit]
        if seconds > 900 and seconds != 3600:
            return match[0]  # these look for what was there before
        least_s = LEAST_FOR_S if before == "for: " else 1
        return f"{before}{max(int(seconds * 1000 / hurry), least_s * 1000)}ms{after}"

    if hurry == 1:
        return rules
    rules = re.sub(r"(\[)(\d+)([smhd])(\])", divided, rules)
    rules = re.sub(r"(for: )(\d+)([smhd])()", divided, rules)
    return rules.replace(") > 60\n", ") > 5\n")


def broken_promises(run: Provoked, told: Provocations) -> list[str]:
    """Return what is wrong with what is told about a run; empty if nothing is."""
    headline = feed_of(run.broker)["headline"]  # the page shows it
    wrong = [] if headline["cause"] == run.cause else [f"headline: got {headline}, expected the cause {run.cause!r}"]
    texts = {"the page": headline["text"]}
    for command in (("status", run.broker.url), ("top", run.broker.url, "--once")):
        result = in_process(*command)
        texts[command[0]] = " ".join(result.stdout.split()) + result.stderr
        wrong += [
            f"{command[0]}: got {result.stdout}, expected {each}" for each in run.rows
            if not re.search(each, texts[command[0]])
        ]  # fmt: skip
    wrong += [f"{where}: got {text}, expected {each}" for where, text in texts.items() for each in run.words
              if not re.search(each, text)]  # fmt: skip
    metrics = set(
        re.findall(
            r'^streampack_delayed\{feed="train",cause="(\w+)"\} 1', fetched(f"{run.broker.url}/metrics").decode(), re.M
        )
    )
    if metrics != ({run.cause} if run.cause else set()):
        wrong.append(f"/metrics: got {metrics}, expected {run.cause!r}")
    firing = told.firing(run.name)
    for name, text in run.alerts.items():
        if not re.search(text, firing.get(name, "")):
            wrong.append(f"alerts: got {firing}, expected {name} with {text}")
    allowed = {*run.alerts, *run.others, "DiskLow"}  # a machine's disk may be nearly full
    if more := told.ever_fired(run.name) - allowed:
        wrong.append(f"alerts: {more} fired, too")
    return wrong


def main(patience_s: float, hurry: float) -> list[str]:
    """Provoke everything, and return what is wrong once ``patience_s`` seconds have passed or nothing is."""
    began = time.monotonic()
    with provoked(hurry) as told:
        *waiting, last = reversed(told.runs.values())
        while waiting and time.monotonic() - began < patience_s:
            time.sleep(max(30 / hurry, 1.0))
            waiting = [run for run in waiting if broken_promises(run, told)]
        return [f"{run.name}: {text}" for run in (*waiting, last) for text in broken_promises(run, told)]
