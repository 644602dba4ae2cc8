"""How this rankwatch was installed, and so the command that adds an extra to it: another one might replace the installation."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from importlib.metadata import Distribution

NAME = "rankwatch"
PACKAGE = Path(__file__).resolve().parents[2]


class Installation(NamedTuple):
    """Where rankwatch came from, and what installs into its environment.

    ``folder``: of the sources, if it was installed from them, ``editable`` or not. ``address``: of the wheel, the archive or
    the repository; without both, rankwatch came from an index. ``installer``: a command, or ``pipx``. ``needs``: what each extra
    needs.
    """

    folder: str
    editable: bool
    address: str
    installer: str
    needs: Sequence[str]


def to_add(extra: str) -> str:
    """The command that adds an extra to this installation; for an empty name, that installs it once more."""
    return command_for(extra, _look())


def command_for(extra: str, installation: Installation) -> str:
    """The same for any installation. Pure."""
    packages = [need.partition(";")[0].strip() for need in installation.needs if _is_of(need, extra)]
    is_gone = bool(installation.folder) and not Path(installation.folder).is_dir()
    if extra and packages and (is_gone or installation.installer == "pipx"):
        how = f"pipx inject {NAME}" if installation.installer == "pipx" else installation.installer
        return shlex.join([*shlex.split(how), *packages])
    how = "pipx install --force" if installation.installer == "pipx" else installation.installer
    what = f"[{extra}]" * bool(extra)
    if installation.folder and not is_gone:
        given = [*["-e"] * installation.editable, installation.folder + what]
    else:
        given = [NAME + what + f" @ {installation.address}" * bool(installation.address)]
    return shlex.join([*shlex.split(how), *given])


def origin(direct_url: dict[str, Any]) -> tuple[str, bool, str]:
    """Folder, whether it is editable, and address, from the file ``direct_url.json`` of a distribution."""
    url = str(direct_url.get("url", ""))
    if "dir_info" in direct_url:
        return unquote(urlsplit(url).path), bool(direct_url["dir_info"].get("editable")), ""
    if "vcs_info" in direct_url:
        vcs = direct_url["vcs_info"]
        revision = vcs.get("requested_revision") or vcs.get("commit_id")
        url = f"{vcs.get('vcs', 'git')}+{url}" + f"@{revision}" * bool(revision)
    folder = direct_url.get("subdirectory")
    return "", False, url + f"#subdirectory={folder}" * bool(folder)


def _is_of(need: str, extra: str) -> bool:
    return bool(re.search(rf"\bextra\s*==\s*['\"]{re.escape(extra)}['\"]", need))


def _look() -> Installation:
    from importlib.metadata import PackageNotFoundError, distribution  # here: every command imports this file

    try:
        found = distribution(NAME)
        direct_url = json.loads(found.read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return Installation(_checkout(), True, "", _installer(""), ())
    folder, is_editable, address = origin(direct_url)
    needs, installer = found.requires or [], _installer((found.read_text("INSTALLER") or "").strip())
    if not _is_ours(found, folder if is_editable else ""):  # another one, which this one goes before on sys.path
        return Installation(_checkout(), True, "", installer, needs)
    return Installation(folder, is_editable, address, installer, needs)


def _is_ours(found: Distribution, sources: str) -> bool:
    """Whether what runs is this distribution, whose package is in the environment or, if it is editable, in its sources."""
    return PACKAGE.is_relative_to(Path(sources or str(found.locate_file(""))).resolve())


def _checkout() -> str:
    """The folder of the sources that run without having been installed; empty if there is none."""
    folder = PACKAGE.parent.parent
    return str(folder) if (folder / "pyproject.toml").is_file() and (folder / "agent").is_dir() else ""


def _installer(by: str) -> str:
    """What installs into this environment. ``by``: what rankwatch was installed by."""
    prefix = Path(sys.prefix)
    if (prefix / "pipx_metadata.json").is_file():
        return "pipx"
    if (prefix / "uv-receipt.toml").is_file():
        return "uv tool install"
    if find_spec("pip") is None or (by == "uv" and shutil.which("uv")):
        return f"uv pip install --python {shlex.quote(sys.executable)}"
    beside = Path(sys.executable).parent
    is_in_path = Path(shutil.which("pip") or "/").parent == beside
    return "pip install" if is_in_path else f"{shlex.quote(sys.executable)} -m pip install"
