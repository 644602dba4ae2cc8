"""A real SLURM on hosts of this machine: slurmctld on the head, a slurmd on each node, all in the foreground and in one folder.

Debian: ``apt-get install slurmctld slurmd slurm-client munge``. The machine's own configuration is neither read nor changed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from collectors import until
from e2e.hosts import Hosts, what_is_missing

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"}
GPUS = 2
"""GPUs that each node claims to have."""

CONFIG = """\
ClusterName=test
SlurmctldHost=head
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdTimeout=6
MessageTimeout=5
KillWait=30
MinJobAge=3600
ReturnToService=2
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
MailProg=/bin/true
GresTypes=gpu
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """The running cluster. ``env``: the environment of its commands, and so of its jobs."""

    def __init__(self, hosts: Hosts, nodes: Sequence[str], env: Mapping[str, str]) -> None:
        # Not in pytest's folder: munged requires that all users can enter every folder above its socket.
        self._folder = tempfile.TemporaryDirectory(prefix="rankwatch-slurm-")
        self.folder = Path(self._folder.name)
        self.folder.chmod(0o755)
        self._hosts = hosts
        self._env = {**env, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes = nodes
        self._configure()
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    def run(self, *command: str, folder: str | os.PathLike[str] = "/", **env: str) -> str:
        """The output of a command on the head."""
        words = [*self._hosts.command("head", folder), *command]
        done = subprocess.run(words, env={**self._env, **env}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def submit(self, folder: Path, *words: str, **env: str) -> str:
        """``sbatch WORDS`` in a folder; the job's id."""
        return self.run("sbatch", "--parsable", *words, folder=folder, **env).strip()

    def state(self, job: str) -> str:
        return self._fact(job, "JobState")

    def wait(self, job: str) -> tuple[str, str]:
        """The state that a job ended in, and its exit code as SLURM writes it, such as ``1:0``."""
        until(lambda: self.state(job) in ENDED)
        return self.state(job), self._fact(job, "ExitCode")

    def boot(self, node: str) -> None:
        """Starts a node's daemon, also after a crash."""
        self._hosts.cables[node].is_cut = False
        self._start(node, "slurmd", "-D", "-N", node)

    def until_idle(self) -> None:
        until(lambda: self._idle() == len(self._nodes))

    def close(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()
        for name in self._hosts.names:  # the jobs that slurmd started
            self._hosts.kill_all(name)
        with contextlib.suppress(OSError):
            self._folder.cleanup()

    def _fact(self, job: str, name: str) -> str:
        found = re.search(rf" {name}=(\S+)", self.run("scontrol", "--oneliner", "show", "job", job))
        assert found is not None
        return found[1]

    def _configure(self) -> None:
        for name in ("state", *(f"spool-{node}" for node in self._nodes)):
            (self.folder / name).mkdir()
        # config_overrides allows more CPUs than the machine has. GPUs need device files: copies of /dev/null are enough.
        places = [f"NodeName={node} NodeAddr={self._hosts.address[node]} CPUs=8 Gres=gpu:{GPUS}\n" for node in self._nodes]
        (self.folder / "slurm.conf").write_text(CONFIG.format(folder=self.folder) + "".join(places))
        for number in range(GPUS):
            os.mknod(self.folder / f"gpu{number}", 0o020666, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
        # slurmd loads a cgroup plugin although nothing here needs one, and v2 requires systemd; 24.05 works without one.
        version = re.findall(r"\d+", subprocess.check_output(["slurmctld", "-V"], text=True))[:2]
        plugin = "disabled" if (int(version[0]), int(version[1])) >= (24, 5) else "cgroup/v1"
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (self.folder / "munge.key").chmod(0o600)

    def _start_all(self) -> None:
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        self._start("head", "munged", "--foreground", *(f"--{name}={self.folder / file}" for name, file in files.items()))
        until((self.folder / "munge.socket").exists)
        self._start("head", "slurmctld", "-D")
        for node in self._nodes:
            self.boot(node)
        self.until_idle()

    def _start(self, host: str, *command: str) -> None:
        with open(self.folder / f"{command[0]}-{host}.out", "wb") as out:
            words = [*self._hosts.command(host, "/"), *command]
            self._daemons.append(subprocess.Popen(words, env=self._env, stdout=out, stderr=out))

    def _idle(self) -> int:
        words = [*self._hosts.command("head", "/"), "sinfo", "--noheader", "--Node", "--format=%t"]
        return subprocess.run(words, env=self._env, capture_output=True, text=True, check=False).stdout.split().count("idle")


def skip_without_slurm() -> None:
    reason = what_is_missing()
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=path) is None]:
        reason = f"SLURM is not here ({', '.join(missing)}): apt-get install slurmctld slurmd slurm-client munge"
    if reason:
        pytest.skip(reason)
