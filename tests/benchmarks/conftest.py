"""The benchmarks are a plain folder beside the product: put the repository's root where Python finds them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
