"""Texts for readers outside an attempt: the ranks for which they wait, by name."""

from __future__ import annotations

from streampack.core.serve.rank_reader import Reader
from streampack.core.serve.rank_registry import RankRegistry


class JoinTexts:
    """The causes of the waits of readers outside an attempt. All waiting readers of an iteration share one text."""

    def __init__(self, registry: RankRegistry) -> None:
        self._registry = registry
        self._texts: dict[int | None, str] = {}
        """Texts by the number of a later iteration; None for the iteration that is served."""

    def forget(self) -> None:
        """Forget the texts, which may be outdated."""
        self._texts.clear()

    def claim(self, reader: Reader) -> str:
        """Return a text that names the holders of the rank that a reader claims."""
        others = self._registry.in_the_way(reader)
        names = self._registry.names_of((other.mesh.ranks for other in others), len(others))
        return f"rank {reader.mesh} becomes free when these readers have left: {names}"

    def join(self, iteration: int | None) -> str:
        """Return a text that names the ranks that are not ready for a later iteration, or for the one that is served.

        Args:
            iteration: Number of the later iteration; None for the one that is served.
        """
        if iteration not in self._texts:
            self._texts[iteration] = self._compose(iteration)
        return self._texts[iteration]

    def _compose(self, iteration: int | None) -> str:
        registry = self._registry
        there = {ranks for ranks, other in registry.held.items() if other.ready and not other.entered}
        absent = registry.num_ranks - len(there)
        if not absent:
            claims = (f"{claim.where} asks for rank {claim.mesh}, too" for claim in registry.claims.values())
            return f"all ranks are ready: {next(claims, 'it begins')}"
        names = registry.names_of((ranks for ranks in registry.ranks() if ranks not in there), absent)
        absent_text = f"{absent} of {registry.num_ranks} ranks are"
        if iteration is None:
            return f"{absent_text} not ready: {names}"
        return f"iteration {iteration} waits, because {absent_text} still in the previous iteration: {names}"
