"""effuse: federated learning of, and with, diffusion models."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["load", "run"]


def __getattr__(name: str) -> Any:
    # importing torch takes seconds; `import effuse` alone should not
    if name in __all__:
        from effuse.engines import notebook

        return getattr(notebook, name)
    raise AttributeError(f"module 'effuse' has no attribute '{name}'")
