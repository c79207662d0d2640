# SPDX-License-Identifier: Apache-2.0
"""A format is complete or absent: meta.properties is the last file that appears in the data folder."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kcoord.logtools.format import format_folder, is_formatted
from kcoord.metadata.bootstrap import feature_records
from kcoord.metadata.records import BOOTSTRAP_FEATURES
from kcoord.storage.errors import StorageError
from kcoord.storage.file_system import RealFileSystem
from kcoord.storage.log_dir import Identity
from tests.unit.logtools.support import NODE_ID, NOW_MS, broker_config

IDENTITY = Identity("the-cluster", NODE_ID, "d" * 22)


class FailingRenames(RealFileSystem):
    """The real file system, in which the move of built files into the data folder fails after `renames` of them."""

    def __init__(self, renames: int) -> None:
        super().__init__()
        self._renames_left = renames

    def rename(self, source: str, target: str) -> None:
        if "/kcoord-format/" in source:
            if not self._renames_left:
                raise OSError(errno.EIO, "no rename")
            self._renames_left -= 1
        super().rename(source, target)


@pytest.mark.parametrize("renames", range(6))
def test_an_interrupted_format_is_no_format(tmp_path: Path, renames: int) -> None:
    fs = FailingRenames(renames)
    config = broker_config(log_dirs=str(tmp_path), kcoord_bootstrap_features="group.version=0")
    made = feature_records(config)
    assert len(made) == len(BOOTSTRAP_FEATURES) - 1
    with pytest.raises(OSError, match="no rename"):
        format_folder(fs, config, IDENTITY, made, NOW_MS)
    assert not is_formatted(fs, str(tmp_path))
    with pytest.raises((StorageError, OSError)):
        format_folder(fs, config, IDENTITY, made, NOW_MS)


def test_a_folder_that_is_no_partition_stays(tmp_path: Path) -> None:
    """The data folder may be the root of a file system, which has a folder lost+found."""
    (tmp_path / "lost+found").mkdir()
    config = broker_config(log_dirs=str(tmp_path))
    format_folder(RealFileSystem(), config, IDENTITY, feature_records(config), NOW_MS)
    assert is_formatted(RealFileSystem(), str(tmp_path))
    assert {"lost+found", "__cluster_metadata-0"} <= {path.name for path in tmp_path.iterdir()}
    assert not (tmp_path / "kcoord-format").exists()
