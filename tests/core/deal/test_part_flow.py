"""The flow of parts to one receiver: what is sent again, and how many bytes may be on their way."""

from __future__ import annotations

from streampack.core.deal.part_flow import PartFlow, PartFlows


def test_steps_that_a_receiver_had_from_an_earlier_sender_count_as_sent_once_it_goes_on_behind_them() -> None:
    """A client that reads on with a new broker reports steps as returned that this broker never sent."""
    flows, flow = PartFlows(1 << 20), PartFlow()
    flows.begin(flow, 0)
    flows.request(flow, 4, 8, 0)
    flows.send_again(flow, (4, 0), 1, 0.0)
    assert flow.place == flow.ever_sent == (4, 0)
