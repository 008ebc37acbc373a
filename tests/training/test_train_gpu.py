"""The benchmark of training on a GPU, as far as a CPU shows it: it runs, and it compares what is the same."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.training.train_gpu import PEAKS, TINY, Llama, main, packed, padded

SAMPLES = [np.arange(1, 1 + length) for length in (40, 7, 33, 1, 20)]


def tiny() -> Llama:
    torch.manual_seed(0)
    return Llama(TINY).double()


def test_the_ways_train_on_the_same() -> None:
    """All samples padded in one micro-batch, or in packs: the same sum of losses, and the same real tokens."""
    model, found = tiny(), []
    ways = (packed(SAMPLES, 128, "cpu", "exact_fill"), packed(SAMPLES, 128, "cpu", "exact_fill", "flex"))
    for batches in (padded([*SAMPLES, np.arange(300)], 300, "cpu"), *ways):
        batch = next(batches)
        with torch.no_grad():
            found.append((batch.loss(model).item(), sorted(batch.lengths.tolist())))
        batches.close()  # type: ignore[attr-defined]
    for loss, lengths in found:
        assert loss == pytest.approx(found[0][0], rel=1e-9)
        assert lengths == sorted(map(len, SAMPLES))


def test_no_device_has_the_peak_of_another() -> None:
    """One whose name is a part of another's stands behind it: ``A10`` behind ``A100``."""
    for name, peak in PEAKS.items():
        assert next(value for each, value in PEAKS.items() if each in name) == peak


def test_flops_are_those_that_torch_counts() -> None:
    """But for attention, which its counter takes for not causal, and for weights that are no matrix."""
    model, ids = tiny(), torch.arange(50)
    with FlopCounterMode(display=False) as counter:
        model(ids, ids, lambda q, k, v: q + v.repeat_interleave(2, 1)).sum().backward()
    attention = 6 * TINY.layers * TINY.hidden * 50**2
    assert model.flops(np.array([50])) - attention == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_the_benchmark_runs_on_a_cpu_and_gives_no_mfu_there(capsys: Any) -> None:
    main(["--quick", "--device", "cpu", "--json", "--budget", "256", "--updates", "2"])
    *lines, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert list(report["ways"]) == ["padded", "greedy", "streampack", "block masks"]
    for way in report["ways"].values():
        assert way["mfu"] is None
        assert 0 < way["utilization"] <= 1
        assert 0 < way["next_share"] < 1
    assert sum("on a GPU" in line for line in lines) == 4
