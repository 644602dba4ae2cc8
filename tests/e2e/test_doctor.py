"""The doctor: real torchrun jobs, ranks that are missing, hang or differ, collectors, and hosts with bad cables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from collectors import Running
from e2e.clinic import Clinic, Diagnosis, Patient
from e2e.hosts import Hosts
from jobs import INTERPRETER, RANKWATCH, environment, finished
from rankwatch.shared.link import connection as connections
from rankwatch.shared.link.connection import Connection
from rankwatch.shared.link.sockets import new_key_pair
from rankwatch.shared.system.installed import to_add

pytestmark = pytest.mark.e2e

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--nnodes", "1"]
PATIENT = ("--check-timeout", "20")
"""More than healthy checks take on a machine with other work; a check that must fail takes all of it."""
UNHURRIED = ("--check-timeout", "100")
"""Where no check is to fail."""
NODES = ["node0", "node1", "node2", "node3"]
NUMBERS = re.compile(r"\d+(\.\d+)?")


@pytest.fixture(scope="module")
def clinic() -> Iterator[Clinic]:
    clinic = Clinic()
    yield clinic
    clinic.close()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    hosts = Hosts(NODES)
    yield hosts
    hosts.close()


@pytest.fixture
def network(hosts: Hosts) -> Iterator[Hosts]:
    yield hosts
    hosts.blocked = None


def doctor(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return finished(command, **env)


# --- a job of two ranks, started as users start it ------------------------------------------------------------------------


def test_two_healthy_ranks() -> None:
    done = doctor(*TORCHRUN, "-m", "rankwatch.doctor")
    assert done.returncode == 0, done.stderr
    host = os.uname().nodename
    first, second, versions, blank, *table = done.stdout.splitlines()
    assert first == f"[{host}-0] is OK (global rank: 0/2)"
    assert second == f"[{host}-1] is OK (global rank: 1/2)"
    assert re.match(r"torch \S+, CUDA \S+, NCCL \S+, driver \S+, Python \S+, rankwatch \S+$", versions)
    assert blank == ""
    rows = [re.split(r"  +", line) for line in table[: table.index("")]]
    assert rows[0] == ["check", "state", "who", "found"]
    assert [row[0] for row in rows[1:]] == [
        *("rendezvous", "gpu", "open files", "shared memory", "name service", "interface"),
        *("collector", "versions", "environment", "clock"),
        *("pairs", "group", "all_reduce", "broadcast", "all_gather"),
    ]
    found = {row[0]: NUMBERS.sub("N", row[3]) for row in rows[1:]}
    assert found["all_reduce"] == "sums right in N s"
    assert found["pairs"] == "N pair well: round trip at most N ms, bandwidth at least N GB/s"
    assert {row[1] for row in rows[1:]} <= {"ok", "skip", "warn"}
    assert re.search(r"\nrankwatch doctor: .*; 2 ranks on 1 node, gloo, \d+\.\d s\n$", done.stdout)


@pytest.mark.slow
def test_the_command_starts_its_own_ranks() -> None:
    done = doctor(*RANKWATCH, "doctor", "--nproc", "2", "--json", "--nccl-debug")
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert [(rank["rank"], rank["ok"]) for rank in body["ranks"]] == [(0, True), (1, True)]
    assert [check["found"] for check in body["checks"] if check["check"] == "nccl log"] == ["NCCL was not used"]
    (pair,) = body["pairs"]
    assert (pair["ranks"], pair["ok"]) == ([0, 1], True)
    assert pair["bytes_per_second"] > 0


@pytest.mark.slow
def test_a_reader_that_closes_the_pipe_early() -> None:
    done = doctor("bash", "-c", f"{INTERPRETER} -m rankwatch.doctor | head -1")
    assert done.stdout == f"[{os.uname().nodename}-0] is OK (global rank: 0/1)\n"
    assert done.stderr == ""


@pytest.mark.slow
def test_without_torch_the_rest_is_checked(tmp_path: Path) -> None:
    """torch is hidden, as on a head node."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(name)\n"
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'torch' else find(name, package)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    done = doctor(*RANKWATCH, "doctor", "--json", PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    states = {check["check"]: check["state"] for check in json.loads(done.stdout)["checks"]}
    assert states["torch"] == "fail"
    assert states["shared memory"] in ("ok", "warn")
    several = doctor(*RANKWATCH, "doctor", "--nproc", "2", PYTHONPATH=path)
    assert several.returncode == 2
    assert to_add("agent") in several.stderr


# --- ranks that differ from the others ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_that_never_starts_is_named(clinic: Clinic, tmp_path: Path) -> None:
    diagnosis = clinic.see(tmp_path, 4, [Patient(rank) for rank in (0, 1, 3)], "--timeout", "20", *UNHURRIED)
    assert diagnosis.codes == [1, 1, 1]
    assert diagnosis.json["missing"] == [2]
    (found,) = diagnosis.of("rendezvous", "fail")
    assert "rank 2 of 4 did not come to 127.0.0.1:" in found["found"]
    assert diagnosis.failed == {"rendezvous"}
    assert all(rank["ok"] for rank in diagnosis.json["ranks"])  # the ranks that started are healthy
    assert diagnosis.of("all_reduce", "ok")[0]["ranks"] == [0, 1, 3]


@pytest.mark.slow
def test_a_rank_0_that_never_starts_is_reported_by_each_rank(clinic: Clinic, tmp_path: Path) -> None:
    diagnosis = clinic.see(tmp_path, 3, [Patient(1), Patient(2)], "--timeout", "0.5")
    assert diagnosis.codes == [1, 1]
    assert diagnosis.out == ""
    lines = sorted(diagnosis.errors.splitlines())
    assert [line.split(" does not reach the store at 127.0.0.1:")[0] for line in lines] == [
        f"rankwatch: doctor: [{os.uname().nodename}-{rank}] rank {rank} of 3" for rank in (1, 2)
    ]
    assert all("has rank 0 started there" in line for line in lines)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_the_others_are_checked(clinic: Clinic, tmp_path: Path) -> None:
    patients = [Patient(0), Patient(1), Patient(2, deaf=True)]
    diagnosis = clinic.see(tmp_path, 3, patients, *PATIENT)
    assert diagnosis.codes == [1, 1, None]
    (found,) = diagnosis.of("rank", "fail")
    assert found["ranks"] == [2]
    assert "it has ended, or hangs" in found["found"]
    assert [rank["ok"] for rank in diagnosis.json["ranks"]] == [True, True, False], diagnosis.out
    assert diagnosis.of("all_reduce", "ok")[0]["ranks"] == [0, 1]


@pytest.mark.slow
def test_a_rank_0_that_hangs_is_reported_by_each_rank(clinic: Clinic, tmp_path: Path) -> None:
    patients = [Patient(0, deaf=True), Patient(1), Patient(2)]
    diagnosis = clinic.see(tmp_path, 3, patients, "--timeout", "20", "--check-timeout", "0.1")
    assert diagnosis.codes == [None, 1, 1]
    lines = sorted(diagnosis.errors.splitlines())
    assert [line.split(" at 127.0.0.1:")[0] for line in lines] == [
        f"rankwatch: doctor: [{os.uname().nodename}-{rank}] rank {rank} of 3 lost the others" for rank in (1, 2)
    ]


@pytest.mark.slow
def test_differences_between_ranks_are_named(clinic: Clinic, tmp_path: Path) -> None:
    patients = [Patient(rank, {"NCCL_ALGO": "Tree" if rank == 2 else "Ring"}, clock=7.0 * (rank == 1)) for rank in range(3)]
    for patient in patients:
        patient.env = {**patient.env, "GROUP_RANK": str(patient.rank)}
    diagnosis = clinic.see(tmp_path, 3, patients, *UNHURRIED)
    assert diagnosis.codes == [0, 0, 0]
    environment, *_ = diagnosis.of("environment", "warn")
    assert environment["found"] == "NCCL_ALGO: Tree on rank 2; Ring on ranks 0-1"
    (clock,) = diagnosis.of("clock", "warn")
    assert clock["ranks"] == [1]
    assert clock["found"].startswith(("7.0", "6.9"))


# --- the collector --------------------------------------------------------------------------------------------------------


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    yield running
    running.stop()


def as_patient(connection: Connection | str) -> Patient:
    if isinstance(connection, Connection):
        connection = json.dumps({"rankwatch_connection": list(connections.FORMAT), **asdict(connection)})
    return Patient(0, {"RANKWATCH_CONNECTION": connection})


def seen(clinic: Clinic, folder: Path, patient: Patient) -> Diagnosis:
    return clinic.see(folder, 1, [patient], *PATIENT)


@pytest.mark.slow
def test_a_collector_that_answers(collector: Running, clinic: Clinic, tmp_path: Path) -> None:
    diagnosis = seen(clinic, tmp_path, as_patient(str(tmp_path / "connection.json")))
    assert diagnosis.codes == [0]
    (found,) = diagnosis.of("collector", "ok")
    assert found["found"].startswith(f"{collector.collector.connection.address} answers, encrypted")
    assert collector.collector.ledger.runs == {}
    assert collector.collector.ledger.refused == 0


@pytest.mark.slow
def test_a_key_that_is_refused(collector: Running, clinic: Clinic, tmp_path: Path) -> None:
    keys = new_key_pair()
    right = collector.collector.connection
    strangers = [
        replace(right, client_public=keys.public, client_secret=keys.secret),
        replace(right, server_public=keys.public),
    ]
    for number, stranger in enumerate(strangers):
        (folder := tmp_path / str(number)).mkdir()
        diagnosis = seen(clinic, folder, as_patient(stranger))
        assert diagnosis.codes == [1]
        assert "takes the connection and refuses the key" in diagnosis.of("collector", "fail")[0]["found"]
        assert keys.secret not in diagnosis.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("tcp://127.0.0.1:1", "nobody listens there"),
        ("tcp://no-such-host.invalid:27077", "no-such-host.invalid does not resolve on this host"),
    ],
)
def test_an_address_without_a_collector(clinic: Clinic, tmp_path: Path, address: str, found: str) -> None:
    keys = new_key_pair()
    diagnosis = seen(clinic, tmp_path, as_patient(Connection(address, keys.public, keys.public, keys.secret)))
    assert diagnosis.codes == [1]
    assert diagnosis.of("collector", "fail")[0]["found"] == f"{address}: {found}"


