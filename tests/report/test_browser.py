"""The page in a real browser: figures, switches, sorting, and that nothing leaves or goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_prep import convert_checkpoint
from deepinfer_prep.report import build_report, render_page
from deepinfer_prep.report.figures import Report
from deepinfer_prep.report.page import visible
from tests.report.browser import CHROMIUM, Browser
from tests.report.hostile import HOSTILE_NAMES
from tests.small_files import write_file

pytest.importorskip("plotly", reason="plotly (the extra `report`) is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def report(sample: Path) -> Report:
    return build_report(sample)


@pytest.fixture(scope="module")
def page(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(report, tmp_path_factory.mktemp("page"))


def written(report: Report, folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(render_page(report), encoding="utf-8", newline="\n")
    return path


def is_quiet(browser: Browser, page: Path) -> bool:
    """Nothing on the console, and no request but for the page itself and pictures that it holds itself."""
    own = page.resolve().as_uri()
    assert browser.console == []
    assert [url for url in browser.requests if url != own and not url.startswith(("data:", "blob:"))] == []
    return True


def marks(browser: Browser, figure: str, selector: str) -> int:
    found = browser.run(f"document.querySelectorAll('#{figure} {selector}').length")
    assert isinstance(found, int)
    return found


def names(browser: Browser) -> list[str]:
    """The names in the table's rows from the top."""
    script = """[...document.querySelectorAll('#body .row')]
        .sort((a, b) => parseInt(a.style.top) - parseInt(b.style.top)).map((row) => row.firstChild.textContent)"""
    found: list[str] = browser.run(script)
    return found


def click(browser: Browser, selector: str) -> None:
    browser.run(f"document.querySelector({selector!r}).click()")


def choose(browser: Browser, element: str, value: object) -> None:
    script = f"""(() => {{ const element = document.getElementById('{element}'); element.value = {str(value)!r};
        for (const name of ['input', 'change']) element.dispatchEvent(new Event(name)); }})()"""
    browser.run(script)


def drawn_map(browser: Browser) -> list[float]:
    values: list[float] = browser.run("document.getElementById('map').data[0].z.flat().filter((z) => z !== null)")
    return values


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_each_figure_is_drawn_in_full(browser: Browser, report: Report, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width=width, dark=dark)
    kinds = [item for item in report.distributions if item.scope != "tensor"]
    assert marks(browser, "sizes", ".bars .point") == len(report.sizes)
    assert marks(browser, "distribution", ".bars .point") == 253
    assert marks(browser, "accuracy", ".scatterlayer .point") == 3 * len(kinds)
    assert marks(browser, "map", ".heatmaplayer image") == 1
    assert len(drawn_map(browser)) == sum(cell.codes is not None for cell in report.map.cells)
    # Nothing is wider than the window, so that nothing has to be pushed aside to read.
    assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert is_quiet(browser, page)
    assert len(browser.screenshot()) > 20_000


def test_colors_follow_the_scheme(browser: Browser, page: Path) -> None:
    backgrounds = []
    for dark in (False, True):
        browser.open(page, dark=dark)
        backgrounds.append(browser.run("document.getElementById('map')._fullLayout.paper_bgcolor"))
    assert backgrounds == ["#ffffff", "#1a2029"]


def test_the_map_switches_between_its_figures(browser: Browser, report: Report, page: Path) -> None:
    browser.open(page)
    cells = report.map.cells
    buttons = browser.run("[...document.querySelectorAll('#map-metrics button')].map((button) => button.textContent)")
    assert buttons == ["above 240", "rounded", "smallest scale", "median scale", "largest scale"]
    shares = [cell.codes.above_240 / cell.codes.codes for cell in cells if cell.codes]
    assert max(drawn_map(browser)) == pytest.approx(max(shares) ** 0.5)
    click(browser, "#map-metrics button:nth-child(3)")
    assert sorted(drawn_map(browser)) == sorted(cell.scale.smallest for cell in cells if cell.scale)
    pressed = "[...document.querySelectorAll('#map-metrics [aria-pressed=true]')].map((button) => button.textContent)"
    assert browser.run(pressed) == ["smallest scale"]
    assert is_quiet(browser, page)


def test_the_distribution_switches_between_tensors(browser: Browser, report: Report, page: Path) -> None:
    browser.open(page)
    drawn = "document.getElementById('distribution').data[0].y.reduce((sum, each) => sum + each, 0)"
    assert report.total is not None
    assert browser.run(drawn) == report.total.codes
    last = len(report.distributions) - 1
    choose(browser, "distribution-of", last)
    assert browser.run(drawn) == report.distributions[last].figures.codes
    click(browser, "#distribution-log")
    assert browser.run("document.getElementById('distribution')._fullLayout.yaxis.type") == "log"
    assert is_quiet(browser, page)


