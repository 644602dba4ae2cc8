"""Root forwards that run: their nesting, their thread, and how one ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from torch import nn

from rankwatch.hook.running import RunningRoots
from rankwatch.judge.events import Feed


def test_only_the_outermost_forward_begins_and_ends_a_batch() -> None:
    roots = RunningRoots(nn.Identity(), Feed())
    assert [roots.enter(), roots.enter(), roots.enter()] == [True, False, False]
    assert [roots.leave(), roots.leave(), roots.leave()] == [False, False, True]
    assert not roots.is_here()


def test_a_second_thread_is_not_watched_while_a_forward_runs() -> None:
    roots = RunningRoots(nn.Identity(), Feed())
    assert roots.enter()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(roots.enter).result() is None
        assert other.submit(roots.is_elsewhere).result()
        assert not other.submit(roots.is_here).result()
        assert roots.is_here()
        assert roots.leave()
        assert other.submit(roots.enter).result()
        assert roots.is_elsewhere()


def test_a_second_thread_is_not_watched_before_the_first_one_is_judged() -> None:
    roots = RunningRoots(nn.Identity(), Feed())
    assert roots.enter()
    with ThreadPoolExecutor(1) as other:
        with roots.leaving() as is_outermost:
            assert is_outermost
            assert other.submit(roots.enter).result() is None
        assert other.submit(roots.enter).result()


def test_a_forward_that_ends_without_a_beginning_is_no_outermost_one() -> None:
    roots = RunningRoots(nn.Identity(), Feed())
    assert not roots.leave()
    assert roots.enter()


def test_only_an_exception_raised_during_the_forward_counts() -> None:
    roots = RunningRoots(nn.Identity(), Feed())
    try:
        raise ValueError("before")
    except ValueError:
        roots.enter()
        assert not roots.is_raising()
        try:
            raise KeyError("during")
        except KeyError:
            assert roots.is_raising()
