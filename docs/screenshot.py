"""Takes the picture of a report in docs/report.md, with Chromium.

    python docs/screenshot.py RUN [--out FILE]

It shows private texts, so give it a run on `builtin/notes`, whose texts are made up.
"""

import argparse
import base64
import shutil
import tempfile
from pathlib import Path

from selenium import webdriver

from fedleak.running.reports import report_run
from fedleak.store.run import Run

WIDTH, HEIGHT = 1200, 1470
PICTURE = Path(__file__).with_name("report.png")


def screenshot(page: Path, width: int = WIDTH, height: int = HEIGHT, scale: float = 1) -> bytes:
    """Returns the top of a page as PNG.

    Args:
        page: A file.
        width, height: Pixels of the page that are shown.
        scale: Pixels of the picture for one of them.
    """
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in (
        "--headless=new",
        "--hide-scrollbars",
        "--no-sandbox",
        "--disable-dev-shm-usage",
    ):
        options.add_argument(argument)
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options, service)
    try:
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(page.as_uri())
        return base64.b64decode(driver.get_screenshot_as_base64())
    finally:
        driver.quit()


def main() -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--out", type=Path, default=PICTURE, metavar="FILE")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = report_run(Run(chosen.run), Path(folder, "report.html"))
        chosen.out.write_bytes(screenshot(page))


if __name__ == "__main__":
    main()
