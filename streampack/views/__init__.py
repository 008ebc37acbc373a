"""Frameworks' batches out of a message's packs: a module for each, of what its framework calls things.

Each has ``form``: from the columns of a message, and what ``tensors.thd`` makes of them, the keys of the framework and
the pack's own values beside them, both with a value for each pack. No memory is in both under two tensors, which would
move to a device twice. What a framework takes beyond batches (Megatron's ``packed_seq_params``, AutoModel's ``stack``,
``strip`` and ``thd_chunks``) is in its module, too.
"""

from __future__ import annotations

from streampack.columns import Columns
from streampack.core.fields import POSITION_IDS
from streampack.core.rules import Rules
from streampack.slabs import Slabs
from streampack.tensors import Rows
from streampack.views import bshd, hf, megatron, torchtitan


def form(format: str, columns: Columns, of_packs: Rows, slabs: Slabs, rules: Rules) -> tuple[Rows, Rows]:
    """(keys, what is beside them) in ``format``; of ``thd``, all that packs have."""
    match format:
        case "hf" | "hf_shifted":
            return hf.form(columns, of_packs, slabs, shifted=format == "hf_shifted")
        case "megatron":
            return megatron.form(columns, of_packs, slabs)
        case "bshd":
            supplied = any(field.name == POSITION_IDS for field in rules.fields)
            return bshd.form(columns, of_packs, slabs, supplied)
        case "torchtitan":
            return torchtitan.form(columns, of_packs)
    return of_packs, {}
