"""Copy a step to a device on a separate stream, while the trainer works on the step before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from streampack.core.layout.boundaries import round_up
from streampack.errors import UserError
from streampack.packs.step import Step

if TYPE_CHECKING:
    import torch

ALIGN = 256
"""Bytes to which tensors are aligned in the array of a step; torch aligns its own arrays on a GPU to 512."""


def side_stream(device: Any) -> SideStream | None:
    """Return a stream for copies to ``device``; None for the CPU and for no device.

    Raises:
        UserError: torch cannot use the device.
    """
    if device is None:
        return None
    import torch

    try:
        # With its index: the client's thread may have another current device.
        with_index = torch.empty(0, device=device).device
        return None if with_index.type == "cpu" else SideStream(with_index)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UserError(f"got device={device!r}, which torch cannot use ({error}), expected 'cuda' or None") from None


class SideStream:
    """A stream that copies steps to ``device`` ahead of use, each step in one copy.

    All tensors of a step are put into one array in pinned memory, and views of the array are cut on the device. The
    device holds ``prefetch`` steps and the step in use, about 33 bytes per token. A trainer that keeps one tensor of a
    step keeps the step's whole array.

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
        with self._module.stream(self._stream):
            moved = _moved({key: tensor for batch in step for key, tensor in batch.tensors().items()}, self.device)
            views = [batch.with_tensors(moved) for batch in step]
            for batch in views:
                batch.copied = event
            event.record(self._stream)
        return replace(step, packs=tuple(views))

    def arrive(self, step: Step) -> None:
        """Make the current stream wait for the copy of ``step``; the host does not wait."""
        if not step:
            return
        current = self._module.current_stream(self.device)
        current.wait_event(step[0].copied)
        if self.device.type != "cpu":  # no stream owns memory of the CPU
            one = next(iter(step[0].tensors().values()))
            one.record_stream(current)  # else the memory of the step could be reused while it is in use


def _moved(tensors: Mapping[int, torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
    """Return the tensors on ``device``, by the same keys, as views of one array that is copied at once."""
    import torch

    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors.values()]
    room = [max(ALIGN, round_up(size, ALIGN)) for size in sizes]
    host = torch.empty(sum(room), dtype=torch.uint8, pin_memory=device.type != "cpu")
    there = _cut(host, tensors, sizes, room)
    for key, tensor in tensors.items():
        there[key].copy_(tensor)
    return _cut(host.to(device, non_blocking=True), tensors, sizes, room)


def _cut(
    slab: torch.Tensor, tensors: Mapping[int, torch.Tensor], sizes: Sequence[int], room: Sequence[int]
) -> dict[int, torch.Tensor]:
    """Cut views with the dtypes and shapes of ``tensors`` from uint8 [sum(room)].

    The views share no version counter, as in ``tensors.cut``.
    """
    import torch

    parts = zip(torch.unsafe_split_with_sizes(slab, list(room)), sizes, tensors.items(), strict=True)
    return {key: part[:size].view(like.dtype).view(like.shape) for part, size, (key, like) in parts}
