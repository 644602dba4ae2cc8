"""The pages of docs/: their commands run, what they show is what is printed, and what they name exists."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from e2e.test_readme import PYTHON as README_PYTHON
from e2e.test_readme import shell_environment
from jobs import ROOT
from rankwatch.shared.config import _FURTHER, FUNCTIONS, Config, resolve
from rankwatch_monitor.cli import COMMANDS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.e2e

PAGES = {path.relative_to(ROOT / "docs" / "pages").as_posix(): path.read_text() for path in ROOT.glob("docs/pages/**/*.md")}
ALL = "".join(PAGES.values())


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def shaped(line: str) -> str:
    """A line without what differs from machine to machine: numbers, and what is cut out of a table by their width."""
    line = re.sub(r"\(vm, |\([\w.-]+, (?=local rank)", "(HOST, ", line)
    line = re.sub(r"in under \S+ s|in \d+\.\d+ s", "in TIME", line)
    return " ".join(re.sub(r"(?<![\w.\[(])x?\d[\d.]*(e[+-]\d+)?(?![\w\]])", "N", line).split())


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=shell_environment(folder),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_tutorial(tmp_path: Path) -> None:
    """Each command runs, and each line that is shown after it is printed by it, but for numbers."""
    (tmp_path / "train_pumps.py").write_text((ROOT / "deploy" / "examples" / "train_pumps.py").read_text())
    parts = re.split(r"```bash\n(.*?)\n```", PAGES["tutorial.md"], flags=re.DOTALL)
    codes, commands = [], parts[1::2]
    for command, after in zip(commands, parts[2::2], strict=True):
        done = run(command, tmp_path)
        codes.append(done.returncode)
        printed = {shaped(line) for line in (done.stdout + done.stderr).splitlines()}
        shown = [line for block in blocks(after, "text") for line in block.splitlines() if line != "[...]"]
        missing = [line for line in shown if shaped(line) not in printed]
        assert not missing, (command, missing, done.stdout, done.stderr)
    assert codes == [77, 77, 0, 0, 0, 0, 0]
    assert [command for command in commands if "torchrun" in command] == [commands[0], commands[1], commands[-1]]


def test_the_numbers_that_the_tutorial_rests_on() -> None:
    """They are told in words beside what is shown."""
    text = PAGES["tutorial.md"]
    for number in ("by a factor of 1.41", "grows by x1.41 a batch", "4.34e+00 input[0]", "3.42e+00 and 1.49e+01", "73.7"):
        assert number in text


def test_zero_code_on_several_nodes(tmp_path: Path) -> None:
    """The commands of the page, with a collector that the ranks find by its file; the options are those of the page's file."""
    page = PAGES["zero-code.md"]
    single, several, configured = [command.strip() for command in blocks(page, "bash")]
    script = README_PYTHON[0].replace("import rankwatch\n", "").replace("watch = rankwatch.watch(model)\n", "")
    (tmp_path / "train.py").write_text(re.sub(r"watch\.close\(\).*", "", script))
    (tmp_path / "rankwatch.toml").write_text(blocks(page, "toml")[0])
    (tmp_path / "shared").mkdir()
    done = run(configured, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "run train-0 finished: 2 ranks, 20 batches, no inf or nan" in done.stderr
    assert done.stderr.count("grad") == 0
    collector = ["rankwatch", "run", "--connection-file", "shared/rankwatch.json", "--job", "train", "--", "bash", "-c"]
    # A collector that ends with the command, which is given the connection by its file alone.
    done = run(shlex.join([*collector, f"unset RANKWATCH_ATTACH PYTHONSTARTUP; {several}"]), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "run train-0.2 finished: 2 ranks, 20 batches, no inf or nan" in done.stderr
    assert single == configured.replace("--rankwatch-config rankwatch.toml ", "")


def test_toml_that_is_shown_is_taken(tmp_path: Path) -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| `(\w+ = .*)` \|$", PAGES["reference/options.md"], re.MULTILINE)
    assert {name for name, _ in rows} == {field.name for field in fields(Config)} - FUNCTIONS
    for name, text in rows:
        assert list(tomllib.loads(text)) == [name]
    shown = [text for _, text in rows] + blocks(ALL, "toml")
    for number, text in enumerate(shown):
        path = tmp_path / f"{number}.toml"
        path.write_text(text)
        assert resolve({"RANKWATCH_CONFIG": str(path)}) != Config()


def test_every_variable_is_shown_and_is_taken() -> None:
    page = PAGES["reference/options.md"]
    known = {*_FURTHER, *(field.name.upper() for field in fields(Config) if field.name not in FUNCTIONS)}
    assert set(re.findall(r"RANKWATCH_([A-Z_]+[A-Z])\b", page)) == known
    for variable, value in re.findall(r"^\| `\w+` \| .*? \| `(RANKWATCH_\w+)=(\S+)` \|", page, re.MULTILINE):
        assert resolve({variable: value}) != Config(), variable


def test_variables_named_elsewhere_exist() -> None:
    known = {f"RANKWATCH_{name}" for name in (*_FURTHER, *(field.name.upper() for field in fields(Config)))}
    meant = {"RANKWATCH_GRADIENT"}  # which is shown as a mistake
    assert set(re.findall(r"RANKWATCH_[A-Z_]+[A-Z]\b", ALL)) - known <= meant


def test_every_command_has_its_help() -> None:
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    page = hooks["on_page_markdown"](PAGES["reference/commands.md"])
    for command in COMMANDS:
        assert f"## rankwatch {command}\n" in page
        assert f"usage: rankwatch {command} " in page


def test_tests_that_are_named_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::|`, `)?(test_\w+)?", ALL)
    assert len(named) > 5
    for path, function in named:
        assert f"def {function}" in (ROOT / path).read_text(), (path, function)


def test_what_troubleshooting_quotes_is_said() -> None:
    """Each message in the first column, cut at what is filled in, is in the source."""
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
    """Words alone: a literal that goes on in the next line of the source, or holds a placeholder, is one text."""
    return " ".join(re.findall(r"[A-Za-z]+", re.sub(r'"\s*(#.*)?\n\s*f?"', "", text)))


@pytest.mark.parametrize("block", blocks(ALL, "python"))
def test_the_python_is_python(block: str) -> None:
    if not block.startswith("--8<--"):
        ast.parse(block)


@pytest.mark.parametrize("page", ["reference/watch.md", "reference/detect_overflow.md"])
def test_the_python_of_the_reference_runs(page: str) -> None:
    for block in blocks(PAGES[page], "python"):
        exec(block, {})


def test_the_pages_load_nothing_from_elsewhere() -> None:
    assert "font: false" in (ROOT / "docs" / "mkdocs.yml").read_text()
    assert not re.search(r"https?://", ALL + (ROOT / "docs" / "mkdocs.yml").read_text())


def test_the_lowest_versions_are_the_floors() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    floors = dict(
        (name, version)
        for group in (project["dependencies"], *(extras[extra] for extra in ("agent", "export", "metrics", "top", "ui")))
        for name, version in (requirement.partition(";")[0].split(">=") for requirement in group)
    )
    lines = (ROOT / "deploy" / "constraints-lowest.txt").read_text().splitlines()
    lowest = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert lowest.keys() == floors.keys()
    for name, version in lowest.items():
        assert f"{version}.0.0".startswith(floors[name])
        assert f"| {name} | {version} |" in PAGES["versions.md"]
