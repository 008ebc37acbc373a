"""Connection: threads that keep a session of ``core.sessions`` running beside a program.

- ``session_thread``: the thread, its socket, and how the program's threads wait for the session.
- ``policy_versions``: checks the versions of policies that a program gives.
- ``telling``: the connection by which a trainer publishes policies and reports values, and a subscriber reads them.
"""