def test_the_table_sorts_filters_and_searches(browser: Browser, report: Report, page: Path) -> None:
    browser.open(page)
    by_size = [row.name for row in report.tensors]
    assert names(browser) == by_size[: len(names(browser))]
    click(browser, "#head button:nth-child(1)")
    assert names(browser)[:5] == sorted(by_size)[:5]
    click(browser, "#head button:nth-child(1)")
    assert names(browser)[:5] == sorted(by_size, reverse=True)[:5]
    click(browser, "#head button:nth-child(6)")
    shares = {row.name: row.codes.above_240 / row.codes.codes for row in report.tensors if row.codes}
    assert shares[names(browser)[0]] == max(shares.values())
    wanted = [name for name in by_size if "wq_b" in name]
    choose(browser, "search", "WQ_B")
    assert sorted(names(browser)) == sorted(wanted)
    assert browser.run("document.getElementById('matches').textContent") == f"{len(wanted)} of {len(by_size)}"
    choose(browser, "search", "")
    roles: list[str] = browser.run("[...document.querySelectorAll('#role option')].map((each) => each.textContent)")
    choose(browser, "role", roles.index("fp8 weight") - 1)
    assert {row.role for row in report.tensors if row.name in names(browser)} == {"fp8 weight"}
    assert is_quiet(browser, page)


def test_only_the_rows_in_view_exist(browser: Browser, report: Report, page: Path) -> None:
    browser.open(page)
    assert len(report.tensors) > 60
    assert len(names(browser)) < 60
    browser.run("document.getElementById('table').scrollTop = 1e9")
    browser.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert names(browser)[-1] == report.tensors[-1].name


def test_hostile_names_do_nothing(browser: Browser, tmp_path: Path) -> None:
    tensors: dict[str, Any] = dict.fromkeys(HOSTILE_NAMES, ("F8_E4M3", (32, 128), 126))
    write_file(tmp_path / "model.safetensors", tensors)
    report = build_report(tmp_path)
    page = written(report, tmp_path)
    browser.open(page, height=2000)
    assert browser.run("window.hacked === undefined")
    assert sorted(names(browser)) == sorted(map(visible, HOSTILE_NAMES))
    # Plotly turns some markup in labels into elements; none may come from a name.
    assert marks(browser, "map", "a") == marks(browser, "accuracy", "a") == 0
    labels = browser.run("[...document.querySelectorAll('#map .ytick text')].map((each) => each.textContent)")
    assert "layers.*.<b>bold</b>" in "".join(labels)
    for position in range(len(report.distributions)):
        choose(browser, "distribution-of", position)
    assert browser.run("window.hacked === undefined")
    assert browser.run("document.querySelectorAll('img, svg[onload]').length") == 0
    assert is_quiet(browser, page)


def test_a_script_that_is_not_the_pages_own_does_not_run(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run(
        "(() => { const script = document.createElement('script'); script.textContent = 'window.hacked = 1';"
        "document.body.append(script); })()"
    )
    assert browser.run("window.hacked === undefined")
    assert browser.run("fetch('https://example.invalid/').then(() => 'sent', () => 'blocked')") == "blocked"
    assert any("Content Security Policy" in message for message in browser.console)


def test_outputs_and_empty_checkpoints_are_shown_too(browser: Browser, sample: Path, tmp_path: Path) -> None:
    convert_checkpoint(sample, tmp_path / "out")
    write_file(tmp_path / "plain" / "model.safetensors", {"w": ("BF16", (4, 4), 0)})
    write_file(tmp_path / "none" / "model.safetensors", {})
    for folder, headers_only in (("out", False), ("out", True), ("plain", False), ("none", False)):
        page = written(build_report(tmp_path / folder, headers_only=headers_only), tmp_path)
        browser.open(page)
        assert is_quiet(browser, page)
        drawn = marks(browser, "distribution", ".bars .point")
        assert drawn == (253 if folder == "out" and not headers_only else 0)
    page = written(build_report(sample, headers_only=True), tmp_path)
    browser.open(page)
    assert is_quiet(browser, page)
    assert "The codes were not read" in browser.run("document.getElementById('map').textContent")


def test_100000_tensors_still_open(browser: Browser, tmp_path: Path) -> None:
    tensors: dict[str, Any] = {
        f"layers.{number // 1000}.experts.{number % 1000}.w": ("F8_E4M3", (1, 4), 0x38) for number in range(100_000)
    }
    write_file(tmp_path / "model.safetensors", tensors)
    report = build_report(tmp_path)
    assert report.total is not None
    assert report.total.codes == 400_000
    page = written(report, tmp_path)
    assert page.stat().st_size < 6_000_000
    browser.open(page)
    assert len(drawn_map(browser)) == 100
    assert "5,000 of 100,000 tensors" in browser.run("document.body.textContent")
    click(browser, "#head button:nth-child(1)")
    assert names(browser)[0] == "layers.0.experts.0.w"
    assert is_quiet(browser, page)
