# SPDX-License-Identifier: Apache-2.0
"""The option combinations of `kcoord topics` and `kcoord configs`, and the values that they parse to."""

from __future__ import annotations

import pytest

from kcoord.cli import configs, topics
from kcoord.cli.configs import parse_assignments
from kcoord.cli.quota_configs import double_text
from kcoord.cli.session import CommandError
from kcoord.cli.topics import parse_configs, parse_replica_assignment
from kcoord.client.admin.model import TopicListing

TOPIC = ["--topic", "t"]
GROUP = ["--entity-type", "groups", "--entity-name", "g"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--list"], None),
        (["--list", "--topic", "a.*", "--exclude-internal"], None),
        (["--describe", "--topics-with-overrides"], None),
        (
            ["--create", *TOPIC, "--partitions", "3", "--replication-factor", "1", "--config", "a=b", "--config", "c="],
            None,
        ),
        (["--create", *TOPIC, "--replica-assignment", "1:2,2:1", "--if-not-exists"], None),
        (["--alter", *TOPIC, "--partitions", "3", "--if-exists"], None),
        (["--delete", *TOPIC], None),
        ([], "exactly one action"),
        (["--list", "--create", *TOPIC], "exactly one action"),
        (["--create"], "--create needs --topic"),
        (["--delete"], "--delete needs --topic"),
        (["--alter", *TOPIC], "--alter needs --partitions"),
        (["--list", "--config", "a=b"], "--config does not go with --list"),
        (["--create", *TOPIC, "--if-exists"], "--if-exists does not go with --create"),
        (["--create", *TOPIC, "--config", "a"], "is not KEY=VALUE"),
        (["--create", *TOPIC, "--replica-assignment", "1:x"], "is not BROKER"),
        (
            ["--create", *TOPIC, "--replica-assignment", "1:2147483648"],
            "--replica-assignment: 2147483648 is not the id of a broker, 0 to 2147483647",
        ),
        (
            ["--create", *TOPIC, "--replica-assignment", "1", "--partitions", "1"],
            "--replica-assignment does not go with",
        ),
        (["--list", "--topic", "a("], "--topic: 'a(' is not a regular expression: missing ), unterminated"),
        (["--describe", "--topic-id", "x"], None),
        (["--describe", "--topic-id", "x", *TOPIC], "--topic-id does not go with --topic"),
        (["--list", "--topic-id", "x"], "--topic-id does not go with --list"),
        (["--list", "--under-replicated-partitions"], "--under-replicated-partitions does not go with --list"),
    ],
)
def test_topics_options(arguments: list[str], problem: str | None) -> None:
    error = topics.find_problem(topics.make_parser().parse_args(arguments))
    assert (error is None) if problem is None else (problem in (error or ""))


