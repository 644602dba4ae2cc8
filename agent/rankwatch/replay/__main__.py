"""``python -m rankwatch.replay``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from ..errors import EXIT_ERROR, RankwatchError, UsageError
from ..shared.printable import page, paragraph
from ..shared.system.installed import describe_missing
from ..shared.system.standard_output import checked_output
from .replay_options import parse


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    os.environ["RANKWATCH_MODE"] = "disabled"  # the user's code may watch a model
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="rankwatch: %(message)s")
    try:
        from .session import replay
        from .summary import render, to_json

        found = replay(options)
        with checked_output():
            sys.stdout.write(to_json(found) if options.json else page(render(found)))
    except RankwatchError as error:
        sys.stderr.write(f"rankwatch: error: {paragraph(str(error))}\n")
        return error.exit_code
    except ImportError as error:
        sys.stderr.write(f"rankwatch: error: {describe_missing('replay', error)}\n")
        return EXIT_ERROR
    if found.error:
        return UsageError.exit_code
    return 0 if found.recurred else EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
