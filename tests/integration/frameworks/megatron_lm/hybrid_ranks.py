"""The same as ``pretrain_ranks`` for ``hybrid_run``: ``hybrid_ranks.py FEED TP FOLDER`` is one rank."""

from __future__ import annotations

from tests.integration.frameworks.megatron_lm import pretrain_ranks

if __name__ == "__main__":
    pretrain_ranks.main("tests.integration.frameworks.megatron_lm.hybrid_run")
