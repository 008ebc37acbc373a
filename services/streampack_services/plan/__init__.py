"""Plan: which settings some lengths ask for, and what a run saved.

- ``plan_inputs``: lengths, out of the arguments of ``plan`` and ``report``.
- ``plan_options``, ``grid``: the settings to compare.
- ``advisor``: forecasts every setting, and chooses.
- ``advice``: the choice in plain words, and as lines for broker.yaml.
- ``plan_report``: shows the result to a person.
- ``savings``, ``savings_report``: what a run saved against other ways of batching.
- ``charts``: pictures of both, by matplotlib.

The package relies on ``forecast``. It starts nothing and changes no run.
"""
