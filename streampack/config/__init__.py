"""Configuration: broker.yaml and producer.yaml as typed, frozen structs.

- ``config_files``: tells which of the two files a file is, and reads it.
- ``typed_yaml``: from YAML text to a typed tree. An error names the key, what was got and what was expected.
- ``daemon_settings``: the structs, with one field for each key, and the rules of a feed that follow from them.
- ``config_validation``: checks that need more than one key: contradictions, and bounds that need arithmetic.
- ``alignment``: the multiples that samples and packs are padded to, for a mesh and a precision.

The package relies on ``core.model.rules`` for the rules of a feed. It starts nothing and opens no other file than the
configuration.
"""
