"""Reject formats that do not suit the mesh or the feed, when a trainer attaches.

Without these checks, a kernel would read a batch wrongly. The mesh is checked before the client connects, the feed once
the rank is attached.
"""

from __future__ import annotations

import os

from streampack.core.model.fields import POSITION_IDS
from streampack.core.model.mesh import Mesh
from streampack.core.model.rules import Rules
from streampack.errors import UserError

_SHARDED_LATER = {
    "megatron": "Megatron's get_batch",
    "bshd": "AutoModel's make_cp_batch_for_te",
    "torchtitan": "torchtitan's trainer",
}
"""Formats of frameworks that shard packs for context parallelism themselves, and the part of each that does."""
_OF_ONE_LENGTH = {"megatron": "Megatron's seq_length", "torchtitan": "torchtitan's training.seq_len"}
"""Formats whose framework needs packs of one length, and its setting of that length."""
_READ_ON_ALL_STAGES = {"bshd": "AutoModel", "torchtitan": "torchtitan"}
"""Formats of frameworks that read tokens and labels on every pipeline stage, and the framework's name."""


def check_mesh(format: str, mesh: Mesh) -> None:
    """Raise UserError for a mesh whose ranks cannot use the format."""
    own = os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1")  # accelerate's
    if format.startswith("hf") and (mesh.cp > 1 or own not in ("", "0", "1")):
        raise UserError(
            f"got format {format!r} with cp={mesh.cp} and PARALLELISM_CONFIG_CP_SIZE={own}, expected no context "
            f"parallelism, because that of transformers does not support packs. Use format='thd' with ring attention "
            f"or Ulysses, or a smaller budget on one rank"
        )
    if format in _READ_ON_ALL_STAGES and mesh.pp > 2:
        raise UserError(
            f"got format {format!r} with pp={mesh.pp}, expected pp of at most 2. {_READ_ON_ALL_STAGES[format]} reads "
            f"tokens on every stage, but middle stages receive no tokens. Pass stages as tensor-parallel ranks "
            f"instead: tp={mesh.tp * mesh.pp}"
        )


def check_feed(format: str, mesh: Mesh, rules: Rules, layout: str, masks: str | None = None) -> None:
    """Raise UserError for a feed, by its rules and context-parallel layout, that does not suit the format.

    ``masks``: kind of the masks that the views have, if any.
    """
    if rules.share is not None and format != "numpy" and (format, masks) != ("thd", "flex"):
        raise UserError(
            f"got format {format!r} with masks={masks!r} for a feed with `rules.share: {rules.share}`, expected "
            f"format='thd' with masks='flex', or format='numpy'. Samples of its packs share tokens, which boundaries "
            f"and padded rows cannot express. Remove the key from broker.yaml for kernels that need boundaries"
        )
    if format == "padded" and not rules.padded:
        raise UserError(
            "got format 'padded' for a feed that packs, expected thd, hf, hf_shifted or numpy. To use format "
            "'padded', set rules.padded in broker.yaml"
        )
    if format.startswith("hf") and layout.startswith("dynamic"):
        raise UserError(
            f"got format {format!r} for a feed with `cp: dynamic`, expected format='thd', because models of "
            f"transformers would not see the tokens on other ranks"
        )
    if format not in _SHARDED_LATER:
        return
    if rules.padded:
        raise UserError(f"got format {format!r} for a feed with rules.padded, expected padded, hf, thd or numpy")
    if layout.startswith("dynamic") or (mesh.cp > 1 and layout != "whole"):
        raise UserError(
            f"got format {format!r} with cp={mesh.cp} and `cp_layout: {layout}`, expected `cp_layout: whole`, because "
            f"{_SHARDED_LATER[format]} shards packs itself. Set `cp_layout: whole` for the feed in broker.yaml"
        )
    if format in _OF_ONE_LENGTH and rules.shape != "fixed":
        raise UserError(
            f"got format {format!r} for a feed with `rules.shape: {rules.shape}`, expected `rules.shape: fixed`. Also "
            f"set {_OF_ONE_LENGTH[format]} to the budget, {rules.budget}, because all packs must have this length"
        )
    if format == "torchtitan" and any(field.name == POSITION_IDS for field in rules.fields):
        raise UserError(
            "got format 'torchtitan' for a feed that declares position_ids, expected no declared position_ids. "
            "torchtitan takes each position 0 as the first token of a sample"
        )
