"""A capsule -> ``repro.py`` and the folder beside it: a script that needs torch alone, and makes the inf or nan again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from .opened import OpenedCapsule

PARTS = (
    *("errors.py", "measure/walk.py", "shared/printable.py", "touch/parts.py"),
    *("rerun/capsule/files.py", "rerun/capsule/surroundings.py", "rerun/capsule/tensor_file.py"),
    *("replay/call.py", "replay/code.py", "replay/definitions.py", "replay/opened.py", "replay/plain_run.py"),
    "replay/rebuild.py",
)
"""The modules of this package that the script needs: they import torch, Python's own modules and one another."""

_SCRIPT = '''\
"""{title}

Written by rankwatch replay. It needs torch and the folder FILES beside it, not rankwatch: FILES/sources has the code of
the training that it runs. Exit code 0: inf or nan again.
"""

import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
CAPSULE = {capsule}
FILES = HERE / {files}
DEVICE = {device}
ROWS = {rows}  # the rows that are enough: from, to before, of how many; None: all
MODULE = {module}  # as given to --module

sys.path.insert(0, str(FILES))
from repro_parts.replay.call import as_in_training, make_call, of_rows, users_code
from repro_parts.replay.opened import open_capsule
from repro_parts.replay.plain_run import FirstBad, backward, forward, is_bad

capsule, device = open_capsule(CAPSULE), torch.device(DEVICE)
code, make = users_code(capsule, MODULE, copies=FILES / "sources")
call = make_call(capsule, code, device, make)  # the module and its inputs
if ROWS is not None:
    call = of_rows(*ROWS)(call)
with as_in_training(capsule, device), FirstBad():
    {run}
found = any(map(is_bad, values))
print("inf or nan:", found)
sys.exit(0 if found else 1)
'''


def write_repro(
    path: Path,
    capsule: OpenedCapsule,
    texts: Mapping[str, str],
    *,
    rows: tuple[int, int, int] | None = None,
    module: Sequence[str] = (),
) -> None:
    """Writes the script, and the folder of what it imports.

    Args:
        texts: the source texts of the user's modules, as they are here.
        rows: the rows that are enough (from, to before, of how many); None: all.
        module: the options ``--module`` of the replay.

    Raises:
        OSError: it cannot be written.
    """
    files = path.with_name(f"{path.stem}_files")
    package = Path(__file__).parents[1]
    parts = {f"repro_parts/{part}": (package / part).read_text(encoding="utf-8") for part in PARTS}
    for name, text in {**parts, **{f"sources/{name}.py": text for name, text in texts.items()}}.items():
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_text(text, encoding="utf-8")
    path.write_text(_script(path, files.name, capsule, rows, module), encoding="utf-8")


def _script(path: Path, files: str, capsule: OpenedCapsule, rows: tuple[int, int, int] | None, module: Sequence[str]) -> str:
    manifest, trip, place = capsule.manifest, capsule.manifest["trip"], capsule.path.resolve()
    what, run = "forward", f"values = forward(call, label={manifest['label']!r}, inner={manifest['inner']!r})"
    if manifest["gradients"]:
        what, run = "backward", "values = backward(call)"
    title = (
        f"The {what} of {manifest['name'] or '(root)'} ({manifest['class']}) that made {trip['state']} on rank "
        f"{manifest['rank']}, in batch {trip['batch']}, with torch {manifest['versions']['torch']}."
    )
    return _SCRIPT.format(
        title=title.replace("\\", "/").replace('"', "'"),  # a text of the capsule must not end the docstring
        files=repr(files),
        capsule="HERE" if path.parent.resolve() == place else f"Path({str(place)!r})",
        device=_device(capsule),
        rows=rows,
        module=list(module),
        run=run,
    )


def _device(capsule: OpenedCapsule) -> str:
    """Where it runs; a GPU, if the training used one and the reader has one."""
    forms = json.dumps([capsule.manifest[key] for key in ("module", "args", "kwargs", "gradients", "code")])
    devices = sorted(set(re.findall(r'"device": "(cuda:\d+)"', forms)))
    return f'"cuda" if torch.cuda.is_available() else "cpu"  # the training ran on {devices[0]}' if devices else '"cpu"'
