"""The rules of the house: who may import whom, and what importing costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from jobs import ROOT, environment

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

AGENT, MONITOR = ROOT / "agent" / "rankwatch", ROOT / "monitor" / "rankwatch_monitor"
FLEET = ROOT / "monitor" / "rankwatch_fleet"

AGENT_WINGS = ["face", "tell", "hook", "replicas", "judge", "rerun", "measure", "touch", "shared", "errors"]
"""Imports inside the agent point to the right: a file imports its own wing and those after it. ``face`` is what lies at the
top of the package and what users import: the doctor, replay, the integrations, the start-up of zero code."""

MONITOR_WINGS = ["face", "commands", "serve", "views", "record", "decide"]
"""The same in the monitor; ``face`` is the command line's entry."""

FACE = {"api", "integrations", "doctor", "replay", "zero_code"}

MONITOR_MAY_IMPORT = {
    "rankwatch",
    *(f"rankwatch.{name}" for name in ("errors", "attach", "doctor.doctor_options", "replay.replay_options")),
}
"""Beside ``rankwatch.shared``: the only parts of the agent that the monitor imports. None of them needs torch."""

DOCTOR = [
    *("result", "wording", "time_limit", "doctor_options", "placement", "checks.pairs", "checks.compare", "checks.clock"),
    *("checks.explain", "quiet", "report", "table", "checks.machine", "checks.reach", "checks.alone", "checks.device"),
    *("checks.groups", "rendezvous", "tasks", "run", "__main__"),
]
"""Imports inside the doctor point to the left; outside of it, to ``shared``, ``errors`` and ``tell.abort``."""
DOCTOR_NEEDS_TORCH = {"checks.device", "checks.groups", "rendezvous"}
"""Only these import torch; ``tasks`` and ``run`` rest on them."""


def name_of(path: Path) -> str:
    """The dotted name of a source file."""
    root = AGENT.parent if path.is_relative_to(AGENT) else MONITOR.parent
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for root in (AGENT, MONITOR, FLEET) for path in sorted(root.rglob("*.py"))}


@cache
def imports(name: str) -> frozenset[str]:
    """The modules that a file imports outside of ``if TYPE_CHECKING``, by their full names."""
    found = set()
    tree = ast.parse(FILES[name].read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    parents = name.split(".") if FILES[name].name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) + 1 - node.level] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{source}.{a.name}" if f"{source}.{a.name}" in FILES else source for a in node.names}
    return frozenset(found)


def wing(name: str) -> str:
    """The wing of one of our files."""
    _, *rest = name.split(".")
    if rest == ["errors"]:
        return "errors"
    is_folder = len(rest) > 1 or bool(rest and FILES[name].name == "__init__.py")
    return rest[0] if is_folder and rest[0] not in FACE else "face"


def of(root: Path) -> list[str]:
    return [name for name, path in FILES.items() if path.is_relative_to(root)]


@pytest.mark.parametrize("root", [AGENT, MONITOR], ids=["agent", "monitor"])
def test_imports_point_down_the_wings(root: Path) -> None:
    wings = AGENT_WINGS if root == AGENT else MONITOR_WINGS
    assert {wing(name) for name in of(root)} == set(wings)
    upward = [
        f"{name} -> {other}"
        for name in of(root)
        for other in imports(name) & set(of(root)) - {root.name}
        if wings.index(wing(other)) < wings.index(wing(name))
    ]
    assert not upward


STREETS = {"trip", "ending", "replicas", "stalls"}
"""What is decided of these meets in the run, and nowhere else."""

FLOORS = {
    "serve": ["daemon launcher", "collector status", "door files metrics printer processes", "niceness settings"],
    "record": ["*", "numbers"],
    "views": ["export top ui", "batches", "*"],
    "decide.replicas": ["*", "groups", "findings", "patterns", "desync rounds votes", "table_layout"],
}
"""By folder of the monitor, its rooms from top to bottom: a room imports only those of the floors below. ``*``: all files that
no other floor names, which may import each other."""


def rooms_of(folder: str) -> set[tuple[str, str]]:
    """What imports what inside a folder of the monitor, by the files and folders that lie in it."""
    inside = f"rankwatch_monitor.{folder}."
    pairs = {
        (name, other)
        for name in of(MONITOR)
        for other in imports(name)
        if {name[: len(inside)], other[: len(inside)]} == {inside}
    }
    rooms = {tuple(one.removeprefix(inside).partition(".")[0] for one in pair) for pair in pairs}
    return {(room, other) for room, other in rooms if room != other}


def test_the_streets_of_decisions_meet_in_the_core() -> None:
    assert not {pair for pair in rooms_of("decide") if set(pair) <= STREETS}


