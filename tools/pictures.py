"""The pictures of the documentation, drawn anew by `make pictures`.

    python tools/pictures.py record http://localhost:8000     # watches a server under load
    python tools/pictures.py draw                             # draws the dashboard's pictures
    python tools/pictures.py lanes TRACE.json                 # draws the lanes of `serve --trace`

The dashboard is drawn by Chromium (Debian: chromium) from a recording of what a real server
answered, docs/images/dashboard.json.gz, so that everybody gets the same pictures without the
device. `lanes` takes the part of the trace in which both phases work most.
"""

import gzip
import io
import json
import sys
import time
import urllib.request
from importlib import resources
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "docs/images"
RECORDING = IMAGES / "dashboard.json.gz"
PAGE = "http://dashboard.test/dashboard"
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
ASK_SECONDS = 0.5
"""As often as the page itself asks."""
ANSWERS, MOVING = 44, 24
"""Answers of a recording, and how many of the last ones move: until then the lanes fill up."""
WIDTH, HEIGHT, ANIMATED = 1280, 860, 540
"""Pixels of the still picture, and the height of the animated one, which ends below the lanes."""


def record(address: str, file: str | None = None) -> None:
    """Keep what a server answers its dashboard, to `RECORDING` or another file."""
    seen, answers = 0, []
    for _ in range(ANSWERS):
        asked = time.monotonic()
        query = f"{address}/dashboard/data?window=minute&after={seen}"
        with urllib.request.urlopen(query, timeout=10) as answer:
            answers.append(json.load(answer))
        seen = answers[-1]["seen"]
        time.sleep(max(0.0, ASK_SECONDS - (time.monotonic() - asked)))
    target = Path(file) if file else RECORDING
    target.write_bytes(gzip.compress(json.dumps(answers).encode(), 9, mtime=0))
    print(f"{target}: {target.stat().st_size:,} bytes, {len(answers)} answers")


def draw() -> None:
    """Draw the still and the animated picture of the dashboard from the recording."""
    from PIL import Image

    shots = [Image.open(io.BytesIO(shot)).convert("RGB") for shot in frames()]
    still = shots[-1].quantize(64, dither=Image.Dither.NONE)
    still.save(IMAGES / "dashboard.png", optimize=True)
    moving = [shot.crop((0, 0, WIDTH, ANIMATED)).resize((960, 405)) for shot in shots[-MOVING:]]
    moving[0].save(
        IMAGES / "dashboard.webp",
        save_all=True,
        append_images=moving[1:],
        duration=int(ASK_SECONDS * 1e3),
        loop=0,
        quality=55,
        method=6,
    )
    for name in ("dashboard.png", "dashboard.webp"):
        print(f"docs/images/{name}: {(IMAGES / name).stat().st_size:,} bytes")


def frames() -> list[bytes]:
    """Return a screenshot after each answer of the recording."""
    from playwright.sync_api import Route, sync_playwright

    from twolane.server.ops.dashboard.page import FILES

    static = resources.files("twolane.server.ops.dashboard") / "static"
    answers = json.loads(gzip.decompress(RECORDING.read_bytes()))
    shown: list[bytes] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        size = {"width": WIDTH, "height": HEIGHT}
        page = browser.new_page(viewport=size, timezone_id="UTC", color_scheme="light")
        left = iter(answers)

        def answer(route: Route) -> None:
            name = route.request.url.partition("?")[0].rpartition("/")[2]
            if name == "data":
                found = next(left, None)
                route.fulfill(json=found) if found else route.abort()
            else:
                name = "dashboard.html" if name == "dashboard" else name
                route.fulfill(body=(static / name).read_text(), content_type=FILES[name])

        page.route("**/*", answer)
        page.goto(PAGE)
        for _ in answers:
            with page.expect_response(lambda response: "/data" in response.url):
                pass
            page.wait_for_timeout(60)
            shown.append(page.screenshot())
        browser.close()
    return shown


def lanes(trace: str, milliseconds: str = "450") -> None:
    """Draw docs/images/lanes.png from a trace of `twolane serve --trace`."""
    from twolane.bench.report import page
    from twolane.results import saved

    drawn = page.make(saved.read([], [trace]), None, float(milliseconds) / 1e3)
    [picture] = (png for name, _, _, png in drawn.figures if name.endswith("-lanes.png"))
    (IMAGES / "lanes.png").write_bytes(picture)
    print(f"docs/images/lanes.png: {(IMAGES / 'lanes.png').stat().st_size:,} bytes")


if __name__ == "__main__":
    command, *arguments = sys.argv[1:] or ("draw",)
    {"record": record, "draw": draw, "lanes": lanes}[command](*arguments)
