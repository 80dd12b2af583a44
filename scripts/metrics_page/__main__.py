"""``python -m scripts.metrics_page`` writes docs/reference/metrics.md."""

from __future__ import annotations

import logging
import sys

from scripts.metrics_page import PAGE, ROOT, made
from scripts.metrics_page.page import Undocumented

if __name__ == "__main__":
    # The deployments warn of the servers that are not there.
    logging.disable()
    try:
        (ROOT / PAGE).write_text(made())
    except Undocumented as error:
        sys.exit(f"{PAGE} is as it was: {error}")
