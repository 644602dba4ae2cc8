"""The command line: its errors and exit codes, the daemon and its signals, and commands wrapped by ``run``."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import makers
import records
from collectors import Running, until
from commands import run as rankwatch
from jobs import RANKWATCH, ROOT, environment
from rankwatch.shared.types.tuning import Check, Tuning
from rankwatch_monitor.cli import COMMANDS, MOST_FLAGS
from rankwatch_monitor.decide.core.ledger import Received
from rankwatch_monitor.serve.launcher import job_name
from rankwatch_monitor.serve.niceness import RECORDING

HEAVY = {"numpy", "zmq", "torch", "asyncio", "http", "rich", "prometheus_client", "starlette"}
"""Libraries that take much longer to import than Python takes to start."""

_FIELDS = ("address", "server_public", "client_public", "client_secret", "job", "for_job_alone")
_VERSION_7 = json.dumps({"rankwatch_connection": [7, 0]} | dict.fromkeys(_FIELDS, ""))


def assert_usage_error(done: subprocess.CompletedProcess[str], complaint: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--help"]])
def test_version_and_help_load_no_command(arguments: list[str]) -> None:
    loaded = loaded_by(*arguments)
    assert {name for name in loaded if name.startswith("rankwatch")} == {
        *(
            "rankwatch",
            "rankwatch.errors",
            "rankwatch.shared",
            "rankwatch.shared.system",
            "rankwatch.shared.system.standard_output",
        ),
        *("rankwatch_monitor", "rankwatch_monitor.cli"),
    }
    assert not loaded & HEAVY


def test_list_loads_no_other_command_and_no_library_that_it_does_not_need(tmp_path: Path) -> None:
    loaded = loaded_by("list", str(tmp_path))
    commands = {name for name in loaded if name.startswith("rankwatch_monitor.commands.")}
    assert commands == {"rankwatch_monitor.commands.list", "rankwatch_monitor.commands.arguments"}
    assert not loaded & HEAVY


def loaded_by(*arguments: str) -> set[str]:
    """The modules that a command has loaded when it ends."""
    code = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
        "from rankwatch_monitor.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("module", ["rankwatch", "rankwatch_monitor"])
def test_python_dash_m_is_the_command(module: str) -> None:
    command = [sys.executable, "-m", module, "list", "no-such-folder"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert_usage_error(done, "rankwatch: error: no folder no-such-folder")


def test_each_command_is_a_file_of_its_name() -> None:
    folder = ROOT / "monitor" / "rankwatch_monitor" / "commands"
    assert {path.stem for path in folder.glob("*.py") if "def main(" in path.read_text()} == set(COMMANDS)


@pytest.mark.parametrize(
    ("listen", "complaint"),
    [
        ("tcp://192.0.2.1:0", "is not an address of this machine"),
        ("tcp://no.such.host.invalid:0", "the name does not resolve"),
        ("udp://127.0.0.1:1", "is no address: expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "is no address"),
        ("tcp://127.0.0.1:99999", "is no address"),
    ],
)
@pytest.mark.parametrize("command", ["collector", "run"])
def test_addresses_that_cannot_be_listened_on(tmp_path: Path, command: str, listen: str, complaint: str) -> None:
    words = ["--", "true"] if command == "run" else []
    assert_usage_error(rankwatch(command, "--listen", listen, "--runs-dir", str(tmp_path), *words), complaint)
    assert not (tmp_path / "connection.json").exists()


def test_an_address_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        done = rankwatch("collector", "--listen", address, "--runs-dir", str(tmp_path))
    assert_usage_error(done, f"cannot listen on {address}: the address is in use")


@pytest.mark.parametrize(
    ("address", "options", "complaint"),
    [
        ("head:27077", [], "is no address: expected tcp://HOST:PORT"),
        ("tcp://*:27077", [], "is no address that ranks can connect to"),
        ("tcp://head:27077", ["--insecure"], "ranks cannot connect to tcp://head:27077 in plain text"),
    ],
)
def test_addresses_that_ranks_cannot_connect_to(tmp_path: Path, address: str, options: list[str], complaint: str) -> None:
    words = ["--listen", "tcp://127.0.0.1:0", "--address", address, "--runs-dir", str(tmp_path)]
    assert_usage_error(rankwatch("collector", *words, *options), complaint)
    assert not (tmp_path / "connection.json").exists()


def test_the_connection_file_has_the_address_that_ranks_connect_to(tmp_path: Path) -> None:
    show = ["--", "sh", "-c", 'cat "$RANKWATCH_CONNECTION"']
    words = ["--listen", "tcp://*:0", "--runs-dir", str(tmp_path)]
    shown = [rankwatch("run", *words, *more, *show) for more in ([], ["--address", "tcp://head-ib0:0"])]
    fixed = rankwatch("run", *words, *show, RANKWATCH_ADDRESS="tcp://rankwatch.ml.svc:7")
    hosts = [json.loads(done.stdout)["address"].rpartition(":") for done in (*shown, fixed)]
    assert [host for host, _, _ in hosts] == [f"tcp://{socket.gethostname()}", "tcp://head-ib0", "tcp://rankwatch.ml.svc"]
    assert all(int(port) > 1024 for _, _, port in hosts[:2])
    assert hosts[2][2] == "7"


def test_an_unwritable_runs_dir(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for runs in (f"{tmp_path}/file/runs", "/proc/nowhere"):
        assert_usage_error(rankwatch("collector", "--runs-dir", runs), f"cannot write to the runs folder {runs}")


def test_a_connection_file_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "mistyped" / "connection.json"
    for command in (["collector", "--listen", "tcp://127.0.0.1:0"], ["run", "--", "true"]):
        done = rankwatch(command[0], "--connection-file", str(path), "--runs-dir", str(tmp_path / "runs"), *command[1:])
        assert_usage_error(done, f"its folder {path.parent} does not exist")


@pytest.mark.parametrize(
    ("text", "mode", "complaint"),
    [
        ("{}", 0o600, "is malformed"),
        (_VERSION_7, 0o600, "is of version 7, this rankwatch reads version 1"),
        ("{}", 0o644, "has mode 0644: others can read the keys in it"),
    ],
)  # fmt: skip
def test_connection_files_that_cannot_be_used(tmp_path: Path, text: str, mode: int, complaint: str) -> None:
    path = tmp_path / "connection.json"
    path.write_text(text)
    path.chmod(mode)
    for command in (["collector"], ["run", "--", "true"]):
        done = rankwatch(command[0], "--connection-file", str(path), "--runs-dir", str(tmp_path / "runs"), *command[1:])
        assert_usage_error(done, complaint)
    assert path.read_text() == text


@pytest.mark.slow
def test_a_missing_connection_file_stops_a_rank_before_its_first_batch() -> None:
    script = "import rankwatch, torch; rankwatch.watch(torch.nn.Linear(1, 1)); print('trained')"
    command, env = [sys.executable, "-c", script], environment(RANKWATCH_CONNECTION="/nowhere/connection.json")
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "ConnectionFileError: connection file /nowhere/connection.json does not exist" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["run"], "nothing to run"),
        (["run", "--", "/no/such/program"], "cannot run /no/such/program: No such file or directory"),
        (["report", "/no/such/run"], "no run /no/such/run; in "),
        (["report", "/no/such/run", "--rank", "0"], "no run /no/such/run; in "),
        (["report", "/no/such/run", "--frames", "5"], "no run /no/such/run; in "),
        (["report", "/no/such/run", "--html", "a"], "no run /no/such/run; in "),
        (["export", "/no/such/run", "--jsonl"], "no run /no/such/run; in "),
        (["diff", "/no/such/run", "--rank", "0", "--rank", "1"], "no run /no/such/run; in "),
        (["report", "--batch", "-1"], "expected a whole number N from 0 on"),
        (["report", "--frames", "0"], "'0': expected a whole number N from 1 on"),
        (["export", "/no/such/run"], "one of the arguments --parquet --tensorboard --jsonl is required"),
        (["export", "/no/such/run", "--parquet", "a", "--tensorboard", "b"], "not allowed with argument"),
        (["export", "/no/such/run", "--parquet", "a"], "no run /no/such/run; in "),
        (["export", "--parquet", "a", "--what", "envelope", "--rank", "1"], "--what envelope is over all ranks"),
        (["export", "--tensorboard", "a", "--what", "envelope"], "--what goes with --parquet"),
        (["export", "--jsonl", "--rank", "1"], "--jsonl prints the whole record"),
        (["export", "--parquet", "a", "--frames"], "--frames goes with --jsonl"),
        (["stack", "/no/such/run"], "connection.json does not exist: is the collector running"),
        (["collector", "--abort-grace", "soon"], "'soon': expected seconds"),
        (["collector", "--on-lost", "cry"], "expected abort or wait"),
        (["collector", "--heartbeat", "-1"], "expected 0.01 to 3600 seconds"),
        (["run", "--every", "0", "true"], "'0': expected a whole number K from 1 on"),
        (["tune"], "nothing to change: give --every"),
        (["tune", "--every", "x"], "'x': expected a whole number K from 1 on"),
        (["tune", "--every", "2"], "connection.json does not exist: is the collector running"),
        (["tune", "--trace-batch-nums", "3,-1"], "'-1': expected a whole number for each batch from 0 on"),
        (["tune", "--trace_batch_nums", ",".join(["1"] * 10_001)], "10001 are over the limit of 10000"),
        (["tune", "--ignore", ",".join(["a"] * 257)], "257 are over the limit of 256"),
        (["tune", "--modules", "x" * 1025], "expected patterns of at most 1024 characters"),
        (["tune", "--check", "never"], "invalid choice: 'never'"),
    ],
)
def test_usage(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    assert_usage_error(rankwatch(*arguments, RANKWATCH_RUNS_DIR=str(tmp_path)), complaint)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return records.write(tmp_path_factory.mktemp("runs") / "train-0", records.part(0, *records.frames(0)))


OUTPUTS = (
    "--help",
    "list ..",
    "report .",
    "report . --json",
    "export . --jsonl --frames",
    "top .",
    "completion fish",
    "doctor",
)


@pytest.mark.parametrize(
    ("command", "is_unbuffered"), [*((command, "") for command in OUTPUTS), ("--help", "1"), ("export . --jsonl", "1")]
)
def test_a_full_disk_is_named_in_one_line(command: str, is_unbuffered: str, recorded: Path) -> None:
    env = environment(PYTHONUNBUFFERED=is_unbuffered)
    with open("/dev/full", "w") as full:
        words = [*RANKWATCH, *command.split()]
        done = subprocess.run(words, cwd=recorded, env=env, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "rankwatch: error: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("is_unbuffered", ["", "1"])
def test_a_reader_that_has_ended_is_left_in_peace(is_unbuffered: str, recorded: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    env = environment(PYTHONUNBUFFERED=is_unbuffered)
    command = [*RANKWATCH, "export", "--jsonl", "."]
    done = subprocess.run(command, cwd=recorded, env=env, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_to_give_a_diff_that_has_one_side(tmp_path: Path) -> None:
    run = records.write(tmp_path / "train-1", records.part(0, *records.frames(0)))
    complaint = "nor this batch of another rank; give another run, or --batch or --rank twice"
    assert_usage_error(rankwatch("diff", str(run)), complaint)


def test_run_ends_as_its_command_does(tmp_path: Path) -> None:
    for code in (0, 3):
        done = rankwatch("run", "--runs-dir", str(tmp_path), "sh", "-c", f"echo out; echo $RANKWATCH_JOB >&2; exit {code}")
        assert (done.returncode, done.stdout) == (code, "out\n")
        said = f"exit code {code} before any rank connected, so there is no report" if code else "no rank"
        assert re.match(rf"echo\n\S+ WARNING rankwatch: {said}", done.stderr)
        assert len(done.stderr.splitlines()) == 2
        assert ("PYTHONPATH" in done.stderr) == (code == 0)
    killed = rankwatch("run", "--runs-dir", str(tmp_path), "--", "sh", "-c", "kill -9 $$")
    assert killed.returncode == 128 + signal.SIGKILL
    assert "exit code 137 (SIGKILL) before any rank connected" in killed.stderr


@pytest.mark.parametrize(
    ("given", "in_environment", "told"),
    [
        (["--on-bad-step", "skip"], "", "skip=3/128"),
        (["--on-bad-step", "abort"], "skip=2/64", "abort"),
        ([], "skip=2/64", "skip=2/64"),
        ([], "", ""),
    ],
)
def test_run_tells_its_command_what_a_bad_step_does(
    tmp_path: Path, given: list[str], in_environment: str, told: str
) -> None:
    says = "echo $RANKWATCH_ON_BAD_STEP"
    done = rankwatch("run", "--runs-dir", str(tmp_path), *given, "sh", "-c", says, RANKWATCH_ON_BAD_STEP=in_environment)
    assert (done.returncode, done.stdout) == (0, f"{told}\n")


def test_run_tells_its_command_the_budget(tmp_path: Path) -> None:
    for given, told in ((["--budget", "0.01"], "0.01"), (["--budget", "0"], "0.0"), ([], "0.05")):
        done = rankwatch(
            "run", "--runs-dir", str(tmp_path), *given, "sh", "-c", "echo $RANKWATCH_BUDGET", RANKWATCH_BUDGET="0.05"
        )
        assert (done.returncode, done.stdout) == (0, f"{told}\n")


def test_run_passes_sigterm_on(tmp_path: Path) -> None:
    command = "trap 'echo ended; exit 5' TERM; echo ready; while :; do read line; done"
    with subprocess.Popen(
        [*RANKWATCH, "run", "--runs-dir", str(tmp_path), "--", "bash", "-c", command],
        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.readline() == "ended\n"
        assert process.wait() == 5


def test_the_connection_of_run_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    script = 'stat -c "%a %n" "$RANKWATCH_CONNECTION"'
    done = rankwatch("run", "--runs-dir", str(tmp_path), "sh", "-c", script)
    mode, path = done.stdout.split()
    assert mode == "600"
    assert not Path(path).exists()


def test_the_daemon_ends_cleanly_by_sigterm(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*RANKWATCH, "collector", "--listen", "tcp://127.0.0.1:0", "--runs-dir", str(tmp_path)],
        env=environment(), stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        ready = process.stderr.readline()
        path = tmp_path / "connection.json"
        assert f"RANKWATCH_CONNECTION={path}" in ready
        assert os.stat(path).st_mode & 0o777 == 0o600
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert list(tmp_path.iterdir()) == []


def test_the_thread_that_writes_to_the_disk_runs_after_the_others_of_the_daemon(tmp_path: Path) -> None:
    command = [*RANKWATCH, "collector", "--listen", "tcp://127.0.0.1:0", "--runs-dir", str(tmp_path)]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL) as process:
        tasks = Path(f"/proc/{process.pid}/task")
        ours = os.getpriority(os.PRIO_PROCESS, 0)

        def niceness() -> list[int]:
            """The niceness of ZeroMQ's thread, of the first thread and of the nicest one."""
            of = {task.name: os.getpriority(os.PRIO_PROCESS, int(task.name)) - ours for task in tasks.iterdir()}
            zeromq = [of[name] for name in of if (tasks / name / "comm").read_text().startswith("ZMQbg/IO")]
            return [*zeromq, of[str(process.pid)], max(of.values())]

        until(lambda: niceness() == [0, 0, min(RECORDING, 19 - ours)])
        process.terminate()


