"""``rankwatch replay`` of real trainings, in processes of their own: without the data, the collector and the launcher."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jobs import RANKWATCH, SCRIPTS, Job, finished

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


class Truth(NamedTuple):
    operator: str
    in_float64: str
    rows: tuple[int, int, int] | None


TRUTHS = {
    "helpers": Truth("aten.exp.default", "inf", (7, 8, 16)),
    "dataclass": Truth("aten.div.Tensor", "inf", (3, 4, 6)),
    "half": Truth("aten.mm.default", "finite", (2, 3, 8)),
    "masked": Truth("aten._softmax.default", "nan", (5, 6, 8)),
    "function": Truth("aten.sqrt.default", "nan", (9, 10, 16)),
    "random": Truth("aten.log.default", "nan", None),
    "inside": Truth("aten.native_layer_norm.default", "nan", (0, 1, 4)),
    "between": Truth("aten.log.default", "nan", (0, 1, 4)),
    "slope": Truth("aten.div.Tensor", "nan", (11, 12, 16)),
    "branch": Truth("aten.div.Tensor", "nan", None),
    "narrow": Truth("aten.mul.Tensor", "finite", (0, 1, 8)),
    "closure": Truth("aten.pow.Tensor_Scalar", "inf", (0, 1, 16)),
}


WITHOUT_RANKWATCH = "import runpy, sys; sys.modules['rankwatch'] = None; runpy.run_path(sys.argv[1])"

BACKWARDS = ("slope", "branch", "narrow")
"""Their forward is finite, a gradient is not."""


@pytest.fixture(scope="module")
def capsules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainings")
    done = finished([sys.executable, str(SCRIPTS / "mechanisms.py"), str(folder)])
    assert done.returncode == 0, done.stderr
    return folder


def capsule_of(folder: Path, name: str) -> Path:
    (found,) = (folder / name / "rankwatch-capsules").glob("process-*/rank-0")
    return found


def replay(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*RANKWATCH, "replay", *map(str, arguments)]
    return finished(command, cwd)


def line_of(name: str) -> tuple[int, str]:
    lines = (SCRIPTS / "mechanisms.py").read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# line of {name}"))
    return number, lines[number - 1].strip()


@pytest.mark.parametrize("name", TRUTHS)
def test_a_mechanism_in_a_fresh_process(name: str, capsules: Path, tmp_path: Path) -> None:
    truth, capsule = TRUTHS[name], capsule_of(capsules, name)
    done = replay(capsule, "--json", "--precision", "float64", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert (found["recurred"], found["of"], found["same_bits"]) == (3, 3, True)
    assert found["bits_of_the_training"] is (None if name in ("inside", "between", *BACKWARDS) else True)
    assert found["module"] == {"inside": "norm"}.get(name, "")
    source = found["operator"]["source"]
    assert (found["operator"]["operator"], source["line"], source["text"]) == (truth.operator, *line_of(name))
    assert found["backward"] is (name in BACKWARDS)
    assert found["precision"]["float64"]["cpu"]["state"] == truth.in_float64
    if truth.rows is not None:
        assert tuple(found["rows"].values()) == truth.rows
    assert found["repro"].endswith("repro.py (run once, by itself: inf or nan again)")
    assert not list(tmp_path.iterdir())


def test_repro_needs_neither_rankwatch_nor_the_script(capsules: Path, tmp_path: Path) -> None:
    assert replay(capsule_of(capsules, "dataclass"), cwd=tmp_path).returncode == 0
    copy = shutil.copytree(capsule_of(capsules, "dataclass"), tmp_path / "copy")
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    text = (copy / "repro.py").read_text()
    assert "rankwatch" not in text.partition('"""\n')[2]
    done = subprocess.run(
        [sys.executable, "-I", "-c", WITHOUT_RANKWATCH, str(copy / "repro.py")],
        env=alone,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, ["first bad operator: aten.div.Tensor", "inf or nan: True"])


def test_a_script_that_is_not_here(capsules: Path, tmp_path: Path) -> None:
    """Neither its copy nor another class is taken without a word."""
    copy = shutil.copytree(capsule_of(capsules, "function"), tmp_path / "copy")
    described = json.loads((copy / "capsule.json").read_text())
    described["code"]["__main__"]["file"] = str(tmp_path / "gone.py")
    seal(copy, described)
    done = replay(copy, cwd=tmp_path)
    assert done.returncode == 2
    for words in ("gone.py is not here", "--module MODULE:CLASS", "--stored-code"):
        assert words in done.stderr
    done = replay(copy, "--stored-code", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["operator"]["source"]["text"] == line_of("function")[1]
    (tmp_path / "mine.py").write_text(
        "import torch\nclass Mine(torch.nn.Module):\n    def forward(self, x):\n        return x.abs().sqrt()\n"
    )
    done = replay(copy, "--module", "mine:Mine", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "recurs     no: finite 3 of 3 times here. It was not the same forward as in the training" in done.stdout
    done = replay(copy, "--module", "not_there:Mine", cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot import not_there" in done.stderr


def test_another_release_of_torch_is_said(capsules: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(capsule_of(capsules, "masked"), tmp_path / "copy")
    described = json.loads((copy / "capsule.json").read_text())
    described["versions"]["torch"] = "2.4.0"
    seal(copy, described)
    done = replay(copy, cwd=tmp_path)
    assert done.returncode == 0
    assert "and was 2.4.0 in the training: bits may differ" in done.stdout


def seal(capsule: Path, described: dict[str, Any]) -> None:
    """Writes a changed manifest with its checksum."""
    (capsule / "capsule.json").write_text(json.dumps(described))
    names = [line.partition("  ")[2] for line in (capsule / "SHA256SUMS").read_text().splitlines()]
    sums = subprocess.check_output(["sha256sum", *names], cwd=capsule, text=True)
    (capsule / "SHA256SUMS").write_text(sums)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere",), "no run nowhere; in rankwatch-runs there is none"),
        (("no/where",), "no/where does not exist: give the folder of a run, or a capsule"),
        ((".",), "no capsule in ."),
        (("cut",), "not as it was written: its checksum differs"),
    ],
)
def test_what_cannot_be_replayed(arguments: tuple[str, ...], words: str, capsules: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(capsule_of(capsules, "masked"), tmp_path / "cut")
    file = copy / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    done = replay(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_run_is_replayed_from_its_folder(bad: Job, tmp_path: Path) -> None:
    """The report names the capsule in the run's folder, and the folder is enough."""
    assert bad.verdict["capsule"] == "capsule/rank-1"
    run = shutil.copytree(bad.run_dir, tmp_path / "moved")
    (line,) = (line for line in bad.stdout.splitlines() if line.startswith("  replay "))
    assert line == f"  replay     rankwatch replay {bad.run_dir}" or line.endswith(bad.run_dir.name)
    done = replay(run, "--precision", "float64", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3 of 3, the same bits each time, the bits of the training" in done.stdout


def test_ranks_that_multiprocessing_has_spawned(tmp_path: Path) -> None:
    """Their script has another name there."""
    command = [*RANKWATCH, "run", "--no-status", "--job", "spawned", "--", sys.executable, str(SCRIPTS / "spawned.py")]
    assert finished(command, tmp_path).returncode == 77
    done = finished([*RANKWATCH, "replay", "rankwatch-runs/spawned-0"], tmp_path)
    assert "recurs     3 of 3, the same bits each time, the bits of the training" in done.stdout, done.stdout + done.stderr
    assert "(run once, by itself: inf or nan again)" in done.stdout
