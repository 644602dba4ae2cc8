"""``rankwatch ui``: a local web page of the runs in a folder, live and afterwards."""

from __future__ import annotations

import argparse
import os
import secrets
import sys

from rankwatch.errors import UsageError
from rankwatch.shared.printable import printable
from rankwatch.shared.system.installed import to_add

from . import arguments as types

DEFAULT_PORT = 27078


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_runs(parser)
    types.describe(
        parser,
        "On a head node: connect by ssh -L PORT:127.0.0.1:PORT HEAD, and open the URL that this command prints. "
        "RANKWATCH_TOKEN sets the token in the URL.",
    )
    host = types.env("host", "127.0.0.1")
    parser.add_argument("--host", default=host, help="address to listen on (default: 127.0.0.1, this machine alone)")
    parser.add_argument(
        "--port",
        type=types.whole("of a port", 0, 65535),
        default=types.env("port", str(DEFAULT_PORT)),
        metavar="N",
        help=f"port to listen on (default: {DEFAULT_PORT}; 0 picks one)",
    )


def main(arguments: argparse.Namespace) -> int:
    try:
        from ..views.ui import server
    except ImportError as error:
        raise UsageError(f"the page needs {error.name}: {to_add('ui')}") from None
    if not arguments.runs_dir.is_dir() and arguments.runs_dir != types.runs_folder():
        raise UsageError(f"no folder {arguments.runs_dir}: give the one that runs are recorded in")
    token = os.environ.get("RANKWATCH_TOKEN") or secrets.token_urlsafe(24)
    with server.listen(arguments.host, arguments.port) as listening:
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        folder = printable(str(arguments.runs_dir))
        sys.stdout.write(f"rankwatch: {folder} is shown at http://{shown}:{port}/?token={token}\n")
        sys.stdout.flush()
        server.serve(server.application(arguments.runs_dir, token), listening)
    return 0
