"""effuse: federated learning of, and with, diffusion models."""

__version__ = "0.1.0"
