"""Audit: show which samples a step holds, verify that every sample is there exactly once, and form a step again.

- ``why``: the samples of a step; ``why_sample``: the places of a sample.
- ``origins``: the file and row that a sample was read from; ``sample_texts``: those of a step's samples, with texts.
- ``named_media``: the references of a sample's media.
- ``verify``: checks the ledger's rows against each other and against the log.
- ``conservation``: keeps the state of each sample of a stream: in a step, rejected, dropped or missing.
- ``compare_runs``: finds the first step in which two runs differ, and the reason.
- ``audit_report``: prints these results for a person.
- ``replay``: forms one recorded step again and compares it; ``rerun`` runs the broker, producers and clients for it.

Each question returns a tree for JSON. The folder reads a state_dir by ``ledger`` and never changes it; a broker that
runs on the same state_dir is not disturbed.
"""
