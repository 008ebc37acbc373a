"""Views: packs in the words of a framework, as torch tensors.

- ``format_validation``: refuses a format that a feed or mesh cannot have, when the trainer attaches.
- ``tensors``: from columns of packs to tensors. One tensor is made of a column; packs get cuts of it.
- ``hf``, ``megatron``, ``bshd``, ``torchtitan``: one module for each framework; ``bshd`` is NeMo AutoModel's.
- ``framework_views``: calls the module of the framework that a format names.
- ``formats``: the view of a pack in a format, padded rows, and copies to a device.

A view shares the memory of its pack. The package relies on ``packs``. It imports torch when a view is asked for, never
before. It does not know sockets or sessions.
"""
