# SPDX-License-Identifier: Apache-2.0
"""The text parts of the page: tiles, the status list, tables. All values are escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

import pandas as pd

from kcoord.pipeline.lake.report.data import ReportData

NOTHING = "-"
_TIME = "%b %d %H:%M:%S"


class Cell(NamedTuple):
    """A column of a table: its title, its text for a row, and its style.

    The style is "n" for a number, "verdict" for a chip, "command" for code.
    """

    title: str
    text: Callable[[pd.Series], str]
    style: str = ""


def number(value: object, unit: str = "") -> str:
    return NOTHING if value is None or pd.isna(value) else f"{float(str(value)):,.0f}{unit}"


def signed(value: object) -> str:
    """Formats a difference: `+5` records were skipped, `-5` are read again."""
    return number(value) if value is None or pd.isna(value) else f"{float(str(value)):+,.0f}"


def moment(value: object) -> str:
    return NOTHING if not isinstance(value, pd.Timestamp) or pd.isna(value) else value.strftime(_TIME)


def duration(milliseconds: object) -> str:
    """Formats a duration in its two largest units."""
    if milliseconds is None or pd.isna(milliseconds):
        return NOTHING
    value = float(str(milliseconds))
    sign, value = ("-" if value < 0 else ""), abs(value)
    if value < 1000:
        return f"{sign}{value:.0f} ms"
    seconds = value / 1000
    if seconds < 60:
        return f"{sign}{seconds:.1f} s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{sign}{minutes:.0f} min {seconds:.0f} s"
    hours, minutes = divmod(minutes, 60)
    return f"{sign}{hours:.0f} h {minutes:.0f} min" if hours < 48 else f"{sign}{hours / 24:.0f} d {hours % 24:.0f} h"


def chip(text: object) -> str:
    shown = NOTHING if text is None or pd.isna(text) else str(text)
    return f'<span class="chip {escape(shown)}">{escape(shown)}</span>'


def empty(text: str) -> str:
    return f'<p class="empty">{text}</p>'


def table(rows: pd.DataFrame, cells: Sequence[Cell]) -> str:
    head = "".join(f'<th class="{cell.style}">{escape(cell.title)}</th>' for cell in cells)
    lines = [
        "".join(f'<td class="{cell.style}">{_content(cell, row)}</td>' for cell in cells) for _, row in rows.iterrows()
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _content(cell: Cell, row: pd.Series) -> str:
    text = cell.text(row)
    if cell.style == "verdict":
        return chip(text)
    return f"<code>{escape(text)}</code>" if cell.style == "command" else escape(text)


def total(rows: pd.DataFrame, name: str) -> int:
    """Returns a count of all rows, of which `rows` are the first ones."""
    return int(rows[name].fillna(0).iloc[0]) if len(rows) else 0


def left_out(rows: pd.DataFrame) -> str:
    """Says how many rows are not shown."""
    rest = total(rows, "all_rows") - len(rows)
    return empty(f"{number(rest)} more are not shown.") if rest else ""


# --- sections ---------------------------------------------------------------------------------------------------------


def tiles(data: ReportData) -> str:
    groups = data.groups
    bad, due = total(groups, "all_errors"), total(data.expiry, "all_due")
    storms, lost = total(data.storms, "all_rows"), total(data.audit, "all_lost")
    facts = (
        ("groups", number(total(groups, "all_rows")), ""),
        ("members", number(total(groups, "all_members")), ""),
        ("groups in error", number(bad), "err" if bad else "ok"),
        ("records behind", number(total(groups, "all_lag")) if groups["all_lag"].notna().any() else NOTHING, ""),
        ("rebalance storms", number(storms), "warn" if storms else "ok"),
        ("offsets expire in a day", number(due), "warn" if due else "ok"),
        ("records lost or at risk", number(lost), "err" if lost else "ok"),
    )
    return "".join(f'<div class="tile {tone}"><b>{value}</b><span>{name}</span></div>' for name, value, tone in facts)


def status(data: ReportData) -> str:
    if data.groups.empty:
        return empty("There are no groups.")
    heads = ("Group", "Status", "Type", "State", "Members", "Partitions", "Lag", "Last commit")
    styles = {"Members": "n", "Partitions": "n", "Lag": "n"}
    head = "".join(f'<span class="{styles.get(title, "")}">{title}</span>' for title in heads)
    by_group = dict(iter(data.status.groupby("group"))) if len(data.status) else {}
    lists = "".join(_group(row, by_group.get(row["group"])) for _, row in data.groups.iterrows())
    return f'<div class="groups"><div class="row head">{head}</div>{lists}</div>{left_out(data.groups)}'


def _count(value: object, singular: str, plural: str) -> str:
    """Formats a number with a label. Phones show the label, since their columns have no heads, unless it is unknown."""
    count = pd.to_numeric(value)
    label = "" if pd.isna(count) else singular if count == 1 else plural
    return f'<span class="n" data-label="{label}">{number(value)}</span>'


def _group(row: pd.Series, partitions: pd.DataFrame | None) -> str:
    kind = row["kind"] if isinstance(row["kind"], str) else "offsets"
    state = row["state"] if isinstance(row["state"], str) else NOTHING
    summary = (
        f'<span class="name">{escape(str(row["group"]))}</span><span>{chip(row["group_status"])}</span>'
        f'<span class="wide soft">{escape(kind)}</span><span class="wide soft">{escape(state)}</span>'
        f"{_count(row['members'], 'member', 'members')}{_count(row['partitions'], 'partition', 'partitions')}"
        f"{_count(row['lag'], 'behind', 'behind')}"
        f'<span class="wide soft">{moment(row["last_commit"])}</span>'
    )
    inner = empty("No committed offsets.") if partitions is None else table(partitions, _PARTITION)
    return f'<details><summary class="row">{summary}</summary>{inner}</details>'


_PARTITION = (
    Cell("Partition", lambda row: f"{row['topic']}-{row['partition']}"),
    Cell("Status", lambda row: str(row["status"]), "verdict"),
    Cell("Committed", lambda row: number(row["committed_offset"]), "n"),
    Cell("End", lambda row: number(row["end_offset"]), "n"),
    Cell("Lag", lambda row: number(row["lag"]), "n"),
    Cell("Last commit", lambda row: moment(row["last_commit_timestamp"])),
)


def convergence(data: ReportData) -> str:
    if data.convergence.empty:
        return ""
    rows = data.convergence.sort_values("max_ms", ascending=False)
    cells = (
        Cell("KIP-848 group", lambda row: str(row["group"])),
        Cell("Epochs", lambda row: number(row["epochs"]), "n"),
        Cell("All members reached", lambda row: number(row["converged"]), "n"),
        Cell("Median time to converge", lambda row: duration(row["p50_ms"]), "n"),
        Cell("Longest", lambda row: duration(row["max_ms"]), "n"),
    )
    return table(rows, cells)


def churn(data: ReportData) -> str:
    if data.churn.empty:
        return empty("No members joined or left.")
    rows = data.churn.sort_values(["joins", "leaves"], ascending=False).head(15)
    cells = (
        Cell("Group", lambda row: str(row["group"])),
        Cell("Joins", lambda row: number(row["joins"]), "n"),
        Cell("Leaves", lambda row: number(row["leaves"]), "n"),
        Cell("Epochs", lambda row: number(row["epochs"]), "n"),
        Cell("Mean stay", lambda row: duration(row["mean_lifetime_ms"]), "n"),
    )
    return table(rows, cells)


def next_to_expire(data: ReportData) -> str:
    due = data.expiry.head(8)
    if due.empty:
        return ""
    cells = (
        Cell("Group", lambda row: str(row["group"])),
        Cell("Offsets", lambda row: number(row["offsets"]), "n"),
        Cell("Expire", lambda row: moment(row["expires_at"])),
        Cell("In", lambda row: "overdue" if row["expires_in_ms"] <= 0 else duration(row["expires_in_ms"]), "n"),
        Cell("Because", lambda row: _BASES.get(row["basis"], row["basis"])),
    )
    return table(due, cells)


_BASES = {
    "empty": "the group is empty",
    "simple": "the group never had members",
    "unsubscribed": "nobody subscribes to the topic",
    "commit-age": "the group is empty, and Kafka counts from the commit",
    "own": "the client set the time",
}


def audit(data: ReportData) -> str:
    if data.audit.empty:
        return empty("<b>No loss:</b> no partition is known to be younger than a group that reads its topic.")
    cells = (
        Cell("Group", lambda row: str(row["group"])),
        Cell("Partition", lambda row: f"{row['topic']}-{row['partition']}"),
        Cell("Verdict", lambda row: str(row["verdict"]), "verdict"),
        Cell("Records", lambda row: number(row["records"]), "n"),
        Cell("Partition created", lambda row: moment(row["partition_created"])),
        Cell("First assigned", lambda row: moment(row["first_assigned"])),
        Cell("First commit at", lambda row: number(row["first_committed_offset"]), "n"),
    )
    return table(data.audit, cells) + left_out(data.audit)


_ACTIONS = {
    "expired": "expired",
    "group-delete": "deleted with the group",
    "topic-delete": "deleted with the topic",
    "offset-delete": "deleted",
    "reset": "reset",
    "rewind": "set back",
}


def losses(data: ReportData) -> str:
    if data.losses.empty:
        return empty("<b>None.</b> No committed offset was removed or set back.")
    cells = (
        Cell("Time", lambda row: moment(row["timestamp"])),
        Cell("Group", lambda row: str(row["group"])),
        Cell("Topic", lambda row: str(row["topic"])),
        Cell("Partitions", lambda row: number(row["partitions"]), "n"),
        Cell("What", lambda row: _ACTIONS.get(row["action"], row["action"])),
        Cell("Records", lambda row: signed(row["records"]), "n"),
        Cell("By", _who),
        Cell("Known from", lambda row: str(row["reason_source"])),
    )
    return table(data.losses, cells) + left_out(data.losses)


def denials(data: ReportData) -> str:
    if data.denials.empty:
        return empty("<b>No denied attempt</b> is in the lake. <code>--audit</code> copies the audit logs of brokers.")
    cells = (
        Cell("Principal", lambda row: str(row["principal"])),
        Cell("Request", lambda row: str(row["request"])),
        Cell("Denied", lambda row: f"{row['operation']} on {str(row['resource_type']).lower()} {row['resource']}"),
        Cell("Times", lambda row: number(row["times"]), "n"),
        Cell("Last", lambda row: moment(row["timestamp"])),
        Cell("From", lambda row: str(row["host"])),
    )
    return table(data.denials, cells) + left_out(data.denials)


def _who(row: pd.Series) -> str:
    """Returns the principal with its client and address, as far as they are known."""
    if row["action"] == "expired":
        return "the retention"
    principal = row["principal"] if isinstance(row["principal"], str) else "unknown"
    client = f" ({row['client_id']} at {row['host']})" if isinstance(row["client_id"], str) else ""
    return f"{principal}{client}"


def orphans(data: ReportData) -> str:
    if data.orphans.empty:
        return empty("<b>None.</b> Every committed offset belongs to a topic that its group still reads.")
    grouped = data.orphans.groupby(["group", "topic", "reason"])["partition"].apply(_numbers).reset_index()
    cells = (
        Cell("Group", lambda row: str(row["group"])),
        Cell("Topic", lambda row: str(row["topic"])),
        Cell("Partitions", lambda row: str(row["partition"])),
        Cell("Why", lambda row: str(row["reason"])),
        Cell("To delete them", _delete_command, "command"),
    )
    return table(grouped, cells) + left_out(data.orphans)


def _numbers(partitions: Iterable[int]) -> str:
    return ",".join(str(number) for number in sorted(partitions))


def _delete_command(row: pd.Series) -> str:
    if row["reason"] == "topic-not-visible":
        return "# check first: the topic was deleted, or the client may not see it"
    place = f"--topic {row['topic']}:{row['partition']}"
    return f"kcoord consumer-groups --delete-offsets --group {row['group']} {place}"
