"""The documentation's site in a real browser: pages, search, dark, narrow, by the keyboard."""

import functools
import os
import re
import runpy
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_dashboard import CHROMIUM, FLAGS, brightness

ROOT = Path(__file__).parents[1]
MKDOCS = ROOT / ".docs/bin/mkdocs"
PAGES = ("index.html", "guides/slo.html", "guides/from-sglang.html", "reference/python.html")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not MKDOCS.exists(), reason="`make docs` makes the environment of the site"),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="there is no Chromium"),
]


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a site built from this checkout."""
    folder = tmp_path_factory.mktemp("site")
    command = (str(MKDOCS), "build", "--quiet", "--site-dir", str(folder))
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextmanager
def opened(site: str, **look: Any) -> Iterator[Any]:
    """A browser's page that keeps what it says and asks; it must say and miss nothing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    said: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(**look)
        page.set_default_timeout(60_000)
        page.on("console", lambda m: said.append(m.text) if m.type in ("error", "warning") else 0)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("response", lambda r: said.append(f"{r.status} {r.url}") if r.status > 399 else 0)
        page.on("request", lambda r: r.url.startswith((site, "data:")) or said.append(r.url))
        yield page
        browser.close()
    assert not said


def colours(page: Any) -> tuple[float, float]:
    """The brightness of a page's ground and text."""
    names = ("backgroundColor", "color")
    ground, text = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in names)
    return brightness(ground), brightness(text)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_load_whole_in_the_colours_that_the_system_asks_for(site: str, scheme: Any) -> None:
    with opened(site, color_scheme=scheme) as page:
        for name in PAGES:
            page.goto(f"{site}/{name}")
            page.wait_for_selector("h1")
            ground, text = colours(page)
            assert (ground > text) == (scheme == "light")
            broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).length"
            assert page.evaluate(broken) == 0


def test_nothing_is_wider_than_a_phone(site: str) -> None:
    with opened(site, viewport={"width": 360, "height": 740}) as page:
        for name in PAGES:
            page.goto(f"{site}/{name}")
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, name


def test_links_and_search_are_reached_by_the_keyboard(site: str) -> None:
    with opened(site) as page:
        page.goto(f"{site}/index.html")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent").strip() == "Skip to content"
        page.keyboard.press("/")
        page.keyboard.type("playout buffer")
        page.wait_for_selector(".md-search-result__item a")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(r"\.html\?h="))
        assert "buffer" in page.inner_text("article").lower()


def test_the_first_page_shows_a_recorded_dashboard_and_the_lanes(site: str) -> None:
    with opened(site) as page:
        page.goto(f"{site}/index.html")
        sources = [image.get_attribute("src") for image in page.query_selector_all("article img")]
    assert sources == ["images/lanes.png", "images/dashboard.webp"]


def test_pictures_are_drawn_from_the_recording(tmp_path: Path) -> None:
    """Each answer of the recording is shown; the moving picture has the last of them."""
    from PIL import Image

    pictures = runpy.run_path(str(ROOT / "tools/pictures.py"))
    pictures["draw"].__globals__["IMAGES"] = tmp_path
    pictures["draw"]()
    with Image.open(tmp_path / "dashboard.webp") as moving:
        assert (moving.n_frames, moving.size) == (pictures["MOVING"], (960, 405))
        first, last = (frame(moving, at) for at in (0, moving.n_frames - 1))
    assert first != last
    with Image.open(tmp_path / "dashboard.png") as still:
        assert still.size == (pictures["WIDTH"], pictures["HEIGHT"])


def frame(picture: Any, at: int) -> bytes:
    """The pixels of a moving picture's frame."""
    picture.seek(at)
    pixels: bytes = picture.convert("RGB").tobytes()
    return pixels


def test_the_reference_shows_arguments_of_the_python_api(site: str) -> None:
    with opened(site) as page:
        page.goto(f"{site}/reference/python.html")
        text = page.inner_text("article")
    for word in ("LLM", "SamplingParams", "max_tokens", "temperature", "chat"):
        assert word in text
