"""A status with something in every field, from which the texts of all commands follow."""

from __future__ import annotations

import msgspec
from streampack_services.broker.status import BrokerStatus, Histogram

from tests.blank import full

HISTOGRAM = Histogram(bounds=[1.0, 2.0], counts=[3, 4, 5], sum=21.0)


def full_status() -> BrokerStatus:
    """Return a status with something in every field; one of its feeds has few ranks, the other has many."""
    tree = msgspec.to_builtins(full(BrokerStatus, {Histogram: HISTOGRAM}))
    tree["feeds"]["one"]["ranks"]["left_out"] = 0
    return msgspec.convert(tree, BrokerStatus)
