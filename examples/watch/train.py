"""Two ranks that take 20 steps per second without a model, for ``docs/how-to/observe.md``: ``python train.py``.

The useful MFU is that of a model with a billion parameters.
"""

import threading
import time

import streampack

FLOPS = streampack.ModelFlops(token=6 * 10**9, pair=400_000)


def train(rank):
    mesh = {"dp": 2, "dp_rank": rank}
    with streampack.connect("tcp://127.0.0.1:7402", mesh=mesh, format="numpy", model=FLOPS, peak_tflops=989) as loader:
        for step in loader.steps():
            time.sleep(0.05)  # in place of a model's step
            if rank == 0 and step.index % 100 == 99:
                loader.commit(step.index)  # in place of a checkpoint


for rank in range(2):
    threading.Thread(target=train, args=(rank,)).start()