@pytest.mark.parametrize(
    ("option", "value", "most"),
    [
        ("--partitions", "99999999999", 2147483647),
        ("--partitions", "0", 2147483647),
        ("--replication-factor", "32768", 32767),
        ("--partition-size-limit-per-response", "0", 2147483647),
    ],
)
def test_numbers_of_topics_that_do_not_fit(
    option: str, value: str, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        topics.make_parser().parse_args([option, value])
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"kcoord topics: error: argument {option}: '{value}' is not a whole number from 1 to {most}"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--describe", *GROUP], None),
        (["--describe", "--entity-type", "topics", "--all"], None),
        (["--alter", *GROUP, "--add-config", "a=1", "--delete-config", "b"], None),
        (["--alter", "--entity-type", "brokers", "--entity-default", "--add-config-file", "f"], None),
        (["--alter", "--user", "u", "--add-config", "SCRAM-SHA-256=[iterations=8192,password=x]"], None),
        (["--alter", "--user", "u", "--delete-config", "SCRAM-SHA-256"], None),
        (["--describe", "--entity-type", "users"], None),
        (["--describe", "--entity-type", "users", "--entity-default"], None),
        (["--describe", "--entity-type", "clients", "--entity-type", "users", "--entity-name", "c"], None),
        (["--describe", "--entity-type", "ips"], None),
        (["--alter", "--user", "u", "--client-defaults", "--delete-config", "a"], None),
        (["--describe", "--entity-type", "users", "--entity-type", "users"], "may be specified together"),
        (["--describe", "--entity-type", "users", "--entity-type", "ips"], "may be specified together"),
        (["--describe", "--entity-type", "ips", "--entity-name", "a", "--entity-default"], "more entity names"),
        (["--describe", "--entity-type", "users", "--all"], "--all does not go with --entity-type users"),
        (["--alter", "--entity-type", "users", "--entity-type", "clients", "--entity-name", "u"], "for each"),
        (["--alter", "--user", "u", "--add-config", "SCRAM-SHA-256"], "--add-config is not KEY=VALUE,..."),
        (["--delete", "--user", "u"], "--delete goes with --entity-type client-metrics"),
        (["--alter", *GROUP], "--alter needs --add-config"),
        (["--alter", "--entity-type", "groups", "--add-config", "a=1"], "needs --entity-name"),
        (["--alter", *GROUP, "--add-config", "a"], "is not KEY=VALUE"),
        (["--alter", *GROUP, "--add-config", "a=1", "--add-config-file", "f"], "not both"),
        (["--alter", *GROUP, "--add-config", "a=1", "--all"], "--all goes with --describe"),
        (["--describe", *GROUP, "--add-config", "a=1"], "--describe changes nothing"),
        (["--describe", "--entity-type", "topics", "--entity-default"], "only the entity types brokers"),
        (["--describe", "--topic", "t"], None),
        (["--alter", "--broker-defaults", "--add-config", "a=1"], None),
        (["--describe"], "--entity-type or one of --topic"),
        (["--delete", "--client-metrics", "m"], None),
        (["--delete", *GROUP], "--delete goes with --entity-type client-metrics"),
        (["--delete", "--entity-type", "client-metrics"], "--delete goes with --entity-type client-metrics"),
        (["--delete", "--client-metrics", "m", "--add-config", "a=1"], "--delete allows only"),
    ],
)
def test_configs_options(arguments: list[str], problem: str | None) -> None:
    error = configs.find_problem(configs.make_parser().parse_args(arguments))
    assert (error is None) if problem is None else (problem in (error or ""))


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (["--topic", "t"], ["--entity-type", "topics", "--entity-name", "t"]),
        (["--group", "g"], ["--entity-type", "groups", "--entity-name", "g"]),
        (["--broker", "1"], ["--entity-type", "brokers", "--entity-name", "1"]),
        (["--broker-defaults"], ["--entity-type", "brokers", "--entity-default"]),
        (["--client-metrics", "m"], ["--entity-type", "client-metrics", "--entity-name", "m"]),
        (["--user", "u"], ["--entity-type", "users", "--entity-name", "u"]),
        (["--ip-defaults"], ["--entity-type", "ips", "--entity-default"]),
        (
            ["--user-defaults", "--client", "c"],
            ["--entity-type", "clients", "--entity-name", "c", "--entity-type", "users", "--entity-default"],
        ),
    ],
)
def test_short_forms(short: list[str], long: list[str]) -> None:
    parse = configs.make_parser().parse_args
    assert parse(["--describe", *short]) == parse(["--describe", *long])
    with pytest.raises(SystemExit):
        parse(["--describe", *short, "--topic", "u"])


def test_numbers_are_printed_as_java_prints_them() -> None:
    """The texts are those of Java 17's Double.toString."""
    texts = ["0.0", "0.001", "1.0E-4", "12.5", "1024.0", "9999999.5", "1.0E7", "1.048576E7", "1.0E10", "1.5E-7"]
    assert [double_text(float(text)) for text in texts] == texts


def test_values() -> None:
    assert parse_configs(["a=b", "c = d=e"]) == {"a": "b", "c": "d=e"}
    assert parse_replica_assignment("1:2, 2:3") == [[1, 2], [2, 3]]
    assert parse_assignments("a=1,b=[x,y] , c=") == {"a": "1", "b": "x,y", "c": ""}
    assert parse_assignments("") == {}


def test_a_name_is_not_a_pattern_if_a_topic_has_this_name() -> None:
    listed = [TopicListing(name, bytes(16), False) for name in ("a-b", "a.b", "c")]

    def chosen(*arguments: str) -> list[str]:
        return topics.chosen_names(listed, topics.make_parser().parse_args(["--delete", *arguments]))

    assert chosen("--topic", "a.b") == ["a.b"]
    assert chosen("--topic", "a..*", "--topic", "c") == ["a-b", "a.b", "c"]
    assert chosen("--topic", "d", "--if-exists") == []
    with pytest.raises(CommandError, match="'d' does not exist"):
        chosen("--topic", "d")
