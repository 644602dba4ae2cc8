"""The pages of docs/: their commands run, their quoted output is the real one, and the names in them exist."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from collectors import PATIENCE
from e2e.pages import ALL, PAGES, blocks, commands, python_of, run, shell_environment
from e2e.test_readme import COLLECTOR, ONE_NODE
from jobs import ROOT, Job
from rankwatch.shared.link import connection, wire
from rankwatch.shared.types.config import _FURTHER, FUNCTIONS, Config, resolve
from rankwatch.shared.types.notice import Notice, NoticeKind, describe_notice
from rankwatch_monitor.cli import COMMANDS, main
from rankwatch_monitor.record import schema
from rankwatch_monitor.views import as_json

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.e2e

UI = "rankwatch ui"
TOLD = next(command for command in commands("behaviour.md") if "--on-verdict" in command)
ONE_OF_TWO_NODES = next(command for command in commands("guide.md") if "--nnodes" in command)
TUNE = [command for command in commands("guide.md") if command.startswith("rankwatch tune")]
COMPLETION = [command for command in commands("guide.md") if "completion" in command]
RESTARTED = [command for command in commands("reference/advice.md") if "--max-restarts" in command]
OF_A_RUN = [command for page in ("report.md", "views.md") for command in commands(page) if command not in (UI, *RESTARTED)]
JOBS = {
    "trace": [command for command in commands("guide.md") if "/trace/" in command or "TRACE" in command],
    "zero-code": commands("zero-code.md"),
    "doctor": commands("doctor.md"),
    "restarts": RESTARTED,
    "fleet": [*commands("fleet.md"), *commands("internals/archive.md")],
    "comparison": commands("internals/comparison.md"),
    "bad-step": commands("bad-step.md"),
    "metrics": [command for command in commands("metrics.md") if command.startswith("rankwatch")],
}
"""Commands with real ranks, by what they are about."""
NOT_RUN = {
    "prometheus": "a server that does not end; tests/unit/test_deploy.py has promtool check its files",
    "python3.11": "another virtual environment, which takes minutes to install",
    ".lowest/bin/pip": "the same",
    ".lowest/bin/python": "the same",
    ".newest/bin/pip": "the same, of several GB",
    ".newest/bin/python": "the same",
    ".newest/bin/rankwatch": "the same",
}
"""Why, by the program of the command."""


def test_every_command_runs_in_a_test() -> None:
    """Another test runs the README's commands; those of the tutorial and of the page on replay run one after the other."""
    shown = {command for page in PAGES if page not in ("README.md", "tutorial.md") for command in commands(page)}
    ours = {
        *commands("replay.md"),
        *commands("replicas.md"),
        TOLD,
        ONE_NODE,
        UI,
        COLLECTOR,
        ONE_OF_TWO_NODES,
        *TUNE,
        *COMPLETION,
        *OF_A_RUN,
        *(each for some in JOBS.values() for each in some),
    }
    assert {command.split()[0] for command in shown - ours} == NOT_RUN.keys()


