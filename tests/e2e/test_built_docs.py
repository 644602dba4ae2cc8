"""The site that ``mkdocs build`` writes, opened as files in a real Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from browser import Browser, needed
from jobs import ROOT, finished

pytest.importorskip("mkdocs")
pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NO_NETWORK = ["unshare", "--map-root-user", "--net"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors and, where the machine allows it, without a network."""
    folder = tmp_path_factory.mktemp("site")
    cut = shutil.which("unshare") and subprocess.run([*NO_NETWORK, "true"], check=False, capture_output=True).returncode == 0
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "docs" / "mkdocs.yml"), "-d", str(folder)]
    done = finished([*NO_NETWORK, *build] if cut else build)
    assert done.returncode == 0, done.stderr
    return folder


def text_of(page: Path) -> str:
    """A page's text, without tags."""
    return re.sub(r"<[^>]+>", "", page.read_text()).replace("&lt;", "<").replace("&quot;", '"')


def test_no_marker_of_a_snippet_is_left(built: Path) -> None:
    pages = list(built.rglob("*.html"))
    assert len(pages) > 20
    for page in [*pages, built / "search" / "search_index.js"]:
        assert not re.search(r"8 ?< ?-|<!-- help", text_of(page)), page
    assert "loss = mse_loss(guess.float(), wear)" in text_of(built / "tutorial.html")
    assert "srun --kill-on-bad-exit=1 torchrun" in text_of(built / "cluster.html")


def test_the_reference_contains_the_whole_public_api(built: Path) -> None:
    import rankwatch

    reference = "".join(text_of(page) for page in (built / "reference").glob("*.html"))
    for name in rankwatch.__all__:
        assert re.search(rf"\b{name}\b", reference), name
    for said in ("max_scale_shrinks", "optimizer_step", "summaries", "RankwatchCallback", "usage: rankwatch export"):
        assert said in reference


def test_the_pages_load_nothing_from_elsewhere(built: Path) -> None:
    """A link that a reader may follow (``<a href>``) loads nothing; any other tag may."""
    for page in built.rglob("*.html"):
        assert not re.search(r'<(?!a\s)[^<>]*\s(?:src|srcset|href|content)="https?:', page.read_text()), page


@needed
def test_search_works_in_pages_that_are_opened_as_files(built: Path) -> None:
    browser = Browser("")
    try:
        browser.driver.get((built / "index.html").as_uri())
        browser.driver.find_element("css selector", ".md-search__input").send_keys("underflow")
        browser.until(lambda: "Notices" in browser.text(".md-search-result__item"))
        browser.run("document.querySelector('.md-search-result__link').click()")
        browser.until(lambda: browser.run("return location.href").startswith((built / "report.html").as_uri()))
        assert not browser.complaints()
    finally:
        browser.driver.quit()
