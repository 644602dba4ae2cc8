"""``python -m rankwatch_monitor`` is ``rankwatch``."""

import sys

from .cli import main

sys.exit(main())
