"""Whose code a file is, decided by its path."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest
import torch

import rankwatch
from rankwatch.touch.whose_code import is_installed, owner_of, text_of

OURS = Path(rankwatch.__file__).parent


@pytest.mark.parametrize(
    ("file", "owner", "installed"),
    [
        ("/home/me/train.py", "user", False),
        ("train.py", "user", False),
        ("<ipython-input-3>", "user", False),
        ("/opt/venv/lib/python3.12/site-packages/transformers/trainer.py", "user", True),
        ("/usr/lib/python3/dist-packages/six.py", "user", True),
        ("/opt/venv/lib/python3.12/site-packages/torch/nn/functional.py", "torch", True),
        ("/opt/venv/lib/python3.12/site-packages/accelerate/accelerator.py", "torch", True),
        (torch.__file__, "torch", True),
        (ast.__file__, "torch", True),
        (threading.__file__, "torch", True),
        ("<frozen importlib._bootstrap>", "torch", True),
        (str(OURS / "hook" / "hooks.py"), "ours", True),
        (str(OURS / "tell" / ".." / "errors.py"), "ours", True),
        (str(OURS / "demo.py"), "user", False),
    ],
)
def test_whose_code_a_file_is(file: str, owner: str, installed: bool) -> None:
    assert (owner_of(file), is_installed(file)) == (owner, installed)


def test_torch_that_was_built_from_source_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__file__", "/src/pytorch/torch/__init__.py")
    assert owner_of("/src/pytorch/torch/nn/functional.py") == "torch"
    assert owner_of("/src/pytorch/benchmarks/mine.py") == "user"


def test_a_line_of_a_file_that_has_changed_is_not_shown(tmp_path: Path) -> None:
    assert text_of(ast.__file__, 1) == Path(ast.__file__).read_text().splitlines()[0].strip()
    changed = tmp_path / "train.py"
    changed.write_text("x = 1\n")
    assert text_of(str(changed), 1) == ""
    assert text_of(str(tmp_path / "absent.py"), 1) == ""
