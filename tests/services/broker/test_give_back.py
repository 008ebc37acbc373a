"""Memory of a flood goes back to the system, also if it was not free yet when the broker first looked."""

from __future__ import annotations

import pytest
from streampack_services.broker import memory_plan
from streampack_services.broker.service import BrokerService

from streampack.config.daemon_settings import BrokerConfig
from streampack.config.rules_settings import RulesSettings, StepSettings
from streampack.config.service_settings import Listen
from streampack.config.stream_settings import StreamSettings
from tests.integration.running import until
from tests.integration.security.keyed import running

MIB = 1 << 20


class Memory:
    """Memory of a process: some in use, some free, which the process keeps until it is asked for it.

    The memory of a flood becomes free only after the process was asked for the first time.
    """

    def __init__(self) -> None:
        self.used, self.free, self.trims = 100 * MIB, 0, 0

    def resident_bytes(self) -> int:
        """Return what the system counts."""
        return self.used + self.free

    def give_back(self) -> None:
        """Give the free memory back."""
        flood = self.used - 100 * MIB
        self.used, self.free = 100 * MIB, flood
        self.trims += 1


def test_memory_that_is_freed_after_the_peak_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    monkeypatch.setattr(memory_plan, "TRIM_S", 0.0)
    monkeypatch.setattr(memory_plan, "resident_bytes", memory.resident_bytes)
    monkeypatch.setattr(memory_plan, "give_back_memory", memory.give_back)
    config = BrokerConfig(
        streams={"web": StreamSettings()}, rules=RulesSettings(budget=128, step=StepSettings(packs=8)), memory="32MiB",
        listen=Listen(producers="tcp://127.0.0.1:*", trainers="tcp://127.0.0.1:*"),
    )  # fmt: skip
    with running(BrokerService(config)):
        until(lambda: memory.trims == 2, 30)
        memory.used += 900 * MIB
        until(lambda: memory.trims > 2 and not memory.free, 10)
        assert memory.trims == 4, "it is not asked for memory that it does not have"
