# SPDX-License-Identifier: Apache-2.0
"""Files of a lake that Spark does not write."""

from __future__ import annotations

from pathlib import Path

from pyarrow import fs

from kcoord.pipeline.lake.files import names_in


class CreatedMeanwhile(fs.LocalFileSystem):  # type: ignore[misc]
    """A file system on which another process creates a folder while it is listed for the first time."""

    def get_file_info(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        folder = Path(selector.base_dir)
        if not folder.exists():
            folder.mkdir()
            (folder / "new").touch()
            raise FileNotFoundError(selector.base_dir)
        return list(super().get_file_info(selector))


def test_the_names_of_a_folder_that_another_process_creates_meanwhile(tmp_path: Path) -> None:
    assert names_in(CreatedMeanwhile(), str(tmp_path / "folder")) == ["new"]
    assert names_in(fs.LocalFileSystem(), str(tmp_path / "other")) == []
