"""Tiny models gain nothing by threads, and lose much where tests run beside each other."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
