"""DEAL, the second stage of planning: it assigns the packs of a step to the ranks of a mesh.

- ``assignment``: the packs of a step on a mesh, and the rank of each pack.
- ``deal``: the order of packs and micro-batches, so that packs of equal cost run at the same moment.
- ``dynamic_batches``: padded micro-batches, for models that do not take packs; also those of passes without gradients.
- ``dynamic_cp``: groups of ranks, each as large as its samples need.
- ``dealt_steps``: steps dealt on a mesh, with all packs of a rank together: one dealer for packs, and one for padded
  micro-batches. The rules of a step choose the dealer.
- ``part_flow``: the flow of a step's parts to one receiver, and the bytes in flight.
- ``step_cache``: steps that are dealt once for a mesh, and the messages of a step for each rank or host.
- ``node_parts``: messages for a whole host, and their split into those that each rank would get directly.
- ``mesh_validation``: the reasons that the rules cannot serve a mesh.
- ``balanced``: packs of one step that cost the same, for ``plan_step``.
- ``deal_kernels``, ``balanced_kernels``: the compiled loops.
- ``deal_stats``: statistics of the ranks' load, and of the padding that a mesh adds.

A step that FORM made is kept in ``step_cache``. When the first rank of a mesh asks for it, ``assignment`` splits and
deals its packs. Then the messages of every rank are slices of one description of the step.
DEAL is a function of (step, mesh, rules). It permutes, splits and pads packs, and never moves a sample to another step.
"""
