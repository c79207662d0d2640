# SPDX-License-Identifier: Apache-2.0
"""`kcoord features describe|upgrade|downgrade|disable`: show and change the levels of the cluster's features.

Options and output lines are those of kafka-features.sh. All levels are numbers, including those of metadata.version.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from kcoord.cli.options import parse_options
from kcoord.cli.output import print_json
from kcoord.cli.session import EXIT_FAILED, add_connection_options, add_json_option, error_text, run_with_admin
from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.model import FeatureMetadata, FeatureUpdate, UpgradeType

DESCRIBE, UPGRADE, DOWNGRADE, DISABLE = "describe", "upgrade", "downgrade", "disable"
_SHORT = re.compile(r"-?[0-9]+")
_DONE = {UPGRADE: "upgraded to {}", DOWNGRADE: "downgraded to {}", DISABLE: "disabled"}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kcoord features", description=__doc__, allow_abbrev=False)
    parser.add_argument("action", choices=(DESCRIBE, UPGRADE, DOWNGRADE, DISABLE))
    parser.add_argument(
        "--feature",
        action="append",
        default=[],
        metavar="NAME=LEVEL",
        help=f"a feature and its new level (for {DISABLE} only the name); may be repeated",
    )
    parser.add_argument("--dry-run", action="store_true", help="only check that the levels can be changed")
    parser.add_argument(
        "--unsafe", action="store_true", help=f"with {DOWNGRADE} and {DISABLE}: allow the loss of metadata"
    )
    add_connection_options(parser)
    add_json_option(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parse_options(parser, arguments, find_problem)
    return run_with_admin(parser.prog, options, _describe if options.action == DESCRIBE else _update)


def find_problem(options: argparse.Namespace) -> str | None:
    """Returns why the options cannot be combined, or None if they can."""
    if options.action == DESCRIBE:
        if options.feature or options.dry_run or options.unsafe:
            return f"{DESCRIBE} shows all features and changes nothing"
        return None
    if options.json:
        return f"--json goes with {DESCRIBE}"
    if not options.feature:
        return f"You must specify at least one feature to {options.action}"
    if options.unsafe and options.action == UPGRADE:
        return f"--unsafe does not go with {UPGRADE}"
    try:
        levels = parse_levels(options)
    except ValueError as error:
        return str(error)
    return "a feature is named more than once" if len(levels) < len(options.feature) else None


def parse_levels(options: argparse.Namespace) -> dict[str, int]:
    """Returns the new levels by feature. Raises ValueError if a text is not NAME=LEVEL."""
    if options.action == DISABLE:
        return dict.fromkeys(options.feature, 0)
    levels: dict[str, int] = {}
    for text in options.feature:
        name, equals, level = text.partition("=")
        if not equals:
            raise ValueError(f"Can't parse feature=level string {text}: equals sign not found.")
        if _SHORT.fullmatch(level) is None or not -(1 << 15) <= int(level) < 1 << 15:
            raise ValueError(f"Can't parse feature=level string {text}: unable to parse {level} as a short.")
        levels[name.strip()] = int(level)
    return levels


async def _describe(admin: AdminClient, options: argparse.Namespace) -> int:
    described = await admin.describe_features()
    if options.json:
        print_json(_as_json(described))
        return 0
    epoch = "-" if described.finalized_epoch is None else described.finalized_epoch
    for name, (lowest, highest) in sorted(described.supported.items()):
        level = described.finalized.get(name, 0)
        print(
            f"Feature: {name:<42}SupportedMinVersion: {lowest:<17}SupportedMaxVersion: {highest:<17}"
            f"FinalizedVersionLevel: {level:<17}Epoch: {epoch}"
        )
    return 0


def _as_json(described: FeatureMetadata) -> dict[str, object]:
    return {
        "epoch": described.finalized_epoch,
        "features": [
            {
                "feature": name,
                "supported_min_version": lowest,
                "supported_max_version": highest,
                "finalized_version_level": described.finalized.get(name, 0),
            }
            for name, (lowest, highest) in sorted(described.supported.items())
        ],
    }


async def _update(admin: AdminClient, options: argparse.Namespace) -> int:
    upgrade_type = UpgradeType.UPGRADE
    if options.action != UPGRADE:
        upgrade_type = UpgradeType.UNSAFE_DOWNGRADE if options.unsafe else UpgradeType.SAFE_DOWNGRADE
    levels = dict(sorted(parse_levels(options).items()))
    updates = {name: FeatureUpdate(level, upgrade_type) for name, level in levels.items()}
    results = await admin.update_features(updates, validate_only=options.dry_run)
    for name, level in levels.items():
        error = results.error(name)
        if error is None:
            print(f"{name} {'can be' if options.dry_run else 'was'} {_DONE[options.action].format(level)}.")
        else:
            target = "" if options.action == DISABLE else f" to {level}"
            verb = "Can not" if options.dry_run else "Could not"
            print(f"{verb} {options.action} {name}{target}. {error.message or error_text(error)}")
    if results.errors:
        print(f"{len(results.errors)} out of {len(levels)} operation(s) failed.", file=sys.stderr)
        return EXIT_FAILED
    return 0
