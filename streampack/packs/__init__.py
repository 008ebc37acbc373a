"""Packs: turn the messages of a step into the packs that a trainer gets.

In the order in which data passes:

- ``build``: checks the messages of a step, and derives the packs' arrays for many packs at once.
- ``columns``: several packs of one message, with one long array for each attribute.
- ``kernel_loader``: imports the compiled kernels of ``core.layout`` in a thread.
- ``block_tables``: computes from boundaries which blocks of keys each block of queries sees.
- ``pack_media``: the media of packs, which may still be on their way.
- ``slabs``: memory for packs, reused once the trainer has dropped them.
- ``lazy``: makes the packs of a step on request, a few at a time.
- ``pack``: the canonical pack, in numpy.
- ``step``: the micro-batches of one update, a sequence of packs or of views, which counts those taken.
- ``batch_type``: the type variable of loaders and steps: a pack or a view.
- ``regroup``: makes forward packs, which are the samples of a step under another budget.
- ``forward_packs``: maps values of forward packs back to the step's micro-batches.
- ``forks``: counts the forks of this process, so that a child does not use its parent's memory.

Invariant: boundaries and sizes are checked when a message arrives; arrays by token are made on request. The folder
relies on ``core.layout``, with which the broker cut the shards. It does not know sockets, sessions or frameworks.
"""
