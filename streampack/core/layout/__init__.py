"""Layout: where each token of a pack lies, and which tokens a context-parallel rank holds.

- ``boundaries``: where the samples of a pack lie.
- ``shards``: the slices of packs that a context-parallel rank holds.
- ``labels``: positions, padding masks and labels.
- ``layout_kernels``: boundaries and labels in compiled code, one pass over memory.
- ``step_frames``: which arrays the messages of a step carry for a rank.

Broker and client use the same functions: the broker cuts shards with them, and the client derives from lengths what was
not sent. They know lengths, never where tokens are kept.
"""