def test_tune_says_what_was_changed_and_for_how_many_ranks(tmp_path: Path) -> None:
    collector = Running(tmp_path)
    file = str(tmp_path / "connection.json")
    try:
        assert_usage_error(
            rankwatch("tune", "--connection", file, "--every", "5"),
            f"the collector at {collector.collector.address} refused: no run is under way here",
        )
        collector.collector.ledger.handle(Received(b"rank", makers.hello()), 0.0)
        done = rankwatch("tune", "--every", "5", "--ignore", "", "--trace_batch_nums", "7, 8", RANKWATCH_CONNECTION=file)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "changed for 1 rank of train-0: every 5; ignore nothing; trace batches 7, 8\n"
        named = rankwatch("tune", "train-0", "--connection", file, "--modules", "a.*,b", "--check", "batch")
        assert named.stdout == "changed for 1 rank of train-0: modules a.*, b; check batch\n"
        assert collector.collector.ledger.runs["train-0"].tuning == Tuning(
            every=5, modules=("a.*", "b"), ignore=(), trace_batch_nums=(7, 8), check=Check.BATCH
        )
    finally:
        collector.stop()


@pytest.mark.slow
def test_tune_does_not_wait_for_ever_for_a_collector_that_is_gone(tmp_path: Path) -> None:
    collector = Running(tmp_path)
    collector.stop(clean=False)  # its connection file stays
    done = rankwatch("tune", "--connection", str(tmp_path / "connection.json"), "--every", "5")
    assert_usage_error(done, f"no collector answers at {collector.collector.address} within 5 s: is it running")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("torchrun --nproc-per-node 8 train.py --lr 1", "train"),
        ("srun torchrun /home/me/gpt/pretrain.py", "pretrain"),
        ("python -m torch.distributed.run -m my.package.train", "train"),
        ("torchrun -m rankwatch.demo", "demo"),
        ("./train.sh", "train.sh"),
    ],
)
def test_job_names(command: str, name: str) -> None:
    assert job_name(command.split(), {}) == name


