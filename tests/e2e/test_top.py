"""``rankwatch top``: real jobs and a large record, shown on real terminals."""

from __future__ import annotations

import re
import signal
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

import crowds
from collectors import until
from jobs import RANKWATCH, Training, environment
from rankwatch.shared.system.installed import to_add
from terminals import Pty, Tmux

pytestmark = pytest.mark.e2e


def top(*arguments: str) -> list[str]:
    return [*RANKWATCH, "top", *arguments]


@pytest.mark.slow
def test_on_a_terminal(training: Training) -> None:
    with closing(Tmux(top(str(training.runs), "--interval", "0.2"))) as terminal:
        terminal.await_text("q: quit")
        with training.begun() as process:
            screen = terminal.await_text("batches/s")
            assert "train-0: job train, restart 0, 2 ranks on 1 node" in screen
            assert "2 running" in screen
            screen = terminal.await_text("gradient norm")  # in the free rows, beside the loss
            assert re.search(r"^loss \S+.*   gradient norm \S+.*\n[▁-█ ]+$", screen, re.MULTILINE)
            assert re.search(r"^  rank +state +batch +lag +loss ", screen, re.MULTILINE)  # of each rank
            assert "changed most" not in screen
            terminal.press("g")
            assert re.search(r"blocks\.\d\.square", terminal.await_text("fastest growing"))
            terminal.press("g", "Down", "Enter")
            screen = terminal.await_text("rank 1 of 2 (")
            assert "running: batch" in screen
            terminal.await_text("largest in its last batches")
            terminal.press("b")
            terminal.await_text("> 1 ")
            terminal.resize(70, 12)
            terminal.await_text("q: quit")
            terminal.resize(80, 24)
            training.overflow()
            terminal.await_text("first inf in run train-0")
        assert process.returncode == 77
        screen = terminal.await_text("aborted after")
        assert "rank 1 of 2 (" in screen
        assert "blocks.2.square (Square), output: inf" in screen
        assert "recurred 3 of 3" in screen
        terminal.press("q")
        screen = terminal.await_text("ended 0")
        assert "first inf" not in screen  # the earlier screen is restored
        terminal.await_text(" icanon")
        terminal.await_text(" echo ")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 15)])
def test_help_and_curves_on_a_real_terminal(training: Training, width: int, height: int) -> None:
    with closing(Tmux(top(str(training.runs), "--interval", "0.2"))) as terminal, training.begun():
        terminal.resize(width, height)
        curves = r"^loss \S+ .*[▁-█!]{6}.*  batches/s \S+ .*[▁-█]{6}|^batches/s \S+ .*[▁-█]{6}(.*\n)+loss (.*\n)+[▁-█]{6}"
        until(lambda: re.search(curves, terminal.screen(), re.MULTILINE))  # they grow batch by batch
        assert "?: help" in terminal.screen()
        terminal.press("?")
        screen = terminal.await_text("rank: its number")
        assert "  lag       how many batches" in screen
        assert "running for" not in screen
        terminal.press("NPage", "NPage", "NPage", "NPage", "NPage", "NPage", "NPage")
        assert "  ?         this help, and back" in terminal.await_text("quit; the run goes on")
        terminal.press("b")
        terminal.await_text("running for")
        terminal.press("Enter", "?")
        terminal.await_text("how many optimizer steps came before it")
        terminal.press("?", "q")
        terminal.await_text("ended 0")


def test_a_terminal_without_bars_gets_letters(tmp_path: Path) -> None:
    crowds.write(tmp_path, 16, 8)
    env = environment(PYTHONIOENCODING="ascii:replace", PYTHONUTF8="0")
    done = subprocess.run(top(str(tmp_path), "--once"), env=env, capture_output=True, text=True, check=True)
    assert re.search(r"^batches/s 2 #+$", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_as_lines(training: Training) -> None:
    command = top(str(training.runs), "--interval", "0.1")
    with subprocess.Popen(command, env=training.env, stdout=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        assert "yet: waiting for it" in viewer.stdout.readline()
        with training.begun():
            assert any(re.search(r"batches/s; 2 running; loss -?\d", line) for line in viewer.stdout)
            training.overflow()
            rest = viewer.stdout.read()
    assert viewer.returncode == 0
    assert "train-0: aborted: rank 1 of 2 (" in rest
    assert "rankwatch: first inf in run train-0" in rest
    assert "frame 7 of 14" in rest
    assert "     inf output\n\nrankwatch: first inf in run train-0: rank " in rest
    assert rest.splitlines()[-1].startswith("  replay     rankwatch replay ")
    assert "\x1b" not in rest


@pytest.mark.parametrize("how", ["q", "SIGTERM", "SIGINT"])
def test_the_terminal_is_restored_however_it_ends(tmp_path: Path, how: str) -> None:
    crowds.write(tmp_path, 16, 2)
    with closing(Pty(top(str(tmp_path)), environment())) as terminal:
        terminal.await_bytes(b"q: quit")
        assert terminal.attributes() != terminal.before
        if how == "q":
            terminal.press(b"q")
        else:
            terminal.process.send_signal(signal.Signals[how])
        assert terminal.end() == {"q": 0, "SIGTERM": 143, "SIGINT": 130}[how]
        assert terminal.attributes() == terminal.before
        assert terminal.seen.rindex(b"\x1b[?1049l") > terminal.seen.rindex(b"\x1b[?1049h")  # the alternate screen is closed
        assert terminal.seen.rindex(b"\x1b[?25h") > terminal.seen.rindex(b"\x1b[?25l")  # and the cursor is visible again
        assert b"Traceback" not in terminal.seen


@pytest.mark.slow
def test_once(tmp_path: Path) -> None:
    crowds.write(tmp_path, 64, 3)

    def once(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = top(str(tmp_path), "--once", *arguments)
        return subprocess.run(command, env=environment(**env), capture_output=True, text=True, check=False)

    text = once().stdout
    assert "crowd-0: job crowd, restart 0, 64 ranks on 8 nodes" in text
    assert "\x1b" not in text
    assert "\x1b[1m" in once(FORCE_COLOR="1").stdout
    assert re.search("^8 +running +3 ", once("--node", crowds.host(8)).stdout, re.MULTILINE)
    assert "rank 9 of 64 (gpu-a100-0001.cluster, local rank 1)" in once("--rank", "9").stdout
    for arguments, why in (
        (("--rank", "64"), "there is no rank 64 in a run of 64"),
        (("--node", "none"), "no rank is on node none; its nodes: gpu-a100-0000.cluster, "),
    ):
        refused = once(*arguments)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert why in refused.stderr
    (tmp_path / "empty").mkdir()
    refused = subprocess.run(
        top(str(tmp_path / "empty"), "--once"), env=environment(), capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "no run in" in refused.stderr


def test_without_rich_it_says_what_to_install(tmp_path: Path) -> None:
    crowds.write(tmp_path, 4, 1)
    code = (
        "import sys, importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'rich' else find(name, *more)\n"
        "from rankwatch_monitor.cli import main; sys.exit(main(['top', '--once', sys.argv[1]]))"
    )
    command = [RANKWATCH[0], "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert to_add("top") in done.stderr
