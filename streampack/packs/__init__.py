"""Packs: from the messages of a step to the canonical pack that a trainer holds.

- ``build``: checks the messages of a step, and derives what packs hold, for many packs at once, in long arrays.
- ``columns``: some packs of one message, as one long array for each attribute.
- ``kernel_loader``: loads the compiled kernels of ``core.layout`` beside the work.
- ``lazy``: makes the packs of a step a few at a time, when they are asked for.
- ``slabs``: memory for packs that is used again when the trainer has dropped them.
- ``pack``: the canonical pack.
- ``step``: the micro-batches of one update: a sequence of packs, or of views of them.
- ``batch_type``: the type variable of what a trainer gets for a pack: a pack or a view.
- ``regroup``: forward packs: the samples of a step under another budget.
- ``forward_packs``: the way back: values of forward packs, given to the packs that their samples are of.
- ``forks``: counts the forks of this process, so that a child does not use its parent's memory.

The package relies on ``core.layout``, with which the broker cut the shards. It does not know sockets, sessions or
frameworks.
"""
