# SPDX-License-Identifier: Apache-2.0
"""Renders the page. It is self-contained: opening it loads nothing else."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from kcoord import __version__
from kcoord.pipeline.lake.builders import WHOLE
from kcoord.pipeline.lake.jobs import SILVER, Jobs
from kcoord.pipeline.lake.report import figures, markup
from kcoord.pipeline.lake.report.data import ReportData, collect
from kcoord.pipeline.lake.storage import Lake

_NO_SAMPLES: Final = "Lag needs samples of the end offsets: <code>kcoord lake ends</code> takes them."


def write_report(lake: Lake, jobs: Jobs, output: str, title: str) -> int:
    """Updates all tables and writes the page. Returns its size in bytes."""
    lake.check_records()
    jobs.ensure_all([*SILVER, "current_offsets", *WHOLE])
    page = render(collect(lake, jobs.now()), title).encode()
    Path(output).write_bytes(page)
    return len(page)


def render(data: ReportData, title: str) -> str:
    """Returns the page as text."""
    drawn = {
        "lag": figures.lag_heat_map(data),
        "timeline": figures.rebalance_timeline(data),
        "expiry": figures.expiry_calendar(data),
        "busiest": figures.busiest(data),
    }
    owners = figures.ownership(data)
    content = {name: json.loads(str(figure.to_json())) for name, figure in drawn.items() if figure is not None}
    content["owners"] = {group: json.loads(str(figure.to_json())) for group, figure in owners.items()}
    for figure in [*(content[name] for name in drawn if name in content), *content["owners"].values()]:
        figure["layout"].pop("template", None)  # it has 7 kB of colours, and the page uses none of them
    return Template(_text("page.html")).substitute(
        title=escape(title),
        about=_about(data),
        version=__version__,
        records=f"{data.records:,}",
        style=_text("style.css"),
        script=_text("script.js"),
        plotly=get_plotlyjs(),
        figures=json.dumps(content).replace("</", "<\\/"),
        tiles=markup.tiles(data),
        status=markup.status(data),
        lag=_plot("lag", drawn["lag"], _NO_SAMPLES),
        timeline=_plot("timeline", drawn["timeline"], "No group has had an epoch."),
        convergence=markup.convergence(data),
        owners=_owners(list(owners)),
        expiry=_plot("expiry", drawn["expiry"], "<b>Nothing expires:</b> all offsets are protected.")
        + markup.next_to_expire(data),
        busiest=_plot("busiest", drawn["busiest"], "No commits."),
        churn=markup.churn(data),
        audit=markup.audit(data),
        orphans=markup.orphans(data),
        losses=markup.losses(data),
        denials=markup.denials(data),
    )


def _about(data: ReportData) -> str:
    now = data.now.strftime("%Y-%m-%d %H:%M:%S")
    if data.first is None:
        return f"As of {now} UTC."
    span = markup.duration((data.now - data.first).total_seconds() * 1000)
    return f"As of {now} UTC, looking back over {span}."


def _plot(name: str, figure: go.Figure | None, otherwise: str) -> str:
    return markup.empty(otherwise) if figure is None else f'<div class="plot" id="plot-{name}"></div>'


def _owners(groups: list[str]) -> str:
    if not groups:
        return markup.empty("No assignments.")
    options = "".join(f'<option value="{escape(group)}">{escape(group)}</option>' for group in groups)
    return f'<select id="owner" aria-label="Group">{options}</select><div class="plot" id="plot-owners"></div>'


def _text(name: str) -> str:
    return files("kcoord.pipeline.lake.report").joinpath(name).read_text(encoding="utf-8")
