"""Calls the module of the framework that a format names.

Each of these modules has ``form``: from the columns of a message, and the tensors that ``tensors.thd`` makes of them,
to the keys of the framework and the pack's own values beside them, both with one value for each pack. No memory is in
both under two tensors, because it would be copied to a device twice. Helpers for a framework (Megatron's
``packed_seq_params``, AutoModel's ``stack``, ``strip`` and ``thd_chunks``) are in its module, too.
"""

from __future__ import annotations

from streampack.core.model.fields import POSITION_IDS
from streampack.core.model.rules import Rules
from streampack.packs.columns import Columns
from streampack.packs.slabs import Slabs
from streampack.views import bshd, hf, megatron, torchtitan
from streampack.views.tensors import Rows


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
