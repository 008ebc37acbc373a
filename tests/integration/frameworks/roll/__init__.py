"""ROLL, from a checkout that STREAMPACK_ROLL names; without one, its recorded losses and shapes.

- ``roll_samples``: the samples of 20 steps, a tiny model, and the loss in one process.
- ``roll_stand_ins``: a worker of ROLL on a processor without a GPU.
- ``roll_ranks``: the program whose ranks train with ROLL.
"""
