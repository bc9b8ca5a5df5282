"""Federated learning of, and with, diffusion models.

    import effuse

    recipe = effuse.recipe("demo", rounds=2)    # a recipe with some keys changed; `effuse list` prints the names
    effuse.check(recipe)["traffic"]["bytes"]    # what it would send, without computing
    run = effuse.run(recipe, out="runs/a", observer=effuse.Display())    # silent without an observer
    run = effuse.resume("runs/a")               # after an interruption
    run.metrics, run.weights_sha256, run.path
    run.result.traffic.bytes.total              # the fields of `result` are the keys of result.json
    run = effuse.Run("runs/a")                  # any run folder; a notebook shows it
    run.rounds, run.clients                     # pandas frames, or lists of records where pandas is missing
    run.plot("loss").save("loss.svg")           # a curve over rounds, or over="bytes"
    run.report(public=True)                     # its page, as `effuse report` writes it
    images = effuse.load("runs/a").sample(64)   # images.pixels: 64 x C x H x W in [-1, 1]
    images.grid().show(), images.save("64.png")    # one picture, as PIL has it, or as a file

Nested keys are changed as on the command line: `recipe.changed(["algorithm.local.lr=1e-3"])`.
"""

import importlib
import os
from typing import Any

# OpenMP threads that spin while waiting make two torch processes on the same cores ten times slower. Without any spinning a
# single process is 40 % slower, so threads spin briefly. This must be set before torch is imported, and changes no result.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# cuBLAS is bitwise reproducible only with a fixed workspace (here 32 MB), set before the first use of a GPU
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

__version__ = "0.2.0.dev0"
__all__ = ["Display", "Run", "check", "load", "recipe", "resume", "run"]


def __getattr__(name: str) -> Any:
    # importing torch takes seconds; `import effuse` alone does not
    if name in __all__:
        return getattr(
            importlib.import_module("effuse.cli.progress" if name == "Display" else "effuse.tools.notebook"), name
        )
    raise AttributeError(f"module 'effuse' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # so that help() lists them
