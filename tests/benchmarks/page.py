"""How long the page takes to open a large run in a real Chromium, from a server that has not yet read the run.

    python tests/benchmarks/page.py [--ranks 1024] [--batches 10000]

For each view: seconds from the navigation until its chart is drawn, the first time and again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "agent", "monitor")]

import large_runs
from browser import browsing

VIEWS = ("", "/modules", "/modules?rank={rank}", "/chart?module=blocks.5.part0&ranks=all,{rank}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kept = range(arguments.batches * 9 // 10, arguments.batches, 10)
        run = large_runs.generate(Path(folder) / "large-0", arguments.ranks, arguments.batches, kept=kept)
        size = (run / "run.db").stat().st_size / 2**20
        print(f"{arguments.ranks} ranks, {arguments.batches} batches, a record of {size:.0f} MiB")
        for view in VIEWS:
            path = "/run/large-0" + view.format(rank=arguments.ranks // 3)
            with browsing(run.parent) as browser:
                seconds = []
                for _ in range(2):
                    browser.open(path)
                    at = 0 if view else 1  # of an overview the heat map, below the loss
                    browser.chart(at)
                    ask = (
                        f"const label = document.querySelectorAll('.chart')[{at}].getAttribute('aria-label');"
                        "return label && /Worst|points/.test(label) && performance.now()"
                    )
                    seconds.append(browser.until(lambda ask=ask: browser.run(ask)) / 1000)  # type: ignore[misc]
                print(f"  {path:60} {seconds[0]:6.2f} s, again {seconds[1]:6.2f} s")


if __name__ == "__main__":
    main()
