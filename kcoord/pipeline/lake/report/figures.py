# SPDX-License-Identifier: Apache-2.0
"""The figures of the page, made with plotly. The page's script sets the colours of the light and dark themes."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import pandas as pd
import plotly.graph_objects as go

from kcoord.pipeline.lake.report.data import ReportData

REASONS: Final = {
    "join": "#1f9d7a",
    "leave": "#e0883a",
    "fenced": "#d4484b",
    "subscription": "#8b6cc9",
    "metadata": "#3f83d4",
    "assignor": "#b8a13c",
    "rack": "#4fb3bf",
    "migration": "#c95f9e",
    "rejoin": "#8a93a3",
}
"""Reason of an epoch -> colour."""
OWNERS: Final = (
    "#3f83d4",
    "#e0883a",
    "#1f9d7a",
    "#8b6cc9",
    "#d4484b",
    "#2fa7b8",
    "#c95f9e",
    "#9aa63c",
    "#6f7f96",
    "#b27a4b",
)
_STORM: Final = "rgba(212, 72, 75, 0.22)"
_ROW_PX: Final = 24
_MARGIN: Final = {"l": 8, "r": 12, "t": 8, "b": 8}
_MAX_LABEL: Final = 34
_FEWEST_BINS: Final = 11
_MOST_BINS: Final = 90


def lag_heat_map(data: ReportData) -> go.Figure | None:
    """Draws a row per partition, the worst on top. The colour is the logarithm of the lag."""
    if data.lag.empty:
        return None
    rows = data.lag.assign(name=_partition_names(data.lag, with_group=True))
    times = rows.groupby("piece")["timestamp"].min()
    lags = rows.pivot_table(index="name", columns="piece", values="lag", aggfunc="max")
    seconds = rows.pivot_table(index="name", columns="piece", values="seconds", aggfunc="max")
    order = lags.max(axis=1).sort_values().index
    lags, seconds = lags.loc[order], seconds.reindex(index=order, columns=lags.columns)
    worst = max(float(lags.max().max()), 10.0)
    ticks = [10**power for power in range(len(str(int(worst))) + 1) if 10**power <= worst * 2]
    figure = go.Figure(
        go.Heatmap(
            x=[times[piece] for piece in lags.columns],
            y=[_short(name) for name in lags.index],
            z=(lags + 1).apply(_log10).to_numpy(),
            customdata=_stack(lags, seconds),
            hovertemplate="<b>%{y}</b><br>%{x|%b %d %H:%M:%S}<br>"
            "%{customdata[0]:,} records, %{customdata[1]:,.1f} s<extra></extra>",
            colorbar={
                "title": {"text": "records", "side": "top"},
                "tickvals": [0, *[_log10(tick + 1) for tick in ticks]],
                "ticktext": ["0", *[_compact(tick) for tick in ticks]],
                "orientation": "h",
                "thickness": 10,
                "len": 0.5,
                "x": 1,
                "xanchor": "right",
                "y": 1,
                "yanchor": "bottom",
            },
            zmin=0,
            xgap=0,
            ygap=2,
        )
    )
    figure.update_layout(height=90 + _ROW_PX * len(lags), margin={**_MARGIN, "t": 56})
    figure.update_yaxes(showgrid=False)
    return figure


def rebalance_timeline(data: ReportData) -> go.Figure | None:
    """Draws a line per group and a mark per epoch, with storms shaded."""
    epochs = data.epochs[~data.epochs["is_tombstone"].astype(bool)] if len(data.epochs) else data.epochs
    if epochs.empty:
        return None
    counts = epochs.groupby("group").size().sort_values()
    groups = list(counts.index)
    place = {group: index for index, group in enumerate(groups)}
    figure = go.Figure()
    for reason, colour in REASONS.items():
        rows = epochs[epochs["reason"] == reason]
        if rows.empty:
            continue
        figure.add_trace(
            go.Scatter(
                x=list(rows["timestamp"]),
                y=[place[group] for group in rows["group"]],
                mode="markers",
                name=reason,
                marker={
                    "color": colour,
                    "size": 9,
                    "opacity": 0.8,
                    "symbol": "line-ns",
                    "line": {"width": 2, "color": colour},
                },
                customdata=rows[["group", "kind", "epoch", "members"]].to_numpy(),
                hovertemplate="<b>%{customdata[0]}</b> epoch %{customdata[2]} (%{customdata[1]})<br>"
                + "%{x|%b %d %H:%M:%S.%L}<br>"
                + f"{reason}, "
                + "%{customdata[3]} members<extra></extra>",
            )
        )
    _add_ends(figure, data.epochs, place)
    _add_storms(figure, data.storms, place)
    figure.update_yaxes(
        tickvals=list(range(len(groups))), ticktext=[_short(group) for group in groups], range=[-0.6, len(groups) - 0.4]
    )
    figure.update_layout(
        height=110 + 30 * len(groups),
        margin={**_MARGIN, "t": 46},
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "itemsizing": "constant"},
    )
    return figure


def _add_ends(figure: go.Figure, epochs: pd.DataFrame, place: dict[str, int]) -> None:
    ends = epochs[epochs["is_tombstone"].astype(bool) & epochs["group"].isin(list(place))]
    if ends.empty:
        return
    figure.add_trace(
        go.Scatter(
            x=list(ends["timestamp"]),
            y=[place[group] for group in ends["group"]],
            mode="markers",
            name="group ended",
            marker={"symbol": "x-thin", "size": 8, "line": {"width": 2, "color": "#8a93a3"}},
            customdata=ends[["group"]].to_numpy(),
            hovertemplate="<b>%{customdata[0]}</b> ended<br>%{x|%b %d %H:%M:%S}<extra></extra>",
        )
    )


def _add_storms(figure: go.Figure, storms: pd.DataFrame, place: dict[str, int]) -> None:
    shown = storms[storms["group"].isin(list(place))] if len(storms) else storms
    for storm in shown.itertuples():
        row = place[str(storm.group)]
        figure.add_shape(
            type="rect",
            x0=storm.from_timestamp,
            x1=storm.to_timestamp,
            y0=row - 0.42,
            y1=row + 0.42,
            fillcolor=_STORM,
            line={"width": 0},
            layer="below",
        )
    if len(shown):
        figure.add_trace(
            go.Scatter(
                x=list(shown["to_timestamp"]),
                y=[place[group] for group in shown["group"]],
                mode="markers",
                name="storm",
                marker={"symbol": "square", "size": 9, "color": "rgba(212, 72, 75, 0.55)"},
                customdata=shown[["group", "epochs", "duration_ms"]].to_numpy(),
                hovertemplate="<b>%{customdata[0]}</b>: %{customdata[1]} epochs in "
                "%{customdata[2]:,} ms<extra>storm</extra>",
            )
        )


def ownership(data: ReportData) -> dict[str, go.Figure]:
    """Draws a figure per group, with a row per partition, a bar per spell and a colour per member."""
    figures = {}
    end = data.now.replace(tzinfo=None)
    for group, rows in data.spells.groupby("group"):
        named = rows.assign(name=_partition_names(rows), until=rows["to_timestamp"].fillna(pd.Timestamp(end)))
        named = named.sort_values("from_timestamp")
        members = list(dict.fromkeys(named["member_id"]))
        figure = go.Figure()
        for index, member in enumerate(members):
            own = named[named["member_id"] == member]
            lengths = (own["until"] - own["from_timestamp"]).clip(lower=timedelta(milliseconds=1))
            figure.add_trace(
                go.Bar(
                    orientation="h",
                    y=[_short(name) for name in own["name"]],
                    base=list(own["from_timestamp"]),
                    x=[length.total_seconds() * 1000 for length in lengths],
                    name=_short(str(member), 14),
                    marker={
                        "color": OWNERS[index % len(OWNERS)],
                        "opacity": [0.45 if revoking else 0.92 for revoking in own["is_revoking"]],
                        "line": {"width": 0},
                    },
                    customdata=[
                        [member, start.strftime("%H:%M:%S"), stop.strftime("%H:%M:%S")]
                        for start, stop in zip(own["from_timestamp"], own["until"], strict=True)
                    ],
                    hovertemplate="<b>%{y}</b><br>%{customdata[0]}<br>"
                    "%{customdata[1]} to %{customdata[2]}<extra></extra>",
                    showlegend=index < len(OWNERS),
                )
            )
        names = sorted(set(named["name"]), key=_natural, reverse=True)
        figure.update_layout(
            barmode="overlay",
            bargap=0.25,
            height=110 + _ROW_PX * len(names),
            margin={**_MARGIN, "t": 46},
            legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        )
        figure.update_yaxes(categoryorder="array", categoryarray=[_short(name) for name in names])
        figure.update_xaxes(type="date")
        figures[str(group)] = figure
    return figures


def expiry_calendar(data: ReportData) -> go.Figure | None:
    """Draws the number of offsets that expire, by group and time. Overdue offsets are in the first column."""
    due = data.expiry
    if due.empty:
        return None
    now = pd.Timestamp(data.now.replace(tzinfo=None))
    moments = due["expires_at"].clip(lower=now)
    span = moments.max() - now
    unit = "D" if span > timedelta(days=2) else "h" if span > timedelta(hours=2) else "min"
    rows = due.assign(bin=moments.dt.floor(unit))
    table = rows.pivot_table(index="group", columns="bin", values="offsets", aggfunc="sum")
    begin = now.floor(unit)
    last = max(rows["bin"].max(), begin + _FEWEST_BINS * pd.Timedelta(1, unit=unit))
    bins = pd.date_range(begin, last, freq=unit)[:_MOST_BINS]
    table = table.reindex(columns=bins).sort_values(by="group", ascending=False)
    form = {"D": "%b %d", "h": "%b %d %H:00", "min": "%H:%M"}[unit]
    labels = [start.strftime(form) for start in bins]
    figure = go.Figure(
        go.Heatmap(
            x=labels,
            y=[_short(group) for group in table.index],
            z=table.to_numpy(),
            text=[["" if pd.isna(value) else f"{int(value)}" for value in row] for row in table.to_numpy()],
            texttemplate="%{text}" if len(bins) <= 31 else None,
            hovertemplate="<b>%{y}</b><br>%{x}: %{z} offsets expire<extra></extra>",
            xgap=3,
            ygap=3,
            showscale=False,
            zmin=0,
        )
    )
    figure.update_layout(height=80 + 30 * len(table), margin=_MARGIN)
    figure.update_xaxes(type="category", showgrid=False, nticks=12)
    figure.update_yaxes(showgrid=False)
    return figure


def busiest(data: ReportData) -> go.Figure | None:
    if data.hot.empty:
        return None
    totals = data.hot.groupby("group")["commits"].sum().sort_values()
    share = totals / max(int(data.hot["commits"].sum()), 1)
    figure = go.Figure(
        go.Bar(
            orientation="h",
            y=[_short(group) for group in totals.index],
            x=list(totals),
            text=[f"{_compact(value)}  ·  {part:.0%}" for value, part in zip(totals, share, strict=True)],
            textposition="outside",
            cliponaxis=False,
            marker={"color": OWNERS[0], "line": {"width": 0}},
            hovertemplate="<b>%{y}</b><br>%{x:,} commits<extra></extra>",
        )
    )
    figure.update_layout(height=60 + 28 * len(totals), margin={**_MARGIN, "r": 96}, bargap=0.35)
    figure.update_xaxes(showticklabels=False, showgrid=False, zeroline=False)
    return figure


def _partition_names(rows: pd.DataFrame, *, with_group: bool = False) -> list[str]:
    """Returns names such as `topic-3` or `group · topic-3`. A topic without a known name has its id."""
    topics = rows["topic"]
    if "topic_id" in rows:
        topics = topics.fillna(rows["topic_id"])
    names = [f"{topic}-{partition}" for topic, partition in zip(topics, rows["partition"], strict=True)]
    return [f"{group} · {name}" for group, name in zip(rows["group"], names, strict=True)] if with_group else names


def _natural(name: str) -> tuple[str, int]:
    topic, _, partition = name.rpartition("-")
    return topic, int(partition)


def _short(text: str, most: int = _MAX_LABEL) -> str:
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-most // 2 :]}"


def _log10(value: pd.Series | float) -> pd.Series | float:
    import numpy as np

    logarithm: pd.Series | float = np.log10(value)
    return logarithm


def _stack(lags: pd.DataFrame, seconds: pd.DataFrame) -> list[list[list[float]]]:
    return [
        [[float(lag), float(second)] for lag, second in zip(lag_row, second_row, strict=True)]
        for lag_row, second_row in zip(lags.to_numpy(), seconds.to_numpy(), strict=True)
    ]


def _compact(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"
