"""Kernels are compiled before a broker says that it is ready, once each, and wherever it is installed.

In processes of their own, since tests before these have compiled kernels for whatever they gave them.
"""

from __future__ import annotations

import os
import subprocess
import sys

from streampack.wire.sample_checksums import compiled

KERNELS = """
import sys
import numpy as np

def signatures():
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("streampack")]
    found = {id(each): each for module in modules for each in vars(module).values() if hasattr(each, "py_func")}
    return {f"{each.py_func.__module__}.{each.__name__}": len(each.signatures) for each in found.values()}
"""
SERVED = f"""{KERNELS}
import streampack
from streampack.kernels import background
from streampack_services.broker import service as broker

class Service(broker.BrokerService):
    def warm_up(self):
        super().warm_up()
        background.compiler.wait()
        warm.update(warm or signatures())

warm, broker.BrokerService = {{}}, Service
rows = [{{"ids": list(range(1 + i % 50)), "loss_mask": [1] * (1 + i % 50)}} for i in range(300)]
with streampack.local(rows, tokens_key="ids", fields={{"loss_mask": {{}}}}, budget=512, packs=2) as loader:
    assert sum(step.num_samples for step in loader.steps()) == 300
later = signatures()
assert warm
print([(name, later[name] - count) for name, count in warm.items() if later[name] != count])
"""
CLEANED = f"""{KERNELS}
from streampack_services.broker.arena import Arena
from streampack.core.model.fields import Field
from streampack.core.layout.boundaries import Contents

arena = Arena(4 * 64 * 5, "int32", 64, (Field(name="mask", dtype="uint8"),))
def store(handle):
    arena.store(np.array([handle]), np.array([0]), np.array([8]), np.array([0]), (bytes(32), bytes(8)))
store(0)
packs = Contents(np.array([0]), np.array([1]), np.array([8]), np.array([1]))
arena.gather(packs, ["input_ids", "mask"], 1, (0,), "whole")
arena.release(np.array([0]))
before = signatures()
for handle in range(1, 100):
    store(handle)
    if handle % 8:
        arena.release(np.array([handle]))
assert arena.moved_tokens
print([name for name, count in signatures().items() if count != before[name]])
"""
SUMMED = f"""{KERNELS}
from streampack.wire.sample_checksums import compiled
from streampack.wire import crc_kernels

crcs_of, bounds = compiled(), np.array([0, 40, 100])
crcs_of([(np.zeros(100, np.uint8), bounds)])
crcs_of([(np.frombuffer(bytes(100), np.uint8), bounds)])
print(len(crc_kernels._pieces.signatures))
"""
EVERYWHERE = """
import numpy as np
from streampack.wire.sample_checksums import compiled
from streampack.packs.kernel_loader import kernels
from streampack.core.form import form_kernels as form_kernel
from streampack.core.packers.exact_fill import exact_fill_kernels as exact_fill_kernel
from streampack_services.broker import arena_kernels
places = np.zeros(1, np.int64)
print(arena_kernels.release_samples(places, places, places, 1, places, places), compiled() is not None)
kernels.load()
kernels.wait()
print(kernels.derive is not None)
"""


def ran(code: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert not done.returncode, done.stderr
    return done.stdout.split()


def test_nothing_is_compiled_once_a_broker_serves() -> None:
    assert ran(SERVED) == ["[]"]


def test_nothing_is_compiled_to_clean_the_arena() -> None:
    assert ran(CLEANED) == ["[]"]


def test_checksums_of_what_may_not_be_written_to_take_no_kernel_of_their_own() -> None:
    if compiled() is not None:
        assert ran(SUMMED) == ["1"]


def test_kernels_work_where_there_is_no_place_to_keep_them() -> None:
    """A read-only installation and no home: numba finds none of the places it looks for."""
    expected = ["0", str(compiled() is not None), "True"]
    assert ran(EVERYWHERE, NUMBA_CACHE_LOCATOR_CLASSES="IPythonCacheLocator") == expected
