"""The standby: a broker on another host that copies the log, and takes over when the active broker is lost.

- ``arbiter_entries``: the numbered entries that the arbiter keeps. Each names the active broker and the *members*: the
  brokers that may write the next entry.
- ``log_shipper``: the active broker's side, which decides which records are safe.
- ``log_follower``: the standby's side, which decides when to take over.
- ``standby_events``: the events and effects of both.

Three rules prevent that a run gets two histories:

- Every start of a broker writes the next entry, and only a member of the newest entry may write one.
- A record is safe only once every member has it. So the active broker removes a lost standby by an entry *before* it
  calls records safe alone.
- A broker that is no member discards its log before it copies that of the active broker. It becomes a member only
  after it has every safe record. A log that is a copy of this very broker's log is continued instead.
"""
