# SPDX-License-Identifier: Apache-2.0
"""Writes docs/configuration.md and kcoord/config/attributes.py from the keys in kcoord/config/keys.txt.

`--check` fails if one of them is not up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from kcoord.config.key import ConfigKey, ConfigType, Effect, value_to_string
from kcoord.config.keys import BROKER_KEYS, GROUP_KEYS, TOPIC_KEYS

EMPTY = '""'
WITHOUT_EFFECT = "Accepted without effect: "

DOCUMENT = Path(__file__).with_name("configuration.md")
ATTRIBUTES = Path(__file__).parents[1] / "kcoord" / "config" / "attributes.py"

PYTHON_TYPES = {
    ConfigType.BOOLEAN: "bool",
    ConfigType.INT: "int",
    ConfigType.SHORT: "int",
    ConfigType.LONG: "int",
    ConfigType.DOUBLE: "float",
    ConfigType.LIST: "list[str]",
}

HEAD = """# Configuration

For operators. After reading it you can set every key, and you know its type, its default and the allowed values.

`kcoord serve [server.properties] [--override key=value ...]` reads these sources; a later one overrides an earlier one:
the defaults, the properties file, environment variables (`KCOORD_` and the key in capitals with `_` for `.`, such as
`KCOORD_LOG_DIRS`), and `--override`. Keys, types, defaults and ranges are Kafka's; keys that begin with `kcoord.` are
kcoord's own. With a bad value the broker does not start, and prints the key, the value and the allowed values. Some
keys of Kafka have no effect here (replication, KRaft quorums ...). The broker checks them, describes them, and names
them in one log line, so that any `server.properties` loads. The last section lists these keys.

The broker also does not start with a setting that promises something that kcoord does not have: a SASL mechanism that
is not offered, or a plug-in class other than Kafka's own, such as `authorizer.class.name`, `principal.builder.class` or
`ssl.engine.factory.class`.

*Dynamic* keys can be changed while the broker runs (`kafka-configs --alter --entity-type brokers`), and take effect at
once. The broker rejects such a change of any other broker key. Keys for one listener (`listener.name.NAME.KEY`) have an
effect if KEY begins with `ssl.` or `sasl.`, or is `connections.max.reauth.ms`. Other keys for one listener are kept and
described, but have no effect. *Inert* topic keys are stored and described, but have no effect here. `make generate`
writes this file.
"""


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def row(key: ConfigKey) -> str:
    default = "" if key.default is None else f"`{value_to_string(key.default) or EMPTY}`"
    allowed = "" if key.validator is None else cell(key.validator.text)
    marks = [mark for mark, applies in (("dynamic", key.dynamic), ("inert", key.effect is Effect.NONE)) if applies]
    text = cell(key.doc) + (f" *{', '.join(marks).capitalize()}.*" if marks else "")
    return f"| `{key.name}` | {key.type.name.lower()} | {default} | {allowed} | {text} |"


def reason(key: ConfigKey) -> str:
    text = key.doc.removeprefix(WITHOUT_EFFECT)
    return text[0].upper() + text[1:]


def table(title: str, keys: Mapping[str, ConfigKey]) -> str:
    rows = [row(key) for _, key in sorted(keys.items()) if not key.internal]
    head = ["| key | type | default | allowed | meaning |", "|---|---|---|---|---|"]
    return "\n".join([f"\n## {title}\n", *head, *rows, ""])


def configuration() -> str:
    own = {name: key for name, key in BROKER_KEYS.items() if name.startswith("kcoord.")}
    kafkas = {name: key for name, key in BROKER_KEYS.items() if key.effect is not Effect.NONE and name not in own}
    inert = [key for _, key in sorted(BROKER_KEYS.items()) if key.effect is Effect.NONE]
    explained = {key.name: key for key in inert if key.doc.startswith(WITHOUT_EFFECT)}
    return "".join(
        [
            HEAD,
            table("kcoord's own", own),
            table("Broker", kafkas),
            table("Topics (`kafka-configs --entity-type topics`)", TOPIC_KEYS),
            table("Groups (`kafka-configs --entity-type groups`)", GROUP_KEYS),
            "\n## Accepted without effect\n\nThese keys have no effect here:\n\n| key | reason |\n|---|---|\n",
            "".join(f"| `{name}` | {cell(reason(key))} |\n" for name, key in explained.items()),
            "\nThe keys of replication, quorums, tiered storage, security and groups of other kinds have no effect "
            "either:\n\n",
            ", ".join(f"`{key.name}`" for key in inert if key.name not in explained) + "\n",
        ]
    )


ATTRIBUTES_HEAD = """# SPDX-License-Identifier: Apache-2.0
# Written by `make generate` from keys.txt; do not edit.
\"\"\"The types of the keys that have an effect. An attribute is named like its key, with `_` for `.`.\"\"\"

from __future__ import annotations
"""


def attributes() -> str:
    parts = [ATTRIBUTES_HEAD]
    for kind, keys in (("Broker", BROKER_KEYS), ("Topic", TOPIC_KEYS), ("Group", GROUP_KEYS)):
        lines = [f"    {key.attribute}: {python_type(key)}\n" for key in keys.values() if key.effect is not Effect.NONE]
        head = f'class {kind}Attributes:\n    """The keys of a {kind.lower()}."""\n\n'
        parts.append(f"\n\n{head}{''.join(lines)}")
    return "".join(parts)


def python_type(key: ConfigKey) -> str:
    return PYTHON_TYPES.get(key.type, "str") + (" | None" if key.default is None else "")


def main() -> int:
    for path, text in ((DOCUMENT, configuration()), (ATTRIBUTES, attributes())):
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{path} does not agree with kcoord/config/keys.txt; run `make generate`", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
