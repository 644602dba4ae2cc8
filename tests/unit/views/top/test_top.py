"""What ``rankwatch top`` shows: the layout of generated records, and the effect of keys; nothing is drawn here."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import crowds
import left_out
import makers
from rankwatch.shared.printable import paragraph, printable
from rankwatch.shared.types.frame import NO_LOSS
from rankwatch_monitor.decide.core.report import RankStack, RankState, Stall
from rankwatch_monitor.decide.replicas.desync import Compared, Desync, DesyncPattern
from rankwatch_monitor.record.follow import Follower, View
from rankwatch_monitor.record.numbers.recent import Recent
from rankwatch_monitor.views.top.focus import Focus, press, window
from rankwatch_monitor.views.top.keys import parse
from rankwatch_monitor.views.top.layout import Block, Scene, Size, height, lay_out, settled
from rankwatch_monitor.views.top.plain import Changes
from rankwatch_monitor.views.top.ranks import MEANINGS, TROUBLE
from rankwatch_monitor.views.top.table import GAP, Column, Line, TableRow, TextTable, shorten
from rankwatch_monitor.views.top.tables import describe_time, rank_table

NORMAL = Size(80, 24)
NODES = Focus()
NODE = crowds.host(crowds.STILL)


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> View:
    """1,024 ranks on 128 nodes, three of them in trouble."""
    return Follower(crowds.write(tmp_path_factory.mktemp("runs"))).look()


def scene(view: View, *, after: float = 0.5) -> Scene:
    return Scene.of(view, view.standings_at + after)


def text_of(blocks: list[Block], width: int = 80) -> list[str]:
    """The lines that are drawn."""
    lines = []
    for block in blocks:
        if isinstance(block, Line):
            lines.append(block.text)
            continue
        widths = block.widths(width)
        for cells in ([column.name for column in block.columns], *(row.cells for row in block.rows)):
            assert all(len(cell) <= most for cell, most in zip(cells[1:], widths[1:], strict=True)), cells
            lines.append((" " * GAP).join(cell.ljust(most) for cell, most in zip(cells, widths, strict=True)).rstrip())
    return lines


def shown(view: View, focus: Focus = NODES, size: Size = NORMAL, *, after: float = 0.5, keys: bool = True) -> str:
    blocks = lay_out(scene(view, after=after), focus, size, keys=keys)
    lines = text_of(blocks, size.width)
    assert sum(map(height, blocks)) <= size.height
    assert max(map(len, lines)) <= size.width
    return "\n".join(lines)


def test_a_run_of_1024_ranks_in_24_lines(view: View) -> None:
    lines = shown(view).splitlines()
    assert len(lines) == 24
    assert lines[0] == "crowd-0: job crowd, restart 0, 1024 ranks on 128 nodes"
    assert re.fullmatch(r"running for 0:00:1\d, batch 20, 2 batches/s", lines[1])
    assert lines[2] == "1 lost, 1 silent, 1 still, 1021 running"
    nodes = [line.split() for line in lines[6:9]]
    assert [node[:2] for node in nodes[1:]] == [["gpu-a100-0051", "408-415"], ["gpu-a100-0012", "96-103"]]
    assert nodes[0][:2] == [">", "gpu-a100-0025"]
    assert nodes[2][2:] == ["1", "still,", "7", "running", "19", "1", "backward", "42", "s"]
    (nearest,) = [line for line in lines if "layers.11.feed_forward output" in line]
    assert nearest.split()[-5:] == ["6.06e+02", "float16", "x108", "x1.050", "0"]
    assert "noticed: ranks 0-3: next to overflow: decoder.layers.11.feed_forward" in "\n".join(lines)
    assert lines[-1] == "up, down: choose   enter: its ranks   g: by growth   ?: help   q: quit"
    assert re.match(r"batches/s 2 █+$", lines[3])
    assert shown(view, size=Size(60, 24)).splitlines()[-1] == "enter: its ranks   g: by growth   ?: help   q: quit"
    keys = shown(view, Focus(NODE, by_growth=True)).splitlines()[-1]
    assert keys.startswith("enter: the rank   b: nodes   g: by headroom   ?: ")


@pytest.mark.parametrize("size", [Size(80, 24), Size(80, 10), Size(120, 50), Size(80, 1000), Size(62, 15)])
@pytest.mark.parametrize("focus", [Focus(), Focus(NODE), Focus(rank=crowds.SILENT), Focus(rank=4711), Focus("nowhere")])
def test_every_view_fits_every_terminal(view: View, size: Size, focus: Focus) -> None:
    shown(view, focus, size)
    shown(replace(view, is_over=True), focus, size)


@pytest.mark.slow
def test_a_run_of_16384_ranks(tmp_path: Path) -> None:
    huge = Follower(crowds.write(tmp_path, 16384, 2)).look()
    text = shown(huge)
    assert "16384 ranks on 2048 nodes" in text
    assert "1 lost, 1 silent, 1 still, 16381 running" in text


def test_the_ranks_of_a_node_and_one_of_them(view: View) -> None:
    lines = shown(view, Focus(NODE)).splitlines()
    assert lines[2] == f"1 still, 7 running on {NODE}; in all 1 lost, 1 silent, 1 still..."
    assert re.fullmatch(r"> 100 +still +19 +1 +7 +backward +0.3 s +42 s", lines[6])
    assert [line.split()[0] for line in lines[7:13]] == ["96", "97", "98", "99", "101", "102"]
    one = shown(view, Focus(rank=crowds.SILENT))
    assert f"rank 411 of 1024 ({crowds.host(411)}, local rank 3), process 511" in one
    assert "heard 14 s ago, moved 3.0 s ago; silent, but still connected" in one
    assert "5 of its batches were dropped" in one
    assert re.search(r"decoder.layers.11.feed_forward output +x108 +19 +19 +500 ms", one)
    assert "there is no rank 4711 in a run of 1024" in shown(view, Focus(rank=4711))
    assert "no rank is on node nowhere; its nodes: gpu-a100-0025.cluster, " in shown(view, Focus("nowhere"))


def test_the_memory_of_a_rank_and_that_it_grows_all_the_time(view: View) -> None:
    def of(**memory: object) -> View:
        rank = view.standings[96]._replace(**memory)  # type: ignore[arg-type]
        return replace(view, standings={**view.standings, 96: rank})

    assert "\nmemory 2 GiB; memory of its device 40 GiB\n" in shown(
        of(memory=2 << 30, device_memory=40 << 30), Focus(rank=96)
    )
    assert "\nmemory" not in shown(view, Focus(rank=96))
    told = "memory 0.4 GiB -> 15.9 GiB, +8 MiB a batch"
    leaking = of(memory=16 << 30, leak=told)
    assert f"\n{told}\n" in shown(leaking, Focus(rank=96))
    leaks = scene(leaking)
    assert rank_table([one for one in leaks.ranks if one.row.rank == 96]).rows[0].style == "yellow"


STALL = Stall((7,), (0, 1), "rank 7 of 1024 (node0) stalled: no progress for 300 s, though its heartbeat comes", 1, 1023)
STACKS = (
    RankStack(7, "train.py:20 in load: time.sleep(3600)", ("main thread", "  train.py:20 in load: time.sleep(3600)")),
    RankStack(0, "all_reduce of 4 float32 (nccl, 1024 ranks), called at train.py:32 in main", ("main thread",)),
    RankStack(1, why_not="it is not connected"),
)


def with_stall(view: View) -> View:
    return replace(view, report=replace(view.report, stall=STALL, stacks=STACKS))


@pytest.mark.parametrize("size", [NORMAL, Size(60, 15), Size(40, 12), Size(80, 8)])
def test_a_stall_is_at_the_head_with_what_its_ranks_are_in(view: View, size: Size) -> None:
    text = shown(with_stall(view), size=size)
    assert "rank 7 of 1024 (node0) stalled" in text or "rank 7 stalled; 1023 ranks wait" in text
    assert "rank 7 is in train.py:20 in load" in text or size.height < 12
    assert "1 still, 2 waiting" in text or "2 still, 2 waiting" in text
    assert "  train.py:20 in load: time.sleep(3600)" in shown(with_stall(view), Focus(rank=7))


def test_a_run_that_stalls_has_no_rate(view: View) -> None:
    trained = replace(view, pace=8.2, recent=Recent((), tuple((batch, batch / 4) for batch in range(9))))
    rates = [("8.2 batches/s" in text, "batches/s 4 " in text) for text in map(shown, (trained, with_stall(trained)))]
    assert rates == [(True, True), (False, False)]
    assert "\nbatches/s 0 ██" in shown(with_stall(trained))


def test_a_stall_its_stacks_and_its_end_are_lines(view: View) -> None:
    changes = Changes(10.0)
    assert not [line for line in changes.lines(view, view.standings_at) if "stalled" in line]
    pending = replace(view, report=replace(view.report, stall=STALL, stacks=(STACKS[2], *STACKS[1:2])))
    first = list(changes.lines(pending, view.standings_at))
    assert first[:2] == [f"crowd-0: {STALL.text}", "crowd-0: rank 1 gave no stack: it is not connected"]
    then = list(changes.lines(with_stall(view), view.standings_at))
    assert then == [
        "crowd-0: rank 7 is in train.py:20 in load: time.sleep(3600)",
        "  main thread",
        "    train.py:20 in load: time.sleep(3600)",
    ]
    assert list(changes.lines(view, view.standings_at)) == ["crowd-0: no rank is stalled any more"]


def test_the_ranks_that_an_election_waits_for_are_shown(view: View) -> None:
    assert view.standing is not None
    waiting = replace(view, standing=view.standing._replace(waiting="waiting for rank 3 to pass frame 7 of batch 3"))
    assert "waiting for rank 3 to pass frame 7 of batch 3" in shown(waiting)
    assert "waiting for" not in shown(replace(waiting, is_over=True))


def test_desynced_parameters_come_first(view: View) -> None:
    flipped = Desync(120, "layers.3.weight", (203,), 1024, DesyncPattern.ONE_RANK, "gpu-a100-0025.cluster", "GPU-5f3a", 104)
    apart = replace(view, report=replace(view.report, desync=(flipped,)))
    lines = shown(apart).splitlines()
    assert len(lines) == 24
    assert lines[5].startswith("desync: rank 203 of 1024 (gpu-a100-0025.cluster, GPU-5f3a): layers.3.weight")
    assert lines[9] == ""
    assert lines[11].startswith("> gpu-a100-0025")
    assert "desync: rank 203 of 1024" in shown(apart, Focus(rank=203))
    assert "desync" not in shown(apart, Focus(rank=204))
    many = tuple(replace(flipped, ranks=(rank,), origin=rank) for rank in range(20))
    crowded = replace(apart, report=replace(apart.report, desync=many))
    assert [line.partition(":")[0] for line in shown(crowded).splitlines()[5:9]] == ["desync"] * 3 + ["[...]"]
    for size in (Size(80, 10), Size(120, 50), Size(62, 15)):
        shown(crowded, size=size)
    changes = Changes(1.0)
    (told,) = [line for line in changes.lines(apart, view.standings_at) if "desync" in line]
    assert told.startswith("crowd-0: desync: rank 203 of 1024 (gpu-a100-0025.cluster, GPU-5f3a): layers.3.weight differs")
    later = replace(view, report=replace(view.report, desync=(flipped, replace(flipped, step=121, parameter="head.weight"))))
    assert not [line for line in changes.lines(later, view.standings_at + 2) if "desync" in line]


def test_what_was_left_out_is_told_while_the_run_goes_on(tmp_path: Path) -> None:
    going_on = Follower(left_out.write(tmp_path, ends=False)).look()
    assert "2 steps were left out: batch 4 (rank 1, layer: invalid), batch 9" in shown(going_on, after=going_on.last)
    changes = Changes(1.0)
    told = [line for line in changes.lines(going_on, 0.0) if "left out" in line]
    assert told[0].startswith("train-0: left out: batch 4 (rank 1, layer: invalid): aten.div is nan")
    assert len(told) == 2
    assert not [line for line in changes.lines(going_on, 9.0) if "left out" in line]


def test_that_replicas_are_equal_is_said_beside_the_ranks(view: View) -> None:
    equal = replace(view, report=replace(view.report, compared=Compared(19, 146, 1024, 20, True)))
    assert "1021 running; replicas equal at step 19\n" in shown(equal)
    assert "replicas" not in shown(replace(view, report=replace(equal.report, compared=Compared(19, 146, 1024, 20, False))))


def test_a_silent_collector_and_a_run_without_progress(view: View) -> None:
    assert "the collector was last heard 40 s ago" in shown(view, after=40)
    assert "last heard" not in shown(replace(view, is_over=True), after=40)
    assert view.standing is not None
    slow = replace(view, standing=view.standing._replace(heartbeat=10.0))
    assert "last heard" not in shown(slow, after=29)  # three heartbeats are 30 s
    assert "the collector was last heard 31 s ago" in shown(slow, after=31)
    still = {rank: standing._replace(still=45.0, state=RankState.RUNNING) for rank, standing in view.standings.items()}
    text = shown(replace(view, standings=still))
    assert "no progress for 45 s" in text
    assert "1 still, 1021 waiting" in text  # they wait for the rank that is furthest behind


def test_a_verdict_gets_the_rows_that_it_needs(tmp_path: Path) -> None:
    view = Follower(crowds.write(tmp_path, 16, 4, trouble=False, verdict=True)).look()
    lines = shown(view).splitlines()
    assert lines[1].startswith("aborted, its ranks are ending, after 0:00:0")
    assert lines[4] == "rankwatch: first inf in run crowd-0: rank 7, batch 4, layer, output (overflow)"
    assert lines[5].startswith("  culprit    rank 7 of 16 (gpu-a100-0000.cluster, local rank 7), batch 4")
    text = "\n".join(lines)
    assert "cause      overflow: inputs and weights were finite" in text
    assert "  try        " in text
    assert "     inf output" in shown(view, size=Size(80, 28))  # the culprit's frame, the last one shown
    assert len([line for line in lines if "gpu-a100-000" in line and "running" in line]) == 2
    everything = shown(view, size=Size(80, 1000), keys=False)
    assert "Last 21 forward frames:" in everything
    assert "noticed: ranks 0-3" in everything


def test_the_culprit_comes_first_with_its_role(tmp_path: Path) -> None:
    view = Follower(crowds.write(tmp_path, 8, 4, trouble=False, verdict=True)).look()
    head, first, second, *_ = shown(view, Focus(crowds.host(7))).splitlines()[-7:]
    assert re.match(r"  rank 1-5/8 +role +state ", head)
    assert re.match(r"> 7 +culprit +running ", first)
    assert re.match(r"  0 +running ", second)
    assert "running, culprit: batch 4" in shown(view, Focus(rank=7))
    going_on = Follower(crowds.write(tmp_path / "other", 8, 4, trouble=False)).look()
    assert "role" not in shown(going_on, Focus(crowds.host(7)))


def test_the_node_of_the_culprit_comes_first(tmp_path: Path) -> None:
    view = Follower(crowds.write(tmp_path, 16, 4, trouble=False, verdict=True)).look()
    verdict = view.report.verdict
    assert verdict is not None
    there = replace(view, report=replace(view.report, verdict=replace(verdict, tripped=11)))
    assert [scene(one).nodes[0].host for one in (view, there)] == [crowds.host(7), crowds.host(11)]


def test_no_rank_has_connected_and_nothing_is_recorded_yet(view: View) -> None:
    rows = tuple(replace(row, state=RankState.MISSING, host="", pid=0) for row in view.report.ranks)
    nothing = replace(view, standings={}, headroom=[], batches={}, pace=None, recent=Recent(), standings_at=0.0)
    empty = replace(nothing, report=replace(view.report, ranks=rows, notices=()))
    lines = shown(empty).splitlines()
    assert lines[1].endswith("no batch yet")
    assert lines[2] == "1024 missing"
    assert lines[5].split()[:3] == [">", "0", "missing"]  # all ranks are on one unknown node, so ranks are shown


def test_names_are_no_markup_and_texts_have_one_line(tmp_path: Path, view: View) -> None:
    evil = printable("\x1b[2J\x07\n\r[red]")
    rows = tuple(replace(row, host=evil, farewell=evil) for row in view.report.ranks)
    notice = makers.notice(module=evil, label=evil)
    report = replace(view.report, run=evil, job=evil, reason=paragraph("x\n\x1b[2J"), ranks=rows, notices=((0, notice),))  # type: ignore[arg-type]
    report = replace(report, notices=tuple(type(view.report.notices[0])(*kept) for kept in report.notices))
    headroom = [one._replace(module=evil, label=evil, dtype=evil) for one in view.headroom]
    hostile = replace(view, report=report, headroom=headroom)
    texts = [shown(hostile, focus) for focus in (Focus(), Focus(evil), Focus(rank=3))]
    texts += Changes(1.0).lines(hostile, view.standings_at)
    for text in texts:
        assert all(letter.isprintable() or letter == "\n" for letter in text)
        assert "\\x1b[2J\\x07" in text


def test_keys_move_through_nodes_and_ranks(view: View) -> None:
    here = scene(view)
    focus = Focus()

    def after(*keys: str) -> Focus:
        moved = focus
        for key in keys:
            moved = press(moved, key, here.names(moved), is_root=len(here.nodes) == 1)
        return moved

    assert after("down", "down") == Focus(chosen=NODE)
    assert after("down", "down", "enter") == Focus(NODE)
    assert after("down", "down", "enter", "down", "enter") == Focus(NODE, rank=96, chosen=96)
    assert after("down", "down", "enter", "enter", "down", "down", "up").rank == 96
    assert after("down", "down", "enter", "down", "enter", "down", "back") == Focus(NODE, chosen=97)
    assert after("down", "down", "enter", "back") == Focus(chosen=NODE)
    assert after("up", "back") == Focus(chosen=crowds.host(crowds.LOST))
    assert after(*["page-down"] * 50).chosen == "gpu-a100-0127.cluster"
    assert after("growth").by_growth
    assert "fastest growing" in shown(view, after("growth"))
    assert "> gpu-a100-0127" in shown(view, after(*["page-down"] * 50))


def test_help_explains_each_column_of_what_is_on_the_screen(view: View, tmp_path: Path) -> None:
    small = Follower(crowds.write(tmp_path, 16, 4)).look()
    for seen, focus in ((view, NODES), (view, Focus(NODE)), (view, Focus(rank=3)), (small, NODES)):
        tables = [block for block in lay_out(scene(seen), focus, Size(200, 60), keys=False) if isinstance(block, TextTable)]
        text = shown(seen, focus._replace(help=0), Size(80, 200))
        for column in (column for table in tables for column in table.columns):
            assert column.means
            name = column.name.partition(" 1-")[0]
            assert re.search(rf"^(  )?{re.escape(name)}(:|\s)", text, re.MULTILINE), name
        assert all(f"\n  {key}" in text for key in ("up, down", "enter", "g", "?", "q"))
        assert ("\n  waiting " in text) == (focus.rank is None)
    assert MEANINGS.keys() == set(TROUBLE)


@pytest.mark.parametrize("size", [Size(80, 24), Size(60, 15), Size(200, 8)])
def test_help_is_scrolled_to_its_end_and_no_further(view: View, size: Size) -> None:
    here = scene(view)

    def after(focus: Focus, key: str, times: int = 1) -> Focus:
        for _ in range(times):
            focus = settled(here, press(focus, key, here.names(focus), is_root=False), size)
        return focus

    first = after(Focus(chosen=NODE), "help")
    assert shown(view, first, size).splitlines()[0].startswith("node: its host, ")
    seen = set()
    focus = first
    for _ in range(300):
        seen.update(shown(view, focus, size).splitlines()[:-1])
        focus = after(focus, "down")
    everything = shown(view, Focus(help=0), Size(size.width, 500)).splitlines()
    assert seen >= set(everything[:-1]) - {""}
    last = shown(view, focus, size).splitlines()
    assert last[-1].startswith("up, down: more   ?: back   q: quit")
    assert "quit; the run goes on" in last[-2]
    assert after(focus, "up") == after(after(focus, "page-down", 9), "up")  # it does not run past its end
    assert after(focus, "help") == after(focus, "back") == Focus(chosen=NODE)
    assert after(focus, "growth") == after(focus, "enter") == focus


def test_free_rows_have_the_loss_and_the_norm_of_the_gradients(tmp_path: Path) -> None:
    few = Follower(crowds.write(tmp_path, 4, 20, trouble=False)).look()
    falls = tuple((batch, 1 / (batch + 1)) for batch in range(200))
    ends = tuple((batch, batch / 4) for batch in range(200))
    norms = tuple((batch, 2.0 if batch < 100 else 1.0) for batch in range(200))
    wide = [one._replace(dtype="bfloat16", change=0.3) for one in few.headroom]
    trained = replace(few, headroom=wide, recent=Recent(falls, ends, norms=norms), report=replace(few.report, notices=()))
    lines = shown(trained).splitlines()
    assert not any("changed most" in line for line in lines)  # nothing has: the loss stands in its place
    assert lines[3].startswith("batches/s 4 ")
    (begin,) = [at for at, line in enumerate(lines) if line.startswith("loss 0.005 (0.005 to 1)")]
    assert re.search(r"   gradient norm 1 \(1 to 2\)$", lines[begin])
    bars = [line for line in lines[begin + 1 :] if re.search("[▁-█]", line)]
    assert [line[0] for line in bars] == ["█"] * len(bars)  # it began high
    assert len(bars) >= 4
    assert [len(line.partition("   ")[0]) for line in bars] == sorted(len(line.partition("   ")[0]) for line in bars)
    turns = ("Critic", falls), ("Actor", falls)
    assert re.search(r"^Critic 0.005 .*   Actor 0.005 .*", shown(replace(trained, recent=Recent(falls, ends, turns))), re.M)
    odd = replace(trained, headroom=[wide[0]._replace(change=6.2), *wide[1:]])
    assert re.search(r"changed most.*\n\S+ +output .* \+6.2 ", shown(odd))
    assert "fastest growing" in shown(trained, Focus(by_growth=True))
    assert "loss 0.005" in shown(replace(trained, headroom=few.headroom))  # beside the modules, where these say something


def test_a_rank_has_its_last_loss(view: View) -> None:
    digests = view.digests.copy()
    digests["loss"] = np.where(digests["rank"] == 100, np.float32(0.25), NO_LOSS)
    lines = shown(replace(view, digests=digests), Focus(NODE)).splitlines()
    assert re.search(r"lag +loss +frame", lines[5])
    assert re.fullmatch(r"> 100 +still +19 +1 +0.25 +7 +backward.*", lines[6])
    assert " loss " not in shown(view, Focus(NODE)).splitlines()[5]


def test_the_curves_of_loss_and_pace_are_one_line(view: View) -> None:
    losses = tuple((batch, 1 / (batch + 1)) for batch in range(200))
    ends = tuple((batch, batch / 4 + (20.0 if batch > 150 else 0)) for batch in range(200))  # it stood still for 20 seconds
    trained = replace(view, recent=Recent(losses, ends))
    line = shown(trained).splitlines()[3]
    loss, rate = re.fullmatch(r"loss 0.005 \(0.005 to 1\) (\S+)  batches/s 4 (\S+)", line).groups()  # type: ignore[union-attr]
    assert loss[-1] == "▁"
    assert list(loss) == sorted(loss, reverse=True)
    assert len(set(loss)) > 4  # by its logarithm
    assert sorted(rate)[1:] == ["█"] * (len(rate) - 1)
    assert min(rate) < "▄"
    narrow = shown(trained, size=Size(60, 15)).splitlines()[3]
    assert re.fullmatch(r"loss 0.005 ([▁-█]{9,})  batches/s 4 ([▁-█]{9,})", narrow)
    assert "batches/s 4" not in shown(trained, size=Size(80, 10))  # where rows are scarce
    assert "loss" not in shown(replace(trained, is_over=True)).splitlines()[3]
    alone = replace(view, recent=Recent((), ends[:3]))
    assert shown(alone).splitlines()[3].startswith("batches/s 4 ██")
    turns = ("Discriminator", losses), ("Generator", tuple((batch, -loss) for batch, loss in losses))
    line = shown(replace(view, recent=Recent(losses, ends, turns))).splitlines()[3]
    assert re.fullmatch(r"Discriminator 0.005 ([▁-█]{6,})  Generator -0.005 ([▁-█]{6,})  batches/s 4 ([▁-█]{6,})", line)
    narrow = shown(replace(view, recent=Recent(losses, ends, turns)), size=Size(60, 15)).splitlines()[3]
    assert re.fullmatch(r"Discriminator 0.005 ([▁-█]{6,})  batches/s 4 ([▁-█]{6,})", narrow)
    bad = replace(view, recent=Recent((*losses[:3], (3, float("nan"))), ()))
    assert shown(bad).splitlines()[3].startswith("loss nan (0.333 to 1) █▃▁!")
    assert shown(replace(view, recent=Recent())).splitlines()[3] == ""


def test_keys_as_terminals_send_them() -> None:
    assert parse(b"\x1b[A\x1b[B\x1bOBx\x1b[6~\r?q") == ["up", "down", "down", "page-down", "enter", "help", "quit"]
    assert parse(b"\x1b") == ["back"]


@pytest.mark.parametrize(("index", "expected"), [(0, range(5)), (2, range(5)), (50, range(48, 53)), (99, range(95, 100))])
def test_the_cursor_is_in_the_window(index: int, expected: range) -> None:
    assert window(index, 100, 5) == expected


def test_cells_are_cut_where_they_say_least() -> None:
    assert shorten("decoder.layers.11.wo", 10, keep_end=True) == "...s.11.wo"
    assert shorten("1 lost, 7 running", 10) == "1 lost,..."
    columns = Column("name"), Column("n", 2, 4), Column("m", 3, 3)
    table = TextTable(columns, [TableRow(("a.very.long.name", "123456", "1"))])
    assert table.fitted(20).rows[0].cells == ("...ong.name", "1...", "1")
    assert table.fitted(18).rows[0].cells == ("....long.name", "1...")  # no room for the last
    times = [describe_time(seconds) for seconds in (0, 0.26, 9.96, 99.6, 5969, 5971)]
    assert times == ["0.0 s", "0.3 s", "10 s", "2 min", "99 min", "2 h"]


def test_lines_report_each_change_once(view: View) -> None:
    changes = Changes(10.0)
    first = list(changes.lines(view, view.standings_at))
    assert first[0].startswith("crowd-0: noticed: ranks 0-3: next to overflow")
    assert first[1].startswith("crowd-0: running for 0:00:1")
    assert first[1].endswith(
        "1 lost, 1 silent, 1 still, 1021 running; nearest to overflow decoder.layers.11.feed_forward output x108, x1.050 a batch"
    )
    assert list(changes.lines(view, view.standings_at + 1)) == []
    moved = {rank: standing._replace(batch=standing.batch + 1) for rank, standing in view.standings.items()}
    later = replace(view, standings=moved)
    assert list(changes.lines(later, view.standings_at + 2)) == []  # not yet
    assert len(list(changes.lines(later, view.standings_at + 11))) == 1
    over = replace(view, is_over=True, report=replace(view.report, reason="somebody stopped it"))
    lines = list(changes.lines(over, time.time()))
    assert lines[0].endswith("somebody stopped it")
    assert any("run crowd-0 finished" in line for line in lines)
