"""The failure matrix with real processes and real signals: what a fault may cost, and what it must not.

See ``site.py`` for the collector and the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from collectors import until
from e2e.site import ABORTED, COMMAND, SPOOL, Site, trained, trip_stops_all
from jobs import environment, processes_of, torchrun
from rankwatch_monitor.record.runs import read_rows
from rankwatch_monitor.views import runs

pytestmark = pytest.mark.e2e


# --- the collector --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_collector_that_starts_after_the_training_gets_the_last_summaries(site: Site) -> None:
    site.collect().kill()
    (rank,) = site.start(1)
    assert rank.ask("batches", SPOOL + 6) == SPOOL + 6
    assert rank.ask("is_connected") is False
    site.collect()
    until(lambda: rank.ask("is_connected"))
    assert rank.ask("settle")
    assert rank.close() == 0
    assert rank.errors.count("no collector answers at tcp://127.0.0.1:") == 1
    assert site.recorded() == Counter((0, batch) for batch in range(6, SPOOL + 6))
    until(lambda: "finished" in site.out)
    (row,) = site.report()["ranks"]
    assert (row["dropped"], row["last_batch"], row["state"]) == (6, SPOOL + 5, "finished")


@pytest.mark.slow
def test_a_collector_killed_and_restarted_misses_nothing_and_stops_all_ranks(site: Site) -> None:
    first = site.collect()
    ranks = site.start(2)
    for rank in ranks:
        assert rank.ask("batches", 5) == 5
        assert rank.ask("settle")
        assert rank.ask("batches", 5) == 10
    first.kill()
    first.wait()
    site.train(5, to=15)
    second = site.collect()
    until(lambda: set(site.greeted(second)) == {0, 1})
    site.train(5, to=20, settles=True)
    assert site.recorded() == trained(20, 20)


@pytest.mark.slow
def test_ranks_reconnect_to_a_collector_that_is_restarted_with_its_keys(site: Site) -> None:
    site.collect("--keep-keys")
    site.start(2)
    site.train(3, settles=True)
    assert site.end() == 0
    site.collect("--keep-keys")
    site.train(3, to=6)
    trip_stops_all(site, culprit=1)
    assert site.end() == 0
    assert site.connection.exists()


@pytest.mark.slow
def test_a_run_has_one_record_although_its_collector_was_killed_and_restarted(site: Site) -> None:
    first = site.collect()
    (rank,) = site.start(1)
    rank.ask("batches", 3)
    first.kill()
    second = site.collect()
    until(lambda: site.greeted(second))
    assert rank.ask("settle")
    assert rank.close() == 0
    until(lambda: "finished" in site.out)
    assert sorted(path.name for path in site.runs.iterdir() if not path.is_symlink()) == ["train-0"]
    assert site.recorded() == trained(3)


@pytest.mark.slow
def test_a_restarted_collector_carries_out_the_abort_that_was_decided_before(site: Site) -> None:
    first = site.collect("--decision-window", "0.1")
    ranks = site.start(2)
    site.train(3)
    ranks[0].kill(signal.SIGSTOP)
    ranks[1].tell("trip")
    until(lambda: "culprit" in site.out)
    first.kill()
    first.wait()
    assert ranks[1].wait() == ABORTED
    second = site.collect()
    ranks[0].kill(signal.SIGCONT)
    until(lambda: site.greeted(second))
    ranks[0].tell("train")  # until the rank receives the abort
    assert ranks[0].wait() == ABORTED


@pytest.mark.slow
def test_a_suspended_collector_delays_no_rank_and_counts_nothing_twice(site: Site) -> None:
    collector = site.collect()
    ranks = site.start(2)
    site.train(5)
    collector.send_signal(signal.SIGSTOP)
    site.train(5, to=10)
    until(lambda: all("fell silent; trying to reach it again" in rank.errors for rank in ranks))
    site.train(5, to=15)
    collector.send_signal(signal.SIGCONT)
    until(lambda: all("the collector is back" in rank.errors for rank in ranks))
    for rank in ranks:
        assert rank.ask("batches", 5) == 20
        assert rank.ask("settle")
        assert rank.close() == 0
    assert site.recorded() == trained(20, 20)
    until(lambda: "run train-0 finished: 2 ranks, 20 batches, no inf or nan" in site.out)
    assert "lost" not in site.log


# --- a rank ---------------------------------------------------------------------------------------------------------------


def test_a_killed_rank_is_named_with_its_last_frame_and_the_others_are_stopped(site: Site) -> None:
    site.collect()
    survivor, victim = site.start(2)
    victim.ask("batches", 3)
    assert victim.ask("hold") == "holding"
    survivor.tell("train")
    until(lambda: (3, 0, 1, "forward") in site.notes("beat"))
    victim.kill()
    assert victim.wait() == -signal.SIGKILL
    assert survivor.wait() == ABORTED
    lost = "rank 1 of 2"
    assert lost in survivor.errors
    until(lambda: "run train-0 lost" in site.out)
    report = site.report()
    assert report["outcome"] == "lost"
    assert lost in report["reason"]
    assert "last seen in batch 3, frame 1, phase forward" in report["reason"]
    assert [row["state"] for row in report["ranks"]] == ["aborted", "lost"]


@pytest.mark.slow
def test_with_on_lost_wait_the_others_continue_without_a_killed_rank(site: Site) -> None:
    site.collect("--on-lost", "wait")
    survivor, victim = site.start(2)
    site.train(3, settles=True)
    victim.kill()
    until(lambda: "rank 1 of 2" in site.log and "was lost" in site.log)
    assert survivor.ask("batches", 5) == 8
    assert survivor.close() == 0
    until(lambda: "run train-0 lost" in site.out)
    assert [(row["state"], row["last_batch"]) for row in site.report()["ranks"]] == [("finished", 7), ("lost", 2)]


@pytest.mark.slow
def test_a_killed_rank_is_lost_although_its_child_process_lives_on(site: Site) -> None:
    """The child process of a data loader keeps its parent's connections open."""
    site.collect()
    survivor, victim = site.start(2)
    child = victim.ask("leave_child")
    try:
        victim.kill()
        until(lambda: "was lost" in site.log)
        survivor.tell("train")
        assert survivor.wait() == ABORTED
    finally:
        os.kill(child, signal.SIGKILL)
    assert "rank 1 of 2" in survivor.errors


