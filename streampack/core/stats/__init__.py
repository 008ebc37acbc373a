"""Stats: what is counted and decides nothing.

- ``fill``: how full packs are.
- ``padding``: tokens of delivered packs that hold no sample, by cause.
- ``data_wait``: what a rank has waited for, by cause.
- ``length_histogram``: how long samples are, in bounded memory.

Causes add up to the whole. The modules know numbers, and no state machine.
"""