def test_a_connection_file_that_others_can_read(clinic: Clinic, tmp_path: Path) -> None:
    (file := tmp_path / "connection.json").write_text("{}")
    file.chmod(0o644)
    diagnosis = seen(clinic, tmp_path, as_patient(str(file)))
    assert diagnosis.codes == [1]
    assert "has mode 0644: others can read the keys in it" in diagnosis.of("collector", "fail")[0]["found"]


# --- four nodes, and the network between them -----------------------------------------------------------------------------


def see_nodes(clinic: Clinic, hosts: Hosts, folder: Path, *options: str, interface: str = "eth0") -> Diagnosis:
    """A job with one rank on each host."""
    patients = [
        Patient(rank, {"GROUP_RANK": str(rank), "GLOO_SOCKET_IFNAME": interface}, hosts.network(name))
        for rank, name in enumerate(NODES)
    ]
    return clinic.see(folder, len(NODES), patients, *options, master=hosts.address["node0"], port=PORT)


PORT = 29500


def node(number: int) -> str:
    return f"node {number} ({os.uname().nodename})"


@pytest.mark.slow
def test_four_healthy_nodes(clinic: Clinic, network: Hosts, tmp_path: Path) -> None:
    diagnosis = see_nodes(clinic, network, tmp_path, *UNHURRIED)
    assert diagnosis.codes == [0] * 4, diagnosis.out
    assert len(diagnosis.json["pairs"]) == 6
    assert diagnosis.json["to_blame"] == {"units": [], "pairs": [], "unclear_pairs": []}
    assert diagnosis.of("all_gather", "ok")[0]["ranks"] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [(0, 1), (0, 2)], ids=["met in the first round", "met by no two rounds"])
