"""Megatron-LM: its adapter in ``pretrain`` and in its core's schedules.

``pretrain`` is that of a checkout that STREAMPACK_MEGATRON names, or of the wheel in ``.venv/megatron``.

- ``megatron_ranks``: one rank of Megatron, and the arguments that the adapter reads.
- ``stand_ins``: what runs Megatron on a processor without a GPU.
- ``pretrain_run``: ``pretrain`` with a tiny model, a forward step and a line for each step.
- ``pretrain_ranks``: the program whose ranks run it.
- ``hybrid_run``: a loop over its schedule of hybrid context parallelism.
- ``hybrid_ranks``: the program whose ranks run it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

CHECKOUT = os.environ.get("STREAMPACK_MEGATRON")
"""A checkout of Megatron-LM, or None."""
PACKAGES = Path(CHECKOUT or Path(sys.prefix) / "megatron")
"""The folder with ``pretrain`` of Megatron-LM, if it is there."""
