"""All that needs a GPU, by one command that ends within 8 minutes; prints one table, and writes ``results.json``.

    bash tests/cuda.sh [--rehearse] [FOLDER]        results go to FOLDER, by default build/cuda

It runs the CUDA tests and the kernel's, the doctor on NCCL, the abort of an NCCL job (exit code 77), and the benchmark: a
GPT-2-medium shape in bfloat16, eager, compiled and with CUDA graphs, with Hugging Face's detector beside it; 2,000 small modules;
the kernel's bandwidth beside a copy's, and the host's time to launch it, directly and by triton.

It uses ``$PYTHON``, else .venv's or the system's: one that has torch, Triton and transformers. pyzmq, msgpack and pytest may be
wheels in ``$WHEELS`` (default: wheels/), where there is no index.

Without a device each step is skipped, with the reason. ``--rehearse`` runs all steps there, small and on the CPU: to see that
they work before a device is at hand. The exit code is 1 if a step has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "tests" / "e2e" / "scripts"
SECONDS = 470.0
"""For all steps together."""
LEAST = 20.0
"""A step is not begun with less left."""
REHEARSAL = 3.0
"""A rehearsal may take so many times as long: it has a few busy cores."""

NEEDED = {"zmq": "pyzmq", "msgpack": "msgpack", "pytest": "pytest"}
TESTS = [
    "tests/torch/test_cuda.py",
    *(f"tests/torch/measure/test_{name}.py" for name in ("kernel", "launch")),
    "tests/torch/doctor/checks/test_groups.py",
    "tests/e2e/test_left_out.py::test_on_a_device",
]
MODES = "bare,bare (again),hugging face,default,async,every=10,between,gradients"

NO_DEVICE = "there is no CUDA device here"
OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"

Done = subprocess.CompletedProcess[str]
Found = tuple[bool, list[str], list[dict[str, Any]]]
"""Whether all is well, what the table says, and the figures for the JSON."""


@dataclass
class Result:
    """How a step went. ``found``: what the table says of it; ``figures``: for the JSON alone."""

    step: str
    state: str
    found: list[str]
    seconds: float = 0.0
    figures: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Step:
    """``read`` says what was found. ``seconds``: the most it may take."""

    name: str
    seconds: float
    command: list[str]
    read: Callable[[Done], Found]
    needs: str = ""
    """A module that it needs."""


class Machine:
    """What this Python has. ``folder``: of the results."""

    def __init__(self, folder: Path) -> None:
        import torch

        self.folder = folder
        self.until = float("inf")
        """When all steps must be done, on the monotonic clock."""
        self.has_device = torch.cuda.is_available()
        self.devices = torch.cuda.device_count()
        self.about = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "device": torch.cuda.get_device_name() if self.has_device else "none",
            "devices": self.devices,
            "python": sys.version.partition(" ")[0],
        }
        paths = [*(str(ROOT / each) for each in ("agent", "monitor", "tests")), str(folder / "packages")]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANKWATCH_", "TORCHELASTIC_"))}
        self.environment = {**kept, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}

    def lack(self) -> str:
        """Installs what is missing beside the results; returns why it cannot, or nothing."""
        missing = [name for module, name in NEEDED.items() if find_spec(module) is None]
        if not missing:
            return ""
        wheels = Path(os.environ.get("WHEELS", ROOT / "wheels"))
        source = ["--no-index", "--find-links", str(wheels)] if wheels.is_dir() else []
        target = ["--target", str(self.folder / "packages")]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *source, *target, *missing]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{', '.join(missing)} cannot be installed: put their wheels into {wheels}, or set WHEELS\n{done.stderr}"
        return ""

    def torchrun(self) -> list[str]:
        ranks = max(1, min(self.devices, 2)) if self.has_device else 2
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]

    def begin(self) -> None:
        self.until = time.monotonic() + SECONDS * self.patience

    @property
    def patience(self) -> float:
        return 1.0 if self.has_device else REHEARSAL

    def run(self, step: Step) -> Result:
        if step.needs and find_spec(step.needs) is None:
            return Result(step.name, SKIPPED, [f"{step.needs} is not installed"])
        begun = time.monotonic()
        limit = min(step.seconds * self.patience, self.until - begun)
        if limit < LEAST:
            return Result(step.name, SKIPPED, ["no time is left"])
        log = self.folder / f"{step.name.replace(' ', '-').replace(',', '')}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                step.command, cwd=ROOT, env=self.environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its own processes, too
                process.wait()
                return Result(step.name, FAILED, [f"not done after {limit:.0f} s, see {log}"], limit)
        done = subprocess.CompletedProcess(step.command, code, log.read_text(errors="replace"))
        try:
            is_good, found, figures = step.read(done)
        except Exception as error:  # noqa: BLE001  (the other steps go on)
            is_good, found, figures = False, [f"its output cannot be read: {error!r}"], []
        if not is_good:
            found = [*found, f"exit code {done.returncode}, see {log}"]
        return Result(step.name, OK if is_good else FAILED, found, time.monotonic() - begun, figures)


def steps_of(machine: Machine, *, is_rehearsal: bool) -> Iterator[Step]:
    """What is worth most comes first: the last ones may find no time."""
    python, large = sys.executable, "launches" if is_rehearsal else "gpt2"  # on the CPU it would be compiled for minutes
    options = ["--noconftest", "-o", "addopts=", "--import-mode=importlib", "-q"]
    yield Step("tests", 120, [python, "-m", "pytest", *options, *TESTS], read_tests)
    yield Step("doctor", 60, [*machine.torchrun(), "-m", "rankwatch.doctor", "--json"], read_doctor)
    runs = machine.folder / f"runs-{os.getpid()}"
    watched = [python, "-m", "rankwatch_monitor", "run", "--runs-dir", str(runs), "--"]
    abort = [*watched, *machine.torchrun(), str(SCRIPTS / "all_reduce.py")]
    yield Step("abort", 60, abort, partial(read_abort, runs / "latest" / "report.json"))
    yield Step("launch", 30, [python, "tests/benchmarks/launches.py"], read_launches, "triton")
    for name, seconds, arguments in (
        ("steps, eager", 120, ["--models", "gpt2", "--ways", "eager", "--modes", MODES, "--steps", "32"]),
        ("steps, launches", 60, ["--models", "launches", "--ways", "eager", "--modes", MODES, "--steps", "16"]),
        ("kernel", 40, ["--tables", "measure", "--steps", "16"]),
        ("steps, compiled", 150, ["--models", large, "--ways", "compiled", "--modes", "bare,default", "--steps", "16"]),
        (
            "steps, reduced",
            150,
            ["--models", large, "--ways", "reduce-overhead", "--modes", "bare,default", "--steps", "16"],
        ),
    ):
        if is_rehearsal:
            arguments = [*arguments[:-1], "2", "--small", "--device", "cpu"]
        if name != "kernel":
            arguments = ["--tables", "steps", "--dtypes", "bfloat16", *arguments]
        file = machine.folder / f"{name.replace(', ', '-')}.json"
        command = [python, "tests/benchmarks/overhead.py", *arguments, "--json", str(file)]
        yield Step(name, seconds, command, partial(read_benchmark, file), "transformers")


def read_tests(done: Done) -> Found:
    last = done.stdout.strip().splitlines()[-1]
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 0, [last, *failed], []


def read_doctor(done: Done) -> Found:
    diagnosis = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    bad = [f"{check['check']}: {check['found']}" for check in diagnosis["checks"] if check["state"] == "fail"]
    found = f"{diagnosis['backend']}, {diagnosis['world_size']} ranks, NCCL {diagnosis['versions']['NCCL']}"
    return done.returncode == 0 and diagnosis["ok"], [found, *bad], [diagnosis]


def read_abort(path: Path, done: Done) -> Found:
    """All ranks are aborted, and torchrun sees the exit code 77."""
    report = json.loads(path.read_text())
    verdict, states = report["verdict"], {row["state"] for row in report["ranks"]}
    is_good = (done.returncode, verdict["module"], verdict["batch"], states) == (77, "1", 3, {"aborted"})
    is_good = is_good and "exitcode  : 77" in done.stdout
    found = (
        f"rank {verdict['rank']}, batch {verdict['batch']}, module {verdict['module']}; ranks {', '.join(sorted(states))}"
    )
    return is_good, [f"{found}; exit code {done.returncode}"], [verdict]


def read_launches(done: Done) -> Found:
    rows = json.loads(done.stdout)
    return done.returncode == 0, [f"{row['way']:<14}{row['us']:.2f} us of the host" for row in rows], rows


def read_benchmark(path: Path, done: Done) -> Found:
    tables = json.loads(path.read_text()) if path.exists() else {"steps": [], "measure": []}
    rows = [{key: value for key, value in row.items() if key != "seconds"} for row in tables["steps"] + tables["measure"]]
    return done.returncode == 0, list(map(line_of, rows)), rows


def line_of(row: dict[str, Any]) -> str:
    if "absent" in row:
        return f"{row['mode']:<14} n/a: {row['absent']}"
    if "elements" in row:
        share = "" if row["share of copy"] is None else f"  {row['share of copy']:.0%} of a copy's bandwidth"
        return f"{row['dtype']}, {row['elements'] >> 10} Ki  {row['us']:.1f} us  {row['ratio']:.2f} of aminmax{share}"
    figures = f"{row['ms']:9.1f} ms  {row['ratio']:.4f} +- {row['error']:.4f}  graphs {row['graphs']}  syncs {row['syncs']}"
    return f"{row['mode']:<14}{figures}  {row['verdict']}"


def show(result: Result) -> None:
    first, *more = result.found or [""]
    print(f"{result.step:<18}{result.state:<9}{result.seconds:5.0f} s  {first}", flush=True)
    for line in more:
        print(f"{'':<36}{line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "cuda")
    parser.add_argument("--rehearse", action="store_true", help="without a device: all steps, small and on the CPU")
    options = parser.parse_args()
    if find_spec("torch") is None:
        sys.exit(f"{sys.executable} has no torch: set PYTHON to one that has")
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    machine = Machine(folder)
    print(", ".join(f"{name} {value}" for name, value in machine.about.items()), flush=True)
    runs = machine.has_device or options.rehearse
    if runs and (why := machine.lack()):
        sys.exit(why)
    results = []
    machine.begin()
    for step in steps_of(machine, is_rehearsal=not machine.has_device):
        if runs:
            results.append(machine.run(step))
        else:
            results.append(Result(step.name, SKIPPED, [NO_DEVICE]))
        show(results[-1])
    written = {"about": machine.about, "results": [asdict(result) for result in results]}
    (folder / "results.json").write_text(json.dumps(written, indent=1))
    print(f"written: {folder / 'results.json'}")
    return int(any(result.state == FAILED for result in results))


if __name__ == "__main__":
    sys.exit(main())
