"""A process that imports Megatron-LM once, and then runs jobs of ``tests.integration.forks``: ``python -m ... JOBS``.

It is the script of each job, too: ``pretrain_ranks.py ARGUMENT ...`` runs ``pretrain`` with these arguments.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module

from tests.integration import forks
from tests.integration.frameworks.megatron_lm import stand_ins

RUN = "tests.integration.frameworks.megatron_lm.pretrain_run"


def main(name: str) -> None:
    """Run the jobs, or as the script of a job ``main`` of the module ``name``."""
    if name not in sys.modules:
        stand_ins.prepare()
    run = import_module(name)
    if sys.argv[1:2] and sys.argv[1].startswith("["):
        gc.freeze()
        forks.main()
    else:
        run.main()


if __name__ == "__main__":
    main(RUN)
