"""Changes of the rules of a running broker: what people ask for, and what a snapshot says of it.

- ``asked_changes``: the changes that people ask for over HTTP, and the core's answers.
- ``live_stage``: completes a stage that a person asks for, from the rules that it begins with.
- ``change_status``: the types of the part of the snapshot about changes.
- ``begin_estimate``: the step at which a stage that waits for tokens will begin.
- ``change_report``: takes that part of the snapshot.

The core decides whether a change is possible, and when it takes effect.
"""
