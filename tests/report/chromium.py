"""Debian's Chromium, without a window: open a page, run a script of clicks in it, and read what it wrote."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars", "--virtual-time-budget=4000",
)  # fmt: skip
needs_chromium = pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed (Debian: chromium)")


def clicked(page: Path, script: str) -> dict[str, Any]:
    """What `script` (statements of an async function, which fill the object `seen`) sees in a copy of the page.

    "errors" are those of the page itself; `await rest()` lets events through.
    """
    driver = f"""<pre id="seen"></pre><script>
      const seen = {{errors: window.pageErrors}};
      const rest = () => new Promise((done) => setTimeout(done, 50));
      const drive = async () => {{ {script} }};
      drive().catch((error) => seen.errors.push("driver: " + error))
        .then(() => {{ document.getElementById("seen").textContent = JSON.stringify(seen); }});
    </script></body>"""
    catcher = "<head><script>window.pageErrors = []; onerror = (text) => { pageErrors.push(text); };</script>"
    text = page.read_text().replace("<head>", catcher, 1).replace("</body>", driver, 1)
    copy = page.with_name("driven.html")
    copy.write_text(text)
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", "--dump-dom", copy.resolve().as_uri()],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-500:]
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    return seen


def in_script(text: str) -> str:
    """The text as a string of a script; nothing in it closes the script."""
    return json.dumps(text).replace("<", "\\u003c")
