"""Real federations: Flower carries the messages, effuse does everything else; Flower's API is used in this folder only."""

import importlib.metadata
import importlib.util

from effuse.core.errors import RunError

KNOWN = ("1.41", "1.42")  # versions of flwr whose internal functions effuse can call


def require() -> None:
    """Refuse to begin where flwr is not installed, or its version is unknown."""
    if importlib.util.find_spec("flwr") is None:
        raise RunError("federations over a network need Flower, which is not installed; run pip install 'effuse[flower]'")
    version = importlib.metadata.version("flwr")
    if ".".join(version.split(".")[:2]) not in KNOWN:
        raise RunError(
            f"flwr {version} is installed, but effuse knows {' and '.join(KNOWN)}; run pip install 'effuse[flower]'"
        )