@pytest.fixture(scope="module")
def user(bad: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with one run that ended with a verdict."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copytree(bad.run_dir.parent / "bad-0", folder / "rankwatch-runs" / "bad-0")
    (folder / "rankwatch-runs" / "latest").symlink_to("bad-0")
    return folder


@pytest.mark.parametrize("command", OF_A_RUN)
def test_the_commands_over_a_run(
    command: str, user: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if "|" in command:
        assert run(command, user).stdout
        return
    monkeypatch.chdir(user)
    program, *arguments = shlex.split(command)
    assert (program, main(arguments)) == ("rankwatch", 0)
    out, err = capfd.readouterr()
    assert out or err


def test_the_completion_of_a_shell(tmp_path: Path) -> None:
    home = f"export HOME={shlex.quote(str(tmp_path))}"
    for command in COMPLETION:
        done = run(f"{home}; {command}", tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
    assert run(f"{home}; source ~/.bashrc; complete -p rankwatch", tmp_path).stdout.endswith(
        "-F _shtab_rankwatch rankwatch\n"
    )


def test_the_page(user: Path) -> None:
    env = {**shell_environment(user), "RANKWATCH_PORT": "0"}
    with subprocess.Popen(["bash", "-c", f"exec {UI}"], cwd=user, env=env, stdout=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None
        url = page.stdout.readline().split()[-1]
        with urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(url) as answer:
            assert b"<title>rankwatch</title>" in answer.read()
        page.send_signal(signal.SIGTERM)
    assert page.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("about", JOBS)
def test_the_commands_that_start_ranks(about: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(python_of("guide.md", "# train.py"))
    (tmp_path / "rankwatch.toml").write_text(blocks(PAGES["zero-code.md"], "toml")[0])
    for command in JOBS[about]:
        done = run(command.replace("9464", "0"), tmp_path)  # another process may use this port
        # The run that stops after a batch fails, and the diff of two traces exits with 1.
        assert done.returncode == (1 if about == "trace" else 0), (command, done.stdout, done.stderr)


UNTIL_STOPPED = """\
import os

def goes_on():  # rank 0 looks for the file, so that all ranks end with the same batch
    is_stopped = torch.tensor(float(os.path.exists("stop")))
    dist.broadcast(is_stopped, 0)
    return not is_stopped

"""


@pytest.mark.slow
def test_several_nodes_and_their_tuning(tmp_path: Path) -> None:
    """Two nodes on this machine find a collector by its connection file, and are tuned while they train."""
    script = python_of("guide.md", "# train.py")
    assert script.count("for batch in range(20):") == 1
    (tmp_path / "train.py").write_text(UNTIL_STOPPED + script.replace("for batch in range(20):", "while goes_on():"))
    (tmp_path / "shared").mkdir()
    env = shell_environment(tmp_path)
    here = f"--master-addr 127.0.0.1 --master-port {env['MASTER_PORT']}"
    node = ONE_OF_TWO_NODES.replace("--master-addr head", here)
    assert node != ONE_OF_TWO_NODES
    collector = f"exec {COLLECTOR.replace('27077', '0')}"
    with subprocess.Popen(
        ["bash", "-c", collector], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as daemon:
        assert daemon.stderr is not None
        assert "collecting on tcp://" in daemon.stderr.readline()
        nodes = [node.replace("--node-rank 0", f"--node-rank {number}") for number in range(2)]
        jobs = [subprocess.Popen(["bash", "-c", each], cwd=tmp_path, env=env) for each in nodes]
        try:
            assert "run train-0: 4 ranks" in daemon.stderr.readline()
            answers = [subprocess.check_output(["bash", "-c", each], cwd=tmp_path, env=env, text=True) for each in TUNE]
        finally:
            (tmp_path / "stop").touch()
            codes = [job.wait(PATIENCE) for job in jobs]
            daemon.send_signal(signal.SIGTERM)
        out, log = daemon.communicate()
    assert codes == [0, 0]
    assert daemon.returncode == 0
    replicas = r"  replicas   equal at step \d+ \(all 4 parameters, 4 ranks\), compared \d+ times\n"
    record = r"  record     rankwatch report \S+/train-0 --all\n\n"
    course = r"  took       \S+( s)?, \S+ batches a second, .* UTC\n  loss       .*\n(  (nearest|grew most) .*\n)*"
    told = rf"{course}{replicas}  noticed    nothing\n  steps      .*\n{record}"
    assert re.fullmatch(rf"rankwatch: run train-0 finished.*[:;] 4 ranks, \d+ batches, no inf or nan\n{told}", out)
    assert not (tmp_path / "shared" / "rankwatch.json").exists()
    changes = [
        "every 10",
        "modules 0, 2; ignore 1:output; check async",
        "trace batches 5000, 5001",
        "every 1; modules all; ignore nothing",
    ]
    answered = [re.sub(r"\b[1-4] ranks? of ", "4 ranks of ", line) for line in answers]
    assert [line.endswith(f": {change}\n") for line, change in zip(answered, changes, strict=True)] == [True] * 4
    assert re.findall(r"options changed: (.*)", log) == changes
    assert f"`{answered[0].strip()}`" in PAGES["guide.md"]


def shaped(line: str) -> str:
    """A line without what differs between machines: numbers, folders, and table cells that are cut because of their width."""
    line = re.sub(r"\(vm, |\([\w.-]+, (?=local rank)", "(HOST, ", line)
    line = re.sub(r"(?<=rank \d of \d \()[\w.-]+(?=\))", "HOST", line)
    line = re.sub(r"(/[\w.-]+)+/(?=\w+\.py|rankwatch-runs/)", "", line)
    line = re.sub(r"in under \S+ s|in \d+\.\d+ s", "in TIME", line)
    return " ".join(re.sub(r"(?<![\w.\[(])x?\d[\d.]*(e[+-]\d+)?(?![\w\]])", "N", line).split())


def for_sure(line: str) -> str:
    """The shape of a line, without what depends on whether a rank that only received an inf is heard before the verdict."""
    return "" if line.startswith("  also ") else shaped(line.partition(";")[0] if line.startswith("  certainty ") else line)


def exit_codes(page: str, folder: Path) -> tuple[list[str], list[int]]:
    """Runs the commands of a page; each prints the lines that the page shows after it, except for numbers."""
    parts = re.split(r"```bash\n(.*?)\n```", PAGES[page], flags=re.DOTALL)
    codes, steps = [], parts[1::2]
    for command, after in zip(steps, parts[2::2], strict=True):
        done = run(command, folder)
        codes.append(done.returncode)
        printed = {"", *map(for_sure, (done.stdout + done.stderr).splitlines())}
        shown = [line for block in blocks(after, "text") for line in block.splitlines() if line != "[...]"]
        missing = [line for line in shown if for_sure(line) not in printed]
        assert not missing, (command, missing, done.stdout, done.stderr)
    return steps, codes


@pytest.mark.slow
def test_the_page_on_replay(tmp_path: Path) -> None:
    _, codes = exit_codes("replay.md", tmp_path)
    assert codes == [0, 0]


@pytest.mark.slow
def test_the_page_on_replicas(tmp_path: Path) -> None:
    (tmp_path / "flipped.py").write_text(python_of("replicas.md", "# flipped.py"))
    (tmp_path / "train.py").write_text(python_of("guide.md", "# train.py"))
    _, codes = exit_codes("replicas.md", tmp_path)
    assert codes == [0, 0]


@pytest.mark.slow
def test_the_tutorial(tmp_path: Path) -> None:
    (tmp_path / "train_pumps.py").write_text((ROOT / "deploy" / "examples" / "train_pumps.py").read_text())
    steps, codes = exit_codes("tutorial.md", tmp_path)
    assert codes == [77, 0, 0, 0, 0, 0, 0, 0]
    assert [command for command in steps if "torchrun" in command] == [steps[0], steps[-1]]


@pytest.mark.slow
def test_a_channel_is_told_of_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[Any] = []

    class Channel(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    (tmp_path / "train.py").write_text((ROOT / "deploy" / "examples" / "train_pumps.py").read_text())
    (tmp_path / "tell.py").write_text(python_of("behaviour.md", "# tell.py"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Channel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = run(f"SLACK_URL=http://127.0.0.1:{server.server_port} {TOLD}", tmp_path)
        server.shutdown()
    assert done.returncode == 77, done.stderr
    (told,) = received
    assert told["text"].startswith("train-0: aborted: rank "), done.stderr
    assert "head" in told["text"]


def test_the_numbers_that_the_tutorial_quotes() -> None:
    """The text beside the output quotes them."""
    text = PAGES["tutorial.md"]
    for number in ("by a factor of 1.41", "grows by x1.41 a batch", "5.25e+00 input[0]", "3.42e+00 and 1.49e+01", "7,240"):
        assert number in text


def test_the_quoted_notices_match_the_printed_ones() -> None:
    overflow = Notice(NoticeKind.HEADROOM, "blocks.1.up", "Linear", "output", "float16", 3, 40, 511.0, 0.26)
    underflow = Notice(NoticeKind.UNDERFLOW, "blocks.0", "Block", "grad_output", "float16", 0, 40, 1.25e-6, 0.0)
    shown = f"  noticed    rank 1: {describe_notice(overflow)}\n{'':13}ranks 0-1: {describe_notice(underflow)}\n"
    assert shown in PAGES["report.md"]


def test_the_quoted_toml_is_accepted(tmp_path: Path) -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| `(\w+ = .*)` \|$", PAGES["options.md"], re.MULTILINE)
    assert {name for name, _ in rows} == {field.name for field in fields(Config)} - FUNCTIONS
    for name, text in rows:
        assert list(tomllib.loads(text)) == [name]
    shown = [text for _, text in rows] + blocks(ALL, "toml")
    for number, text in enumerate(shown):
        path = tmp_path / f"{number}.toml"
        path.write_text(text)
        assert resolve({"RANKWATCH_CONFIG": str(path)}) != Config()


def test_every_variable_is_documented_and_accepted() -> None:
    page = PAGES["options.md"]
    known = {*_FURTHER, *(field.name.upper() for field in fields(Config) if field.name not in FUNCTIONS)}
    assert set(re.findall(r"RANKWATCH_([A-Z_]+[A-Z])\b", page)) == known
    for variable, value in re.findall(r"^\| `\w+` \| .*? \| `(RANKWATCH_\w+)=(\S+)` \|", page, re.MULTILINE):
        assert resolve({variable: value}) != Config(), variable
    assert all(f"| `{function}` |" in page for function in FUNCTIONS)


def test_variables_named_elsewhere_exist() -> None:
    known = {f"RANKWATCH_{name}" for name in (*_FURTHER, *(field.name.upper() for field in fields(Config)))}
    meant = {"RANKWATCH_GRADIENT"}  # the page shows it as a mistake
    meant |= {
        f"RANKWATCH_{name}" for name in ("EVENT", "TEXT", "RUN", "OUTCOME", "CAUSE", "RUN_DIR")
    }  # for the command of --on-verdict
    assert set(re.findall(r"RANKWATCH_[A-Z_]+[A-Z]\b", ALL)) - known <= meant


def test_every_command_has_its_help() -> None:
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    page_of = SimpleNamespace(file=SimpleNamespace(src_uri="reference/commands.md"))
    page = hooks["on_page_markdown"](PAGES["reference/commands.md"], page=page_of)
    for command in COMMANDS:
        assert f"## rankwatch {command}\n" in page
        assert f"usage: rankwatch {command} " in page


def test_the_named_files_and_tests_exist() -> None:
    for path in re.findall(r"`((?:deploy|docs|tests)/[\w./-]+)`", ALL):
        assert (ROOT / path).exists(), path
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::|`, `)?(test_\w+)?", ALL)
    assert len(named) > 1
    for path, function in named:
        assert f"def {function}" in (ROOT / path).read_text(), (path, function)


def test_what_a_user_reads_first_is_short() -> None:
    """The pages of the first two parts, the README among them, have 18,000 words at most."""
    nav = (ROOT / "docs" / "mkdocs.yml").read_text().partition("nav:\n")[2].partition("  - For a site:")[0]
    pages = ["README.md", *re.findall(r"(\S+\.md)$", nav, re.MULTILINE)]
    assert {"README.md", "tutorial.md", "report.md", "glossary.md"} < set(pages)
    assert sum(len(PAGES[page].split()) for page in pages) <= 18_000


def test_no_sentence_is_repeated() -> None:
    """No sentence of more than eight words, and no row of a table, occurs in two pages."""
    text = re.sub(r"^```.*?^```$", "", ALL, flags=re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| (?!---).*\|$(?!\n\| ---)", text, re.MULTILINE)  # without the tables' heads
    prose = re.sub(r"^\|.*\|$|^#.*$", "", text, flags=re.MULTILINE)
    sentences = [" ".join(each.split()) for each in re.split(r"(?<=[.:;])\s|\n\n|^- ", prose, flags=re.MULTILINE)]
    said = [each for each in sentences if len(each.split()) > 8] + [row for row in rows if len(row.split()) > 8]
    assert len(said) > 300
    assert not [each for each in set(said) if said.count(each) > 1]


def test_messages_quoted_in_troubleshooting_exist() -> None:
    """The source contains each message of the first column, split at its placeholders."""
    source = " ".join(path.read_text() for folder in ("agent", "monitor") for path in (ROOT / folder).rglob("*.py"))
    said = plain(source)
    for quote in quoted():
        for piece in re.split(r"\.\.\.|\bN\b|\bM\b|\d+|tcp://|RANKWATCH_\w+|ranks? | at |\s{2,}", quote):
            assert plain(piece) in said, (quote, piece)


def quoted() -> Iterator[str]:
    for row in re.findall(r"^\| ([^|]*) \|", PAGES["troubleshooting.md"], re.MULTILINE):
        for quote in re.findall(r"`([^`]+)`", row):
            if " " in quote:
                yield quote


def plain(text: str) -> str:
    """Only the words: so a literal of several lines, or with a placeholder, becomes one text."""
    return " ".join(re.findall(r"[A-Za-z]+", re.sub(r'"\s*(#.*)?\n\s*f?"', "", text)))


@pytest.mark.parametrize("block", [block for block in blocks(ALL, "python") if not block.startswith("--8<--")])
def test_the_python_blocks_compile(block: str) -> None:
    # ``continue`` belongs to the surrounding training loop.
    ast.parse(block.replace("continue", "pass"))


@pytest.mark.parametrize("page", ["reference/watch.md", "reference/detect_overflow.md"])
def test_the_python_of_the_reference_runs(page: str) -> None:
    for block in blocks(PAGES[page], "python"):
        exec(block, {})


def test_the_float32_recipe_mends_an_overflow() -> None:
    block = nn.Module()
    block.ffn = nn.Linear(64, 64, bias=False)
    nn.init.constant_(block.ffn.weight, 100.0)
    x = torch.full((1, 64), 100.0)
    with torch.autocast("cpu", dtype=torch.float16):
        assert block.ffn(x).isinf().all()
        exec(python_of("report.md", "class Float32"), {"nn": nn, "torch": torch, "block": block})
        assert block.ffn(x.half()).isfinite().all()


def test_the_versions_of_the_formats() -> None:
    protocol, file = (".".join(map(str, version)) for version in (wire.VERSION, connection.FORMAT))
    for row in (
        f"| protocol between ranks and collector | {protocol} |",
        f"| connection file | {file} |",
        f"| record, `run.db` | {schema.SCHEMA} |",
        f"| `report.json`, field `schema` | {as_json.SCHEMA} |",
    ):
        assert row in PAGES["versions.md"]


def test_the_guide_has_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = PAGES["guide.md"].partition("| extra |")[2].partition("\n\n")[0]
    first = "".join(row.split("|")[1] for row in table.splitlines()[1:])
    assert {*re.findall(r"`(\w+)`", first)} == extras.keys() - {"dev", "test"}


def test_the_documented_lowest_versions_are_the_required_ones() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    floors = dict(
        (name, version)
        for group in (
            project["dependencies"],
            *(extras[extra] for extra in ("agent", "export", "fleet", "metrics", "top", "ui")),
        )
        for name, version in (requirement.partition(";")[0].split(">=") for requirement in group)
    )
    lines = (ROOT / "deploy" / "constraints-lowest.txt").read_text().splitlines()
    lowest = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert lowest.keys() == floors.keys()
    for name, version in lowest.items():
        assert f"{version}.0.0".startswith(floors[name])
        assert f"| {name} | {version} |" in PAGES["versions.md"]
