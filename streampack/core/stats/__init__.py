"""Statistics that decide nothing: fill, padding, media, streams, displacement, data waits and lengths.

- ``fill``: utilization and other measures of how full packs are.
- ``padding``: padding of delivered packs, by cause.
- ``media_figures``: media of the packs formed, and the axis that filled each pack.
- ``trained_samples``: samples and tokens of each stream in the steps that every rank has returned, and in the last.
- ``displacement``: how many steps before or after its turn a sample leaves.
- ``data_wait``: the time that a rank waits for its next step, by cause.
- ``sample_warnings``: the words of warnings about samples that are delivered.
- ``length_histogram``: a histogram of the samples' lengths, in bounded memory.

FORM, DEAL and the serving of steps count here; the services turn the counts into status and metrics. The tokens or
seconds of all causes add up to the whole. The modules know numbers, and no state machine.
"""
