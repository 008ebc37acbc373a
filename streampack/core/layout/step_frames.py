"""The arrays that a message of a step carries, by the rank's role, the layout and the declared fields.

A rank of a pipeline's middle stage computes on activations. It needs boundaries and positions only, which it derives
from lengths, so it gets no payload unless the producer supplies positions. All other ranks get tokens and every field.
If slices may end inside a sample, these ranks also get ``edges``. These are the tokens after each slice, the labels of
each slice's last token.
"""

from __future__ import annotations

from streampack.core.model.fields import LABELS, POSITION_IDS, Field
from streampack.core.model.mesh import Mesh

INPUT_IDS, EDGES = "input_ids", "edges"


def frames_for(fields: tuple[Field, ...], mesh: Mesh, layout: str) -> list[str]:
    """Return the names of the payload frames for one rank, in order: ``input_ids``, ``edges``, fields as declared."""
    if 0 < mesh.pp_rank < mesh.pp - 1:
        return [field.name for field in fields if field.name == POSITION_IDS]
    names = [field.name for field in fields]
    cut = mesh.cp > 1 and layout != "whole" and LABELS not in names
    return [INPUT_IDS, *([EDGES] if cut else []), *names]
