"""Compiled kernels come while a process works: a second process compiles, and a thread loads the result.

- ``background``: the thread. It asks the second process for what is missing on this machine, and swaps kernels.
- ``ahead``: compiles before a run, for ``streampack kernels``.
- ``helper``: the second process, which compiles kernels into numba's folder on disk.

``core.jit`` has the kernels themselves.
"""
