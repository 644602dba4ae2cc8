"""The command that adds an extra fits how rankwatch was installed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from jobs import ROOT
from rankwatch.shared.system.installed import Installation, command_for, origin, to_add

NEEDS = ("numpy>=1.23", "rich>=13; extra == 'top'", 'pyarrow>=14 ; extra == "export"', "fsspec>=2024.3; extra == 'export'")
HERE = str(ROOT)


def installed(direct_url: str = "{}", installer: str = "pip install") -> Installation:
    return Installation(*origin(json.loads(direct_url)), installer, NEEDS)


def folder(path: str, *, editable: bool) -> str:
    info = {"editable": True} if editable else {}
    return json.dumps({"url": f"file://{path}", "dir_info": info})


GIT = '{"url": "https://git.example/rw", "vcs_info": {"vcs": "git", "requested_revision": "v1", "commit_id": "5f3a"}%s}'


@pytest.mark.parametrize(
    ("installation", "command"),
    [
        (installed(), "pip install 'rankwatch[top]'"),
        (installed(folder(HERE, editable=True)), f"pip install -e '{HERE}[top]'"),
        (installed(folder(HERE, editable=False)), f"pip install '{HERE}[top]'"),
        (installed(folder("/no/such%20folder", editable=True)), "pip install 'rich>=13'"),
        (
            installed('{"url": "file:///tmp/rankwatch-0.1.0-py3-none-any.whl", "archive_info": {}}'),
            "pip install 'rankwatch[top] @ file:///tmp/rankwatch-0.1.0-py3-none-any.whl'",
        ),
        (installed(GIT % ""), "pip install 'rankwatch[top] @ git+https://git.example/rw@v1'"),
        (
            installed(GIT % ', "subdirectory": "py"'),
            "pip install 'rankwatch[top] @ git+https://git.example/rw@v1#subdirectory=py'",
        ),
        (installed(installer="pipx"), "pipx inject rankwatch 'rich>=13'"),
        (installed(folder(HERE, editable=True), "uv tool install"), f"uv tool install -e '{HERE}[top]'"),
        (installed(installer="'/a b/python' -m pip install"), "'/a b/python' -m pip install 'rankwatch[top]'"),
    ],
)
def test_the_command_fits_the_installation(installation: Installation, command: str) -> None:
    assert command_for("top", installation) == command


def test_all_packages_of_an_extra_are_named_where_the_sources_are_gone() -> None:
    gone = installed(folder("/no/such/folder", editable=True))
    assert command_for("export", gone) == "pip install 'pyarrow>=14' 'fsspec>=2024.3'"
    assert command_for("", installed(installer="pipx")) == "pipx install --force rankwatch"
    assert command_for("", installed(folder(HERE, editable=True))) == f"pip install -e {HERE}"


def test_the_sources_that_run_here_stay_editable() -> None:
    *_, how, what = shlex.split(to_add("top"))
    assert how == "-e"
    assert what.endswith("[top]")
    assert (Path(what.removesuffix("[top]")) / "agent" / "rankwatch").samefile(ROOT / "agent" / "rankwatch")
