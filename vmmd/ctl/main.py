"""`vmmctl`: looks at a daemon, verifies what it holds, drops conversations, drains it, and probes the host.

It keeps no model of its own: everything shown is the daemon's word.
"""

import sys
from typing import NoReturn

import click

from vmmd.ctl.conversations import conversations, drop
from vmmd.ctl.doctor import doctor
from vmmd.ctl.drain import drain
from vmmd.ctl.status import status
from vmmd.ctl.top import top
from vmmd.ctl.trades import explain, trades
from vmmd.ctl.verify import verify
from vmmd.errors import VmmError

PROGRAM = "vmmctl"
EXIT_NO_DAEMON = 3


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="strata-vmm", prog_name=PROGRAM)
def cli() -> None:
    """Looks at vmmd, which owns this host's GPU memory, verifies and drains it, and probes the host."""


cli.add_command(status)
cli.add_command(top)
cli.add_command(conversations)
cli.add_command(drop)
cli.add_command(trades)
cli.add_command(explain)
cli.add_command(verify)
cli.add_command(drain)
cli.add_command(doctor)


def main() -> NoReturn:
    """Runs the command line; every error is one line. Exit 3: there is no daemon."""
    sys.exit(_exit_code())


def _exit_code() -> int:
    try:
        if sys.stdout is None:
            raise VmmError("standard output is closed: there is nowhere to write to")
        # Names may have characters that the locale has not.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        cli.main(prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
        return 0
    except (KeyboardInterrupt, click.Abort):
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        _complain(error.format_message())
        return error.exit_code
    except BrokenPipeError:
        sys.stdout = None  # nobody is left to flush to
        return 141
    except VmmError as error:
        _complain(error.message)
        return EXIT_NO_DAEMON if error.reason == "no_daemon" else 1
    except OSError as error:
        sys.stdout = None
        _complain((error.strerror or str(error)).lower())
    except Exception as error:
        _complain(f"internal error, please report it: {type(error).__name__}: {error}")
    return 1


def _complain(message: str) -> None:
    click.echo(f"{PROGRAM}: {' '.join(message.split())}", err=True)


if __name__ == "__main__":
    main()
