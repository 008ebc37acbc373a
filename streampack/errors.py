"""Every error that streampack raises, in one tree.

::

    StreampackError
    ├── UserError              what was asked for cannot be; exit code 2
    │   ├── ConfigError        a configuration key or value (message holds its path; also a ValueError)
    │   ├── MeshError          the rules cannot serve this mesh, or a rank is taken
    │   ├── StateError         a checkpoint's state that is of another run, rules or version
    │   └── SampleError        a sample that the policies do not admit (also a ValueError)
    ├── SourceError            files that are missing, broken or changed; exit code 1
    │   └── DamagedFile        cut short, or not of its format: may be passed over
    ├── LogDamaged             the broker's log is not what was written; exit code 1
    ├── LedgerDamaged          nor the ledger, which can be made again; exit code 1
    ├── PeerError              the other end: gone, refused us, or sent what it should not
    │   ├── Unreachable        nobody answers at the endpoint; exit code 75: try again
    │   ├── DataStall          the broker is gone or hung, or ranks are missing; exit code 75
    │   ├── Rejected           the broker said no, and why
    │   └── WireError          a message that is damaged, hostile or of another version
    └── InternalError          our bug: an invariant does not hold
        └── InvariantError     a batch does not hold what it promises

A message says what was got, what was expected and what to do.
"""


class StreampackError(Exception):
    """The root; ``exit_code`` is what the command line ends with."""

    exit_code = 1


class UserError(StreampackError):
    """What was asked for cannot be done as asked."""

    exit_code = 2


class ConfigError(UserError, ValueError):
    """A configuration key or value is wrong; the message holds its path in the file.

    Also a ValueError, so that code which validates settings with ``except ValueError`` catches it.
    """


class MeshError(UserError):
    """The recorded rules cannot serve this mesh, or another reader holds the rank."""


class StateError(UserError):
    """A checkpoint's state is of another run, other rules or another version; the message names the key."""


class SampleError(UserError, ValueError):
    """A sample that no policy admits: too long, empty, ragged or of a wrong dtype."""


class SourceError(StreampackError):
    """Source files are missing, broken, or not what they were."""


class DamagedFile(SourceError):
    """A file whose bytes are cut short or not of its format; with ``poison: drop`` the others are read on."""


class LogDamaged(StreampackError):
    """The broker's log is not what was written; the message names file and offset."""


class LedgerDamaged(StreampackError):
    """The ledger is not what was written, or does not belong to the log; the message names what."""


class PeerError(StreampackError):
    """The other end of a socket is gone, refused us, or sent what it should not."""


class DataStall(PeerError):
    """No step has come for longer than a trainer should wait; raised before its collectives time out."""

    exit_code = 75


class Unreachable(PeerError):
    """Nobody answers at the endpoint."""

    exit_code = 75
    """EX_TEMPFAIL of sysexits.h: the same command may succeed later."""


class Rejected(PeerError):
    """The broker refused; its own words are the message."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{detail} [{code}]")
        self.code = code
        self.detail = detail


class WireError(PeerError):
    """A message that is damaged, hostile, or of another protocol version."""


class InternalError(StreampackError):
    """An invariant of streampack itself does not hold: please report it."""


class InvariantError(InternalError):
    """A batch does not hold what it promises; the message names the invariant, the sample and the position."""
