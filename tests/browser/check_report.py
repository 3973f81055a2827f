"""Look at a report in headless Chromium: ``python -m tests.browser.check_report REPORT.html [...]``.

Each file is opened from disk (or the address of ``tools/report.py --serve``, whose page must renew itself and keep what
the reader sees) at 1280 and 390 pixels, light and dark, and printed as a picture into a temporary folder.
Exit status 1 where the page scrolls sideways, an element leaves the page, a script fails, anything but the file is
requested, text has too little contrast to its ground, or the values under the pointer do not appear. Needs playwright
(``pip install 'unigen_ds[browser]'``) and a Chromium (the system's, or ``playwright install chromium``).
Not part of ``make test``: ``make check-report``.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

WIDTHS, SCHEMES = (1280, 390), ("light", "dark")
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
LEAST_CONTRAST = 4.5  # of WCAG 2 AA, for text

OUTSIDE = """() => [...document.querySelectorAll('body *')].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width > 1 && box.height > 1 && !e.closest('.cursor,thead,svg,.x,.flags') &&
    (box.right > innerWidth + 1 || box.left < -1);
}).map(e => e.tagName + '.' + e.className + ': ' + e.textContent.slice(0, 60)).slice(0, 10)"""

CONTRAST = """() => {
  const rgb = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
  const ground = e => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] > 0.99) return c;
    }
    return [255, 255, 255];
  };
  const found = new Map();
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || e.tagName === 'SCRIPT') continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const key = e.tagName + '.' + e.className;
    if (ratio < LEAST && !found.has(key)) found.set(key, ratio.toFixed(2) + ' ' + e.textContent.slice(0, 30));
  }
  return [...found].map(pair => pair.join(': '));
}""".replace("LEAST", str(LEAST_CONTRAST))


def problems_of(page: Any, address: str, shot: Path) -> list[str]:
    """What is wrong with the page at its present size; the picture is at ``shot``."""
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(f"script: {error}"))
    page.on("request", lambda r: problems.append(f"request: {r.url[:80]}")
            if r.url != address and not r.url.startswith("data:") else None)  # fmt: skip
    page.goto(address)
    page.wait_for_load_state("networkidle")
    page.screenshot(path=str(shot), full_page=True)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    if not address.startswith("file:"):
        problems += renewal_problems(page)
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    if wide > 0:
        problems.append(f"scrolls sideways by {wide} pixels")
    problems += [f"outside of the page: {text}" for text in page.evaluate(OUTSIDE)]
    problems += [f"contrast: {text}" for text in page.evaluate(CONTRAST)]
    plot = page.locator(".plot").first
    if plot.count():
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] / 2)
        if not plot.locator(".cursor").is_visible() or not plot.locator(".cursor").inner_text().strip():
            problems.append("no values appear under the pointer")
        page.screenshot(path=str(shot.with_suffix(".pointer.png")))
    return problems


def renewal_problems(page: Any) -> list[str]:
    """Whether a served page exchanges its content, and then has the same scroll position and open details."""
    page.evaluate("document.querySelector('main').dataset.old = 1; scrollTo({top: 700, behavior: 'instant'})")
    page.wait_for_function("!document.querySelector('main').dataset.old", timeout=15_000)
    state = page.evaluate("[scrollY, document.querySelectorAll('details:not([open])').length, live.className]")
    return [] if state == [700, 0, "chip good"] else [f"after a renewal, scroll, closed details and state: {state}"]


def main(files: list[str]) -> int:
    if not files:
        print(__doc__)
        return 2
    from playwright.sync_api import sync_playwright

    folder = Path(tempfile.mkdtemp(prefix="report-"))
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    failed = False
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for number, name in enumerate(files):
            for width in WIDTHS:
                for scheme in SCHEMES:
                    context = browser.new_context(
                        viewport={"width": width, "height": 900},
                        color_scheme=scheme,
                        offline=not name.startswith("http:"),
                        device_scale_factor=1,
                    )
                    address = name if name.startswith("http:") else Path(name).resolve().as_uri()
                    shot = folder / f"{number}-{width}-{scheme}.png"
                    problems = problems_of(context.new_page(), address, shot)
                    context.close()
                    failed |= bool(problems)
                    print(f"{Path(name).name or name} {width} {scheme}: {'ok' if not problems else ''}  {shot}")
                    print("".join(f"  {text}\n" for text in dict.fromkeys(problems)), end="")
        browser.close()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
