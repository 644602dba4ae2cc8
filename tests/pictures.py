"""Takes the pictures of the README and the pages from a real run of the demo; ``flow.svg`` is drawn by hand.

python tests/pictures.py
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "agent", "monitor")]

from rich.console import Console
from rich.text import Text

from browser import browsing
from jobs import RANKWATCH, environment
from rankwatch_monitor.record import replay
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.schema import FILE, StoreError

PICTURES = ROOT / "docs" / "pages" / "pictures"
BATCHES = 18
"""After this many the run, which lasts a second, is stopped for a moment while its picture is taken."""

RENAME = """
    const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) for (const [from, to] of Object.entries(arguments[0])) {
        const node = texts.currentNode;
        if (node.data.includes(from)) node.data = node.data.replaceAll(from, to);
    }
"""
"""The folders of this machine are nobody's business."""


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "rankwatch-runs"
        command = [*RANKWATCH, "demo", "--runs-dir", str(runs)]
        with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as demo:
            while demo.poll() is None and _batches(runs / "demo-0" / FILE) < BATCHES:
                time.sleep(0.005)
            _picture_top(runs / "demo-0")
        with browsing(runs) as browser:
            browser.size(1100, 1090)
            browser.open("/run/demo-0")
            browser.until(lambda: "At the end" in browser.chart() and "Worst" in browser.chart(1))
            browser.run(RENAME, {str(ROOT / "agent"): "/home/ann", folder: "/home/ann"})
            browser.driver.save_screenshot(str(PICTURES / "page.png"))
            browser.size(860, 1200)
            browser.open("/run/demo-0/modules?rank=1")
            browser.until(lambda: "Worst" in browser.chart())
            browser.driver.find_element("css selector", ".chart").screenshot(str(PICTURES / "modules.png"))


def _batches(path: Path) -> int:
    with suppress(StoreError), RunRecord(path) as record:
        return len(set(record.digests()["batch"].tolist()))
    return 0


def _picture_top(run: Path) -> None:
    with RunRecord(run / FILE) as record:
        processes = [row.pid for row in replay.take(record).report.ranks]
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        env = environment(FORCE_COLOR="1", COLUMNS="80", LINES="24")
        shown = subprocess.run([*RANKWATCH, "top", str(run), "--once"], env=env, capture_output=True, text=True, check=True)
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=80, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(shown.stdout.rstrip("\n")))
        picture = console.export_svg(title="rankwatch top")
    # A browser would fetch these fonts from another site.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    (PICTURES / "top.svg").write_text(picture)


if __name__ == "__main__":
    main()
