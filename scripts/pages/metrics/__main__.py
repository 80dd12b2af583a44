"""``python -m scripts.pages.metrics`` writes docs/reference/metrics.md."""

from __future__ import annotations

import logging
import sys

from scripts.pages.metrics import PAGE, ROOT, made
from scripts.pages.metrics.page import Undocumented

if __name__ == "__main__":
    # The deployments warn of the servers that are not there.
    logging.disable()
    try:
        (ROOT / PAGE).write_text(made())
    except Undocumented as error:
        sys.exit(f"{PAGE} is as it was: {error}")
