"""Views: packs in a framework's format, as torch tensors.

- ``format_validation``: rejects a format that does not suit the feed or the mesh, when the trainer attaches.
- ``formats``: turns a step's packs into views in the requested format, with the framework's module.
- ``tensors``: turns columns of packs into tensors: one tensor for each column, cut into packs.
- ``hf``, ``megatron``, ``bshd``, ``torchtitan``: one module for each framework; ``bshd`` is NeMo AutoModel's.
- ``isolation``: keeps samples of packs apart in each call of a transformers model.
- ``padded``: padded micro-batches, as rows.
- ``block_mask``: makes the ``BlockMask`` of FlexAttention from a pack's block tables.
- ``static_shapes``: gives boundaries and samples' fields one size in all packs.
- ``view``: a pack in one format, with a framework's keys and the pack's other values.
- ``device``: copies a step to a device ahead of use.

Invariants: a view shares the memory of its pack, and torch is imported only when a trainer requests views. Users import
``view``, ``megatron`` and ``bshd``; the other modules are internal. The folder relies on ``packs``. It does not know
sockets or sessions.
"""
