"""Sockets, which send frames from one process to another. No other package uses ZeroMQ.

- ``endpoints``, ``ipc_files``: addresses, when to move to the next of several, and the files of an ``ipc://`` address.
- ``rendezvous``: finds the broker's address, in the environment or in the rendezvous file that it writes.
- ``relay_socket``: the address of the relay of a host.
- ``keys``, ``secret_files``: key files, written for their user alone.
- ``curve``: encrypts connections, and authenticates peers by key.
- ``sockets``: a ``Router`` for many peers, and a ``Dealer`` for one. A single thread uses a socket, which never blocks.
- ``unread``: bounds the bytes that ZeroMQ reads ahead of the process.
- ``links``, ``shared_memory``, ``slots``: large frames between processes of one host, by reference.
- ``waker``: wakes the thread that waits for messages.

A thread waits with a ``Poller``, then drains its sockets. A frame that is large and for a process of the same host goes
through shared memory, all others through ZeroMQ. The sockets may lose messages: the state machines of
``core.sessions`` and the broker ask again. The package knows frames, not the contents of messages.
"""
