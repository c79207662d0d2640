# SPDX-License-Identifier: Apache-2.0
"""`kcoord upstream`: moves groups between an existing cluster and kcoord in front of it.

The commands connect to both sides: to kcoord at --bootstrap-server, and to the cluster itself, the upstream. kcoord
tells the addresses of the upstream. Other settings of the connections to it are in the file of --command-config, with
the prefix `kcoord.upstream.`, as in the configuration of kcoord. They may be those of an administrator.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Sequence

from kcoord.cli.session import add_connection_options, add_json_option, run_safely
from kcoord.cli.upstream_groups import export_groups, import_groups, verify_groups
from kcoord.cli.upstream_sides import Sides, connect
from kcoord.cli.upstream_status import show_status

Work = Callable[[Sides, argparse.Namespace], Awaitable[int]]


def main(arguments: Sequence[str]) -> int:
    options = make_parser().parse_args(arguments)
    work: Work = options.work

    async def run() -> int:
        async with connect(options) as sides:
            return await work(sides, options)

    return run_safely(f"kcoord upstream {options.action}", run)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kcoord upstream", description=__doc__, allow_abbrev=False)
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    _add_action(
        actions, "status", show_status, "show instances, brokers and groups of both sides; exit code 1 for a problem"
    )
    imports = _add_action(actions, "import", import_groups, "import committed offsets from the upstream into kcoord")
    imports.add_argument(
        "--again", action="store_true", help="also import groups that were here before, and were deleted or expired"
    )
    exports = _add_action(actions, "export", export_groups, "commit the offsets of kcoord in the upstream")
    exports.add_argument(
        "--overwrite", action="store_true", help="also export groups whose offsets in the upstream are later"
    )
    for action in (imports, exports):
        action.add_argument("--dry-run", action="store_true", help="only show what would be done")
    _add_action(
        actions, "verify", verify_groups, "compare the committed offsets of both sides; exit code 1 if any differ"
    )
    return parser


def _add_action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, work: Work, text: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
    parser.add_argument(
        "--group", action="append", default=[], metavar="GROUP", help="a group; can be repeated (default: all groups)"
    )
    add_connection_options(parser)
    add_json_option(parser)
    parser.set_defaults(work=work)
    return parser
