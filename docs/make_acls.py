# SPDX-License-Identifier: Apache-2.0
"""Writes docs/reference/authorization.md from the table of checks. `--check` fails if the page differs."""

from __future__ import annotations

import sys
from pathlib import Path

from kcoord.server.api.authorization_table import CHECKS, Check
from kcoord.server.api.served_versions import SERVED_VERSIONS
from kcoord_protocol.api_keys import ApiKey

PAGE = Path(__file__).parent / "reference" / "authorization.md"

HEAD = """\
# Rights that requests need

For operators who write ACLs. Each row is one check of an API: the operation on the resource, and the error that a
client gets without the right to it. No error means that the response leaves something out. `docs/make_acls.py` makes
this page from `kcoord/server/api/authorization_table.py`; a test compares the table with the handlers.

A client that may not describe a topic does not learn whether it exists. The broker and its workers need no rights for
what they ask each other, and for internal topics that they create.

| API | operation | resource | error | when |
|---|---|---|---|---|
"""


def main() -> int:
    """Writes or checks the page."""
    if CHECKS.keys() != SERVED_VERSIONS.keys():
        names = sorted(key.name for key in CHECKS.keys() ^ SERVED_VERSIONS.keys())
        print(f"kcoord/server/api/authorization_table.py and served_versions.py differ in {names}", file=sys.stderr)
        return 1
    text = HEAD + "".join(_rows(key, checks) for key, checks in sorted(CHECKS.items()))
    if "--check" in sys.argv[1:]:
        if PAGE.read_text() != text:
            print(f"{PAGE} is not what docs/make_acls.py makes: run `make generate`", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    return 0


def _rows(key: ApiKey, checks: tuple[Check, ...]) -> str:
    name = "".join(part.capitalize() for part in key.name.split("_"))
    if not checks:
        return f"| {name} | | | | needs no right |\n"
    return "".join(
        f"| {name} | {check.operation.title} | {check.resource_type.title} | "
        f"{check.error.name if check.error is not None else ''} | {check.note} |\n"
        for check in checks
    )


if __name__ == "__main__":
    sys.exit(main())
