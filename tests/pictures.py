"""Makes the README's pictures anew, from a real run of the demo.

python tests/pictures.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "agent", "monitor")]

from browser import browsing
from jobs import RANKWATCH, environment

PICTURES = ROOT / "deploy" / "pictures"


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "rankwatch-runs"
        subprocess.run(
            [*RANKWATCH, "demo", "--runs-dir", str(runs)], env=environment(), check=True, stdout=subprocess.DEVNULL
        )
        with browsing(runs) as browser:
            browser.size(1100, 850)
            browser.open("/run/demo-0")
            browser.until(lambda: "Worst" in browser.chart())
            browser.driver.save_screenshot(str(PICTURES / "page.png"))


if __name__ == "__main__":
    main()
