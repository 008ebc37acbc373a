"""The type variable of loaders and steps: ``Pack`` or ``View``, as the format of ``connect`` determines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # The default keeps annotations such as ``loader: streampack.Client`` valid under mypy's strict mode.
    from typing_extensions import TypeVar

    BatchT = TypeVar("BatchT", default=Any)
else:
    from typing import TypeVar

    BatchT = TypeVar("BatchT")
