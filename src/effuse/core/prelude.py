"""What nearly every algorithm imports, in one line."""

from effuse.core.algorithm import FEDERATE, Algorithm, Server, on_client
from effuse.core.errors import RecipeError
from effuse.core.federation import Federation
from effuse.core.message import message
from effuse.core.model import Model
from effuse.core.params import Params
from effuse.core.solvers import Solver
from effuse.core.spec import spec
from effuse.core.task import Given
from effuse.core.workbench import Client

__all__ = [
    "FEDERATE",
    "Algorithm",
    "Client",
    "Federation",
    "Given",
    "Model",
    "Params",
    "RecipeError",
    "Server",
    "Solver",
    "message",
    "on_client",
    "spec",
]