@pytest.mark.parametrize(
    ("command", "env", "name"),
    [
        (["bash", "-c", "cd /home/me && torchrun --nproc-per-node 2 train.py --lr 1 > log 2>&1"], {}, "train"),
        (["sh", "-c", "echo begun; python rank.py; exit $?"], {}, "rank"),
        (["sh", "-c", 'exec torchrun --module my.pkg.pretrain "$@"'], {}, "pretrain"),
        (["bash", "-lc", "python -m torch.distributed.run -m my.package.train"], {}, "train"),
        (["bash", "launch.sh", "--big"], {}, "launch"),
        (["bash", "launch.sh"], {"SLURM_JOB_NAME": "llama-7b"}, "llama-7b"),
        (["bash", "launch.sh"], {"SLURM_JOB_NAME": "interactive"}, "launch"),
        (["env", "A=1", "bash", "-c", "./train --fast"], {}, "train"),
        (["bash", "-c", "it's broken; torchrun fit.py"], {}, "fit"),
        (["torchrun", "train.py"], {"SLURM_JOB_NAME": "llama-7b"}, "train"),
        (["bash"], {}, "bash"),
    ],
)
def test_a_job_behind_a_shell_has_the_name_of_what_runs(command: list[str], env: dict[str, str], name: str) -> None:
    assert job_name(command, env) == name


def test_a_low_limit_of_open_files_is_logged_at_the_start(tmp_path: Path) -> None:
    command = [*RANKWATCH, "collector", "--listen", "tcp://127.0.0.1:0", "--runs-dir", str(tmp_path)]
    with subprocess.Popen(
        ["bash", "-c", 'ulimit -n 1000 && exec "$@"', "bash", *command],
        env=environment(), stderr=subprocess.PIPE, text=True,
    ) as collector:  # fmt: skip
        assert collector.stderr is not None
        assert "this process may have 1000 files open, so at most 904 ranks can connect: raise `ulimit -Hn`" in (
            collector.stderr.readline()
        )
        assert "collecting on" in collector.stderr.readline()
        collector.terminate()


@pytest.mark.parametrize("command", [*COMMANDS])
def test_an_error_shows_few_options(command: str) -> None:
    done = rankwatch(command, "--nonsense")
    assert done.returncode == 2
    usage = done.stderr.partition("usage: ")[2]
    assert len(set(re.findall(r"\[(--[a-z-]+)", usage))) <= MOST_FLAGS
    assert ("more options: " in usage) == (command in ("run", "collector"))