@pytest.mark.parametrize("folder", FLOORS)
def test_imports_between_rooms_point_down(folder: str) -> None:
    place = {room: number for number, floor in enumerate(FLOORS[folder]) for room in floor.split()}
    others = place.get("*", -1)
    floors = {pair: (place.get(pair[0], others), place.get(pair[1], others)) for pair in rooms_of(folder)}
    assert not [pair for pair, (above, below) in floors.items() if not (above < below or above == below == others)]


def test_no_file_imports_itself_in_a_circle() -> None:
    inner = {name: {other for other in imports(name) if other in FILES and other != "rankwatch"} for name in FILES}
    list(TopologicalSorter(inner).static_order())


def test_the_agent_never_imports_the_monitor() -> None:
    users = {name for name in of(AGENT) for other in imports(name) if other.startswith("rankwatch_monitor")}
    assert users == {"rankwatch.__main__"}  # which is the command line


def test_the_archive_of_a_site_is_imported_by_its_commands_alone() -> None:
    users = {name for name in of(MONITOR) + of(AGENT) for other in imports(name) if other.startswith("rankwatch_fleet")}
    assert users == {"rankwatch_monitor.commands.archive", "rankwatch_monitor.commands.fleet"}


def test_no_file_has_a_license_header() -> None:
    assert not [name for name, path in FILES.items() if "SPDX" in path.read_text()]  # LICENSE and the metadata name it


def test_the_monitor_imports_only_what_is_free_of_torch() -> None:
    for name in of(MONITOR):
        theirs = {other for other in imports(name) if other in FILES and other.partition(".")[0] == "rankwatch"}
        assert {other for other in theirs if wing(other) != "shared"} <= MONITOR_MAY_IMPORT, name
    free = [*of(MONITOR), *(name for name in of(AGENT) if wing(name) in ("shared", "errors")), "rankwatch.attach"]
    assert not {name for name in free for other in imports(name) if other.partition(".")[0] == "torch"}


def test_every_file_of_the_doctor_has_its_place() -> None:
    files = [path.relative_to(AGENT / "doctor") for path in (AGENT / "doctor").rglob("*.py") if path.stem != "__init__"]
    assert {".".join(path.with_suffix("").parts) for path in files} == set(DOCTOR)


@pytest.mark.parametrize("name", DOCTOR)
def test_imports_inside_the_doctor_point_one_way(name: str) -> None:
    ours = {other for other in imports(f"rankwatch.doctor.{name}") if other in FILES} - {"rankwatch"}
    own = {other.removeprefix("rankwatch.doctor.") for other in ours if other.startswith("rankwatch.doctor.")}
    assert own <= set(DOCTOR[: DOCTOR.index(name)])
    outside = {other for other in ours if ".doctor." not in other and wing(other) not in ("shared", "errors")}
    assert outside <= {"rankwatch.tell.abort"}
    if name not in DOCTOR_NEEDS_TORCH | {"tasks"}:
        assert "torch" not in {other.partition(".")[0] for other in imports(f"rankwatch.doctor.{name}")}


def test_nothing_else_imports_the_integrations() -> None:
    inside = "rankwatch.integrations"
    users = {name for name in of(AGENT) if any(other.startswith(inside) for other in imports(name))}
    assert all(name.startswith(inside) for name in users)


