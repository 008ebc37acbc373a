"""Plain torch: a loop killed in the middle has the losses and steps of one that was not."""

from __future__ import annotations

from pathlib import Path

from tests.integration.frameworks import killed_and_resumed_is_the_same, serving


def test_a_loop_of_plain_torch_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    with serving() as broker:
        killed_and_resumed_is_the_same("plain_torch", broker, tmp_path)
