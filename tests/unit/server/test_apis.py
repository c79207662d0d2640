# SPDX-License-Identifier: Apache-2.0
"""The table of served APIs agrees with the handlers, and settings hide the versions that they switch off."""

from __future__ import annotations

import importlib
import json
import pkgutil

import pytest

from kcoord.config import BrokerConfig, Kip1327Form
from kcoord.server.api import handlers
from kcoord.server.api.api_table import KEY_AND_VERSION, build_api_table
from kcoord.server.api.served_versions import KAFKA_4_4_VERSIONS, KIP_1327_VERSIONS, SERVED_VERSIONS, UNSTABLE_VERSIONS
from kcoord.server.workers.peer_listener import PEER_APIS
from kcoord_protocol.api_keys import ApiKey, request_class, response_class
from tests.support.shared import shared


@pytest.mark.parametrize("key", SERVED_VERSIONS, ids=lambda key: key.name.lower())
def test_each_served_api_has_a_handler_for_its_versions(key: ApiKey) -> None:
    module = importlib.import_module(f"kcoord.server.api.handlers.{key.name.lower()}")
    versions = SERVED_VERSIONS[key]
    assert (key, versions) == (module.API_KEY, module.VERSIONS)
    assert callable(module.handle)
    assert callable(module.error_response)
    readable = range(3, versions.stop) if key is ApiKey.PRODUCE else versions
    for message in (request_class(key), response_class(key)):
        assert set(readable) <= set(message.valid_versions)


def test_each_handler_is_served() -> None:
    modules = [
        importlib.import_module(f"{handlers.__name__}.{module.name}")
        for module in pkgutil.iter_modules(handlers.__path__)
    ]
    served = {module.API_KEY for module in modules if hasattr(module, "API_KEY")}
    assert served == {*SERVED_VERSIONS, *PEER_APIS}
    assert served - set(SERVED_VERSIONS) == {ApiKey.ALLOCATE_PRODUCER_IDS, ApiKey.BROKER_HEARTBEAT}
    for key, versions in PEER_APIS.items():
        assert set(versions) <= set(SERVED_VERSIONS.get(key, versions))


def test_lookup_by_the_first_bytes_of_a_request() -> None:
    table = build_api_table(BrokerConfig.from_properties({}))
    bound = table.bound(b"\x00\x10\x00\x05")
    assert bound is not None
    assert (bound.key, bound.version) == (ApiKey.LIST_GROUPS, 5)
    assert table.bound(b"\x00\x10\x00\x05") is bound
    for unserved in (
        b"\x00\x00\x00\x02",
        b"\x00\x10\x00\x06",
        b"\x00\x10\xff\xff",
        b"\x03\xe7\x00\x00",
        b"\x00\x10",
        b"",
    ):
        assert table.bound(unserved) is None


def test_the_oldest_offset_commit_is_served_and_not_listed() -> None:
    api = build_api_table(BrokerConfig.from_properties({})).apis[ApiKey.OFFSET_COMMIT]
    assert (api.versions, api.listed_versions) == (range(1, 11), range(2, 11))


def test_unstable_versions_are_served_only_if_enabled() -> None:
    for shown in (False, True):
        table = build_api_table(BrokerConfig.from_properties({"unstable.api.versions.enable": str(shown).lower()}))
        for key, first in UNSTABLE_VERSIONS.items():
            assert table.apis[key].versions.stop == first + shown


@pytest.mark.parametrize(("release", "facts"), [("4.3", "kafka-facts"), ("4.4", "kafka-facts-4.4.0")])
def test_listed_versions_equal_those_of_the_kafka_release(release: str, facts: str) -> None:
    config = BrokerConfig.from_properties({"kcoord.release": release, "kcoord.kip1327.enable": "false"})
    schemas = {}
    for path in shared(facts, "README.md").parent.glob("requests/*.json"):
        schema = json.loads(path.read_text())
        schemas[schema["apiKey"]] = schema
    for key, api in build_api_table(config).apis.items():
        lowest, _, highest = schemas[key]["validVersions"].partition("-")
        unstable = schemas[key].get("latestVersionUnstable", False)
        first = 0 if key == ApiKey.PRODUCE else int(lowest)
        assert api.listed_versions == range(first, int(highest or lowest) + 1 - unstable), api.key.name


def test_the_versions_of_kafka_4_4_are_hidden_under_4_3() -> None:
    old, new = (
        build_api_table(BrokerConfig.from_properties({"kcoord.release": release})) for release in ("4.3", "4.4")
    )
    for key, first in KAFKA_4_4_VERSIONS.items():
        request = KEY_AND_VERSION.pack(key, first)
        assert old.bound(request) is None
        assert new.bound(request) is not None


def test_kip_1327_can_be_hidden() -> None:
    table = build_api_table(BrokerConfig.from_properties({"kcoord.kip1327.enable": "false"}))
    for key, first in KIP_1327_VERSIONS.items():
        assert table.apis[key].versions.stop == first
        assert SERVED_VERSIONS[key].stop == first + 1
        for form in Kip1327Form:
            assert (table.in_form(form).apis[key].versions.stop == first) == (
                form is Kip1327Form.OFF
                or (form is Kip1327Form.NEW_PARTITIONS and key is not ApiKey.CONSUMER_GROUP_HEARTBEAT)
            )


def test_a_client_without_a_name_gets_the_configured_form() -> None:
    for form in Kip1327Form:
        config = BrokerConfig.from_properties({"kcoord.kip1327.revisions": f"a:off,*:{form.value}"})
        assert build_api_table(config).form is form
        assert build_api_table(config).in_form(form).form is form
