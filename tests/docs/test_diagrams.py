# SPDX-License-Identifier: Apache-2.0
"""Mermaid draws every diagram of the documents."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

from tests.docs.terminal import blocks_of
from tests.support.shared import ROOT, missing

SCRIPT = ROOT / "docs" / "javascripts" / "mermaid.min.js"
DIAGRAMS = [
    block.text
    for path in sorted((ROOT / "docs").rglob("*.md"))
    for block in blocks_of(path.read_text())
    if block.language == "mermaid"
]
PAGE = """<body><script src="%s"></script><script>
(async () => {
  for (const [number, text] of %s.entries()) {
    const kind = await mermaid.render(`drawing${number}`, text).then(
      drawing => drawing.diagramType, error => "error");
    document.body.append(Object.assign(document.createElement("p"), {textContent: kind}));
  }
})();
</script></body>
"""


def test_diagrams(tmp_path: Path) -> None:
    drawn = draw([*DIAGRAMS, "no diagram"], tmp_path)
    assert drawn[-1] == "error", "a fault is seen"
    assert "error" not in drawn[:-1]
    assert len(drawn) == len(DIAGRAMS) + 1 > 1


def draw(diagrams: list[str], folder: Path) -> list[str]:
    """Returns the type of each drawing, as Mermaid names it; `error` if it cannot read the diagram."""
    chromium = shutil.which("chromium") or missing("chromium is not installed")
    if not SCRIPT.exists():
        missing(f"{SCRIPT} does not exist: `make docs` gets it from npm")
    page = folder / "page.html"
    page.write_text(PAGE % (SCRIPT.as_uri(), json.dumps(diagrams)))
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    options = ["--allow-file-access-from-files", "--virtual-time-budget=20000", "--dump-dom", page.as_uri()]
    document = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=True).stdout
    return re.findall(r"<p>(.*?)</p>", document)
