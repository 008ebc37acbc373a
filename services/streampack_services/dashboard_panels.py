"""What the Grafana dashboard shows: rows of panels, each one question with its expressions, unit and limits.

Data alone; ``dashboard`` makes Grafana's JSON of it. In expressions ``{broker}`` stands for the series of the brokers
chosen, ``{feed}`` for those of the feeds chosen, ``[~]`` for the range that fits what is shown, RANK for the labels of
a rank. Figures of ranks are the ten worst, or one line a cause: 512 lines could not be read; the table has them all.
Limits are those of the alerts (``deploy/prometheus/alerts.yaml``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OF_RANK = "{{feed}} dp {{dp_rank}} cp {{cp_rank}} tp {{tp_rank}} pp {{pp_rank}} on {{host}}"
TOKENS, SAMPLES = "si:tok", "si:smp"
"""Grafana's way to say 1.2 Mtok."""

PACKED = "sum by (feed) (rate(streampack_packed_tokens_total{feed}[~]))"
WASTED = "sum by (feed) (rate(streampack_waste_tokens_total{feed}[~]))"
DELIVERED = "sum by (feed) (rate(streampack_delivered_tokens_total{feed}[~]))"
STARVED = "sum by (RANK) (rate(streampack_reader_starved_seconds_total{feed}[~]))"
RANKS = "sum by (feed) (streampack_readers_connected{feed})"


