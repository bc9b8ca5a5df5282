"""effuse: federated learning of, and with, diffusion models."""

import os
from typing import Any

# OpenMP threads that spin for long while they wait make two torch processes on the same cores ten times slower, and several workers
# on one machine are our daily bread; not to spin at all costs a lone process 40 %. It must be said before torch is imported, and
# changes no result
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# 32 MB of scratch memory: torch takes cuBLAS to repeat to the bit only where the amount is said (and before a GPU is used)
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

__version__ = "0.1.0"
__all__ = ["load", "run"]


def __getattr__(name: str) -> Any:
    # importing torch takes seconds; `import effuse` alone should not
    if name in __all__:
        from effuse.engines import notebook

        return getattr(notebook, name)
    raise AttributeError(f"module 'effuse' has no attribute '{name}'")