def test_two_nodes_that_cannot_reach_each_other(
    clinic: Clinic, network: Hosts, tmp_path: Path, cut: tuple[int, int]
) -> None:
    """A firewall between just these two; the master's port is open."""
    ends = {network.address[f"node{number}"] for number in cut}
    network.blocked = lambda packet: {packet.source, packet.target} == ends and PORT not in packet[2:]
    diagnosis = see_nodes(clinic, network, tmp_path, *PATIENT)
    assert diagnosis.codes == [1] * 4
    assert diagnosis.json["to_blame"] == {"units": [], "pairs": [[node(number) for number in cut]], "unclear_pairs": []}
    (found,) = diagnosis.of("pairs", "fail")
    assert found["ranks"] == list(cut)
    assert diagnosis.failed == {"pairs"}
    assert diagnosis.of("all_reduce", "ok")[0]["ranks"] == [rank for rank in range(4) if rank != cut[1]]


@pytest.mark.slow
def test_a_node_that_reaches_only_the_master(clinic: Clinic, network: Hosts, tmp_path: Path) -> None:
    """A firewall that lets through only the master's port, the one that every manual names."""
    address = network.address["node2"]
    network.blocked = lambda packet: address in packet[:2] and PORT not in packet[2:]
    diagnosis = see_nodes(clinic, network, tmp_path, *PATIENT)
    assert diagnosis.codes == [1] * 4
    assert diagnosis.json["to_blame"] == {"units": [node(2)], "pairs": [], "unclear_pairs": []}
    assert [rank["ok"] for rank in diagnosis.json["ranks"]] == [True, True, False, True]
    assert diagnosis.of("all_reduce", "ok")[0]["ranks"] == [0, 1, 3]


@pytest.mark.slow
def test_nodes_that_listen_on_loopback(clinic: Clinic, network: Hosts, tmp_path: Path) -> None:
    diagnosis = see_nodes(clinic, network, tmp_path, *PATIENT, interface="lo")
    assert diagnosis.codes == [1] * 4
    (interface,) = diagnosis.of("interface", "warn")
    assert interface["ranks"] == [0, 1, 2, 3]
    (pairs,) = diagnosis.of("pairs", "fail")
    assert "none of 6 pairs speak with each other" in pairs["found"]
    assert pairs["try"] == interface["try"] == "export GLOO_SOCKET_IFNAME=eth0, or mend the host's name in /etc/hosts"
