"""The arrays that a message of a step carries, by the rank's role, the layout and the declared fields.

A rank of a pipeline's middle stage computes on activations. It needs boundaries and positions only, which it derives
from lengths, so it gets no payload unless the producer supplies positions. All other ranks get tokens and every field.
If slices may end inside a sample, these ranks also get ``edges``. These are the tokens after each slice, the labels of
each slice's last token. The ranks of the first stage run the encoder of media, so they alone get ``media``.
"""

from __future__ import annotations

from streampack.core.model.fields import LABELS, MEDIA, POSITION_IDS, Field
from streampack.core.model.mesh import Mesh

INPUT_IDS, EDGES = "input_ids", "edges"


def frames_for(fields: tuple[Field, ...], mesh: Mesh, layout: str) -> list[str]:
    """Return the names of the payload frames for one rank, in order.

    These are ``input_ids``, ``edges``, the fields as declared, and ``media`` for all fields of axis item and patch.
    """
    if 0 < mesh.pp_rank < mesh.pp - 1:
        return [field.name for field in fields if field.name == POSITION_IDS]
    names = [field.name for field in fields if not field.of_media]
    cut = (mesh.cp > 1 and layout != "whole") or layout.startswith("dynamic")
    cut = cut and LABELS not in names
    media = [MEDIA] if len(names) < len(fields) and mesh.pp_rank == 0 else []
    return [INPUT_IDS, *([EDGES] if cut else []), *names, *media]
