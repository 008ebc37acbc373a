"""Copy a step to a device on a separate stream, while the trainer works on the step before."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streampack.errors import UserError
from streampack.packs.step import Step

if TYPE_CHECKING:
    import torch


def side_stream(device: Any) -> SideStream | None:
    """Return a stream for copies to ``device``; None for the CPU and for no device.

    Raises:
        UserError: torch cannot use the device.
    """
    if device is None:
        return None
    import torch

    try:
        found = torch.empty(0, device=device).device  # with its index: the client's thread may have another current one
        return None if found.type == "cpu" else SideStream(found)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UserError(f"got device={device!r}, which torch cannot use ({error}), expected 'cuda' or None") from None


class SideStream:
    """A stream that copies steps to ``device`` ahead of use.

    The device holds ``prefetch`` steps and the step in use, about 33 bytes per token.

    Runs on any device that torch has streams for. Tested on the CPU, whose streams do nothing; the overlap of the copy
    was not tested on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device) if device.type != "cpu" else self._module.Stream()

    def copy(self, step: Step) -> Step:
        """Begin to copy a step and return the step on the device; call ``arrive`` before using it."""
        event = self._module.Event()
        views = []
        with self._module.stream(self._stream):
            for batch in step:
                pinned = batch if self.device.type == "cpu" else batch.pin_memory()
                moved = pinned.to(self.device, non_blocking=True)
                moved.copied = event
                views.append(moved)
            event.record(self._stream)
        return replace(step, packs=tuple(views))

    def arrive(self, step: Step) -> None:
        """Make the current stream wait for the copy of ``step``; the host does not wait."""
        current = self._module.current_stream(self.device)
        for event in {id(batch.copied): batch.copied for batch in step}.values():
            current.wait_event(event)
        if self.device.type != "cpu":  # no stream owns memory of the CPU
            for batch in step:
                for tensor in batch.tensors().values():
                    tensor.record_stream(current)  # else the memory could be reused while it is in use
