"""Several open files end to end, as one: shards that are read together gather their samples in one call."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from streampack.sources.files.byte_source import ShardFile
from streampack.sources.files.local_files import LocalFile


class JoinedFile:
    """A ShardFile of several files; byte 0 of file i is byte ``starts[i]``. Its files close by themselves."""

    def __init__(self, files: Sequence[ShardFile]) -> None:
        self._files = files
        self.path, self.name, self.location = files[0].path, files[0].name, files[0].location
        *self.starts, self.size = accumulate((file.size for file in files), initial=0)
        self._begins = np.array(self.starts)

    def close(self) -> None: ...

    def pread(self, size: int, offset: int) -> bytes:
        """Return exactly ``size`` bytes of the file that holds byte ``offset``. Raises SourceError."""
        at = bisect_right(self.starts, offset) - 1
        return self._files[at].pread(size, offset - self.starts[at])

    def gather(self, sizes: NDArray[np.int64], offsets: NDArray[np.int64]) -> bytes:
        """Return the pieces at ``offsets`` of ``sizes`` bytes, joined. Raises SourceError."""
        views = [file.mapped() if isinstance(file, LocalFile) else None for file in self._files]
        owners = np.searchsorted(self._begins, offsets, "right") - 1
        begins = offsets - self._begins[owners]
        pieces = zip(owners.tolist(), begins.tolist(), (begins + sizes).tolist(), strict=True)
        if any(view is None for view in views):
            return b"".join([self._files[at].pread(end - begin, begin) for at, begin, end in pieces])
        data = b"".join([views[at][begin:end] for at, begin, end in pieces])
        for file in self._files:
            assert isinstance(file, LocalFile)
            file.check_size()
        return data
