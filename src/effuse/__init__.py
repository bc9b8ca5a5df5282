"""Federated learning of, and with, diffusion models.

    import effuse

    recipe = effuse.recipe("demo", rounds=2)    # by name, keys changed; `effuse list` prints the names
    effuse.check(recipe)["traffic"]["bytes"]    # what it would send and cost, with nothing computed
    run = effuse.run(recipe, out="runs/a", observer=effuse.Display())    # silent without an observer
    run = effuse.resume("runs/a")               # after an interruption
    run.metrics, run.weights_sha256, run.path
    run.result.traffic.bytes.total              # the fields of `result` are the keys of result.json
    effuse.load("runs/a").sample(64).pixels     # 64 x C x H x W in [-1, 1]

Keys that lie deeper are changed as on the command line: `recipe.changed(["algorithm.local.lr=1e-3"])`.
"""

import importlib
import os
from typing import Any

# OpenMP threads that spin for long while they wait make two torch processes on the same cores ten times slower, and several workers
# on one machine are our daily bread; not to spin at all costs a lone process 40 %. It must be said before torch is imported, and
# changes no result
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# 32 MB of scratch memory: torch takes cuBLAS to repeat to the bit only where the amount is said (and before a GPU is used)
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

__version__ = "0.2.0.dev0"
__all__ = ["Display", "check", "load", "recipe", "resume", "run"]


def __getattr__(name: str) -> Any:
    # importing torch takes seconds; `import effuse` alone should not
    if name in __all__:
        return getattr(
            importlib.import_module("effuse.cli.progress" if name == "Display" else "effuse.tools.notebook"), name
        )
    raise AttributeError(f"module 'effuse' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # so that help() finds them, too
