"""Tables, pictures and the page: all cases are there, nothing is fetched, and what names and errors say stays text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import msgspec
import pytest
from rich.console import Console

from octavo.bench import plots
from octavo.bench.compare import changes, changes_table
from octavo.bench.html_report import html_report
from octavo.bench.plots import PLOTS, draw_all
from octavo.bench.results import BenchResults
from octavo.bench.tables import COLUMNS, case_cells, facts, kernel_tables, markdown, shorter
from octavo.tests.bench.fabricated import changed, full_run, results, row

pytest.importorskip("matplotlib")
PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = "</td><script>alert('x')</script>&\" [/bold] [red]x :smile: | $\\frac{$ %s {}"


def hostile_run() -> BenchResults:
    run = results(
        row(shape=HOSTILE),
        row(shape=HOSTILE, implementation=HOSTILE),
        row("8q1s2k", shape=HOSTILE),
        row(us=None, shape=HOSTILE, implementation="peer", note=f"failed: {HOSTILE}\n{HOSTILE}", is_fault=True),
        *(row(us=9.0 + n, shape=HOSTILE, plan=f"tile_kv={n},num_splits=1,{HOSTILE}") for n in range(5)),
        row(us=None, shape=HOSTILE, implementation="nothing at all"),
    )  # fmt: skip
    return changed(run, device=HOSTILE, commit="")


def shown(*what: object, width: int = 200) -> str:
    console = Console(width=width, highlight=False, markup=False, emoji=False, color_system=None)
    with console.capture() as capture:
        for each in what:
            console.print(each)
    return capture.get()


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


# ---------------------------------------------------------------- pictures


def test_every_picture_is_drawn() -> None:
    drawn = draw_all(full_run())
    assert list(drawn) == list(PLOTS)
    for png in drawn.values():
        assert png.startswith(PNG) and len(png) > 5000


@pytest.mark.parametrize("draw", PLOTS.values(), ids=PLOTS)
@pytest.mark.parametrize(
    "run",
    [
        results(),
        results(row(us=None, note="failed")),
        results(row(op="copy_blocks", flops=0, batch="256 blocks")),
        results(row("2q1s40_q5", bytes_moved=0)),
    ],
    ids=["empty", "failed", "no flops", "no bytes"],
)
def test_nothing_to_draw_is_none(draw, run: BenchResults) -> None:
    assert draw(run) is None


def _texts(figure) -> list[str]:
    figure.canvas.draw()
    texts = [text for axes in figure.axes for text in (*axes.texts, axes.title)]
    texts += [
        label
        for axes in figure.axes
        for label in (*axes.get_xticklabels(), *axes.get_yticklabels())
    ]
    return [text.get_text() for text in texts]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list:
    """What was drawn, before it became a PNG."""
    drawn: list = []
    real = plots._png
    monkeypatch.setattr(plots, "_png", lambda figure: drawn.append(figure) or real(figure))
    return drawn


def test_lengths_and_times_are_written_out(figures: list) -> None:
    run = full_run()
    slow = [
        msgspec.structs.replace(each, median_us=123456.0) for each in run.measurements if each.plan
    ]
    plots.plan_heat_map(results(*slow))
    plots.latency_by_context(run)
    plots.host_growth(run)
    heat, latency, host = map(_texts, figures)
    assert "123456" in heat
    assert {"1k", "2k", "4k", "8k"} <= {*latency} and {"200", "500"} <= {*latency}
    assert {"128", "1k", "8k"} <= {*host}
    assert not [text for text in (*heat, *latency, *host) if "e+" in text or "^" in text]


def test_the_roof_is_named_above_it_and_no_point_is_cut_off(figures: list) -> None:
    run = full_run()  # its prompt is faster than the roof: a fault that has to be seen
    plots.roofline(run)
    (figure,) = figures
    figure.canvas.draw()
    (axes,) = figure.axes
    name = next(text for text in axes.texts if "copy" in text.get_text())
    roof = axes.transData.transform((1, run.ceilings.matmul_flops_per_s))[1]
    assert name.get_window_extent().y0 > roof
    assert axes.get_ylim()[1] > max(each.flops_per_s or 0 for each in run.measurements)
    assert {"8q1s1k", "8q1s8k", "q2k"} <= {text.get_text() for text in axes.texts}


def test_names_are_not_formulas() -> None:
    assert set(draw_all(hostile_run())) == {"roofline", "latency_by_context", "plan_heat_map"}


def test_plans_of_other_fields_are_left_out_of_the_map() -> None:
    rows = [row(us=9.0 + n, plan=f"queries={n}") for n in range(6)]
    assert plots.plan_heat_map(results(*rows)) is None
    prefill = [row("q64", us=9.0 + n, plan=f"rows=64,tile_kv={2**n},num_warps=4") for n in range(6)]
    assert (plots.plan_heat_map(results(*rows, *prefill)) or b"").startswith(PNG)


# ---------------------------------------------------------------- the page


class _Page(HTMLParser):
    """Tags that are open or fetch something, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("run", [full_run(), hostile_run(), results()], ids=["full", "hostile", "empty"])  # fmt: skip
