"""``python -m scripts.pages`` fills the sections of the pages that are made from the code."""

from __future__ import annotations

import logging
import sys

from scripts.pages import filled, pages
from scripts.pages.metrics.page import Undocumented

if __name__ == "__main__":
    # The deployments that declare the metrics warn of the servers that are not there.
    logging.disable()
    try:
        for page in pages():
            page.write_text(filled(page.read_text()))
    except Undocumented as error:
        sys.exit(f"{page} is as it was: {error}")
