"""Configuration: broker.yaml and producer.yaml as typed, frozen structs.

- ``config_files``: tells which of the two files a file is, and reads it.
- ``typed_yaml``: converts YAML text to a typed struct. An error names the key, what was got and what was expected.
- ``daemon_settings``: the struct of each file, and the rules of a feed that follow from it.
- ``service_settings``: addresses, log, limits and standby of the broker.
- ``rules_settings``: the key ``rules``, and the mesh that a run is planned for.
- ``stage_settings``: stages, whose rules and mixture differ from those before.
- ``stream_settings``: streams, feeds and fields.
- ``config_validation``: checks that need more than one key: contradictions, and bounds that are computed.
- ``alignment``: the multiples that samples and packs are padded to, for a mesh and a precision.

The text that explains a key to users is its ``Meta(description=...)``: ``streampack check`` and the documentation show
it. ``core.model.keys`` declares the keys that a run records, and says how to add a key. The package relies on
``core.model.rules`` for the rules of a feed. It opens only the configuration file.
"""
