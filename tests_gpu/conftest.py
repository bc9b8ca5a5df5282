"""These tests need a CUDA GPU: `make test-gpu`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
