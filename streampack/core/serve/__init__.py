"""Serve: the trainers' side of the broker. Who holds which rank, and who has had which step?

- ``readers``: hears trainers' messages and their silence, and joins the others.
- ``rank_registry``: which process holds which rank of the mesh, and which one claims it.
- ``attempts``: when all ranks begin together, at which step.
- ``snapshot_requests``: the snapshots of checkpoints that trainers bring.
- ``step_server``: sends the parts of steps to ranks, and keeps steps until every rank has returned them.
- ``progress``: how many steps each rank has returned.
- ``reader_link``: messages to readers, as effects.
- ``step_source``: what a feed does for its readers.

The package relies on ``deal.step_cache`` for the messages of a step. It knows steps by number. It does not know how
steps are formed, or samples.
"""
