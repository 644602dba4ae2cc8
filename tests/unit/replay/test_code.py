"""What is said of a user's code that cannot be run again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed

from rankwatch.errors import UsageError
from rankwatch.replay.code import UsersCode


@pytest.mark.parametrize("said", ["no group. Call init_process_group.", "no group. Call init_process_group"])
def test_the_full_stop_of_an_error_is_not_doubled(said: str, tmp_path: Path) -> None:
    text = f"def refuse():\n    raise ValueError({said!r})\n\nWIDTH = refuse()\n\nclass Net:\n    width = WIDTH\n"
    (script := tmp_path / "train.py").write_text(text)
    about = {"file": str(script), "package": "", "globals": []}
    code = UsersCode({"__main__": about}, {"__main__": text}, [])
    with pytest.raises(UsageError) as raised:
        code.find("__main__:Net")
    assert "needs it: ValueError: no group. Call init_process_group. --module MODULE:CLASS names" in str(raised.value)


def test_nor_that_of_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "refusing_module.py").write_text("raise RuntimeError('no licence.')\n")
    with pytest.raises(UsageError, match=r": RuntimeError: no licence\. Its own code raises this"):
        UsersCode({}, {}, [str(tmp_path)]).find("refusing_module:Net")


def test_code_that_asks_for_its_rank_as_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    text = "import torch.distributed as dist\nfrom torch.distributed import get_world_size\n"
    text += "class Net:\n    rank, size = dist.get_rank(), get_world_size()\n"
    (tmp_path / "asking_module.py").write_text(text)
    net = UsersCode({}, {}, [str(tmp_path)], rank=(3, 8)).find("asking_module:Net")
    assert (net.rank, net.size) == (3, 8)
    with pytest.raises(ValueError, match="process group has not been initialized"):
        torch.distributed.get_rank()
