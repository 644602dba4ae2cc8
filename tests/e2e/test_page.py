"""The page in a real Chromium, over the records of real runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import large_runs
import left_out
import makers
import records
from browser import Browser, browsing, needed
from e2e.ended import Ended
from e2e.site import Site
from jobs import Job
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import FrameTable
from rankwatch.shared.types.trip import Source
from rankwatch_monitor.decide.core.journal import (
    NO_RANK,
    Desynced,
    Entry,
    JobEnded,
    Opened,
    ReplicasCompared,
    Trained,
    Waited,
)
from rankwatch_monitor.decide.replicas.desync import Compared, Desync, DesyncPattern
from rankwatch_monitor.record.schema import FILE
from rankwatch_monitor.record.store import Store
from rankwatch_monitor.views.ui import single
from rankwatch_monitor.views.ui.pages import RunPages

pytestmark = [pytest.mark.e2e, pytest.mark.slow, needed]


@pytest.fixture(scope="module")
def runs(ended: Ended, bad: Job, good: Job) -> Path:
    """A run with a verdict, and one that finished."""
    assert (bad.code, good.code) == (77, 0)
    return ended.runs


@pytest.fixture(scope="module")
def window(runs: Path) -> Iterator[Browser]:
    with browsing(runs) as browser:
        yield browser


@pytest.fixture
def browser(window: Browser) -> Iterator[Browser]:
    yield window
    assert not window.complaints()  # no refused script, no exception
    window.size(1280, 900)


LOSS, HEAT, NORM, RATE = range(4)
"""The charts of a run, in their order on the page."""


def series(browser: Browser, chart: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = browser.run(
        "return echarts.getInstanceByDom(document.querySelectorAll('.chart')[arguments[0]]).getOption().series"
        ".map(({ name, lineStyle, color }) => ({ name, lineStyle, color }))",
        chart,
    )
    return found


def test_from_the_list_to_the_verdict(browser: Browser) -> None:
    browser.open("/")
    browser.shows("bad-0")
    assert {"aborted", "finished"} <= set(browser.text(".badge").split())
    assert browser.text(".badge.chip") == "overflow"
    assert browser.text("td.name").splitlines()[0] in ("bad-0 Model", "good-0 Model")
    points = browser.run("return [...document.querySelectorAll('.spark polyline')].map((line) => line.points.length)")
    assert sorted(points) == [6, 12]  # the loss of each run
    browser.run("[...document.querySelectorAll('main a')].find((a) => a.textContent === 'bad-0').click()")
    browser.shows("First inf: rank 1, batch 5 overflow", ".panel h2")
    assert "recurred" not in browser.text(".panel")
    browser.click(".panel summary", "all that is known")
    browser.shows("rank 1 of 4", ".panel")
    assert "(Square)" in browser.text(".panel")
    assert "aten." in browser.text(".panel .clamp")
    assert "recurred 3 of 3" in browser.text(".panel")
    assert "Worst: rank 1, batch 5: inf or nan." in browser.chart(HEAT)
    browser.click("main a", "What led to it")
    browser.shows("← culprit", ".chain li:first-child")  # from the culprit back
    assert "square Square, frame 7 ← culprit" in browser.text(".chain li:first-child")
    assert "blocks.2.linear Linear, frame 6, ran before" in browser.text(".chain li")  # x + 2 was made outside of a module
    assert "all ranks, rank 1: " in browser.chart()
    assert not browser.text("tr.is-bad")
    browser.click("summary", "The last ")
    browser.shows("output", "tr.is-bad")
    browser.click("main a", "Its modules")
    browser.shows("modules, rank 1, round batch 5", "h1")


def test_steps_that_were_left_out_are_marked_and_have_their_verdicts(tmp_path: Path) -> None:
    left_out.write(tmp_path)
    with browsing(tmp_path) as browser:
        browser.open("/run/train-0")
        browser.shows("2 steps were left out", ".panel")
        browser.until(lambda: f"Left out: {left_out.TOLD.partition(': ')[2]}." in browser.chart(LOSS))
        steps = "step 9, batch 9 (rank 0, layer: invalid)\nstep 4, batch 4 (rank 1, layer: invalid)"
        assert browser.text(".panel summary") == steps
        browser.click("summary", "step 4")
        browser.click("details[open] summary", "all that is known")
        browser.shows("rank 1 of 2 (node0, local rank 1), batch 4, optimizer step 4", "details[open]")
        browser.shows("Put back: bn.running_mean. 2 more of 3 in 128 steps could be left out.", "details[open]")
        marks = "echarts.getInstanceByDom(document.querySelectorAll('.chart')[0]).getOption().series[0].markLine.data"
        assert [mark["xAxis"] for mark in browser.run(f"return {marks}")] == [4, 9]
        assert not browser.complaints()


def test_a_gan_has_a_curve_for_each_of_its_losses(tmp_path: Path) -> None:
    parts = [records.part(rank, *records.gan(batch), seq=batch + 1) for batch in range(20) for rank in (0, 1)]
    for name in ("train-0", "train-1"):
        records.write(tmp_path / name, *parts)
    with browsing(tmp_path) as browser:
        browser.open("/run/train-0?ranks=1")
        browser.until(
            lambda: "At the end: Critic, mean of the ranks: 0.82, Critic, rank 1: 0.82, Generator, " in browser.chart(LOSS)
        )
        names = ["Critic, mean of the ranks", "Critic, rank 1", "Generator, mean of the ranks", "Generator, rank 1"]
        drawn = series(browser, LOSS)
        assert [line["name"] for line in drawn] == names
        assert [line["lineStyle"]["width"] for line in drawn] == [2.5, 1, 2.5, 1]  # a mean is thick, a rank is thin
        assert len({line["color"] for line in drawn[:2]}) == 1
        assert len({line["color"] for line in drawn}) == 2
        assert "Generator, rank 1: -4.19." in browser.chart(LOSS)
        browser.open("/compare?run=train-0&run=train-1")
        browser.until(
            lambda: "At the end: train-0, Critic: 0.82, train-0, Generator: -4.19, train-1, Critic" in browser.chart()
        )
        assert not browser.complaints()


def test_each_view_of_a_run_that_finished_has_its_own_address(browser: Browser) -> None:
    browser.open("/run/good-0")
    browser.shows("finished", ".badge")
    assert "12" in browser.text(".tiles").split()
    browser.open("/run/good-0/verdict")
    browser.shows("no inf or nan was found")
    browser.open("/run/good-0/modules?rank=3&match=blocks.1")
    browser.shows("good-0: modules, rank 3")
    browser.until(lambda: "batches" not in browser.chart() and "blocks.1" in browser.chart())
    browser.open("/run/good-0/chart?module=blocks.1.linear&label=output&ranks=all,0,3")
    browser.until(lambda: "all ranks, rank 0, rank 3: 36 points." in browser.chart())
    browser.open("/run/good-0/diff?batch=3&batch=4")
    browser.shows("rank 0, batch 4 of good-0")
    browser.open("/compare?run=good-0&run=bad-0")
    browser.until(lambda: "good-0, bad-0" in browser.chart(2))
    browser.open("/run/good-0/events")
    browser.shows("the run is over")
    browser.open("/run/none-0")
    browser.shows("there is no run none-0 here", "#trouble")
    assert len(browser.complaints()) >= 1  # the 404s that the test provoked


def test_a_chart_is_read_and_opened_by_keyboard(browser: Browser) -> None:
    browser.open("/run/bad-0")
    browser.until(lambda: "Worst" in browser.chart(HEAT))
    browser.run("document.querySelectorAll('.chart')[1].focus()")
    for key in ("ArrowRight", "ArrowLeft", "ArrowDown"):
        browser.press(key)
    browser.shows("rank 1, batch 4: ", ".note")
    browser.press("Enter")
    browser.shows("bad-0: modules, rank 1")
    browser.open("/run/bad-0/chart?module=head")
    browser.until(lambda: "points" in browser.chart())
    browser.run("document.querySelector('.chart').focus()")
    browser.press("ArrowLeft")
    browser.shows("all ranks, batch ", ".note")


@pytest.mark.parametrize(
    "view",
    [
        "/", "/run/bad-0", "/run/bad-0/verdict", "/run/bad-0/modules", "/run/bad-0/diff?rank=0&rank=1",
        "/compare?run=good-0&run=bad-0",
    ],
)  # fmt: skip
def test_a_narrow_dark_window_shows_it_without_scrolling_sideways(browser: Browser, view: str) -> None:
    browser.size(400, 900, dark=True)
    browser.open(view)
    browser.until(lambda: len(browser.text("main")) > 60)
    assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(17, 24, 31)"


def test_the_overview_has_the_curves_and_marks_the_culprit(browser: Browser) -> None:
    browser.open("/run/bad-0")
    browser.until(lambda: "Loss. At the end: mean of the ranks" in browser.chart(LOSS))
    browser.until(lambda: "Norm of the gradients. At the end: mean of the ranks" in browser.chart(NORM))
    browser.until(lambda: "Batches a second. At the end: median of the ranks" in browser.chart(RATE))
    assert browser.text(".how:not([hidden])") == ""  # how to read a chart stands behind its ?
    browser.run("document.querySelectorAll('section:not([hidden]) .ask').forEach((ask) => ask.click())")
    assert "▸ marks rank 1 (culprit)." in browser.text(".how:not([hidden])")
    assert len(browser.text(".how:not([hidden])").splitlines()) == 4
    assert browser.text("tbody tr").split("\t")[:2] == ["1", "culprit"]
    assert re.search(r"\d ms", browser.text("td.time"))
    browser.run("document.querySelectorAll('.chart')[0].focus()")
    browser.press("ArrowLeft")
    browser.until(lambda: re.search(r"batch \d+, after \d+ s: mean of the ranks: ", browser.text(".note")))
    browser.type("input[name=ranks]", "2")
    browser.press("Enter")
    browser.until(lambda: "rank 2: " in browser.chart(LOSS) and "rank 0: " not in browser.chart(LOSS))


@pytest.mark.parametrize(("run", "is_open"), [("bad-0", True), ("good-0", False)])
def test_the_loss_stands_before_the_heat_map_which_is_folded_while_all_is_as_usual(
    browser: Browser, run: str, is_open: bool
) -> None:
    browser.open(f"/run/{run}")
    assert browser.chart(LOSS).startswith("Loss. At the end")
    browser.until(lambda: browser.run("return document.querySelector('.heat').open") is is_open)
    if not is_open:
        browser.shows("as usual on every rank", ".heat summary")
        browser.click(".heat summary", "Change by rank and batch")
    assert "by rank and batch" in browser.chart(HEAT)
    loss, heat = (
        browser.run(
            "const chart = echarts.getInstanceByDom(document.querySelectorAll('.chart')[arguments[0]]);"
            "return [0, 2].map((batch) => Math.round(chart.convertToPixel({ xAxisIndex: 0 }, batch)))",
            chart,
        )
        for chart in (LOSS, HEAT)
    )
    assert loss == heat  # a batch is at one place in both
    axis = "echarts.getInstanceByDom(document.querySelectorAll('.chart')[0]).getOption().xAxis[0]"
    assert re.fullmatch(r"2\n\d+ s", browser.run(f"return {axis}.axisLabel.formatter(2)"))  # and has its time below it


def test_the_cells_show_headroom_or_change_as_the_reader_chooses(browser: Browser) -> None:
    browser.open("/run/bad-0?ranks=2")
    browser.until(lambda: "Change by rank and batch" in browser.text(".heat h2"))
    browser.run("document.querySelector('select[name=measure]').value = 'headroom'")
    browser.run("document.querySelector('select[name=measure]').form.requestSubmit()")
    browser.until(lambda: "Headroom by rank and batch" in browser.text(".heat h2"))
    browser.until(lambda: "rank 2: " in browser.chart(LOSS))  # the other form's choice stays
    browser.open("/run/bad-0/modules?measure=headroom")
    browser.until(lambda: "Headroom by module and batch" in browser.text("section h2"))


def test_a_cell_opens_the_modules_of_its_rank_round_its_batch(browser: Browser) -> None:
    browser.open("/run/bad-0")
    browser.until(lambda: "Worst" in browser.chart(HEAT))
    browser.click_chart(0.95, 0.5, HEAT)  # the last batch of a rank
    browser.shows(", round batch ")
    assert "rank=" in browser.run("return location.search")
    browser.until(lambda: "Worst: module " in browser.chart())


def test_the_diff_opens_with_the_culprits_batch(browser: Browser) -> None:
    browser.open("/run/bad-0")
    browser.click("main a", "Its batch beside the last good one")
    browser.shows("rank 1, batch 5 of bad-0", ".facts")
    browser.shows("rank 1, batch 4 of bad-0", ".facts")
    fields = browser.run("return [...document.querySelectorAll('form input')].map((input) => input.value)")
    assert fields == ["1", "1", "4", "5", ""]
    assert "inf" in browser.text("tr.is-bad")
    browser.type("input[name=batch]", "3")
    browser.press("Enter")
    browser.shows("rank 1, batch 3 of bad-0", ".facts")


def test_a_trip_in_the_first_batch_has_no_diff(tmp_path: Path) -> None:
    bad = makers.frame(makers.reading("output", makers.INF), at=(0, 0, 0))
    records.write(tmp_path / "train-1", records.tripped(1, bad), Entry(9.0, NO_RANK, Waited()))
    with browsing(tmp_path) as browser:
        browser.open("/run/train-1")
        browser.shows("What led to it")
        assert "Its batch beside" not in browser.text()
        browser.open("/run/train-1/diff")
        browser.shows("there is nothing to compare batch 0 of rank 1 with")
        assert "No batch of rank" not in browser.text()
        (complaint,) = browser.complaints()
        assert "400" in complaint


def test_runs_are_filtered_sorted_and_compared(tmp_path: Path) -> None:
    for name, ranks, batches in (("alpha-0", 2, 30), ("beta-0", 4, 10), ("gamma-0", 2, 20)):
        large_runs.generate(tmp_path / name, ranks, batches, modules=20, kept=range(batches), trips=name == "beta-0")

    def listed(browser: Browser) -> list[str]:
        names: list[str] = browser.run(
            "return [...document.querySelectorAll('tbody td.name a')].map((link) => link.innerText)"
        )
        return names

    with browsing(tmp_path) as browser:
        browser.until(lambda: len(listed(browser)) == 3)
        browser.click("th button", "run")
        assert listed(browser) == ["alpha-0", "beta-0", "gamma-0"]
        browser.click("th button", "run")
        assert listed(browser) == ["gamma-0", "beta-0", "alpha-0"]
        browser.click("th button", "ranks")
        assert listed(browser)[0] == "beta-0"
        assert "sort=ranks" in browser.run("return location.search")
        browser.type("input[type=search]", "because BETA")
        browser.until(lambda: listed(browser) == ["beta-0"])
        browser.shows("1 of 3 runs")
        browser.open("/?sort=run&text=a-0")
        browser.until(lambda: listed(browser) == ["alpha-0", "beta-0", "gamma-0"])
        for at in (0, 2):
            browser.run("document.querySelectorAll('td.choice input')[arguments[0]].click()", at)
        browser.click("button", "Compare two")
        browser.until(lambda: "Loss. At the end: alpha-0: " in browser.chart(0))
        browser.until(lambda: "gamma-0: " in browser.chart(1))
        browser.type("input[name=module]", "blocks.1.part3")
        browser.press("Enter")
        browser.until(lambda: "alpha-0, gamma-0: 50 points" in browser.chart(2))


def test_a_rank_that_was_lost_stands_before_those_that_failed_because_of_it(tmp_path: Path) -> None:
    records.write(
        tmp_path / "train-1",
        records.part(0, *records.frames(1)),
        *(Entry(2.0, rank, messages.Bye(9, "failed", "RuntimeError: Connection closed by peer")) for rank in (0, 1, 3)),
        Entry(3.0, NO_RANK, JobEnded(1)),
        world_size=4,
    )
    with browsing(tmp_path) as browser:
        browser.open("/run/train-1")
        browser.shows("the first that was lost", "tbody tr.is-bad")
        ask = "return [...document.querySelectorAll('tbody tr')].map((row) => [row.cells[0].innerText, row.cells[1].innerText])"
        rows = browser.run(ask)
        assert rows == [["2", "the first that was lost"], *([rank, "failed after rank 2"] for rank in "013")]


def test_a_folder_without_runs_says_how_to_get_one(tmp_path: Path) -> None:
    with browsing(tmp_path) as browser:
        browser.shows("No run is recorded here yet.")
        large_runs.generate(tmp_path / "new-0", 2, 5)
        browser.shows("new-0")


def test_a_run_grows_while_the_page_is_open(site: Site) -> None:
    site.collect()
    ranks = site.start(2)
    for rank in ranks:
        rank.ask("batches", 3)
    with browsing(site.runs) as browser:
        browser.open("/run/train-0")
        browser.shows("batches 3", ".tiles")
        for rank in ranks:
            rank.ask("batches", 2)
        browser.shows("batches 5", ".tiles")
        browser.shows("running", ".badge")
        ranks[1].tell("trip")
        browser.shows("First inf")
        browser.until(lambda: "inf or nan" in browser.chart(HEAT))
        browser.click(".panel summary", "all that is known")
        browser.shows("rank 1 of 2", ".panel")


HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def test_hostile_names_are_text(tmp_path: Path) -> None:
    spec = makers.frame(makers.reading("output"), module=HOSTILE, module_class=HOSTILE).spec
    table = FrameTable((spec, makers.frame(module="").spec))
    (tmp_path / "hostile-0").mkdir()
    store = Store(tmp_path / "hostile-0" / FILE)
    hello = makers.hello(0, 1, host=HOSTILE, job=HOSTILE)
    notice = messages.Noticed(2, makers.notice(module=HOSTILE, label=HOSTILE))
    trip = messages.Tripped(4, makers.trip(module=HOSTILE, at=(1, 0, 0)))
    line = Source(HOSTILE, 87, HOSTILE, HOSTILE)
    found = makers.closeup(operator=replace(makers.made_by(), source=line), note=HOSTILE, machine=HOSTILE, recurred=0)
    looked = messages.LookedCloser(5, found)
    apart = Desynced((Desync(1, HOSTILE, (0,), 1, DesyncPattern.UNTIED, HOSTILE, HOSTILE, source=HOSTILE),), 0)
    facts = [Entry(0.0, NO_RANK, Opened(HOSTILE, 0, 1)), Entry(0.0, 0, hello), Entry(0.0, NO_RANK, apart)]
    facts += [Entry(1.0, 0, notice), Entry(2.0, 0, trip), Entry(2.5, 0, looked)]
    batches = [Entry(0.5, 0, Trained(1 + batch, makers.summary(batch, of=table), table)) for batch in range(2)]
    store.write([*facts[:3], *batches, *facts[3:]], 1.8e9)
    store.close()
    (tmp_path / "single.html").write_text(single.render(RunPages(tmp_path / "hostile-0")))
    with browsing(tmp_path) as browser:
        for view, text in (
            ("", "First inf"), ("/verdict", "← culprit"), ("/events", "tripped"), ("/modules", "all ranks"),
            (f"/chart?module={HOSTILE}", "over the batches"),
        ):  # fmt: skip
            browser.open(f"/run/hostile-0{view}")
            browser.shows(text)
            if view != "/modules":
                browser.shows("<img src=x")
            assert not browser.run("return document.querySelector('main script, main img')")
            assert "rankwatch" in browser.driver.title
        browser.driver.get((tmp_path / "single.html").as_uri())
        browser.shows("<img src=x")
        assert "hostile-0" in browser.driver.title
        assert not browser.run("return document.querySelector('main script, main img')")


def test_the_close_up_is_on_the_page_and_in_the_file(tmp_path: Path) -> None:
    run = records.write(
        tmp_path / "train-1",
        records.part(0, *records.frames(1)),
        records.tripped(0, makers.frame(makers.reading("output", makers.INF), at=(2, 0, 0))),
        Entry(3.0, 0, messages.LookedCloser(10, makers.closeup(is_eager=False))),
        world_size=1,
    )
    (tmp_path / "run.html").write_text(single.render(RunPages(run)))
    with browsing(tmp_path) as browser:
        for address in (None, (tmp_path / "run.html").as_uri()):
            browser.open("/run/train-1") if address is None else browser.driver.get(address)
            if address is None:
                browser.click(".panel summary", "all that is known")
            browser.shows("aten.exp at model.py:87, in forward: e = torch.exp(scores)", ".panel")
            browser.shows("self (2, 3) float32", ".panel")
            browser.shows("recurred 3 of 3", ".panel")
            browser.shows("finite in float32: abs max 120,000; inf in float64", ".panel")
            browser.shows(f"rankwatch replay {run}", ".panel code")
            assert not browser.complaints()


def test_desynced_parameters_are_on_the_page_and_in_the_file(tmp_path: Path) -> None:
    flipped = Desync(9, "layers.0.weight", (1,), 4, DesyncPattern.ONE_RANK, "gpu07", "GPU-5f3a", 8, source="DDP")
    many = tuple(replace(flipped, parameter=f"layers.{number}.weight") for number in range(12))
    run = records.write(
        tmp_path / "train-1",
        records.part(0, *records.frames(1)),
        Entry(2.0, NO_RANK, ReplicasCompared(Compared(9, 146, 4, 10, False))),
        Entry(2.0, NO_RANK, Desynced(many, 0)),
        world_size=4,
    )
    equal = Entry(2.0, NO_RANK, ReplicasCompared(Compared(9, 146, 4, 10, True)))
    records.write(tmp_path / "equal-1", records.part(0, *records.frames(1)), equal, world_size=4, job="equal")
    (tmp_path / "run.html").write_text(single.render(RunPages(run)))
    line = (
        "rank 1 of 4 (gpu07, GPU-5f3a): layers.0.weight differs from the other 3 since step 9, equal at step 8; and 11 more"
    )
    with browsing(tmp_path) as browser:
        for width in (1440, 390):
            browser.size(width, 900)
            for address in (None, (tmp_path / "run.html").as_uri()):
                browser.open("/run/train-1") if address is None else browser.driver.get(address)
                browser.shows(line, ".panel")
                browser.shows("layers.7.weight", ".panel table")
                browser.shows("and 4 more: report.json has them", ".panel")
                assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
        browser.open("/run/train-1/verdict")
        browser.shows(line, ".panel")
        browser.open("/run/equal-1")
        browser.shows("Replicas were equal at step 9 (all 146 parameters, 4 ranks), compared 10 times.")
        assert not browser.complaints()


def test_a_single_file_contains_every_view(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "run.html").write_text(single.render(RunPages(runs / "bad-0")))
    with browsing(tmp_path) as browser:
        browser.driver.get((tmp_path / "run.html").as_uri())
        browser.shows("First inf")
        browser.shows("← culprit")
        assert "Loss. At the end: " in browser.chart(0)
        assert "all ranks, rank 1: " in browser.chart(1)
        assert "Worst: rank 1, batch 5: inf or nan." in browser.chart(2)
        assert "Worst: module blocks" in browser.chart(3)
        fetched = browser.run("return performance.getEntriesByType('resource').map((each) => each.name)")
        assert fetched == []


def test_a_thousand_ranks_and_ten_thousand_batches(tmp_path: Path) -> None:
    large_runs.generate(tmp_path / "large-0", 1024, 10_000, kept=range(9000, 10_000, 100))
    with browsing(tmp_path) as browser:
        browser.open("/run/large-0")
        browser.until(lambda: "Worst: rank 336-343, batches 9984 to " in browser.chart(HEAT))
        assert browser.run("return document.querySelectorAll('main tr').length") < 40
        browser.shows("1008 more ranks")
        browser.open("/run/large-0/modules")
        browser.until(lambda: "Worst: module blocks.5.part0" in browser.chart())
        browser.open("/run/large-0/modules?rank=341&from=9000")
        browser.until(lambda: "Worst: module blocks.5.part0" in browser.chart())
        browser.open("/run/large-0/chart?module=blocks.5.part0&ranks=all,341")
        browser.until(lambda: "all ranks, rank 341: 1010 points" in browser.chart())
