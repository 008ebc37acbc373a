"""Opens the arbiter that broker.yaml names, and proves that it works."""

from __future__ import annotations

from pathlib import Path

from streampack.errors import UserError
from streampack_services.standby.arbiter import Arbiter
from streampack_services.standby.file_arbiter import FileArbiter, Folder, ObjectStore
from streampack_services.standby.lease_arbiter import LeaseArbiter


def open_arbiter(where: str) -> Arbiter:
    """Open the arbiter ``where``, and prove that it works.

    Args:
        where: A path, ``file://`` and a path, ``kubernetes://NAMESPACE/NAME``, or a URL that fsspec knows.

    Raises:
        ConfigError: ``where`` cannot be opened.
        UserError: It cannot be used, or would let a run have two active brokers.
    """
    kind, separator, rest = where.partition("://")
    arbiter: Arbiter
    if kind == "kubernetes" and separator:
        arbiter = LeaseArbiter(where)
    elif separator and kind != "file":
        arbiter = FileArbiter(ObjectStore(where), where)
    else:
        try:
            arbiter = FileArbiter(Folder(Path(rest if separator else where)), where)
        except OSError as error:
            raise UserError(
                f"standby.arbiter: {where} cannot be used: {error.strerror or error}. Choose a folder that both hosts "
                f"share"
            ) from None
    arbiter.probe()
    return arbiter
