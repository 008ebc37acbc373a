"""Configuration keys: each is declared once, with its type, default, bounds and description.

- ``key_groups``: the base of structs that share keys.
- ``planning_keys``: keys of ``rules``, and of the run.
- ``stream_keys``: keys of a stream, and policies for its samples.
- ``field_keys``: keys of a declared field.
- ``stage_keys``: a stage of a run, and the rules that it may change.
- ``keyword_arguments``: keyword arguments of ``streampack.local`` and ``streampack.connect``, some of which are keys.

Keys that a run records stand in a group here. The file's struct in ``config`` and the recorded struct in ``model`` have
the group among their bases. Keys that only a daemon reads stand in ``config.service_settings`` or ``daemon_settings``.
To add a key:

1. Declare it in the group or settings struct that it belongs to: ``key: Annotated[type, Meta(bounds, description=)]``.
2. Give it a default with which a run without the key has the same steps; records leave defaults out.
3. Use it where it acts, as an attribute of ``Rules``, ``StreamRules``, ``StreamTerms``, ``Field`` or ``BrokerConfig``.
4. Reject values that contradict other keys in ``Rules.__post_init__``, or in ``config.config_validation``.

The file, ``streampack check``, the schema, the documentation and recorded rules have the key then. In
``streampack.local`` a stream's dict takes the keys of a stream. An argument of ``local`` for the key is one line of
``LocalArguments`` in ``streampack/local.py``.
"""
