"""Layout: where each token of a pack lies, and which tokens a context-parallel rank holds.

- ``boundaries``: the place of each sample in a pack.
- ``shards``: the slices of packs that a context-parallel rank holds.
- ``labels``: positions, padding masks and labels.
- ``loss_tokens``: which labels of a sample count in the loss.
- ``layout_kernels``: boundaries and labels in compiled code, one pass over memory.
- ``step_frames``: the arrays that the messages of a step carry for a rank.

Broker and client use the same functions. The broker cuts shards with them. The client derives boundaries, positions and
labels from lengths, because these arrays are not sent. The functions take lengths, and do not know where tokens are
stored.
"""
