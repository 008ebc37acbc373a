"""One hypothesis profile for all tests: machines are shared, and the first call of a kernel compiles it.

And one thread for numpy and for torch, here and in every process that a test starts: numpy's starting of threads that
nobody uses is half of what its import costs, and tiny models lose much by threads where tests run beside each other.

Signals have their usual meaning, also where the tests were started with nohup or in the background of a script: daemons
that tests start inherit it.
"""

import gc
import os
import signal

from hypothesis import settings

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("streampack", deadline=None)
settings.load_profile("streampack")


def pytest_collection_finish() -> None:
    """What is imported by now stays: a collection that walks torch's and numba's objects, too, takes half a second."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