def test_only_the_doctor_and_the_agreement_meet_at_a_store() -> None:
    assert {name for name in of(AGENT) if "TCPStore" in FILES[name].read_text()} == {
        "rankwatch.doctor.rendezvous",
        "rankwatch.tell.agreement",
    }


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("msgpack", "shared.link.wire"),
        ("zmq", "shared.link.sockets tell.link tell.reception serve.door.inbox serve.collector serve.door.control"
         " doctor.checks.reach"),
        ("starlette", "views.ui.server"),
        ("uvicorn", "views.ui.server"),
        ("sqlite3", "record.schema record.store record.reader record.checked record.disk"),
        (
            "numpy",
            "record.numbers.layout record.numbers.digest record.numbers.headroom record.numbers.jumps"
            " record.numbers.losses record.numbers.recent record.store record.reader record.origin record.course"
            " record.judged"
            " decide.replicas.groups.replicated_rows decide.replicas.groups.inferred decide.replicas.groups.replica_group"
            " decide.replicas.groups.gathers decide.replicas.table_layout decide.replicas.votes decide.replicas.extent"
            " views.ui.grids views.ui.bins views.ui.curves views.ui.by_rank views.ui.sources"
            " views.export.rows views.export.parquet views.export.events views.export.written row",
        ),
        ("prometheus_client", "serve.metrics.families serve.metrics.server"),
        ("rich", "views.top.screen"),
        ("shtab", "commands.completion"),
        ("termios", "views.top.keys"),
        ("pyarrow", "views.export.parquet views.export.rows layout archive"),
        ("duckdb", "query"),
        ("fsspec", "views.export.target"),
        ("tensorboardX", "views.export.events"),
        ("transformers", "integrations.transformers"),
        ("lightning", "integrations.lightning"),
        ("pytorch_lightning", "integrations.lightning"),
        ("accelerate", ""),
        ("deepspeed", ""),
        ("wandb", ""),
    ],
)  # fmt: skip
def test_libraries_have_one_home(library: str, home: str) -> None:
    users = {name.partition(".")[2] for name in FILES if any(other.partition(".")[0] == library for other in imports(name))}
    assert users <= set(home.split())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import rankwatch", {"torch", "zmq", "msgpack"}),
        ("import rankwatch.shared.link.wire, rankwatch.shared.words.text", {"torch", "zmq"}),
        ("import rankwatch.attach", {"torch", "zmq", "msgpack"}),
        ("import rankwatch; rankwatch.watch", {"zmq"}),
        ("import rankwatch_monitor.commands.list", {"torch", "zmq", "msgpack", "numpy", "rankwatch.shared.types.frame"}),
        ("import rankwatch_monitor.cli", {"torch", "prometheus_client", "rich", "starlette"}),
        ("import rankwatch.doctor.__main__", {"torch"}),
        ("import rankwatch.integrations; rankwatch.integrations.lightning_callbacks()", {"torch", "lightning"}),
    ],
)
def test_what_an_import_does_not_pull_in(statement: str, absent: set[str]) -> None:
    code = f"import sys; {statement}; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], env=environment(), text=True)
    assert not absent & set(loaded.split())


def test_dev_adds_to_test_only_what_no_test_needs_to_pass() -> None:
    """So what passes in the environment of ``dev`` passes in that of ``test``; without triton, the kernel's tests are skipped."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [re.split("[>;]", line)[0] for line in extras["dev"]] == ["rankwatch[test]", "ruff", "mypy", "triton"]


@pytest.mark.parametrize(
    ("name", "home"),
    [
        (r"torch\._C\b", "touch.torch_private rerun.graph_nodes rerun.wider"),
        ("_active_ddp_module|_get_fsdp_state|_disable_current_modes", "touch.torch_private"),
        (r"\.f_back\b", "touch.stack hook.running rerun.user_line"),
        (r"\b_rankwatch\b", "touch.patched"),
        (r"\w\.(buffers|parameters|modules)\(\)", "demo"),  # elsewhere: ``touch/parts.py``
    ],
)
def test_what_of_torch_is_touched_lies_in_one_place(name: str, home: str) -> None:
    users = {file.partition(".")[2] for file in of(AGENT) if re.search(name, FILES[file].read_text())}
    assert users == set(home.split())


def test_sockets_are_created_in_one_file() -> None:
    creators = [name for name in FILES if ".socket(" in FILES[name].read_text()]
    assert creators == ["rankwatch.shared.link.sockets"]


SAME_NAME = {"RankwatchCallback"}
"""The public name of the callback for each framework."""


def test_a_class_name_stands_for_one_thing() -> None:
    classes = Counter(
        node.name
        for path in FILES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in classes.items() if count > 1} == SAME_NAME


def names_from(upper: str, lower: str) -> set[str]:
    """The names that a room of the agent imports from another one, also for types alone."""
    found = set()
    for name in of(AGENT):
        if name.split(".")[1:2] != [upper]:
            continue
        for node in ast.walk(ast.parse(FILES[name].read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                parents = name.split(".")[: -node.level]
                source = [*parents, *(node.module or "").split(".")]
                found |= {f"{'.'.join(source)}.{alias.name}" for alias in node.names if source[1] == lower}
    return found


def test_no_more_names_cross_a_wall_than_contributing_says() -> None:
    rows = re.findall(r"^\| (\w+) \| (\w+) \| .* \| (\d+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert len(rows) > 10
    assert not [row for *wall, most in rows if len(row := names_from(*wall)) > int(most)]


MOST_IN_A_FOLDER = 16
MOST_BESIDE_FOLDERS = 10


def test_no_folder_is_a_drawer() -> None:
    """Each command is a file of one folder."""
    folders = Counter(path.parent for path in FILES.values() if path.parent != MONITOR / "commands")
    crowded = {folder.name: count for folder, count in folders.items() if count > MOST_IN_A_FOLDER}
    drawers = {folder.name: folders[folder] for folder in (AGENT, AGENT / "shared") if folders[folder] > MOST_BESIDE_FOLDERS}
    assert (crowded, drawers) == ({}, {})


def test_a_file_name_of_the_agent_stands_for_one_thing() -> None:
    names = Counter(FILES[name].stem for name in of(AGENT))
    assert {name for name, count in names.items() if count > 1} == {"__init__", "__main__"}