def _quantiles(histogram: str, *quantiles: float) -> dict[str, str]:
    buckets = f"sum by (feed, le) (rate(streampack_{histogram}_bucket{{feed}}[~]))"
    return {f"{{{{feed}}}}: {100 * q:g}%": f"histogram_quantile({q}, {buckets})" for q in quantiles}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A question, and what answers it.

    ``queries`` are legends and their expressions. ``limits``: where green becomes orange and then red, or, ``falling``,
    red orange and then green. ``words`` stand for the values 0, 1, ... ``units`` are of a table's columns.
    """

    title: str
    text: str
    queries: dict[str, str]
    unit: str = "none"
    kind: Literal["timeseries", "stat", "table"] = "timeseries"
    width: int = 8
    least: float | None = 0.0
    decimals: int | None = None
    limits: tuple[float, ...] = ()
    falling: bool = False
    stacked: bool = False
    words: tuple[str, ...] = ()
    units: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """A heading and what is below it."""

    title: str
    panels: tuple[Panel, ...]


OVERVIEW = Row("Overview", (
    Panel(title="Broker", kind="stat", width=3, limits=(1,), falling=True, words=("not ready", "serving"),
          text="Whether the broker serves. It does not while it starts or drains.",
          queries={"ready": "max(streampack_ready{broker})"}),
    Panel(title="Alerts", kind="stat", width=3, limits=(1, 2),
          text="Alerts of this run that fire now.",
          queries={"alerts": 'count(ALERTS{alertstate="firing",run=~"$run"}) or vector(0)'}),
    Panel(title="Packed", kind="stat", width=3, unit=f"{TOKENS}/s",
          text="Real tokens packed a second.",
          queries={"packed": f"sum({PACKED})"}),
    Panel(title="Utilisation", kind="stat", width=3, unit="percentunit", decimals=2, limits=(0.9, 0.95), falling=True,
          text="Real tokens over all tokens delivered, lately.",
          queries={"real": f"1 - sum({WASTED}) / sum({DELIVERED})"}),
    Panel(title="Starved", kind="stat", width=3, unit="percentunit", decimals=2, limits=(0.05, 0.1),
          text="Share of its time that the hungriest rank waits for data.",
          queries={"starved": f"max({STARVED})"}),
    Panel(title="Ranks", kind="stat", width=3,
          text="Ranks attached. With fewer than the mesh has no step is served.",
          queries={"ranks": f"sum({RANKS})"}),
    Panel(title="Committed", kind="stat", width=3,
          text="Step at which the last checkpoint begins that trainers call durable.",
          queries={"step": "max(streampack_committed_step{feed})"}),
    Panel(title="Steps left", kind="stat", width=3,
          text="Steps left of this pass over the data, estimated; nothing where a stream repeats for ever.",
          queries={"steps": 'max(streampack_steps_left{feed,bound="estimate"})'}),
))  # fmt: skip

FLOW = Row("Flow by stream", (
    Panel(title="Tokens received", width=6, unit=f"{TOKENS}/s",
          text="Tokens taken from producers and kept.",
          queries={"{{stream}}": "sum by (stream) (rate(streampack_received_tokens_total{broker}[~]))"}),
    Panel(title="Samples received", width=6, unit=f"{SAMPLES}/s",
          text="Samples taken from producers.",
          queries={"{{stream}}": "sum by (stream) (rate(streampack_received_samples_total{broker}[~]))"}),
    Panel(title="Credits used", width=6, unit="percentunit",
          text="Tokens that have come and wait for their turn, of all that may. The stream near 0 is the one that the "
               "others wait for.",
          queries={"{{stream}}": "sum by (stream) (streampack_stream_used_tokens{broker})"
                                 " / sum by (stream) (streampack_stream_granted_tokens{broker} > 0)"}),
    Panel(title="Lag", width=6, unit=SAMPLES,
          text="Samples that may be sent and have not come.",
          queries={"{{stream}}": "sum by (stream) (streampack_stream_lag_samples{broker})"}),
    Panel(title="Silence", width=6, unit="s", limits=(60,),
          text="Time since any producer of the stream was heard.",
          queries={"{{stream}}": "max by (stream) (time() - streampack_stream_last_seen_timestamp_seconds{broker})"}),
    Panel(title="Producers", width=6,
          text="Producers that offer the stream, and those that were gone without a goodbye.",
          queries={"{{stream}}": "sum by (stream) (streampack_stream_producers{broker})",
                   "vanished": "sum(increase(streampack_vanished_producers_total{broker}[~]))"}),
    Panel(title="Rejected", width=6, unit=f"{SAMPLES}/s",
          text="Samples that could not be used and were dropped, by reason.",
          queries={"{{stream}} {{reason}}":
                   "sum by (stream, reason) (rate(streampack_rejected_samples_total{broker}[~]))"
                   " or on (stream) 0 * sum by (stream) (streampack_stream_producers{broker})"}),
    Panel(title="Not trained", width=6, unit=f"{TOKENS}/s",
          text="Tokens that came and are in no step that is trained, by what took them.",
          queries={"{{feed}}: {{policy}}": "sum by (feed, policy) (rate(streampack_untrained_tokens_total{feed}[~]))"}),
))  # fmt: skip

PACKING = Row("Waste and packing", (
    Panel(title="Waste by cause", width=6, unit="percentunit", stacked=True, limits=(0.05,),
          text="Share of the tokens delivered that are nobody's.",
          queries={"{{cause}}": "sum by (cause) (rate(streampack_waste_tokens_total{feed}[~]))"
                                f" / on () group_left () sum({DELIVERED})"}),
    Panel(title="Packed and delivered", width=6, unit=f"{TOKENS}/s",
          text="Real tokens packed, and tokens delivered with their padding.",
          queries={"{{feed}}: packed": PACKED, "{{feed}}: delivered": DELIVERED}),
    Panel(title="Utilisation, efficiency, balance", width=6, unit="percentunit", least=None,
          text="Since the broker began: real tokens over packs times budget; packs that the tokens alone would need, "
               "over those formed; how alike packs are filled.",
          queries={"{{feed}}: utilisation": "streampack_utilisation_ratio{feed}",
                   "{{feed}}: efficiency": "streampack_packing_efficiency_ratio{feed}",
                   "{{feed}}: balance": "streampack_bin_balance_ratio{feed}"}),
    Panel(title="Fill of packs", width=6, unit="percentunit", least=None,
          text="Real tokens of a pack over the budget: one pack of a hundred, of ten, and of two is filled less.",
          queries=_quantiles("pack_fill_ratio", 0.01, 0.1, 0.5)),
    Panel(title="Samples in a pack", width=6, decimals=1,
          text="Samples that share a pack: the mean, and what nine of ten packs have at most, about.",
          queries={"{{feed}}: mean": "sum by (feed) (rate(streampack_pack_samples_sum{feed}[~]))"
                                     " / sum by (feed) (rate(streampack_pack_samples_count{feed}[~]))",
                   **_quantiles("pack_samples", 0.9)}),
    Panel(title="Steps formed", width=6, unit="cps",
          text="Steps formed a second.",
          queries={"{{feed}}": "sum by (feed) (rate(streampack_steps_total{feed}[~]))"}),
    Panel(title="Time spent packing", width=6, unit="percentunit",
          text="Share of one core that forms steps. Near 1 the packer is what all wait for.",
          queries={"{{instance}}": "rate(streampack_form_seconds_total{broker}[~])"}),
    Panel(title="Over-long", width=6, unit=f"{SAMPLES}/s",
          text="Samples that the over-long policy cut, split or dropped.",
          queries={"{{stream}}": "sum by (stream) (rate(streampack_overlong_samples_total{broker}[~]))"}),
))  # fmt: skip

BALANCE = Row("Balance and ranks", (
    Panel(title="Starved by cause", width=6, unit="percentunit", stacked=True, limits=(0.1,),
          text="Share of its time that a rank waits for data, by what it waits for; mean over ranks.",
          queries={"{{feed}}: {{cause}}":
                   "sum by (feed, cause) (rate(streampack_reader_starved_seconds_total{feed}[~]))"
                   f" / on (feed) group_left () {RANKS}"}),
    Panel(title="Starved by stream", width=6, unit="percentunit", stacked=True,
          text="Share of its time that a rank waits for samples of a stream; mean over ranks.",
          queries={"{{feed}}: {{stream}}":
                   'sum by (feed, stream) (rate(streampack_reader_starved_seconds_total{feed,cause="stream"}[~]))'
                   f" / on (feed) group_left () {RANKS}"}),
    Panel(title="The ten hungriest ranks", width=6, unit="percentunit", limits=(0.1,),
          text="Share of its time that a rank waits for data, of the ten that wait most.",
          queries={OF_RANK: f"topk(10, {STARVED})"}),
    Panel(title="Dearest over the mean", width=6, decimals=3, least=1.0, limits=(1.1,),
          text="Cost of the dearest rank of a micro-batch, and of a step, over the mean: 1 where no rank waits for "
               "another's attention. Mean since the broker began.",
          queries={"{{feed}}: micro-batch": "streampack_cost_max_over_mean_ratio{feed}",
                   "{{feed}}: step": "streampack_step_cost_max_over_mean_ratio{feed}"}),
    Panel(title="The ten slowest waits", width=6, unit="s",
          text="99th percentile of a rank's wait for a step, of the ten that wait longest.",
          queries={OF_RANK: "topk(10, streampack_reader_next_p99_seconds{feed})"}),
    Panel(title="Waits for a step", width=6, unit="s",
          text="How long ranks wait for a step, all of them: one of two, 99 of 100, and 999 of 1000 wait less.",
          queries=_quantiles("next_wait_seconds", 0.5, 0.99, 0.999)),
    Panel(title="Ranks attached", width=6,
          text="Ranks that are there, and those that the mesh has.",
          queries={"{{feed}}": "streampack_readers_connected{feed}",
                   "{{feed}}: mesh": "streampack_readers_expected{feed}"}),
    Panel(title="Steps returned", width=6,
          text="Steps of this iteration that the first rank has returned, and the last.",
          queries={"{{feed}}: first rank": "max by (feed) (streampack_reader_returned_steps{feed})",
                   "{{feed}}: last rank": "min by (feed) (streampack_reader_returned_steps{feed})"}),
    Panel(title="Every rank", kind="table", width=24, units=("percentunit", "percentunit", "s", "s", "none", "s"),
          text="As it is now, the hungriest first.",
          queries={"waits": STARVED,
                   "trains": "sum by (RANK) (rate(streampack_reader_trainer_seconds_total{feed}[~]))",
                   "a step": "max by (RANK) (streampack_reader_step_seconds{feed})",
                   "wait, p99": "max by (RANK) (streampack_reader_next_p99_seconds{feed})",
                   "steps returned": "max by (RANK) (streampack_reader_returned_steps{feed})",
                   "silent": "max by (RANK) (streampack_reader_silent_seconds{feed})"}),
))  # fmt: skip

HELD = Row("Window and memory", (
    Panel(title="Window", width=6, unit=TOKENS,
          text="Tokens merged and not in a step yet.",
          queries={"{{feed}}": "streampack_window_tokens{feed}"}),
    Panel(title="Age in the window", width=6,
          text="Steps that samples waited for their pack.",
          queries={"{{feed}}: 99 of 100": "streampack_wait_p99_steps{feed}",
                   "{{feed}}: longest ever": "streampack_longest_wait_steps{feed}",
                   "{{feed}}: oldest now": "streampack_window_oldest_steps{feed}"}),
    Panel(title="Held", width=6, unit=TOKENS,
          text="Tokens merged and not yet returned by all ranks, and the most that may be.",
          queries={"{{feed}}": "streampack_held_tokens{feed}",
                   "{{feed}}: limit": "streampack_held_limit_tokens{feed}"}),
    Panel(title="Arena", width=6, unit="bytes",
          text="Memory of samples: taken, and all there is. A full one makes producers wait, as it should where "
               "trainers are slower.",
          queries={"taken": "streampack_arena_live_tokens{broker} * streampack_arena_token_bytes{broker}",
                   "all": "streampack_arena_capacity_bytes{broker}"}),
))  # fmt: skip

LOG = Row("Log and disk", (
    Panel(title="Log", unit="bytes",
          text="What the log's files take. retain.bytes is the most that they may.",
          queries={"{{instance}}": "streampack_log_bytes{broker}"}),
    Panel(title="Free on its disk", unit="bytes",
          text="What is left for it.",
          queries={"{{instance}}": "streampack_log_disk_free_bytes{broker}"}),
    Panel(title="Stalled", limits=(1,),
          text="1 while the log takes no more: the disk or retain.bytes is full.",
          queries={"{{instance}}": "streampack_log_stalled{broker}"}),
    Panel(title="Records appended", unit="cps",
          text="Records appended to the log a second.",
          queries={"{{instance}}": "rate(streampack_log_records_total{broker}[~])"}),
    Panel(title="Not safe yet",
          text="Records that are not as safe yet as durability asks. Steps wait for theirs.",
          queries={"{{instance}}": "streampack_log_unsafe_records{broker}"}),
    Panel(title="Time syncing", unit="percentunit",
          text="Share of its time that the log's thread waits for the disk.",
          queries={"{{instance}}": "rate(streampack_log_sync_seconds_total{broker}[~])"}),
))  # fmt: skip

PROCESS = Row("The broker's process", (
    Panel(title="CPU", decimals=2,
          text="Cores that the broker uses.",
          queries={"{{instance}}": "rate(process_cpu_seconds_total{broker}[~])"}),
    Panel(title="Memory", unit="bytes",
          text="Resident memory of the broker.",
          queries={"{{instance}}": "process_resident_memory_bytes{broker}"}),
    Panel(title="Sent", unit=f"{TOKENS}/s",
          text="Tokens sent to trainers, padding too.",
          queries={"{{instance}}": "rate(streampack_sent_tokens_total{broker}[~])"}),
    Panel(title="Bad messages", unit="cps",
          text="Messages damaged, refused, of another run, or that could not be sent.",
          queries={"{{reason}}": "sum by (reason) (rate(streampack_bad_messages_total{broker}[~]))"}),
    Panel(title="Open files",
          text="Files and sockets that the broker has open.",
          queries={"{{instance}}": "process_open_fds{broker}"}),
    Panel(title="Uptime", unit="s",
          text="Time since the broker began: a fall is a restart.",
          queries={"{{instance}}": "time() - process_start_time_seconds{broker}"}),
))  # fmt: skip

ROWS = (OVERVIEW, FLOW, PACKING, BALANCE, HELD, LOG, PROCESS)
