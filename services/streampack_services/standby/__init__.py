"""The shell of a standby: the arbiter, the copy of the log on another host, and the connection between both hosts.

- ``arbiter``: the interface of a place that keeps numbered entries, each of which can be written once.
- ``file_arbiter``, ``lease_arbiter``: a folder or object store, and a Lease of Kubernetes; ``open_arbiter`` opens one.
- ``questions``: asks the arbiter in a thread, because a shared folder may hang.
- ``copy_state``: the note beside a log that says which broker wrote it.
- ``shipping``: the active broker's side: ships the log, and knows which records are safe on both hosts.
- ``following``: the standby's side: copies the log until it takes over.

``streampack.core.standby`` makes all decisions.
"""
