"""The command ``sharpmax``: runs the commands of :mod:`sharpmax.cli` and says in one sentence what went wrong.

Exit codes: 0 done, 1 could not be done, 2 bad arguments, 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from .extras import require

PROGRAM = "sharpmax"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line ``arguments`` (``sys.argv`` if not given) and exit."""
    for stream in (sys.stdout, sys.stderr):  # what a terminal cannot show is no reason to fail
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        for package in ("typer", "rich"):
            require(package, "experiments", "The command line")
        code = _run(arguments)
    except ModuleNotFoundError as error:
        if "sharpmax[" not in str(error):  # not an optional package: a defect
            raise
        code = _complain(str(error), 1)
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        code = _complain(f"{error.strerror or error}{where}", 1)
    if code == 130:
        _complain("interrupted", code)
    sys.exit(code)


def _run(arguments: Sequence[str] | None) -> int:
    import typer

    from .cli import app
    from .inputs import InputError

    # click's UsageError, whether typer carries its own click or uses the installed one.
    usage_error: Any = typer.BadParameter.__bases__[0]
    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name=PROGRAM, standalone_mode=False)
    except usage_error as error:
        context = f" (see '{error.ctx.command_path} --help')" if error.ctx else ""
        return _complain(f"{error.format_message().rstrip('.')}{context}", 2)
    except InputError as error:
        return _complain(str(error), 2)
    except typer.Abort:
        return 130
    return code if isinstance(code, int) else 0


def _complain(sentence: str, code: int) -> int:
    print(f"{PROGRAM}: {' '.join(sentence.split())}", file=sys.stderr)
    return code


def command() -> NoReturn:
    """What the installed command runs: :func:`main`, but an interrupt ends the process at once.

    A library that is compiling in a thread of its own does not survive an orderly end.
    """
    try:
        main()
    except SystemExit as stopped:
        if stopped.code != 130:
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)


if __name__ == "__main__":
    command()
