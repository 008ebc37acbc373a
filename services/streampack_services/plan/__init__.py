"""Plan: recommend settings for some lengths before a run, and report what packing saved after it.

``streampack plan`` passes through these files in order:

- ``plan_inputs``: reads the lengths that the arguments name.
- ``plan_options``: reads the settings to compare, and varies one at a time around the base setting.
- ``advisor``: forecasts every setting with ``forecast``, and chooses.
- ``advice``: explains the choice in sentences, and writes the lines for broker.yaml.
- ``group_plan``: for a feed with ``cp: dynamic``, compares groups of ranks with groups of one size instead.
- ``stage_plan``: recommends a stage for a running broker, as ``streampack set stage`` takes it.
- ``plan_report``: prints the result; ``charts`` draws it.

``streampack report`` reads a run by ``plan_inputs``; ``step_time_fit`` fits its cost to step times. ``savings``
compares the run with other ways of batching, and prints the result. The folder starts nothing and changes no run.
"""