@pytest.mark.slow
def test_a_rank_that_is_suspended_briefly_is_named_and_continues(site: Site) -> None:
    site.collect()
    other, stopped = site.start(2)
    assert stopped.ask("batches", 3) == 3
    # Without this wait the rank may be suspended before it has reported batch 2.
    until(lambda: any(batch == 2 for batch, *_ in site.notes("beat")))
    stopped.kill(signal.SIGSTOP)
    until(lambda: "is silent, but still connected; last seen in batch 2" in site.log)
    assert other.ask("batches", 5) == 5
    stopped.kill(signal.SIGCONT)
    assert stopped.ask("batches", 2) == 5
    assert (other.close(), stopped.close()) == (0, 0)
    until(lambda: "run train-0 finished: 2 ranks, 5 batches, no inf or nan" in site.out)
    assert site.recorded() == trained(5, 5)


@pytest.mark.slow
def test_a_rank_that_is_suspended_for_long_is_named_as_stalled_with_its_frame_and_the_waiting_ranks(
    site: Site,
) -> None:
    site.collect("--stall-after", "6")  # more than a busy machine takes for what comes before
    waiting, stopped = site.start(2)
    waiting.ask("batches", 4)
    stopped.ask("batches", 3)
    assert stopped.ask("hold") == "holding"
    until(lambda: (3, 0, 1, "forward") in site.notes("beat"))
    stopped.kill(signal.SIGSTOP)
    until(lambda: "stalled" in site.log)
    (line,) = [line for line in site.log.splitlines() if "stalled" in line]
    assert "rank 1 of 2" in line
    assert "last seen in batch 3, frame 1, phase forward; rank 0 waits, from batch 3" in line


@pytest.mark.slow
def test_with_on_stall_abort_the_others_are_aborted_and_the_suspended_rank_when_it_resumes(site: Site) -> None:
    site.collect("--stall-after", "6", "--on-stall", "abort", "--abort-grace", "30")  # 6: as above
    other, stopped = site.start(2)
    other.ask("batches", 4)
    stopped.ask("batches", 3)
    stopped.kill(signal.SIGSTOP)
    other.tell("train")
    until(lambda: "rank 1 of 2" in other.errors)
    stopped.kill(signal.SIGCONT)
    stopped.tell("train")
    assert (stopped.wait(), other.wait()) == (ABORTED, ABORTED)


# --- the end of a rank ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_that_closed_its_watch_is_never_ended_and_a_save_is_waited_for(site: Site) -> None:
    site.collect("--abort-grace", "1")
    back, saver, tripped = site.start(3)
    assert saver.ask("save") == "holding"
    until(lambda: site.notes("held"))
    back.tell("come_back")
    tripped.tell("trip")
    until(lambda: "rank 1 of 3" in site.log and "is saving: the abort waits up to 300 s" in site.log)
    until(lambda: "stays up to" in tripped.errors)
    saver.tell("done")
    assert saver.hear() == 0
    saver.tell("train")
    assert (saver.wait(), tripped.wait()) == (ABORTED, ABORTED)
    assert back.hear() == "came back"
    assert back.close() == 0


