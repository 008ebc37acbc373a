"""What crosses the network for a node of eight tensor-parallel ranks, counted by the kernel between two namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.scale.two_hosts import NoNamespaces, TwoHosts, measure, two_hosts

TP = 8
STEPS = 60
MOST_RATIO = 1.05
"""Most bytes that the broker's host may send for each unique byte: the rest is plans, requests and headers."""


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(two_hosts())
        except NoNamespaces as error:
            pytest.skip(f"cannot make network namespaces, which need root and iproute2: {error}")
        yield found


def test_a_relay_brings_each_byte_to_a_node_of_tensor_parallel_ranks_once(hosts: TwoHosts) -> None:
    direct = measure(hosts, TP, STEPS, relay=False)
    by_relay = measure(hosts, TP, STEPS, relay=True)
    assert direct.ratio > TP  # the count is of what crosses the network: each rank has its own copy
    assert 1.0 < by_relay.ratio <= MOST_RATIO, by_relay
    assert set(by_relay.digests) == set(direct.digests)
    assert len(set(direct.digests)) == 1
    assert len(direct.digests) == len(by_relay.digests) == TP
