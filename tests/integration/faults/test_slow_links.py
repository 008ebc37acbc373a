"""A rank behind a slow link gets its link's rate, and costs the broker neither memory nor bytes sent twice.

``benchmarks/attacks/slow_links.py`` is the longer form.
"""

from __future__ import annotations

import pytest
from streampack_services.broker.memory_peak import PROCESS_BYTES
from streampack_services.broker.memory_plan import ARRIVING_BYTES, LEAVING

from tests.integration.faults.slow_links import read_slowly
from tests.integration.running import executed

PARTITIONS = 2


@pytest.mark.parametrize(("ranks", "bytes_per_s", "packs"), [(1, 1e6, 256), (4, 0.4e6, 256)])
def test_a_slow_link_is_used_for_bytes_that_are_useful(ranks: int, bytes_per_s: float, packs: int) -> None:
    with executed():
        found = read_slowly(ranks, bytes_per_s, 8.0, packs=packs)
    print(found, f"useful {found.useful:.3f}, of the links {found.link_use:.3f}")
    assert found.useful >= 0.95
    assert found.link_use >= 0.9
    most = PROCESS_BYTES + found.memory_bytes + found.memory_bytes // LEAVING + PARTITIONS * ARRIVING_BYTES
    assert found.most_bytes <= most