@pytest.mark.slow
def test_no_rank_ends_while_another_one_saves(site: Site) -> None:
    """torchrun would end the saving rank with the first one that ends: by its exception, or, if it is stuck, by its deadline."""
    site.collect("--abort-grace", "0.2")
    stuck, saver, raising, tripped = site.start(4)
    assert saver.ask("save") == "holding"
    assert stuck.ask("hold") == "holding"
    until(lambda: site.notes("held"))
    raising.tell("raise_the_abort")
    tripped.tell("trip")
    until(lambda: "another rank saves: this one is not ended before that" in stuck.errors)
    until(lambda: raising.errors.count("stays up to") == tripped.errors.count("stays up to") == 1)
    saver.tell("done")
    assert saver.hear() == 0
    saver.tell("train")
    assert [rank.wait() for rank in (saver, tripped, raising, stuck)] == [ABORTED] * 4
    assert "did not come back" in stuck.errors


@pytest.mark.slow
def test_a_rank_that_keeps_the_interpreter_is_ended_at_the_grace(site: Site) -> None:
    site.collect("--abort-grace", "1")
    stuck, tripped = site.start(2)
    stuck.tell("keep_interpreter_in_abort", 59)
    tripped.tell("trip")
    assert (stuck.wait(), tripped.wait()) == (ABORTED, ABORTED)


@pytest.mark.slow
def test_a_rank_that_keeps_the_interpreter_already_as_the_abort_comes_is_ended_after_the_grace(site: Site) -> None:
    site.collect("--abort-grace", "1")
    stuck, tripped = site.start(2)
    assert stuck.ask("keep_interpreter", 59) == "kept"
    tripped.tell("trip")
    assert (stuck.wait(), tripped.wait()) == (ABORTED, ABORTED)
    assert f"ended process {stuck.pid}" in site.log


# --- the disk -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(site: Site) -> Iterator[Path]:
    """A separate file system in the runs' folder."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    site.runs.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(site.runs)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr}")
    yield site.runs
    subprocess.run(["umount", "--lazy", str(site.runs)], check=True)


FILL = """
import contextlib, os, sys
def fill():
    with contextlib.suppress(OSError), open(sys.argv[1], "ab", buffering=0) as filler:
        while True:
            filler.write(bytes(512))
fill()
print("full", flush=True)
if "keep" in sys.argv:
    os.nice(-20)
    while True:
        fill()
