# SPDX-License-Identifier: Apache-2.0
"""Client quotas: rates against a simple oracle, which quota counts, and who shares its rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.metadata.image import QuotaEntity
from kcoord.server.client_quotas import ConnectionQuota, QuotaLimits, Rate, RateQuota, TokenBucket

WINDOWS = 11
WINDOW_MS = 1000
KEY = "producer_byte_rate"


def oracle_throttle_ms(events: list[tuple[int, int]], limit: float, now_ms: int) -> int:
    """Computes the throttle time from all events, (time, amount), without forgetting any."""
    windows: list[list[tuple[int, int]]] = []
    for at_ms, amount in events:
        if not windows or at_ms - windows[-1][0][0] >= WINDOW_MS:
            windows.append([])
        windows[-1].append((at_ms, amount))
    kept = [window for window in windows if now_ms - window[-1][0] < WINDOWS * WINDOW_MS]
    if not kept:
        return 0
    elapsed_ms = now_ms - kept[0][0][0]
    elapsed_ms = max(elapsed_ms, (WINDOWS - 1) * WINDOW_MS + elapsed_ms % WINDOW_MS)
    excess = sum(amount for window in kept for _, amount in window) - limit * elapsed_ms / 1000
    return int(excess * 1000 / limit + 0.5) if excess > 0 else 0


@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 5000)), min_size=1, max_size=60), st.integers(1, 2000))
def test_a_rate_measures_as_the_oracle(steps: list[tuple[int, int]], limit: int) -> None:
    rate, events, now_ms = Rate(WINDOWS, WINDOW_MS), [], 1_000_000
    for pause_ms, amount in steps:
        now_ms += pause_ms
        events.append((now_ms, amount))
        rate.record(amount, now_ms)
        # The two sums round differently.
        assert abs(rate.throttle_ms(limit, now_ms) - oracle_throttle_ms(events, limit, now_ms)) <= 1


@given(
    st.lists(
        st.tuples(st.integers(0, 20_000), st.integers(0, 40), st.sampled_from([0.5, 3.0, 10.0])),
        min_size=1,
        max_size=60,
    )
)
def test_a_bucket_has_the_tokens_of_the_oracle(steps: list[tuple[int, int, float]]) -> None:
    """The oracle counts in thousandths of a token, one millisecond after the other."""
    bucket, now_ms = TokenBucket(WINDOWS), 1_700_000_000_000
    left: float | None = None
    for pause_ms, count, rate in steps:
        now_ms += pause_ms
        full = rate * WINDOWS * 1000
        left = full if left is None else min(left, full)
        for _ in range(pause_ms):
            left = min(left + rate, full)
        assert bucket.tokens(rate, now_ms) == pytest.approx(left / 1000)
        assert bucket.is_idle(now_ms) is (bucket.tokens(rate, now_ms) == rate * WINDOWS)
        left -= count * 1000
        assert bucket.spend(count, rate, now_ms) == pytest.approx(left / 1000)


def test_what_is_taken_back_does_not_count() -> None:
    quota = RateQuota(KEY, WINDOWS, WINDOW_MS)
    quota.change_limits({(("user", "alice"),): {KEY: 100.0}})
    assert quota.record("alice", "app", 1100, 0) == 1000
    quota.take_back("alice", "app", 1100, 0)
    assert quota.record("alice", "app", 1000, 0) == 0
    assert quota.largest_burst("alice", "app") == 1000
    assert quota.largest_burst("bob", "app") is None


LEVELS: list[tuple[QuotaEntity, tuple[str | None, str | None]]] = [
    ((("client-id", "app"), ("user", "alice")), ("alice", "app")),
    ((("client-id", None), ("user", "alice")), ("alice", "app")),
    ((("user", "alice"),), ("alice", None)),
    ((("client-id", "app"), ("user", None)), ("alice", "app")),
    ((("client-id", None), ("user", None)), ("alice", "app")),
    ((("user", None),), ("alice", None)),
    ((("client-id", "app"),), (None, "app")),
    ((("client-id", None),), (None, "app")),
]
"""The entities in the order in which Kafka looks for the quota of a client, and who shares the rate."""


@pytest.mark.parametrize("first", range(len(LEVELS)))
def test_the_most_specific_quota_counts(first: int) -> None:
    quotas = {entity: {KEY: float(level + 1)} for level, (entity, _) in enumerate(LEVELS) if level >= first}
    assert QuotaLimits(quotas, KEY).of("alice", "app") == (first + 1, LEVELS[first][1])
    assert QuotaLimits(quotas, "consumer_byte_rate").of("alice", "app") is None


def test_clients_of_one_user_share_the_quota_of_the_user() -> None:
    quota = RateQuota(KEY, WINDOWS, WINDOW_MS)
    quota.change_limits({(("user", None),): {KEY: 100.0}})
    assert quota.record("alice", "a", 1000, 0) == 0
    assert quota.record("bob", "a", 1000, 0) == 0
    assert quota.record("alice", "b", 100, 0) == 1000


def test_rates_of_idle_clients_are_dropped() -> None:
    quota = RateQuota(KEY, WINDOWS, WINDOW_MS)
    quota.change_limits({(("client-id", None),): {KEY: 100.0}})
    for number in range(10_000):
        quota.record("alice", f"app{number}", 1, number * 100)
    assert len(quota._meters) <= 2000


def test_new_quotas_keep_the_rates_and_clients_without_a_quota_are_free() -> None:
    quota = RateQuota(KEY, WINDOWS, WINDOW_MS)
    quota.change_limits({(("user", "alice"),): {KEY: 100.0}})
    assert quota.record("alice", "app", 1000, 0) == 0
    assert quota.record("bob", "app", 1 << 40, 0) == 0
    quota.change_limits({(("user", "alice"),): {KEY: 50.0}})
    assert quota.record("alice", "app", 0, 0) == 10_000


def connections(rates: dict[str | None, float]) -> ConnectionQuota:
    quota = ConnectionQuota(WINDOWS, WINDOW_MS)
    quota.change_limits({(("ip", ip),): {"connection_creation_rate": rate} for ip, rate in rates.items()})
    return quota


@given(st.lists(st.integers(0, 400), min_size=1, max_size=80), st.integers(1, 5))
def test_connections_above_the_rate_of_the_oracle_are_closed(pauses_ms: list[int], limit: int) -> None:
    """Closed connections do not count. The delay is a window at most."""
    quota, events, now_ms = connections({"192.0.2.1": float(limit)}), [], 0
    for pause_ms in pauses_ms:
        now_ms += pause_ms
        events.append((now_ms, 1))
        expected_ms = oracle_throttle_ms(events, limit, now_ms)
        delay_ms = quota.throttle_ms("192.0.2.1", now_ms)
        assert abs(delay_ms - min(expected_ms, WINDOW_MS)) <= 1
        if delay_ms:
            events.append((now_ms, -1))


def test_each_address_has_a_rate_of_its_own() -> None:
    quota = connections({None: 1.0, "192.0.2.9": 2.0, "2001:DB8:0::9": 3.0})

    def accepted(host: str) -> int:
        return sum(quota.throttle_ms(host, 0) == 0 for _ in range(50))

    assert [accepted("192.0.2.1"), accepted("192.0.2.2")] == [10, 10]
    assert accepted("192.0.2.9") == 20
    assert accepted("::ffff:192.0.2.9") == 0, "the same address, on a listener for IPv6"
    assert accepted("2001:db8::9") == 30
    assert connections({"192.0.2.9": 1.0}).throttle_ms("192.0.2.1", 0) == 0
    assert connections({}).throttle_ms("192.0.2.1", 0) == 0


def test_the_name_of_a_host_is_not_the_default_of_all_addresses() -> None:
    """A log of Kafka may have such a quota. It limits no address here."""
    assert connections({"host.example": 0.05}).throttle_ms("192.0.2.1", 0) == 0
    assert connections({None: 0.05}).throttle_ms("192.0.2.1", 0) == 1000


@pytest.mark.parametrize("limit", [1.0, 1e-300, 5e-324])
def test_a_throttle_time_fits_its_field(limit: float) -> None:
    rate = Rate(WINDOWS, WINDOW_MS)
    rate.record(1e12, 0)
    assert rate.throttle_ms(limit, 0) == 2**31 - 1
