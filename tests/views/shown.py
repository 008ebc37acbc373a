"""Steps of cases, and their packs in a framework's format."""

from __future__ import annotations

from typing import Any

from streampack.core.model.mesh import Mesh
from streampack.packs.build import build_step
from streampack.packs.slabs import Slabs
from streampack.packs.step import Step
from streampack.views.formats import Views
from tests.packs.cases import SLABS, Case, attached, parts

TWO = Case([[[5, 6, 7], [8, 9]], [[3]]], align=4, budget=12, cp=1)


def steps_of(case: Case, slabs: Slabs = SLABS) -> list[Step]:
    """The step as each context-parallel rank gets it."""
    meshes = [Mesh(cp=case.cp, cp_rank=rank) for rank in range(case.cp)]
    sizes = [len(case.packs)]
    return [build_step(parts(case, mesh.cp_rank, sizes), attached(case), mesh, slabs) for mesh in meshes]


def seen(case: Case, format: str) -> list[Any]:
    """The packs of the first rank in a format."""
    return list(Views(format, Mesh()).make(steps_of(case)[0], attached(case).rules))


def views_of(case: Case, format: str = "thd") -> list[list[Any]]:
    """Of each context-parallel rank, its packs."""
    rules = attached(case).rules
    return [list(Views(format, Mesh()).make(step, rules)) for step in steps_of(case)]
