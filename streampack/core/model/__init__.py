"""The core's data types: samples, packs, steps, rules and snapshots.

- ``samples``: the table of samples that the broker holds: identity, length and checksum.
- ``fields``: the values that a sample carries beside its token ids.
- ``items``: the units that a packer packs: a sample, or a group of samples that stay together.
- ``steps``: packs and steps, and their digests.
- ``shapes``: the length of a pack in tokens.
- ``rules``: the planning settings that a run records.
- ``lease_terms``: the terms of a stream: the rules that its samples have to meet.
- ``rule_changes``: changes to a running feed, and the rules that follow from a change.
- ``snapshot``: the state that decides all later steps, apart from samples that are not merged yet.
- ``capacity``: the feeds of a broker, and the most that each side may hold.
- ``mesh``: the trainers' mesh, and one process's ranks in it.
- ``bounded``: types with bounds on the values that a peer may send.
- ``phases``: the phases of a peer, and which phase may follow which.

The folder ``keys`` declares configuration keys. The modules get the parameters of each packer from ``packers``. They
make no decisions, and do not know peers or messages.
"""
