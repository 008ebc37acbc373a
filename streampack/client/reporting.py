"""Publish policies and report values of samples to the broker, over a connection of its own.

The connection is made at the first call, so a trainer that tells nothing has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from streampack.connection.policy_versions import checked_version
from streampack.connection.telling import Telling
from streampack.core.model.fields import MAX_FIELDS
from streampack.core.model.mesh import Mesh
from streampack.core.model.samples import I64
from streampack.core.protocol.result_messages import Publish, ReportValues
from streampack.errors import UserError
from streampack.transport.keys import Key

Reduce = Literal["sum", "same"]
Attempt = tuple[int, int]


class Reporting:
    """Connection by which one rank of a feed tells the broker something; see ``Client.publish`` and ``Step.report``."""

    def __init__(self, endpoint: str, feed: str, mesh: Mesh, timeout_s: float, key: Key | None) -> None:
        self._endpoint, self._feed, self._mesh, self._timeout_s, self._key = endpoint, feed, mesh, timeout_s, key
        self._telling: Telling | None = None
        self._published: tuple[Attempt, int] | None = None

    def publish(self, version: SupportsIndex, step: int, attempt: Attempt) -> None:
        """Publish a policy's version; ``step`` is trained next."""
        number = checked_version(version, "version")
        if self._published is not None and self._published[0] == attempt and number < self._published[1]:
            raise UserError(
                f"got policy version {number} after version {self._published[1]}, expected a version that is not lower"
            )
        message = Publish(feed=self._feed, number=0, version=number, step=step, attempt=attempt)
        self._connection().ask(message, awaited="the published version to be durable")
        self._published = attempt, number

    def report(
        self, step: int, lineage: int, attempt: Attempt, ids: I64, values: Mapping[str, Any], reduce: Reduce,
        cp_sizes: I64 | None = None,
    ) -> None:  # fmt: skip
        """Report values of the samples ``ids`` of a step, unless another rank does.

        ``cp_sizes``: ranks that share each sample, with dynamic context parallelism. The first rank of a group is a
        multiple of its size.
        """
        if reduce not in ("sum", "same"):
            raise UserError(f"got reduce={reduce!r}, expected 'sum' or 'same'")
        columns = {name: _column(name, column, len(ids)) for name, column in values.items()}
        if not 0 < len(columns) <= MAX_FIELDS:
            raise UserError(f"got {len(columns)} values for each sample, expected 1 to {MAX_FIELDS}")
        mesh = self._mesh
        if reduce == "same" and cp_sizes is not None:
            is_first = mesh.dp_cp_rank % cp_sizes == 0
            columns, reduce = {name: np.where(is_first, column, 0.0) for name, column in columns.items()}, "sum"
        alone = reduce == "same"
        if mesh.tp_rank or mesh.pp_rank != mesh.pp - 1 or (alone and mesh.cp_rank):
            return
        names = tuple(sorted(columns))
        message = ReportValues(
            feed=self._feed, number=0, lineage=lineage, step=step, attempt=attempt,
            part=mesh.dp_rank if alone else mesh.dp_cp_rank,
            parts=mesh.dp if alone else mesh.dp * mesh.cp, names=names,
            streams_u32=ids[:, 0].astype("<u4").tobytes(), indices_u64=ids[:, 1].astype("<u8").tobytes(),
            parts_u32=ids[:, 2].astype("<u4").tobytes(),
        )  # fmt: skip
        payload = tuple(columns[name].tobytes() for name in names)
        self._connection().ask(message, payload, awaited="the reported values to be durable")

    def move_to(self, endpoint: str) -> None:
        """Use the broker's new address from the next call on."""
        self.close()
        self._endpoint = endpoint

    def close(self) -> None:
        """End the connection, if there is one."""
        telling, self._telling = self._telling, None
        if telling is not None:
            telling.close()

    def _connection(self) -> Telling:
        """Return the connection; make it at the first call."""
        if self._telling is None:
            self._telling = Telling(self._endpoint, self._feed, self._timeout_s, self._key)
        return self._telling


def _column(name: str, values: Any, count: int) -> NDArray[Any]:
    """Return the values of ``count`` samples as float64. Raises UserError for other shapes and types."""
    value = values.detach().cpu() if hasattr(values, "detach") else values
    value = value.float() if "bfloat16" in str(getattr(value, "dtype", "")) else value
    try:
        column = np.asarray(value, "<f8")
    except (TypeError, ValueError):
        raise UserError(f"got values of {name} that are not numbers, expected one number for each sample") from None
    if column.shape != (count,):
        raise UserError(
            f"got values of {name} of shape {list(column.shape)}, expected [{count}]: one number for each row of "
            f"step.sample_ids"
        )
    return column
