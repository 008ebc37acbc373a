"""Media of samples: fields with values for each image (or other item) of a sample, and for each patch of an item.

The packing core knows two small numbers of a sample beside its tokens: its items and its patches. Everything else of a
sample's media is one string of bytes, which only producers and trainers look into.

- ``media_format``: the format of these bytes, and the checks that they fit the declared fields.
- ``references``: where the bytes of an item are, if they do not pass through the broker.
- ``media_counts``: items, patches, bytes and cost of each sample, in chunks, snapshots and steps.
"""
