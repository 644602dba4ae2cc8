"""``python -m rankwatch`` is ``rankwatch``."""

import sys

from rankwatch_monitor.cli import main

sys.exit(main())
