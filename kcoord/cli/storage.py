# SPDX-License-Identifier: Apache-2.0
"""`kcoord storage format`: prepares a data folder before the first start of its broker, as kafka-storage.sh does.

`kcoord serve` formats an empty folder by itself. The command is for a cluster id or for users that a broker must have
from its first moment.
"""

from __future__ import annotations

import argparse
import re
import secrets
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from kcoord.cli.output import print_json
from kcoord.cli.serve import broker_settings
from kcoord.cli.table import current_time_ms
from kcoord.config import BrokerConfig, ConfigError
from kcoord.config.scram_users import parse_scram_users
from kcoord_protocol.scram_mechanisms import SALT_SEED_BYTES, salt_of
from kcoord_protocol.uuid import uuid_to_string

_CLUSTER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kcoord storage", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    options = commands.add_parser("format", help="format the data folder", description=__doc__, allow_abbrev=False)
    options.add_argument(
        "-c", "--config", type=Path, metavar="FILE", required=True, help="the properties file of the broker"
    )
    options.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting that overrides the file; may be repeated",
    )
    options.add_argument("-t", "--cluster-id", metavar="ID", help="the cluster id (default: a random one)")
    options.add_argument(
        "-S",
        "--add-scram",
        action="append",
        default=[],
        metavar="USER",
        help="a user: SCRAM-SHA-256=[name=alice,password=pw], or with iterations, salt and saltedpassword (base64); "
        "may be repeated",
    )
    options.add_argument(
        "-g", "--ignore-formatted", action="store_true", help="succeed without a change if the folder is formatted"
    )
    options.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.cluster_id is not None and _CLUSTER_ID.fullmatch(options.cluster_id) is None:
        parser.error(f"--cluster-id: {options.cluster_id!r} is not 1 to 64 letters, digits, - and _")
    from kcoord.storage.errors import StorageError

    try:
        return _format(options)
    except BrokenPipeError:
        raise
    except (StorageError, ConfigError, OSError, ValueError) as error:
        print(f"kcoord storage: {error}", file=sys.stderr)
    return 1


def _format(options: argparse.Namespace) -> int:
    from kcoord.logtools.format import format_folder, is_formatted
    from kcoord.metadata.bootstrap import credential_records, feature_records
    from kcoord.storage.file_system import RealFileSystem
    from kcoord.storage.log_dir import Identity

    config = BrokerConfig.from_properties(broker_settings(options.config, options.override))
    folder = config.data_folders[0]
    users = [*config.bootstrap_users, *parse_scram_users(options.add_scram)]
    fs = RealFileSystem()
    formatted = is_formatted(fs, folder)
    if formatted and not options.ignore_formatted:
        raise ConfigError(f"Log directory {folder} is already formatted. Use --ignore-formatted to ignore it.")
    if not formatted:
        identity = Identity(
            options.cluster_id or uuid_to_string(uuid.uuid4().bytes),
            config.node_id,
            uuid_to_string(uuid.uuid4().bytes),
        )
        records = feature_records(config) + credential_records(
            users, lambda: salt_of(secrets.token_bytes(SALT_SEED_BYTES))
        )
        format_folder(fs, config, identity, records, current_time_ms())
    if options.json:
        print_json({"folder": folder, "formatted": not formatted, "users": 0 if formatted else len(users)})
    elif formatted:
        print("All of the log directories are already formatted.")
    else:
        credentials = "1 SCRAM credential" if len(users) == 1 else f"{len(users)} SCRAM credentials"
        print(f"Formatting metadata directory {folder}, {credentials}.")
    return 0
