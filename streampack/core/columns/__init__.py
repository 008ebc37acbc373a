"""The columns of samples, each declared once: what travels from a producer to the log and to trainers.

- ``chunk_body``: the columns and facts of a chunk, as messages and records carry them.
- ``step_columns``: the columns of a step's packs, as it is dealt and sent.

Other folders copy columns with the methods here, so that a new column reaches every place.
"""
