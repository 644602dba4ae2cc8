"""The doctor's conclusions: locations of ranks, differences, clocks, interfaces, NCCL's log, the report."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import environment
from rankwatch.doctor.checks import machine
from rankwatch.doctor.checks.clock import Stamps, judge
from rankwatch.doctor.checks.compare import compare, environment_of
from rankwatch.doctor.checks.explain import explain
from rankwatch.doctor.placement import Placement, StoreAddress, expand, find_placement, find_store
from rankwatch.doctor.report import DoctorReport, PairResult, judge_attendance, judge_pairs
from rankwatch.doctor.result import CheckResult, CheckState, fail, ok, skip, warn
from rankwatch.doctor.table import render, to_json
from rankwatch.doctor.time_limit import bounded, describe, in_turn
from rankwatch.doctor.wording import describe_bandwidth
from rankwatch.errors import UsageError
from rankwatch.shared.words.text import name_spans


def placement(rank: int, host: str = "gpu1", node: str = "0", world_size: int = 4) -> Placement:
    return Placement(rank, world_size, rank % 2, host, node, 100 + rank)


# --- where a rank is ------------------------------------------------------------------------------------------------------

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "70003", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}


def test_nodes_differ_by_the_launchers_variables() -> None:
    assert find_placement({**TORCHRUN, "GROUP_RANK": "2"}).node == "2"
    assert find_placement({**SRUN, "SLURM_NODEID": "3"}).node == "3"
    by_hand = find_placement(TORCHRUN)
    assert by_hand.node == by_hand.host


def test_ranks_rendezvous_at_the_launchers_store() -> None:
    agent = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert find_store(agent, find_placement({**agent, "RANK": "0"})) == StoreAddress("gpu1", 29500, is_opened_here=False)
    assert find_store(TORCHRUN, find_placement({**TORCHRUN, "RANK": "0"})).is_opened_here
    assert not find_store(TORCHRUN, find_placement(TORCHRUN)).is_opened_here


def test_ranks_of_srun_rendezvous_on_the_first_node_at_a_port_of_the_job() -> None:
    env = {**SRUN, "SLURM_STEP_NODELIST": "gpu[07-09],gpu20"}
    assert find_store(env, find_placement(env)) == StoreAddress("gpu07", 20003, is_opened_here=False)


def test_a_process_without_a_job_rendezvouses_with_itself() -> None:
    assert find_store({}, find_placement({})) == StoreAddress("127.0.0.1", 0, is_opened_here=True)


@pytest.mark.parametrize("lacking", ["MASTER_ADDR", "MASTER_PORT"])
def test_ranks_without_a_rendezvous_address(lacking: str) -> None:
    env = {name: value for name, value in TORCHRUN.items() if name != lacking}
    with pytest.raises(UsageError, match="no place to meet"):
        find_store(env, find_placement(env))


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("head", ["head"]),
        ("a,b-1", ["a", "b-1"]),
        ("gpu[01-03,7],head", ["gpu01", "gpu02", "gpu03", "gpu7", "head"]),
        ("r1-n[9-11]-ib,x[2]", ["r1-n9-ib", "r1-n10-ib", "r1-n11-ib", "x2"]),
    ],
)
def test_lists_of_nodes(nodes: str, names: list[str]) -> None:
    assert expand(nodes) == names


# --- time limits ----------------------------------------------------------------------------------------------------------


def test_a_check_that_hangs_is_a_result() -> None:
    never = threading.Event()
    found = bounded("gpu", lambda: ok("gpu", str(never.wait())), 0.01)
    assert found == fail("gpu", "no answer within 0.01 s")
    never.set()


def test_a_check_that_raises_is_a_result_in_one_line() -> None:
    def broken() -> CheckResult:
        raise RuntimeError("[/pytorch/gloo/pair.cc:152] timed out\n  remote=[10.0.0.3]:4000\nException raised from x (most")

    assert bounded("pair", broken, 30) == fail("pair", "gloo: timed out")
    assert describe(KeyError()) == "KeyError"


def test_after_a_failed_step_the_later_ones_are_skipped() -> None:
    steps = [("a", lambda: ok("a", "")), ("b", lambda: fail("b", "no")), ("c", lambda: ok("c", ""))]
    assert [result.state for result in in_turn(steps, 30)] == [CheckState.OK, CheckState.FAIL, CheckState.SKIP]


def test_a_deadline_that_nobody_renews_ends_the_process() -> None:
    code = (
        "import threading\nfrom rankwatch.doctor.time_limit import Watchdog\n"
        "last = Watchdog('[gpu1-0]')\nlast.renew(3600, 'a')\nlast.renew(0.2, 'pair')\nthreading.Event().wait()"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "rankwatch: doctor: [gpu1-0] hangs for 0.2 s (pair) and is ended\n")


# --- differences ----------------------------------------------------------------------------------------------------------


def test_differences_name_the_fewest_ranks_first() -> None:
    facts = {rank: {"NCCL_ALGO": "Tree" if rank == 3 else "Ring", "OMP_NUM_THREADS": "1"} for rank in range(6)}
    (found,) = compare("environment", facts, is_fatal=False, advice="mend it")
    assert found == warn("environment", "NCCL_ALGO: Tree on rank 3; Ring on ranks 0-2, 4-5", "mend it")


def test_a_variable_that_only_some_ranks_have() -> None:
    (found,) = compare("environment", {0: {}, 1: {"NCCL_DEBUG": "INFO"}}, is_fatal=True, advice="")
    assert found.state is CheckState.FAIL
    assert found.found == "NCCL_DEBUG: not set on rank 0; INFO on rank 1"


@given(st.dictionaries(st.sampled_from(["torch", "CUDA"]), st.text(max_size=3)), st.integers(1, 5))
def test_equal_ranks_do_not_differ(facts: dict[str, str], ranks: int) -> None:
    (found,) = compare("versions", dict.fromkeys(range(ranks), facts), is_fatal=True, advice="")
    assert found.state is CheckState.OK


def test_secret_keys_do_not_leave_the_rank() -> None:
    env = {"RANKWATCH_CONNECTION": '{"client_secret": "abc"}', "HOME": "/root", "NCCL_IB_HCA": "mlx5"}
    env["TORCHELASTIC_RUN_ID"] = "1"
    shared = environment_of(env)
    assert set(shared) == {"RANKWATCH_CONNECTION", "NCCL_IB_HCA"}
    assert "abc" not in shared["RANKWATCH_CONNECTION"]
    assert shared != environment_of({**env, "RANKWATCH_CONNECTION": '{"client_secret": "abd"}'})


@given(st.sets(st.integers(0, 30), min_size=1))
def test_ranks_in_words_are_complete(ranks: set[int]) -> None:
    _, text = name_spans(ranks, most=None).split(" ", 1)
    spans = [list(map(int, span.split("-"))) for span in text.split(", ")]
    assert {rank for span in spans for rank in range(span[0], span[-1] + 1)} == ranks


def test_bandwidth_in_words() -> None:
    assert [describe_bandwidth(value) for value in (12.5e9, 2e7)] == ["12.50 GB/s", "20.00 MB/s"]


# --- clocks ---------------------------------------------------------------------------------------------------------------


@given(st.floats(-100, 100), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_an_offset_is_known_to_half_the_delay(offset: float, there: float, between: float, back: float) -> None:
    stamps = Stamps(1000 + offset, 1000 + there, 1000 + there + between, 1000 + offset + there + between + back)
    assert abs(stamps.offset - offset) <= stamps.delay / 2 + 1e-9


def test_the_quickest_exchange_counts() -> None:
    slow, quick = Stamps(0, 9, 9, 10), Stamps(20, 20.5, 20.5, 21)
    assert judge([slow, quick]).state is CheckState.OK
    far = judge([Stamps(0, 5, 5, 0.002)])
    assert far.state is CheckState.WARN
    assert far.found == "4.999 s behind rank 0's, within 0.001 s"


# --- this machine ---------------------------------------------------------------------------------------------------------


def test_shared_memory_of_few_and_of_too_many_ranks(tmp_path: Path) -> None:
    assert machine.shared_memory(1, tmp_path).state is CheckState.OK
    assert machine.shared_memory(10**9, tmp_path).state is CheckState.WARN
    assert list(tmp_path.iterdir()) == []
    gone = machine.shared_memory(1, tmp_path / "gone")
    assert (gone.state, gone.found) == (CheckState.FAIL, f"{tmp_path / 'gone'}: No such file or directory")


@pytest.mark.parametrize(("limit", "state"), [(1024, CheckState.WARN), (4096, CheckState.OK), (-1, CheckState.OK)])
def test_open_files(limit: int, state: CheckState) -> None:
    assert machine.open_files(limit).state is state


def test_a_name_service_that_is_too_slow() -> None:
    never = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        slow = machine.name_service(server.getsockname(), 0.01, lambda *address: never.wait())
        quick = machine.name_service(server.getsockname(), 60)
    never.set()
    assert slow.state is CheckState.WARN
    assert "no name for 127.0.0.1 within 0.01 s" in slow.found
    assert quick.state is CheckState.OK


ADDRESSES = {"lo": "127.0.0.1", "eth0": "10.0.0.3", "ib0": "10.1.0.3"}


@pytest.mark.parametrize(
    ("resolved", "nodes", "state", "found"),
    [
        (["10.0.0.3"], 2, CheckState.OK, "gloo listens on eth0 (10.0.0.3), the address of gpu3"),
        (["127.0.1.1"], 2, CheckState.WARN, "gpu3 is 127.0.1.1: gloo will listen on loopback, where no other node reach"),
        (["::1"], 2, CheckState.WARN, "gpu3 is ::1: gloo will listen on loopback"),
        (["192.0.2.9"], 2, CheckState.WARN, "gpu3 is no address of this host: gloo will listen on loopback"),
        ([], 2, CheckState.WARN, "gpu3 is no address of this host: gloo will listen on loopback"),
        (["127.0.1.1"], 1, CheckState.OK, "gloo listens on loopback (gpu3 is 127.0.1.1): fine on one node"),
    ],
)
def test_the_address_that_gloo_chooses_by_default(resolved: list[str], nodes: int, state: CheckState, found: str) -> None:
    result = machine.gloo_by_default("gpu3", resolved, ADDRESSES, "to gpu1 by eth0", nodes)
    assert result.state is state
    assert result.found.startswith(found)
    assert ("export GLOO_SOCKET_IFNAME=eth0" in result.advice) is (state is CheckState.WARN)


@pytest.mark.parametrize(
    ("wanted", "nodes", "state", "found"),
    [
        (["ib0"], 2, CheckState.OK, "gloo listens on ib0 (10.1.0.3), as told"),
        (["eth7"], 2, CheckState.FAIL, "GLOO_SOCKET_IFNAME=eth7: no eth7 with an address here"),
        (["lo"], 2, CheckState.WARN, "GLOO_SOCKET_IFNAME=lo is loopback: gloo will listen on loopback"),
        (["lo"], 1, CheckState.OK, "gloo listens on lo (127.0.0.1), as told"),
    ],
)
def test_the_interface_that_gloo_is_configured_with(wanted: list[str], nodes: int, state: CheckState, found: str) -> None:
    result = machine.gloo_with_names(wanted, ADDRESSES, "to gpu1 by eth0", nodes)
    assert result.state is state
    assert result.found.startswith(found)


# --- NCCL's log -----------------------------------------------------------------------------------------------------------

LOG = """\
gpu1:11:11 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
gpu1:11:11 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal implementation
NCCL version 2.21.5+cuda12.4
gpu1:11:40 [0] NCCL INFO NET/IB : No device found.
gpu1:11:40 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
gpu1:11:40 [0] NCCL INFO Trees [0] -1/-1/-1->1->0
gpu1:11:40 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
gpu1:11:40 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/Socket/0
gpu1:11:40 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.2<43211> failed : Connection refused
"""


def test_the_log_in_words() -> None:
    explained = explain(LOG.splitlines())
    assert [one.found.partition(": ")[0] for one in explained if one.state is CheckState.WARN] == [
        "NCCL sees no InfiniBand or RoCE card and takes TCP, which is far slower",
        "NCCL could not reach another rank by TCP",
    ]
    assert [one.found.partition(": ")[0] for one in explained if one.state is CheckState.OK] == [
        "the interface by which NCCL's ranks find each other",
        "no network plugin",
        "NCCL's version",
        "data between nodes goes over plain TCP",
    ]
    assert "10.0.0.2<43211>" in explained[1].found


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found", "the interface that NCCL was told to use"),
        ("NCCL WARN Error while creating shared memory segment /dev/shm/nccl-V (size 9637888)", "/dev/shm is too small"),
        ("NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory", "may not lock enough memory"),
        ("NCCL WARN Call to ibv_modify_qp failed with error Network is unreachable", "ports do not reach each other"),
        ("NCCL WARN NET/IB : Got completion from peer 10.2.0.5<3> with error 12, opcode 0", "ports do not reach each other"),
        ("NCCL WARN NET/IB : Got completion from peer 10.2.0.5<3> with error 5, opcode 0", "transfer failed"),
        ("NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000", "two ranks are on the same GPU"),
        ("enqueue.cc:63 NCCL WARN Cuda failure 2 'out of memory'", "no GPU memory is left"),
        ("NCCL WARN Cuda failure 217 'peer access is not supported between these two devices'", "a way between two GPUs"),
        ("NCCL WARN Cuda failure 700 'an illegal memory access was encountered'", "CUDA failed below NCCL"),
        ("NCCL WARN socketProgress: Connection closed by remote peer gpu2<4>", "another rank went away"),
    ],
)
def test_troubles(line: str, words: str) -> None:
    (explained,) = explain([f"gpu1:1:2 [0] {line}"])
    assert explained.state is CheckState.WARN
    assert words in explained.found
    assert explained.advice


def test_an_unknown_warning_is_shown_unchanged() -> None:
    (explained,) = explain(["gpu1:1:2 [0] x.cc:1 NCCL WARN the moon is full", "gpu1:1:2 [0] NCCL INFO comm 0x1 rank 0"])
    assert (explained.state, explained.found) == (CheckState.WARN, "the moon is full")


def test_many_healthy_results_stay_short() -> None:
    assert len(explain(f"x NCCL WARN trouble {number}" for number in range(1000))) == 20


# --- the report -----------------------------------------------------------------------------------------------------------


def test_units_are_nodes_or_the_ranks_of_a_single_node() -> None:
    one = DoctorReport(2, "gloo", {rank: placement(rank) for rank in range(2)}).units
    assert one == [("rank 0", 0, (0,)), ("rank 1", 1, (1,))]
    hosts = {0: placement(0, "a", "0"), 1: placement(1, "a", "0"), 2: placement(2, "b", "1")}
    assert DoctorReport(3, "gloo", hosts).units == [("a", 0, (0, 1)), ("b", 2, (2,))]
    alike = {0: placement(0, "vm", "0"), 1: placement(1, "vm", "1")}
    assert [unit.name for unit in DoctorReport(2, "gloo", alike).units] == ["node 0 (vm)", "node 1 (vm)"]


def test_missing_ranks_and_hosts_are_named() -> None:
    placements = {0: placement(0, "gpu1.site"), 1: placement(1, "gpu1.site")}
    found = judge_attendance(DoctorReport(4, "gloo", placements), ["gpu1", "gpu2"], "gpu1:29500", 30.0)
    assert found.found == (
        "ranks 2-3 of 4 did not come to gpu1:29500 within 30 s; nobody from gpu2; here are gpu1.site (ranks 0-1)"
    )


LATE = fail("pair", "timed out")


def well(bandwidth: float = 1e9) -> CheckResult:
    return ok("pair", "", round_trip=1e-4, bandwidth=bandwidth)


def sick_report() -> DoctorReport:
    """Four ranks on two nodes: the nodes do not reach each other, and a limit is low."""
    report = DoctorReport(4, "gloo", {rank: placement(rank, f"gpu{rank // 2}", str(rank // 2)) for rank in range(4)})
    report.versions = {"torch": "2.9.0", "CUDA": "12.8"}
    report.add(report.placements, ok("rendezvous", "4 ranks at gpu0:29500"))
    for rank in report.placements:
        low = warn("open files", "limit 1024, under 4096", "ulimit -n 65536")
        report.add([rank], low if rank == 3 else ok("open files", "limit 20000"))
    report.pair_results = [PairResult(1, (0, 1), LATE)]
    judge_pairs(report)
    report.add([2, 3], skip("collectives", "left out, so that the others can be tried"))
    report.add([0], ok("all_reduce", "sums right in 0.1 s"))
    report.add([1], ok("all_reduce", "sums right in 0.2 s"))
    report.seconds = 12.34
    return report


def test_the_text() -> None:
    assert render(sick_report()) == SICK


SICK = """\
[gpu0-0] is broken (global rank: 0/4): pairs
[gpu0-1] is OK (global rank: 1/4)
[gpu1-0] is broken (global rank: 2/4): pairs
[gpu1-1] is here, and took part in no collective (global rank: 3/4)
torch 2.9.0, CUDA 12.8

