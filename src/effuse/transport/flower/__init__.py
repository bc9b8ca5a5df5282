"""Real federations: Flower carries the messages, effuse does everything else; nothing of Flower's API leaves this folder."""

import importlib.metadata
import importlib.util

from effuse.core.errors import RunError

KNOWN = ("1.41", "1.42")  # versions of flwr whose inner parts we call


def require() -> None:
    """Refuse to begin where the extra is not installed, or is one that we do not know."""
    if importlib.util.find_spec("flwr") is None:
        raise RunError("federations over a network need Flower, which is not installed; run pip install 'effuse[flower]'")
    version = importlib.metadata.version("flwr")
    if ".".join(version.split(".")[:2]) not in KNOWN:
        raise RunError(
            f"flwr {version} is installed, but effuse knows {' and '.join(KNOWN)}; run pip install 'effuse[flower]'"
        )
