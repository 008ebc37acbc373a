"""The command ``streampack``: parse the arguments, run the command, print an error in one line, return an exit code.

Exit codes: 0 success, 1 failure, 2 wrong usage, 75 try again, 130 interrupted. Each command imports the modules that do
its work when it runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import signal
import sys
import traceback
from typing import Annotated

import typer

from streampack.config.typed_yaml import with_home
from streampack.errors import InternalError, StreampackError
from streampack.version import __version__
from streampack_services.cli import (
    cli_audit,
    cli_check,
    cli_control,
    cli_daemons,
    cli_export,
    cli_kernels,
    cli_keys,
    cli_plan,
    cli_stages,
    cli_watch,
)
from streampack_services.cli.cli_options import Command

app = typer.Typer(
    name="streampack", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)  # fmt: skip


def main() -> int:
    """Run the command line and return the exit code; only a bug of streampack prints a traceback."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    try:
        app(_with_home(sys.argv[1:]))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except InternalError:
        return _report_bug()
    except StreampackError as error:
        print("streampack:", " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception:
        return _report_bug()
    return 0


def _with_home(words: list[str]) -> list[str]:
    """Return the arguments with the home folder in place of ``~``, which shells leave in ``--option=~/file``.

    The words of a command that follows ``--`` stay as they are.
    """
    end = words.index("--") if "--" in words else len(words)
    pairs = [word.partition("=") if word.startswith("-") else ("", "", word) for word in words[:end]]
    return [name + equals + with_home(value) for name, equals, value in pairs] + words[end:]


def _report_bug() -> int:
    """Print the traceback of the current error and ask the user to report it; return the exit code."""
    traceback.print_exc()
    text = f"streampack: this is a bug in streampack {__version__}. Please report the bug with the lines above."
    print(text, file=sys.stderr)
    return 1


def _version(wanted: bool) -> None:
    """Print the version and exit, if ``--version`` was given."""
    if wanted:
        print(f"streampack {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Pack tokenized samples into training steps and stream them to GPUs.

    Producers send tokenized samples to a broker. The broker packs the samples
    into steps. Each rank of the trainers reads its shard of every step.

    \b
    To see all of this on your machine:
        streampack demo

    Exit codes: 0 success, 1 failure, 2 wrong usage, 75 try again later, 130
    interrupted.
    """


for _command in (
    cli_daemons.broker, cli_daemons.produce, cli_daemons.relay, cli_daemons.run, cli_check.check, cli_check.demo,
    cli_watch.status, cli_watch.top, cli_watch.health, cli_plan.plan, cli_plan.report, cli_audit.why, cli_audit.replay,
    cli_control.skip, cli_export.export, cli_kernels.kernels,
):  # fmt: skip
    # After COMMAND of ``run``, options are those of COMMAND.
    app.command(cls=Command, context_settings={"allow_interspersed_args": _command is not cli_daemons.run})(_command)
for _name, _group in (("ledger", cli_audit.ledger), ("set", cli_stages.settings), ("keys", cli_keys.keys)):
    app.add_typer(_group, name=_name)
