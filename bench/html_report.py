"""One HTML file with a run's tables and pictures in it: it opens with no network and no other file."""

from __future__ import annotations

import base64
from html import escape
from itertools import groupby

from .results import BenchResults
from .tables import COLUMNS, case_cells, facts, shorter

_CAPTIONS = {
    "roofline": "What each case reached, under the roof of this machine's own copy and matrix product. Named: Octavo's own choice.",
    "latency_by_context": "Time of one call over the length of its sequences.",
    "plan_heat_map": "Each cell: the best time of the plans with this tile, whatever their warps and stages. Framed: the tile of the plan that is chosen without being told; its own time stands above.",
    "host_growth": "What the host does for a decode step, without the model. It should grow with the context no faster than the floor, which only finds more of its memory cold.",
}
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --own: #0b6e9922; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
p.facts { white-space: pre-line; opacity: .8; font-size: .9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr.own { background: var(--own); } td.note { text-align: left; white-space: normal; opacity: .7; }
figure { margin: 1.5rem 0; } img { max-width: 100%; background: white; border-radius: 4px; }
figcaption { font-size: .85rem; opacity: .8; }
"""


def html_report(results: BenchResults, pictures: dict[str, bytes]) -> str:
    """`pictures`: PNG files by the name of their plot."""
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>Octavo benchmarks</title><style>{_STYLE}</style></head><body>",
        f"<h1>Octavo benchmarks</h1><p class=facts>{escape(facts(results))}</p>",
        "<p>Everything in a table was verified against an fp64 computation, then timed in turns. "
        "<b>ratio</b> is the time over Octavo's own choice in the same turns. <b>of ceiling</b> is the share of the copy bandwidth "
        "or of the matrix product's FLOP/s, whichever is nearer. Where a call can be replayed as a graph, that time counts; a ratio is of two graphs or of two plain calls. On a CPU, what its caches kept from the call before counts for all alike; a GPU's is overwritten.</p>",
        *_pictures(pictures),
        *_tables(results),
        "</body></html>",
    ]
    return "\n".join(parts)


def _pictures(pictures: dict[str, bytes]) -> list[str]:
    return [
        f"<figure><img alt='{escape(name)}' src='data:image/png;base64,{base64.b64encode(png).decode()}'>"
        f"<figcaption>{escape(_CAPTIONS.get(name, name))}</figcaption></figure>"
        for name, png in pictures.items()
    ]


def _tables(results: BenchResults) -> list[str]:
    parts = []
    for (op, batch, shape), group in groupby(results.measurements, key=lambda row: row.key[:3]):
        rows = list(group)
        parts.append(
            f"<h2 title='{escape(batch)}'>{escape(op)} &nbsp; {escape(shorter(batch))} &nbsp; {escape(shape)}</h2>"
        )
        parts.append("<div class=wide><table><tr>" + "".join(f"<th>{name}</th>" for name in COLUMNS) + "</tr>")  # fmt: skip
        for row, cells in zip(rows, case_cells(rows, results), strict=True):
            if row.median_us is None:
                parts.append(f"<tr><td class=note colspan={len(COLUMNS)}>{escape(cells[0])}</td></tr>")  # fmt: skip
                continue
            own = " class=own" if row.is_own_choice else ""
            parts.append(f"<tr{own}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")  # fmt: skip
        parts.append("</table></div>")
    if results.host_costs:
        parts.append("<h2>Host cost of a decode step</h2><div class=wide><table>")
        parts.append("<tr><th>sequences</th><th>context</th><th>host us</th><th>floor us</th><th>x floor</th></tr>")  # fmt: skip
        parts += [
            f"<tr><td>{cost.num_seqs}</td><td>{cost.context_len}</td><td>{cost.host_us:.1f}</td>"
            f"<td>{cost.floor_us:.1f}</td><td>{cost.host_us / cost.floor_us:.2f}</td></tr>"
            for cost in results.host_costs
        ]
        parts.append("</table></div>")
    return parts
