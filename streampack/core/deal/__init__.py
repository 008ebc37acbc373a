"""DEAL: from the packs of a step to the ranks of a mesh.

- ``assignment``: which packs a step has on a mesh, and which rank has which.
- ``deal``: the order of packs and micro-batches: packs that cost the same run at the same moment.
- ``dynamic_batches``: padded micro-batches, for models that take no packs.
- ``step_cache``: steps that are dealt once for a mesh, and described in messages for each rank.
- ``mesh_validation``: which meshes the rules cannot serve.
- ``balanced``: packs of one step that cost the same, for ``plan_step``.
- ``deal_kernels``, ``balanced_kernels``: the compiled loops.
- ``deal_stats``: how evenly ranks are loaded, and the padding that a mesh adds.

DEAL is a function of (step, mesh, rules). It permutes, splits and pads packs, and never moves a sample to another step.
"""
