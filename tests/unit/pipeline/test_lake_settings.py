# SPDX-License-Identifier: Apache-2.0
"""The settings of a lake: stored as text, overridden by given settings, and rejected if they are bad."""

from __future__ import annotations

import pytest

from kcoord.pipeline.lake.settings import MS_PER_MINUTE, ExpiryPolicy, LakeSettings


def test_settings_survive_being_stored() -> None:
    settings = LakeSettings(retention_ms=5 * MS_PER_MINUTE, expiry_policy=ExpiryPolicy.KAFKA, storm_epochs=3)
    assert LakeSettings.from_text(settings.to_text()) == settings


def test_given_settings_win_over_stored_settings() -> None:
    stored = LakeSettings(retention_ms=5 * MS_PER_MINUTE, storm_epochs=3).to_text()
    settings = LakeSettings.from_text(stored, retention_ms=60_000, storm_epochs=None)
    assert (settings.retention_ms, settings.storm_epochs) == (60_000, 3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("retention_ms", "0"),
        ("storm_epochs", "1"),
        ("storm_window_ms", "-1"),
        ("expiry_policy", "never"),
        ("speed", "1"),
    ],
)
def test_the_error_names_the_bad_setting_or_its_value(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{key}|{value}"):
        LakeSettings.from_text({key: value})
