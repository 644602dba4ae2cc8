"""The rules of the house: who may import whom, and what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import ROOT, environment

AGENT, MONITOR = ROOT / "agent" / "rankwatch", ROOT / "monitor" / "rankwatch_monitor"
SHARED = [
    *("errors", "str_enum", "frame", "trip", "notice", "wire", "text", "scalars", "identity", "config", "connection"),
    *("sockets", "attach"),
]
"""The agent's files that the collector imports: none of them may need torch."""

ORDER = [
    *("errors", "str_enum", "frame", "trip", "notice", "wire", "text", "scalars", "config", "connection", "sockets"),
    *(
        "identity",
        "kernel",
        "measure",
        "tape",
        "walk",
        "modules",
        "stage",
        "weights",
        "traced",
        "recorder",
        "batch",
        "health",
    ),
    *("settle", "scaler", "steps", "backward", "hooks", "detector", "fork", "spool", "link", "abort"),
    *("registry", "mark", "watcher", "drop_in", "finder", "attach", "demo"),
]
"""Imports inside the agent point to the left."""

DOCTOR = [
    *("finding", "words", "bounded", "options", "place", "pairs", "compare", "clock", "explain", "quiet", "report", "table"),
    *("machine", "reach", "alone", "device", "groups", "room", "tasks", "run", "__main__"),
]
"""The same inside the doctor, which may import what the collector may, and what is named here."""
DOCTOR_MAY_IMPORT = {*SHARED, "abort"}
DOCTOR_NEEDS_TORCH = {"device", "groups", "room"}
"""Only these import torch; ``tasks`` and ``run`` rest on them."""


def imports(path: Path) -> set[str]:
    """The modules a file imports outside of ``if TYPE_CHECKING``, relative ones with their dots."""
    found = set()
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found |= {f".{alias.name}" for alias in node.names} if base == "." else {base}
    return found


def test_every_file_of_the_agent_has_its_place() -> None:
    assert {path.stem for path in AGENT.glob("*.py")} - {"__init__"} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_imports_inside_the_agent_point_one_way(name: str) -> None:
    above = {module.removeprefix(".") for module in imports(AGENT / f"{name}.py") if module.startswith(".")}
    assert above <= set(ORDER[: ORDER.index(name)])


def test_every_file_of_the_doctor_has_its_place() -> None:
    assert {path.stem for path in (AGENT / "doctor").glob("*.py")} - {"__init__"} == set(DOCTOR)


@pytest.mark.parametrize("name", DOCTOR)
def test_imports_inside_the_doctor_point_one_way(name: str) -> None:
    modules = imports(AGENT / "doctor" / f"{name}.py")
    own = {module.removeprefix(".") for module in modules if module.startswith(".") and not module.startswith("..")}
    assert own <= set(DOCTOR[: DOCTOR.index(name)])
    assert {module.removeprefix("..") for module in modules if module.startswith("..")} <= DOCTOR_MAY_IMPORT | {""}
    if name not in DOCTOR_NEEDS_TORCH | {"tasks"}:
        assert not {module for module in modules if module.partition(".")[0] == "torch"}


@pytest.mark.parametrize("path", sorted(AGENT.glob("*.py")), ids=lambda path: path.stem)
def test_nothing_else_imports_the_integrations(path: Path) -> None:
    assert not {module for module in imports(path) if "integrations" in module}


def test_only_the_doctor_meets_at_a_store() -> None:
    users = {path.stem for path in AGENT.rglob("*.py") if "TCPStore" in path.read_text()}
    assert users == {"room"}


@pytest.mark.parametrize("path", sorted(AGENT.rglob("*.py")), ids=lambda path: path.stem)
def test_the_agent_never_imports_the_monitor(path: Path) -> None:
    assert not {module for module in imports(path) if module.startswith("rankwatch_monitor")}


@pytest.mark.parametrize("path", sorted(MONITOR.rglob("*.py")), ids=lambda path: path.stem)
def test_the_monitor_imports_only_what_is_free_of_torch(path: Path) -> None:
    modules = imports(path)
    assert not {module for module in modules if module.partition(".")[0] == "torch"}
    ours = {module.partition(".")[2] for module in modules if module.startswith("rankwatch.")}
    assert ours <= {*SHARED, "doctor.options"}


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("msgpack", "wire"),
        ("zmq", "sockets link inbox collector control reach"),
        ("starlette", "server"),
        ("uvicorn", "server"),
        ("sqlite3", "store record kept migrations"),
        ("numpy", "digest headroom store record kept migrations grids rows parquet events written"),
        ("prometheus_client", "metrics metrics_server"),
        ("rich", "screen"),
        ("termios", "keys"),
        ("pyarrow", "parquet"),
        ("fsspec", "target"),
        ("tensorboardX", "events"),
        ("transformers", "transformers"),
        ("lightning", "lightning"),
        ("pytorch_lightning", "lightning"),
        ("accelerate", ""),
        ("deepspeed", ""),
        ("wandb", ""),
    ],
)
def test_libraries_have_one_home(library: str, home: str) -> None:
    users = {
        path.stem
        for folder in (AGENT, MONITOR)
        for path in folder.rglob("*.py")
        if any(module.partition(".")[0] == library for module in imports(path))
    }
    assert users <= set(home.split())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import rankwatch", {"torch", "zmq", "msgpack"}),
        ("import rankwatch.wire, rankwatch.text", {"torch", "zmq"}),
        ("import rankwatch.attach", {"torch", "zmq", "msgpack"}),
        ("import rankwatch; rankwatch.watch", {"zmq"}),
        ("import rankwatch_monitor.cli", {"torch", "prometheus_client", "rich", "starlette"}),
        ("import rankwatch.doctor.__main__", {"torch"}),
        ("import rankwatch.integrations; rankwatch.integrations.lightning_callbacks()", {"torch", "lightning"}),
    ],
)
def test_what_an_import_does_not_pull_in(statement: str, absent: set[str]) -> None:
    code = f"import sys; {statement}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    ).stdout.split()
    assert not absent & set(loaded)


def test_sockets_are_created_in_one_file() -> None:
    creators = [p.stem for f in (AGENT, MONITOR) for p in f.rglob("*.py") if ".socket(" in p.read_text()]
    assert creators == ["sockets"]
