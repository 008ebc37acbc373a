"""The nouns of the core, and what a run records of itself.

- ``samples``: what is known of a sample when the broker has taken it.
- ``fields``: what a sample carries beside its token ids.
- ``items``: what a packer packs: a sample, or a group of samples that stay together.
- ``steps``: packs and steps, and the digests that name them.
- ``shapes``: how long a pack is.
- ``rules``: the planning settings that a run records.
- ``rule_changes``: what may be asked of a running feed, and the rules that follow.
- ``snapshot``: all that decides later steps, beside samples that were not merged yet.
- ``capacity``: what a broker is given before it runs: its feeds, and how much each side may hold.
- ``mesh``: the trainers' mesh, and one process's ranks in it.
- ``bounded``: types with bounds on what a peer may send.
- ``phases``: the phases of a peer, and which may follow which.

The modules rely on ``packers`` for the parameters of each packer. They decide nothing, and know no peers and no
messages.
"""
