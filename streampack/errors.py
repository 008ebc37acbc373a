"""All exceptions of streampack, in one tree.

::

    StreampackError
    ├── UserError              a request or an argument is invalid; exit code 2
    │   ├── ConfigError        a configuration key or value is wrong (also a ValueError)
    │   ├── MeshError          the rules cannot serve this mesh, or the rank is taken
    │   ├── StateError         a checkpoint of another run, feed, rules or version
    │   └── SampleError        a sample that the policies do not admit (also a ValueError)
    ├── StageEnds              the trainer cannot go on with the next step as it is; exit code 1
    ├── SourceError            source files are missing, broken or changed; exit code 1
    │   └── DamagedFile        a file is cut short or not of its format
    ├── LogDamaged             the broker's log is damaged; exit code 1
    ├── LedgerDamaged          the ledger is damaged; it can be rebuilt; exit code 1
    ├── PeerError              the peer is gone, rejected us, or sent something invalid
    │   ├── Unreachable        no answer at the endpoint; exit code 75: try again
    │   ├── DataStall          no step came in time; exit code 75
    │   ├── Rejected           the broker rejected this client or producer
    │   │   └── ValuesRejected values of late fields contradict earlier ones; names the samples
    │   └── WireError          a message is damaged, hostile or of another version
    └── InternalError          a bug in streampack
        └── InvariantError     a batch breaks an invariant

Each message has three parts: the value, the expected value, and what to do.
"""

from __future__ import annotations


class StreampackError(Exception):
    """Base class of all exceptions that streampack raises.

    Example:
        >>> import streampack
        >>> try:
        ...     streampack.pack_lengths([9], budget=8)
        ... except streampack.StreampackError as error:
        ...     print(type(error).__name__, error.exit_code)
        SampleError 2
    """

    exit_code = 1
    """Exit code of the command line after this error."""


class UserError(StreampackError):
    """A request or an argument is invalid, or does not fit the run."""

    exit_code = 2


class ConfigError(UserError, ValueError):
    """A configuration key or value is wrong; the message names its path in the file.

    Also a ValueError, so that ``except ValueError`` catches invalid settings.
    """


class MeshError(UserError):
    """The recorded rules cannot serve this mesh, or another reader holds the rank."""


class StateError(UserError):
    """A checkpoint's state is of another run, feed, rules or version; the message names the key."""


class SampleError(UserError, ValueError):
    """A sample is too long, empty, ragged or of a wrong dtype, and no policy drops or cuts such samples."""


class StageEnds(StreampackError):
    """The trainer cannot go on with the next step as it is, because a stage of the run has other rules.

    A loader raises it after every earlier step was handed out. Save a checkpoint, which then begins at ``step``, and
    start the trainer again from it as ``detail`` says.

    Args:
        step: Number of the first step that was not handed out.
        stage: Name of its stage, or the number of the stage.
        detail: The value that does not fit, and the values with which the trainer can go on.

    Example:
        >>> try:  # doctest: +SKIP
        ...     for step in loader.steps():
        ...         train(step)
        ... except streampack.StageEnds:
        ...     save(model, loader.state_dict())
    """

    step: int
    """Number of the first step that was not handed out."""
    stage: str
    """Name of its stage, or the number of the stage."""
    detail: str
    """The value that does not fit, and the values with which the trainer can go on."""

    def __init__(self, step: int, stage: str, detail: str) -> None:
        super().__init__(
            f"cannot go on with step {step}, which is in stage {stage!r}: {detail}. Start the trainer again from a "
            f"checkpoint of step {step}"
        )
        self.step, self.stage, self.detail = step, stage, detail

    def __reduce__(self) -> tuple[type[StageEnds], tuple[int, str, str]]:
        return type(self), (self.step, self.stage, self.detail)


class SourceError(StreampackError):
    """Source files are missing, broken, or have changed since the run began."""


class DamagedFile(SourceError):
    """A file is cut short or not of its format; with ``poison: drop`` the producer skips the file."""


class LogDamaged(StreampackError):
    """The broker's log is damaged; the message names the file and the offset in bytes."""


class LedgerDamaged(StreampackError):
    """The ledger is damaged or belongs to another log; the message names the cause."""


class MediaError(StreampackError):
    """Media of a sample cannot be fetched or decoded; the message names the sample and the place of the media."""


class PeerError(StreampackError):
    """The peer of a socket is gone, rejected this process, or sent something invalid."""


class DataStall(PeerError):
    """No step came within the time limits of ``connect``; raised before the trainer's collectives time out.

    Args:
        detail: The wait and its cause, for a person.
        code: Short name of the cause, such as ``keys_full``; empty for causes without a name.
    """

    exit_code = 75
    code: str
    """Short name of the cause; empty for causes without a name."""

    def __init__(self, detail: str, code: str = "") -> None:
        super().__init__(detail)
        self.code = code


class Unreachable(PeerError):
    """No broker answers at the endpoint within the time limit."""

    exit_code = 75
    """EX_TEMPFAIL of sysexits.h: the same command may succeed later."""


class Rejected(PeerError):
    """The broker rejected this client or producer.

    Args:
        code: The broker's short name of the reason, such as ``forbidden``.
        detail: The broker's explanation, for a person.
    """

    code: str
    """The broker's short name of the reason."""
    detail: str
    """The broker's explanation, for a person."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{detail} [{code}]")
        self.code = code
        self.detail = detail


class ValuesRejected(Rejected):
    """Values of late fields contradict what the broker has; the other values of the call are stored.

    Args:
        detail: The broker's explanation, for a person.
        samples: All samples of the call whose values were not stored, with the reason of each.
    """

    samples: dict[tuple[int, int, int], str]
    """Id of each sample whose values were not stored, with the reason; empty if the whole call was rejected."""

    def __init__(self, detail: str, samples: dict[tuple[int, int, int], str]) -> None:
        super().__init__("amend", detail)
        self.samples = samples

    def __reduce__(self) -> tuple[type[ValuesRejected], tuple[str, dict[tuple[int, int, int], str]]]:
        return type(self), (self.detail, self.samples)


class WireError(PeerError):
    """A message is damaged, hostile, or of another protocol version."""


class InternalError(StreampackError):
    """A bug in streampack: an internal invariant does not hold. Please report it."""


class InvariantError(InternalError):
    """A batch breaks an invariant; the message names the invariant, the sample and the position."""
