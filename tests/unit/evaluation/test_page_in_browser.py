"""The page of an evaluation in a real browser: nothing overflows, text is legible, no errors."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from adaattn.evaluation.html_report import html_report
from adaattn.evaluation.results import EvaluationResult

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=2000",
    "--enable-logging=stderr",
    "--window-size=1400,1000",
)

# The page stands in a frame of the width in question, since a browser's own window may be wider
# than what it was asked for.
HOLDER = """<!DOCTYPE html><meta charset="utf-8"><body>
<iframe style="width:{width}px;height:900px;border:0" srcdoc="{page}"></iframe>
<pre id="found"></pre>
<script>
addEventListener("load", () => {{
  const inner = document.querySelector("iframe").contentWindow, page = inner.document;
  const sizes = [...page.querySelectorAll("svg text")].map(
    text => parseFloat(inner.getComputedStyle(text).fontSize) * text.getScreenCTM().a);
  const clipped = [...page.querySelectorAll("svg text")].filter(text => {{
    const words = text.getBoundingClientRect();
    const picture = text.ownerSVGElement.getBoundingClientRect();
    return words.left < picture.left - 1 || words.right > picture.right + 1;
  }}).map(text => text.textContent);
  const names = [...page.querySelectorAll("svg text.name")];
  const covers = (one, other) => {{
    const a = one.getBoundingClientRect(), b = other.getBoundingClientRect();
    return Math.min(a.right, b.right) > Math.max(a.left, b.left)
      && Math.min(a.bottom, b.bottom) > Math.max(a.top, b.top) + 2;
  }};
  const covered = names.filter((name, i) => names.slice(0, i).some(other => covers(name, other)));
  document.getElementById("found").textContent = JSON.stringify({{
    width: inner.innerWidth, scrolls: page.documentElement.scrollWidth,
    smallest: Math.min(...sizes), texts: sizes.length, clipped: clipped,
    names: names.length, covered: covered.map(text => text.textContent),
    dark: inner.matchMedia("(prefers-color-scheme: dark)").matches,
    background: inner.getComputedStyle(page.body).backgroundColor,
    colour: inner.getComputedStyle(page.body).color,
  }});
}});
</script>"""


def opened(page: str, width: int, scheme: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what the browser found in a page, and the errors of its console."""
    assert BROWSER is not None
    holder = folder / "holder.html"
    holder.write_text(HOLDER.format(width=width, page=html.escape(page)), encoding="utf-8")
    # 0 is dark, 1 is light.
    colours = f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"
    done = subprocess.run(
        [BROWSER, *FLAGS, colours, f"--user-data-dir={folder / 'profile'}", "--dump-dom", holder],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "HOME": str(folder)},
    )
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout)
    assert found, done.stderr
    errors = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(html.unescape(found[1])), errors


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_fits_its_window_and_can_be_read(
    demo_result: EvaluationResult, width: int, scheme: str, tmp_path: Path
) -> None:
    found, errors = opened(html_report(demo_result), width, scheme, tmp_path)
    assert errors == []
    assert found["width"] == width
    assert found["scrolls"] <= width
    assert found["texts"] > 40
    assert found["smallest"] >= 10
    assert found["clipped"] == []
    assert found["names"] == len(demo_result.runs)
    assert found["covered"] == []
    assert found["dark"] == (scheme == "dark")
    light, dark = "rgb(255, 255, 255)", "rgb(19, 22, 26)"
    assert found["background"] == (dark if scheme == "dark" else light)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_what_the_test_above_looks_for_would_be_found(tmp_path: Path) -> None:
    broken = (
        '<body><p style="width:600px">wide</p><svg viewBox="0 0 420 20" style="width:200px">'
        '<text font-size="12" y="9" x="400">clipped</text><text y="9" class="name">one</text>'
        '<text y="9" x="5" class="name">other</text></svg>'
        "<script>console.error('broken'); undefinedFunction();</script>"
    )
    found, errors = opened(broken, 400, "light", tmp_path)
    assert found["scrolls"] > 400
    assert found["smallest"] < 9
    assert found["clipped"] == ["clipped"]
    assert found["covered"] == ["other"]
    assert len(errors) == 2
