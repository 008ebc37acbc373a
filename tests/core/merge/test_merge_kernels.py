"""The broker's core without numba."""

import subprocess
import sys

import pytest

WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import numpy as np
from streampack.core.merge.merge_kernels import merge_take
from streampack.core.merge.schedule import Merge
merge = Merge([1.0], [2], 0)
for p in range(2):
    merge.push(p, np.array([p, 2 + p]), np.array([3, 4]), np.zeros(2, np.int64))
    merge.end(p)
print(merge.take(100).handles.tolist(), merge.closed, merge_take.is_compiled)
"""


@pytest.mark.timeout(60)
def test_everything_works_without_numba() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[0, 1, 2, 3] True False"
