"""Dynamic context parallelism: each sample of a step gets as many ranks as it needs.

- ``cp_plan``: the micro-batches of a step, and the groups of ranks in each.
- ``cp_plan_kernels``: the compiled loops.

A plan is a function of the samples' lengths and of the settings. FORM decides which samples are in a step, so a plan
changes no step.
"""
