"""The command line: verbs only. Data goes to stdout, logs and progress to stderr; heavy imports wait for their verb."""

import sys
import traceback
from typing import Annotated, NoReturn

import typer

from parseshot import __version__
from parseshot.cli import data, demo, evaluation, looking, recognition, training
from parseshot.cli.terminal import fail
from parseshot.errors import DataError, ParseshotError, UsageError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Recognise fine-grained things from a few photos of each, and see which parts decided.",
)
for verbs in (demo, training, evaluation, recognition, looking):  # in this order they are listed
    app.registered_commands += verbs.app.registered_commands
app.add_typer(data.app, name="data")


def main() -> NoReturn:
    """Run the command; an error a user can cause is one sentence and an exit code, never a traceback."""
    try:
        code = app(standalone_mode=False)
    except ParseshotError as error:
        fail(f"{error} [{error.code}]", error.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except BrokenPipeError:
        sys.exit(0)
    except OSError as error:
        fail(f"{error} [{DataError.code}]", DataError.exit_code)
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # the option parser's own errors
            fail(f"{error.format_message()} [{UsageError.code}]", UsageError.exit_code)
        traceback.print_exc()
        fail("this is a bug in parseshot; please report it with the lines above [E_INTERNAL]", 5)
    sys.exit(code if isinstance(code, int) else 0)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"parseshot {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...
