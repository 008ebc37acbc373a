"""What ``streampack check`` says of a broker's memory; that a real one takes it is in ``tests/integration``."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st
from streampack_services.broker.memory_peak import Peak, peak
from streampack_services.broker.memory_plan import plan

from streampack.config.config_validation import checked
from streampack.config.daemon_settings import BrokerConfig
from streampack.config.typed_yaml import convert, parse_size
from streampack.errors import ConfigError

MIB = 2**20
settings = st.fixed_dictionaries(
    {
        "memory": st.integers(64, 65536).map("{}MiB".format),
        "tokens": st.sampled_from(["int32", "uint16"]),
        "steps_ahead": st.integers(1, 63),
        "rules": st.fixed_dictionaries(
            {
                "budget": st.integers(256, 65536),
                "step": st.one_of(
                    st.fixed_dictionaries({"packs": st.integers(1, 2048)}),
                    st.fixed_dictionaries({"samples": st.integers(1, 4096)}),
                ),
            }
        ),
        "streams": st.fixed_dictionaries({"web": st.fixed_dictionaries({"partitions": st.integers(1, 64)})}),
    }
)


def peaks(tree: dict[str, Any], *means: int | None) -> list[Peak]:
    config = checked(convert(tree, BrokerConfig))
    try:
        planned = plan(config)
    except ConfigError:  # too little memory
        assume(False)
    return [peak(config, planned, mean) for mean in means]


@given(settings)
def test_no_part_is_larger_than_of_the_longest_samples(tree: dict[str, Any]) -> None:
    found, longer, most = peaks(tree, 500, 1000, None)
    assert all(part > 0 for part in astuple(found))
    memory = int(tree["memory"].removesuffix("MiB")) * MIB
    assert found.arena <= longer.arena <= most.arena == memory
    for name in ("libraries", "arriving", "leaving"):
        assert getattr(found, name) <= getattr(longer, name) <= getattr(most, name)
    assert found.total == sum(astuple(found))


@given(settings, st.sampled_from(["16KiB", "1MiB", "2MiB", "8MiB"]))
def test_a_partition_holds_four_chunks_unless_they_would_be_small(tree: dict[str, Any], limit: str) -> None:
    config = checked(convert(tree | {"limits": {"chunk": limit, "sample_tokens": 256}}, BrokerConfig))
    try:
        found = plan(config)
    except ConfigError:
        assume(False)
    most, quota = parse_size(limit, ""), found.capacity.quota_tokens * found.token_bytes
    assert min(most, MIB) <= found.chunk_bytes <= most
    assert 2 * found.chunk_bytes <= quota
    if found.chunk_bytes > min(most, MIB):
        assert 4 * found.chunk_bytes <= quota
    if found.chunk_bytes < most:
        assert quota < 4 * most
    longest = max(256, found.rules.budget + 1) * found.token_bytes
    assert found.capacity.max_chunk_bytes <= max(found.chunk_bytes, longest) <= quota


@given(settings)
def test_more_steps_ahead_take_no_less(tree: dict[str, Any]) -> None:
    [fewer] = peaks(tree, 500)
    [more] = peaks(tree | {"steps_ahead": tree["steps_ahead"] + 1}, 500)
    assert all(a <= b for a, b in zip(astuple(fewer), astuple(more), strict=True))
