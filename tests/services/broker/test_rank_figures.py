"""The ranks of a snapshot: worst first, in bounded bytes, and data waits that count each second once."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from streampack_services.broker.ranks.rank_figures import (
    MOST_RANKS,
    PAGE_RANKS,
    WORST_NODES,
    WORST_RANKS,
    RankColumns,
    RankFigures,
)
from streampack_services.broker.ranks.rank_status import NodeStatus
from streampack_services.broker.ranks.rank_table import RANKS_A_TURN, RankTable
from streampack_services.broker.ranks.recent_waits import COLUMNS, TRAINER, RankTotals, RecentWaits, WaitWindow
from streampack_services.broker.status import BrokerStatus, FeedStatus
from streampack_services.http.metrics import exposition

from streampack.core.serve.rank_reader import Receiver
from streampack.core.serve.served_steps import RankProgress
from streampack.core.stats.data_wait import CAUSES
from tests.integration.simulated_ranks import NODE_RANKS, SimulatedRanks

MANY = 30_000
SILENT_S = 5.0
PEERS = CAUSES.index("peers")


@pytest.fixture(scope="module")
def few() -> Iterator[SimulatedRanks]:
    """8 ranks on a node."""
    found = SimulatedRanks(8)
    found.attach()
    found.deal()
    found.ping(1.0)
    yield found
    found.close()


@pytest.fixture(scope="module")
def many() -> Iterator[SimulatedRanks]:
    """30,000 ranks on 3,750 nodes, with figures of half a minute."""
    found = SimulatedRanks(MANY)
    found.attach()
    found.deal()
    for _ in range(3):
        found.ping(10.0)
    yield found
    found.close()


def status(simulated: SimulatedRanks) -> BrokerStatus:
    """Return a snapshot after at least one whole pass over the ranks."""
    return simulated.snapshot()


def feed_of(simulated: SimulatedRanks) -> FeedStatus:
    """Return the status of the only feed."""
    return status(simulated).feeds["train"]


# Bounds


def test_all_of_8_ranks_are_listed_in_order_with_their_node(few: SimulatedRanks) -> None:
    feed = feed_of(few)
    assert [row.tp_rank for row in feed.readers] == list(range(8))
    assert (feed.ranks.attached, feed.ranks.left_out, feed.ranks.nodes_left_out) == (8, 0, 0)
    (node,) = feed.ranks.nodes
    assert (node.host, node.ranks, node.attached) == ("node0000.cluster", 8, 8)
    assert node.cause == "stream", "rank 3 waits for a stream"
    assert node.worst_rank == [0, 0, 3, 0]
    assert (feed.ranks.mesh.dp, feed.ranks.mesh.tp) == (1, 8) if feed.ranks.mesh else False
    text = exposition(status(few)).decode()
    assert text.count("streampack_reader_step_seconds{") == 8
    assert "streampack_node_silent_seconds{" not in text


@pytest.mark.parametrize("ranks", [MOST_RANKS, MOST_RANKS + 1])
def test_ranks_are_listed_up_to_the_limit_and_nodes_above_it(ranks: int) -> None:
    simulated = SimulatedRanks(ranks)
    try:
        simulated.attach()
        simulated.ping(1.0)
        now = status(simulated)
        feed, text = now.feeds["train"], exposition(now).decode()
        listed = ranks if ranks == MOST_RANKS else WORST_RANKS
        assert (len(feed.readers), feed.ranks.left_out) == (listed, ranks - listed)
        assert text.count("streampack_reader_silent_seconds{") == (ranks if ranks == MOST_RANKS else 0)
        assert text.count("streampack_node_silent_seconds{") == (0 if ranks == MOST_RANKS else WORST_NODES)
    finally:
        simulated.close()


def test_30_000_ranks_are_in_bounded_bytes(many: SimulatedRanks) -> None:
    now = status(many)
    feed = now.feeds["train"]
    assert len(msgspec.json.encode(now)) < 100_000
    assert len(exposition(now)) < 100_000
    assert (feed.ranks.attached, feed.ranks.left_out) == (MANY, MANY - WORST_RANKS)
    assert (feed.ranks.num_nodes, feed.ranks.nodes_left_out) == (MANY // NODE_RANKS, MANY // NODE_RANKS - WORST_NODES)
    whole = many.service.rank_page("train", None, 0)
    assert whole is not None
    assert len(msgspec.json.encode(whole)) < 300_000


def test_figures_of_clients_with_long_names_stay_bounded_too() -> None:
    """A host may have 255 characters, and a rank 32 figures with names of 200 characters."""
    simulated = SimulatedRanks(MOST_RANKS + 8, host="h" * 240 + "{}")
    try:
        simulated.attach()
        simulated.ping(1.0)
        now = status(simulated)
        assert len(exposition(now)) < 400_000
        assert len(msgspec.json.encode(now)) < 200_000
    finally:
        simulated.close()


def test_a_turn_reads_a_limited_number_of_ranks(many: SimulatedRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    progress_of = many.feed.readers.steps.progress_of

    def counted(reader: object) -> RankProgress:
        read.append(reader)
        return progress_of(reader)  # type: ignore[arg-type]

    monkeypatch.setattr(many.feed.readers.steps, "progress_of", counted)
    table, turns = RankTable(many.feed), 0
    while not table.figures.attached:
        before, turns = len(read), turns + 1
        table.turn(float(turns))
        assert len(read) - before <= RANKS_A_TURN
    assert turns == -(-MANY // RANKS_A_TURN)
    assert len(read) == MANY


def test_the_bytes_of_a_relay_count_once_for_its_node(few: SimulatedRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = Receiver(b"relay", is_relay=True)
    relay.flow.queued_bytes = 1000
    for reader in few.feed.readers.registry.held.values():
        monkeypatch.setattr(reader, "receiver", relay)
    (node,) = feed_of(few).ranks.nodes
    assert node.queued_bytes == 1000


# On request


def test_pages_have_every_rank_once_in_order(many: SimulatedRanks) -> None:
    status(many)
    found = []
    for first in range(0, MANY, PAGE_RANKS):
        page = many.service.rank_page("train", None, first)
        assert page is not None
        assert (page.first, page.attached, page.node) == (first, MANY, None)
        found += [(row.dp_rank, row.tp_rank) for row in page.readers]
    assert found == [(rank // 8, rank % 8) for rank in range(MANY)]
    last = many.service.rank_page("train", None, MANY)
    assert last is not None
    assert last.readers == []


def test_a_node_that_is_asked_for_is_shown_with_its_ranks(many: SimulatedRanks) -> None:
    status(many)
    for asked in ("node2000.cluster", "node2000", "2000"):
        page = many.service.rank_page("train", asked, 0)
        assert page is not None
        assert page.node is not None
        assert page.node.host == "node2000.cluster"
        assert [(row.dp_rank, row.tp_rank) for row in page.readers] == [(2000, tp) for tp in range(8)]
    assert many.service.rank_page("train", "nobody's", 0) is None


# Worst first


def test_a_node_that_is_gone_is_the_first_and_comes_back(few: SimulatedRanks) -> None:
    simulated = SimulatedRanks(MOST_RANKS + 8)
    try:
        simulated.attach()
        simulated.ping(1.0)
        gone = list(range(800, 808))
        simulated.leave(gone)
        feed = feed_of(simulated)
        node = feed.ranks.nodes[0]
        assert (node.host, node.ranks, node.attached) == ("node0100.cluster", 8, 0)
        assert (node.data_wait, node.silent_s, node.done_upto) == (None, None, None)
        assert feed.ranks.attached == MOST_RANKS
        simulated.attach(gone)
        assert all(node.attached == 8 for node in feed_of(simulated).ranks.nodes)
    finally:
        simulated.close()


RANK = st.tuples(
    st.integers(0, 3),  # host
    st.booleans(),  # attached
    st.integers(0, 3),  # steps returned
    st.sampled_from([0.0, 1.0, SILENT_S, 9.0, 30.0]),  # seconds of silence
    st.sampled_from([0.0, 0.25, 0.5]),  # share of time that it waits for a stream
    st.sampled_from([0.0, 0.25, 0.5]),  # share of time that it waits for peers
)


@given(st.lists(RANK, min_size=1, max_size=40))
@example([(1, True, 0, 0.0, 0.0, 0.0), (1, True, 1, 0.0, 0.0, 0.0)])
def test_nodes_and_ranks_are_listed_worst_first(
    few: SimulatedRanks, rows: list[tuple[int, bool, int, float, float, float]]
) -> None:
    columns = columns_of(rows)
    progress = [progress_at(at, row) if row[1] else None for at, row in enumerate(rows)]
    hosts = [f"node{n}" for n in range(4)]
    figures = RankFigures(few.feed, 0.0, hosts, columns, progress)
    most = max((done for _, there, done, *_ in rows if there), default=0)
    named = [node.host for node in figures.nodes]
    assert sorted(named) == hosts
    keys = [node_key([row for row in rows if f"node{row[0]}" == host], most) for host in named]
    assert keys == sorted(keys, reverse=True)
    for node in figures.nodes:
        check_node(node, [row for row in rows if f"node{row[0]}" == node.host])
    worst = figures._worst_ranks(5)
    keys = [rank_key(rows[at], most) for at in worst]
    every = sorted((rank_key(row, most) for row in rows if row[1]), reverse=True)
    assert keys == every[:5]


def rank_key(row: tuple[int, bool, int, float, float, float], most: int) -> tuple[float, ...]:
    """Return a key that is the larger, the worse an attached rank is."""
    _, _, done, silent_s, own, peers = row
    return (silent_s if silent_s >= SILENT_S else 0.0, own, most - done, own + peers)


def node_key(rows: list[tuple[int, bool, int, float, float, float]], most: int) -> tuple[float, ...]:
    """Return a key that is the larger, the worse a node with these ranks is."""
    there = [row for row in rows if row[1]]
    missing = len(rows) - len(there)
    if not there:
        return (missing, 0.0, 0.0, 0, 0.0)
    silent_s = max(row[3] for row in there)
    return (
        missing, silent_s if silent_s >= SILENT_S else 0.0, max(row[4] for row in there),
        most - min(row[2] for row in there), max(row[4] + row[5] for row in there),
    )  # fmt: skip


def check_node(node: NodeStatus, rows: list[tuple[int, bool, int, float, float, float]]) -> None:
    """Check that the figures of a node are the worst of its attached ranks."""
    there = [row for row in rows if row[1]]
    assert (node.ranks, node.attached) == (len(rows), len(there))
    if not there:
        assert (node.data_wait, node.silent_s, node.done_upto, node.ahead) == (None, None, None, None)
        return
    assert node.silent_s == max(row[3] for row in there)
    assert node.done_upto == min(row[2] for row in there)
    assert node.data_wait == pytest.approx(max(row[4] + row[5] for row in there))
    assert node.queued_bytes == 10 * len(there)


def columns_of(rows: list[tuple[int, bool, int, float, float, float]]) -> RankColumns:
    """Return the columns of these ranks, each with a second of time."""
    figures = np.zeros((len(rows), COLUMNS))
    figures[:, 0], figures[:, PEERS] = [row[4] for row in rows], [row[5] for row in rows]
    figures[:, TRAINER] = 1.0 - figures.sum(axis=1)
    waits = RecentWaits(figures, [{}] * len(rows))
    host, attached, done = (np.array([row[n] for row in rows]) for n in range(3))
    ranks = np.stack([np.arange(len(rows)), *[np.zeros(len(rows), np.int64)] * 3])
    return RankColumns(
        ranks, host, attached, done, done + 2, np.full(len(rows), 10), np.array([row[3] for row in rows]),
        np.full(len(rows), np.nan), done, waits, waits,
    )  # fmt: skip


def progress_at(at: int, row: tuple[int, bool, int, float, float, float]) -> RankProgress:
    """Return the progress of the rank with this number."""
    return RankProgress((at, 0, 0, 0), f"node{row[0]}:{at}", 0, row[2], row[2] + 2, 10, row[3], {}, None)


# Data waits over time


def test_data_waits_are_those_of_the_last_seconds_and_of_the_same_process() -> None:
    window, keys = WaitWindow(), np.array([1, 2, 3])
    seconds = np.zeros((3, COLUMNS))
    for now in range(0, 100, 5):
        if now == 80:
            keys = np.array([1, 2, 4])  # another process has the last rank
            seconds[2] = 0.0
        window.begin(float(now), 10.0, 3)
        found = window.since(0, keys, seconds.copy(), [{}] * 3)
        seconds[:, TRAINER] += 5.0
        seconds[0, 0] += 5.0 if now < 40 else 0.0  # waits all the time at first, and never later
        seconds[2, PEERS] += 15.0
    assert found.share == pytest.approx([0.0, 0.0, 0.75])
    assert found.cause[2] == PEERS
    assert found.own[2] == pytest.approx(0.0, abs=1e-9)


@given(st.lists(st.dictionaries(st.integers(0, 3), st.one_of(st.none(), st.floats(0, 1)), max_size=4), max_size=30))
def test_the_sum_rises_by_what_ranks_have_waited_while_they_were_there(turns: list[dict[int, float | None]]) -> None:
    """In each second, each attached rank has waited so much of the second, or says nothing (None)."""
    starved, waited, heard = RankTotals(), dict.fromkeys(range(4), 1000.0), dict[int, float]()
    least = most = last = 0.0
    for second, there in enumerate(turns):
        for rank, more in there.items():
            waited[rank] += more or 0.0
        said = {rank: waited[rank] if more is not None else None for rank, more in there.items()}
        found = add(starved, float(second), said)
        heard = {rank: before for rank, before in heard.items() if rank in there}
        spoken = {rank: waited[rank] for rank, more in there.items() if more is not None}
        least += sum(now - heard[rank] for rank, now in spoken.items() if rank in heard)
        most += len(there)
        heard |= spoken
        assert last <= found
        assert least - 1e-6 <= found <= most
        last = found


def test_a_rank_that_comes_from_another_broker_has_waited_no_longer_than_it_is_here() -> None:
    starved = RankTotals()
    assert add(starved, 1.0, {0: None}) == 0
    assert add(starved, 3.0, {0: 5000.0}) == pytest.approx(2.0)
    assert add(starved, 4.0, {0: 5000.5}) == pytest.approx(2.5)
    assert add(starved, 5.0, {0: None}) == pytest.approx(2.5)
    assert add(starved, 6.0, {0: 5001.0}) == pytest.approx(3.0)
    assert add(starved, 7.0, {}) == pytest.approx(3.0), "the rank has left"
    assert add(starved, 8.0, {0: 5009.0}) == pytest.approx(3.0), "the rank has come again"


def add(starved: RankTotals, now: float, said: dict[int, float | None]) -> float:
    """Add the seconds that each of 4 ranks reports, None for a rank that has not reported; return the sum."""
    waits = np.zeros((4, COLUMNS))
    waits[:, 0] = [said.get(rank) or 0.0 for rank in range(4)]
    keys = np.array([rank if rank in said else -1 for rank in range(4)])
    reported = np.array([said.get(rank) is not None for rank in range(4)])
    starved.add(now, 0, keys, reported, waits)
    return float(starved.sums[0])
