"""The MFU of all ranks is that of the ranks that count their FLOPs."""

from __future__ import annotations

import numpy as np
import pytest
from streampack_services.broker.ranks.recent_waits import COLUMNS, TIMED, USEFUL, RecentWaits


def test_ranks_without_a_peak_have_no_mfu_and_do_not_lower_that_of_others() -> None:
    figures = np.zeros((3, COLUMNS))
    figures[:, 0] = 10.0
    figures[:2, TIMED], figures[:2, USEFUL] = 10.0, (4.0, 2.0)
    waits = RecentWaits(figures, [{}, {}, {}])
    assert waits.mfu.tolist() == pytest.approx([0.4, 0.2, np.nan], nan_ok=True)
    assert waits.mfu_of_all() == pytest.approx(0.3)
    assert waits.seconds.tolist() == [10.0] * 3
    assert RecentWaits(figures[2:], [{}]).mfu_of_all() is None