def test_the_page_has_everything_and_fetches_nothing(run: BenchResults) -> None:
    pictures = draw_all(run)
    html = html_report(run, pictures)
    page = _Page(html)
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    assert len(page.links) == len(pictures)
    assert not re.search(r"https?://|//cdn|@import|url\(", html)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert page.tags.count("tr") >= len(run.measurements)
    text = "".join(page.text)
    for measured in run.measurements:
        for part in (measured.op, measured.batch, measured.shape, measured.implementation):
            assert part in text
        assert (measured.note or "") in text
    assert run.machine.device in text


def test_captions_fit_pictures() -> None:
    page = html_report(full_run(), {name: PNG for name in [*PLOTS, "<odd>"]})
    assert page.count("<figcaption>") == len(PLOTS) + 1
    assert "<odd>" not in page


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("run", [full_run(), hostile_run()], ids=["full", "hostile"])
def test_terminals_of_any_width_show_all_of_it(run: BenchResults, width: int) -> None:
    """Names fold, and no figure is cut; errors are printed as they are."""
    text = shown(facts(run), *kernel_tables(run, width), width=width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    whole = shown(*kernel_tables(run), width=500)
    for measured in run.measurements:
        assert f"{measured.implementation}" in whole
        if measured.note:
            assert squeezed(measured.note) in squeezed(whole)
    for table in kernel_tables(run, width):
        figures = [str(cell) for column in table.columns[1:] for cell in column.cells]
        assert len(figures) > 0 or len(table.columns) == 1
        assert all(figure in shown(table, width=width) for figure in figures)


def test_a_comparison_on_a_narrow_terminal_has_its_verdicts() -> None:
    run = full_run()
    slower = results(*(row(us=500.0) if each.is_own_choice else each for each in run.measurements))
    text = shown(changes_table(changes(run, slower), 0.1), width=60)
    assert "slower" in text and all(len(line) <= 60 for line in text.splitlines())
    hostile = hostile_run()
    assert "[/bold]" in shown(changes_table(changes(hostile, hostile), 0.1))


def test_a_ratio_is_over_octavos_own_choice() -> None:
    rows = [row(us=50.0, plan="tile_kv=16"), row(us=100.0), row(us=150.0, implementation="sdpa")]
    ratios = [cells[COLUMNS.index("ratio")] for cells in case_cells(rows, results(*rows))]
    assert ratios == ["0.50", "1.00", "1.50"]
    of_graphs = [
        row(us=100.0, graph_us=50.0),
        row(us=150.0, graph_us=100.0),
        row(us=120.0),
        row(us=1e6),
    ]
    of_graphs[1:] = [msgspec.structs.replace(each, implementation="peer") for each in of_graphs[1:]]
    ratios = [cells[COLUMNS.index("ratio")] for cells in case_cells(of_graphs, results())]
    assert ratios == ["1.00", "2.00", "1.20", "10000.00"]
    tiny = [row(us=1e5), row(us=50.0, implementation="sdpa")]
    assert list(case_cells(tiny, results()))[1][COLUMNS.index("ratio")] == "0.0005"
    without = [row(us=None, note="failed"), row(us=150.0, implementation="sdpa")]
    assert [cells[COLUMNS.index("ratio")] for cells in case_cells(without, results())] == ["", ""]


def test_markdown_has_one_line_a_measurement() -> None:
    for run in (full_run(), hostile_run()):
        lines = markdown(run).splitlines()
        assert len(lines) == 2 + len(run.measurements)
        bars = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
        assert bars == {len(COLUMNS) + 4}
        assert "<script" not in markdown(run)


def test_a_batch_of_hundreds_of_lengths_has_a_short_name() -> None:
    long = "_".join(f"q1s{n}" for n in range(1001, 1301))
    assert len(shorter(long)) < 90
    assert shorter(long).endswith("_... (300 sequences)")
    assert shorter("8q1s1k") == "8q1s1k"
    run = results(row(long))
    assert "(300sequences)" in squeezed(shown(*kernel_tables(run)))
    assert long in html_report(run, {})
