"""Sockets: how frames get from one process to another. No other package knows ZeroMQ.

- ``endpoints``, ``ipc_files``: addresses, and the files of an ``ipc://`` address.
- ``rendezvous``: reads a broker's addresses from its rendezvous file.
- ``keys``, ``secret_files``: key files, written for their user alone.
- ``curve``: encrypts connections, and says whose key a connection has.
- ``sockets``: a ``Router`` for many peers, and a ``Dealer``. One thread uses a socket; it never blocks.
- ``unread``: bounds the bytes that ZeroMQ reads ahead of the process.
- ``links``, ``shared_memory``: large frames between processes of one host, by reference.
- ``waker``: wakes the thread that waits for messages.

The sockets may lose messages: the state machines of ``core.sessions`` and the broker ask again. The package knows
frames. It does not know what a message says.
"""