"""


def filling(disk: Path, *how: str) -> subprocess.Popen[str]:
    """A process that has filled the disk; ``keep``: it goes on."""
    command = [sys.executable, "-S", "-c", FILL, str(disk / "filler"), *how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "full\n"
    return process


def fill(disk: Path) -> None:
    assert filling(disk).wait() == 0


@contextlib.contextmanager
def kept_full(disk: Path) -> Iterator[None]:
    """What is freed is taken at once: SQLite frees its log where it closes a record that the disk refused.

    By a process that goes before all others: what a busy machine lets a record have meanwhile, it writes.
    """
    with filling(disk, "keep") as process:
        try:
            yield
        finally:
            process.kill()


@pytest.mark.slow
def test_a_full_disk_costs_nothing_where_it_is_freed_in_time(site: Site, small_disk: Path) -> None:
    site.collect()
    ranks = site.start(2, RANKWATCH_TRACE_BATCH_NUMS="1,2")
    until(lambda: (small_disk / "train-0" / "run.db").exists())
    fill(small_disk)
    site.train(60)
    until(lambda: "cannot write run train-0 (the disk was full); it is tried again" in site.log)
    (small_disk / "filler").unlink()
    for rank in ranks:
        assert rank.ask("settle")  # acknowledged, so it is in the record
    assert site.recorded() == trained(60, 60)
    assert [rank.close() for rank in ranks] == [0, 0]
    until(lambda: "no inf or nan" in site.out)
    assert site.report()["gaps"] == []
    assert site.end() == 0
    assert "Traceback" not in site.log


@pytest.mark.slow
def test_a_full_disk_costs_the_record_and_nothing_else(site: Site, small_disk: Path) -> None:
    site.collect()
    site.start(2, RANKWATCH_TRACE_BATCH_NUMS="1,2")
    site.train(3, settles=True)
    with kept_full(small_disk):
        site.train(60, to=63)
        until(lambda: "cannot write run train-0 (the disk was full); it is tried again" in site.log)
        trip_stops_all(site, culprit=1)
        until(lambda: "rankwatch: first inf in run train-0: rank 1, batch " in site.out)
        assert "not on record: the disk was full" in site.out
        assert site.end() == 0
    assert "what came last of run train-0 is not in its record: the disk was full" in site.log
    assert "Traceback" not in site.log
    (row,) = read_rows(small_disk)
    assert (row.is_over, row.is_alive) == (False, False)


@pytest.mark.slow
def test_a_list_tells_a_run_whose_collector_was_killed(site: Site) -> None:
    collector = site.collect()
    (rank,) = site.start(1)
    assert rank.ask("batches", 3) == 3
    assert rank.ask("settle")
    assert [runs.state_of(row) for row in read_rows(site.runs)] == ["running"]
    collector.kill()
    collector.wait()
    assert [runs.state_of(row) for row in read_rows(site.runs)] == ["unfinished"]
    site.collect()
    until(lambda: [runs.state_of(row) for row in read_rows(site.runs)] == ["running"])  # it was taken over


@pytest.mark.slow
def test_a_run_that_begins_on_a_read_only_disk_gets_a_verdict_without_a_folder(site: Site, small_disk: Path) -> None:
    site.collect()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    site.start(2, RANKWATCH_TRACE_BATCH_NUMS="1,2")
    site.train(3)
    trip_stops_all(site, culprit=0)
    until(lambda: "rankwatch: first inf in run train-0: rank 0, batch " in site.out)
    assert site.end() == 0
    assert "cannot write run train-0 (the file system is read-only)" in site.log
    assert "Traceback" not in site.log


@pytest.mark.slow
def test_a_restarted_collector_reaches_a_verdict_although_the_record_is_unreadable(site: Site) -> None:
    first = site.collect()
    site.start(2)
    site.train(3, settles=True)
    first.kill()
    first.wait()
    for part in site.runs.glob("train-0/run.db*"):
        part.write_bytes(b"no database any more" * 1000)
    second = site.collect()
    until(lambda: set(site.greeted(second)) == {0, 1})
    site.train(2, to=5, settles=True)
    assert "train-0/run.db: file is not a database" in site.log
    trip_stops_all(site, culprit=1)
    until(lambda: "first inf in run train-0.2" in site.out)
    assert site.recorded("train-0.2") >= trained(5, 5) - trained(3, 3)
    assert max(site.recorded("train-0.2").values()) == 1
    assert "Traceback" not in site.log


@pytest.mark.slow
def test_a_run_folder_deleted_in_mid_run_costs_no_verdict(site: Site) -> None:
    site.collect()
    site.start(2)
    site.train(2, settles=True)
    shutil.rmtree(site.runs)
    trip_stops_all(site, culprit=0)
    until(lambda: "rankwatch: first inf in run train-0" in site.out)
    assert site.end() == 0
    assert site.report("train-0")["verdict"]["rank"] == 0  # the folder is created again


@pytest.mark.slow
def test_output_that_cannot_be_written_costs_neither_the_verdict_nor_the_exit_code(site: Site) -> None:
    site.collect(stdout="/dev/full")
    site.start(2)
    trip_stops_all(site, culprit=1)
    until(lambda: "cannot print the report: No space left on device" in site.log)
    assert site.report()["verdict"]["rank"] == 1
    assert site.end() == 0


@pytest.mark.slow
def test_a_report_that_nobody_reads_delays_no_rank(site: Site) -> None:
    pipe = site.folder / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while os.write(reader, bytes(4096)):
            pass
    site.collect(stdout=str(pipe))
    site.start(2)
    trip_stops_all(site, culprit=1)
    until(lambda: (site.runs / "latest" / "report.json").exists())
    assert site.report()["verdict"]["rank"] == 1
    assert site.end() == 0
    os.close(reader)


@pytest.mark.slow
def test_a_rank_whose_output_is_full_still_trips(site: Site) -> None:
    site.collect()
    ranks = site.start(2, stdout="/dev/full", RANKWATCH_TRACE_BATCH_NUMS="1")
    for rank in ranks:
        assert rank.ask("batches", 3) == 3
        assert "Traceback" not in rank.errors
    trip_stops_all(site, culprit=1)
    until(lambda: "rankwatch: first inf in run train-0: rank 1, batch " in site.out)


@pytest.mark.slow
def test_a_single_rank_whose_output_is_full_still_trips(site: Site) -> None:
    (rank,) = site.start(1, stdout="/dev/full", RANKWATCH_CONNECTION="")
    assert rank.ask("batches", 3) == 3
    rank.tell("trip")
    rank.tell("close")
    assert rank.wait() == ABORTED
    assert "gate (Gate), output: inf" in rank.errors


# --- internal errors ------------------------------------------------------------------------------------------------------


def test_an_internal_error_in_a_hook_is_logged_once_and_reported_and_the_training_continues(site: Site) -> None:
    site.collect()
    healthy, broken = site.start(2)
    broken.ask("batches", 2)
    broken.ask("break_hooks")
    assert broken.ask("batches", 5) == 7
    assert healthy.ask("batches", 7) == 7
    assert (healthy.close(), broken.close()) == (0, 0)
    fault = "switched itself off in batch 2 by an error of its own: RuntimeError('planted')"
    assert broken.errors.count(fault) == broken.errors.count("Traceback") == 1
    assert healthy.errors == ""
    until(lambda: "run train-0 finished" in site.out)
    assert "but rank 1 of 2" in site.out
    assert fault in site.out
    assert site.report()["ranks"][1]["farewell"] == fault


@pytest.mark.slow
def test_a_rank_whose_hooks_broke_is_still_stopped_by_the_verdict_of_another(site: Site) -> None:
    site.collect("--decision-window", "60")  # it is not waited for
    _, broken = site.start(2)
    broken.ask("break_hooks")
    assert broken.ask("batches", 2) == 2
    trip_stops_all(site, culprit=0)
    until(lambda: "first inf in run train-0" in site.out)
    assert site.report()["verdict"]["missing_ranks"] == [1]  # its broken hooks cannot report a finite frame


# --- forks, restarts, clocks ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("with_model", [False, True], ids=["plain", "that_call_the_model"])
def test_data_workers_forked_from_a_watched_rank_are_not_ranks(site: Site, with_model: bool) -> None:
    site.collect(heartbeat=1)
    rank, _ = site.start(2)
    loaded = rank.ask("load", with_model)
    assert loaded == {"makers": 2, "exit_codes": [0, 0]}
    assert rank.ask("batches", 4) == 10
    assert rank.ask("settle")
    assert site.recorded() == trained(10)
    greeted = {(number, peer) for _, number, peer in site.notes("hello")}  # each rank repeats HELLO until it is answered
    assert sorted(number for number, _ in greeted) == [0, 1]
    assert "rankwatch:" not in rank.errors
    assert "Traceback" not in rank.errors
    trip_stops_all(site, culprit=0)


@pytest.mark.slow
def test_a_restart_by_torchrun_is_a_separate_run_with_batches_from_zero(site: Site) -> None:
    command = torchrun("fault_restarted.py")
    command.insert(command.index("--standalone"), "--max-restarts=1")
    done = subprocess.run(
        [*COMMAND, "run", "--runs-dir", str(site.runs), "--heartbeat", "0.2", "--job", "train", "--", *command],
        env=environment(FAULT_NOTES=str(site.folder / "notes"), TEST_JOB_MARKER=str(site.folder)),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (site.recorded("train-0"), site.recorded("train-1")) == (trained(3, 3), trained(6, 6))
    first, second = site.report("train-0"), site.report("train-1")
    assert (first["outcome"], second["outcome"]) == ("lost", "finished")
    assert "rank 1 of 2" in first["reason"]
    assert [row["last_batch"] for row in first["ranks"]] == [2, 2]
    assert [(row["state"], row["last_batch"]) for row in second["ranks"]] == [("finished", 5)] * 2
    assert site.report() == second
    assert processes_of(str(site.folder)) == []


@pytest.mark.slow
@pytest.mark.parametrize("hours", [-5, 5])
def test_a_clock_that_jumps_changes_no_verdict(site: Site, hours: float) -> None:
    site.collect()
    ranks = site.start(2)
    site.train(2)
    ranks[1].ask("jump", hours)
    site.train(2, to=4)
    trip_stops_all(site, culprit=1)
    until(lambda: "first inf in run train-0" in site.out)
    verdict = site.report()["verdict"]
    assert (verdict["rank"], verdict["batch"], verdict["certainty"]) == (1, 4, "complete")
    # torchrun shows the error file with the smallest timestamp.
    files = [json.loads((site.folder / f"error-{rank}.json").read_text())["message"] for rank in (0, 1)]
    times = [int(file["extraInfo"]["timestamp"]) for file in files]
    assert times[1] < times[0]
    assert "gate (Gate), output: inf" in files[1]["message"]
