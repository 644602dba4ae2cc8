"""Runs all trainings with a silent fault, and prints how each was named: ``python -m desynced.table [NAME ...]``.

From the repository's root: ``PYTHONPATH=agent:monitor:tests``. ``since``: optimizer steps from the first one that could show
the fault to the one that the report says; ``known``: to the one whose checksums settled it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from desynced import CASES
from desynced.judged import judged

ROW = (
    "{how:6} {name:46} {ranks:>5} {step:>5} {since:>5} {known:>5} {pattern:15} {who:12} {entries:>7} {lines:>5}  {parameter}"
)


def main(names: list[str]) -> None:
    head = dict(
        how="", name="training", ranks="ranks", step="step", since="since", known="known", pattern="pattern", who="named"
    )
    print(ROW.format(**head, entries="entries", lines="lines", parameter="first parameter"))
    wrong = 0
    for case in CASES.values():
        if names and case.name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            result = judged(case, Path(folder))
            entries = result.entries
        first = entries[0] if entries else {"pattern": "-", "ranks": [], "parameter": "-", "step": None}
        wrong += bool(result.complaints)
        print(
            ROW.format(
                how="wrong" if result.complaints else "right",
                name=case.name,
                ranks=case.ranks,
                step=case.truth.step,
                since=first["step"] - case.truth.step if entries else "-",
                known=result.named - case.truth.step if result.named >= 0 else "-",
                pattern=first["pattern"],
                who=",".join(map(str, first["ranks"])) or "-",
                entries=len(entries),
                lines=result.lines,
                parameter=first["parameter"],
            ),
            *(f"\n       {complaint}" for complaint in result.complaints),
            flush=True,
        )
    print(f"{wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
