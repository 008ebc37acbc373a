"""Connection: threads that keep a session of ``core.sessions`` running beside a program.

- ``session_thread``: the thread, its socket, and how the program's threads wait for the session.
- ``telling``: the connection by which a trainer publishes policies and reports values, and a subscriber reads them.
"""
