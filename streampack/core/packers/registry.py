"""Every packer by its name. To register a new packer, add it to ``_EVERY``; ``packer`` has the protocol to follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

from streampack.core.packers.arguments import is_integer
from streampack.core.packers.blocks.best_fit import BestFitDecreasing
from streampack.core.packers.blocks.decreasing import FirstFitDecreasing
from streampack.core.packers.blocks.first_fit import FirstFitShuffle
from streampack.core.packers.blocks.karmarkar_karp import KarmarkarKarp
from streampack.core.packers.blocks.knapsack import GreedyKnapsack
from streampack.core.packers.blocks.modified_first_fit import ModifiedFirstFitDecreasing
from streampack.core.packers.blocks.unpacked import Unpacked
from streampack.core.packers.exact_fill.exact_fill import ExactFill
from streampack.core.packers.joint.joint import Joint
from streampack.core.packers.packer import Packer
from streampack.core.packers.sliding.buffer_first_fit import BufferFirstFit
from streampack.core.packers.sliding.concatenative import Concatenative
from streampack.core.packers.sliding.sliding_ffd import SlidingFFD
from streampack.errors import ConfigError

_EVERY: tuple[Packer, ...] = (
    ExactFill(),
    Joint(),
    SlidingFFD(),
    FirstFitDecreasing(),
    Concatenative(),
    ModifiedFirstFitDecreasing(),
    FirstFitShuffle(),
    BestFitDecreasing(),
    GreedyKnapsack(),
    BufferFirstFit(),
    KarmarkarKarp(),
    Unpacked(),
)
PACKERS: Mapping[str, Packer] = MappingProxyType({packer.name: packer for packer in _EVERY})
"""Every packer by name, with default parameters."""
PACKER_NAMES = tuple(packer.name for packer in _EVERY if packer.config_key == "packer")
"""Packers that the rule ``packer`` may name."""
LIMITED_PACKERS = tuple(name for name in PACKER_NAMES if PACKERS[name].keeps_limits)
"""The packers of these that keep limits in other units than tokens."""
if TYPE_CHECKING:
    PackerName = str
else:
    PackerName = Literal[PACKER_NAMES]


def make_packer(name: str, **parameters: Any) -> Packer:
    """Return the packer called ``name`` with these ``parameters``, and defaults for the others.

    Raises ConfigError for an unknown packer or parameter (the error lists the known names), or for a wrong type.
    """
    names = parameters_of(name)
    for unknown in sorted(parameters.keys() - names):
        raise ConfigError(
            f"packer {name}: got the parameter {unknown!r}, expected {' or '.join(names) or 'no parameter'}"
        )
    for key, value in parameters.items():
        usual = getattr(PACKERS[name], key)
        if isinstance(usual, bool):
            if not isinstance(value, bool):
                raise ConfigError(f"packer {name}: got {key}={value!r}, expected true or false")
        elif not (isinstance(usual, str) or is_integer(value) or (value is None and usual is None)):
            raise ConfigError(f"packer {name}: got {key}={value!r}, expected an integer")
    try:
        return cast(Packer, dataclasses.replace(cast(Any, PACKERS[name]), **parameters))
    except ValueError as error:
        raise ConfigError(f"packer {name}: {error}") from None


def parameters_of(name: str) -> tuple[str, ...]:
    """Return the names of a packer's parameters. Raises ConfigError, which lists the packers, for an unknown name."""
    if not isinstance(name, str) or name not in PACKERS:
        raise ConfigError(f"packer: got {name!r}, expected one of {', '.join(PACKERS)}")
    return tuple(field.name for field in dataclasses.fields(cast(Any, PACKERS[name])) if field.name != "name")
