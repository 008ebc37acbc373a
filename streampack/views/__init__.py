"""Views: packs in the words of a framework, as torch tensors.

- ``format_validation``: refuses a format that a feed or mesh cannot have, when the trainer attaches.
- ``view``: a pack in one format: a framework's keys, and beside them all that the pack has.
- ``tensors``: from columns of packs to tensors. One tensor is made of a column; packs get cuts of it.
- ``hf``, ``megatron``, ``bshd``, ``torchtitan``: one module for each framework; ``bshd`` is NeMo AutoModel's.
- ``padded``: padded micro-batches, by row.
- ``formats``: steps in the format that a trainer asks for; calls the module of the framework.
- ``device``: copies of a step to a device.

A view shares the memory of its pack. The package relies on ``packs``. It imports torch when a view is asked for, never
before. It does not know sockets or sessions.
"""