check        state  who            found
rendezvous   ok     all 4          4 ranks at gpu0:29500
open files   warn   rank 3 (gpu1)  limit 1024, under 4096
open files   ok     ranks 0-2      limit 20000
pairs        fail   ranks 0, 2     gpu0 and gpu1 do not speak with each other; no test shows which of them it is: timed out
collectives  skip   ranks 2-3      left out, so that the others can be tried
all_reduce   ok     ranks 0-1      sums right in 0.1 s

FAIL  pairs: gpu0 and gpu1 do not speak with each other; no test shows which of them it is: timed out
      try: open all TCP ports between the nodes, not the master's alone; set GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME to an \
interface that reaches the others
WARN  open files: rank 3 (gpu1): limit 1024, under 4096
      try: ulimit -n 65536

rankwatch doctor: 1 failure, 1 warning; 4 ranks on 2 nodes, gloo, 12.3 s
"""


def test_the_json_says_the_same() -> None:
    body = json.loads(to_json(sick_report()))
    assert body["ok"] is False
    assert [rank["ok"] for rank in body["ranks"]] == [False, True, False, True]
    assert body["to_blame"] == {"units": [], "pairs": [], "unclear_pairs": [["gpu0", "gpu1"]]}
    assert [(check["check"], check["state"], check["ranks"]) for check in body["checks"]][:3] == [
        ("rendezvous", "ok", [0, 1, 2, 3]),
        ("open files", "warn", [3]),
        ("open files", "ok", [0, 1, 2]),
    ]
    assert CheckResult.from_json(body["checks"][1]) == warn("open files", "limit 1024, under 4096", "ulimit -n 65536")


def test_a_slow_pair_is_named() -> None:
    report = DoctorReport(4, "gloo", {rank: placement(rank, f"gpu{rank}", str(rank)) for rank in range(4)})
    speeds = {(0, 1): 9e9, (2, 3): 1e9, (1, 2): 8e9, (0, 3): 10e9}
    report.pair_results = [PairResult(1, pair, well(speed)) for pair, speed in speeds.items()]
    judge_pairs(report)
    slow, others = (row.result for row in report.rows)
    assert slow.state is CheckState.WARN
    assert slow.found == "gpu2 and gpu3 are slow: 1.00 GB/s, the others' median is 9.00 GB/s"
    assert others.found == "4 pairs well: round trip at most 0.10 ms, bandwidth at least 1.00 GB/s"
    assert not report.failed


def test_a_broken_node_is_named_with_its_partners() -> None:
    report = DoctorReport(3, "gloo", {rank: placement(rank, f"gpu{rank}", str(rank)) for rank in range(3)})
    report.pair_results = [PairResult(1, (0, 1), LATE), PairResult(1, (0, 2), well()), PairResult(1, (1, 2), LATE)]
    judge_pairs(report)
    (row,) = [row for row in report.rows if row.result.state is CheckState.FAIL]
    assert row.ranks == (1,)
    assert row.result.found == "gpu1 speaks with none it met, gpu0 and gpu2: timed out"


def test_a_node_that_listens_on_loopback_gets_advice() -> None:
    report = DoctorReport(4, "gloo", {rank: placement(rank, f"gpu{rank}", str(rank)) for rank in range(4)})
    report.add([1], warn("interface", "gpu1 is 127.0.1.1", "export GLOO_SOCKET_IFNAME=eth0"))
    report.pair_results = [PairResult(1, pair, LATE) for pair in ((0, 1), (0, 2), (1, 2))]
    report.pair_results += [PairResult(1, pair, well()) for pair in ((0, 3), (2, 3))]
    judge_pairs(report)
    advice = [row.result.advice for row in report.rows if row.result.check == "pairs"]
    assert advice[0] == "start without gpu1 meanwhile; on it: export GLOO_SOCKET_IFNAME=eth0"
    assert "between just these two" in advice[1]
