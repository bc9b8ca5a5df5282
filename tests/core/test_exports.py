"""Classes can be imported from their room, so that a file may move within it."""

import importlib
import subprocess
import sys

import pytest

from effuse.core.registry import registry
from effuse.core.spec import Spec

ROOMS = ("data", "models", "metrics", "algorithms", "diffusion", "tasks")


@pytest.mark.parametrize("room", ROOMS)
def test_every_part_of_a_recipe_is_in_its_room(room):
    package = importlib.import_module(f"effuse.{room}")
    own = [cls for cls in registry(Spec).values() if cls.__module__.rpartition(".")[0] == f"effuse.{room}"]
    assert own and all(getattr(package, cls.__name__) is cls for cls in own)


def test_submodules_and_unknown_names_are_left_to_python():
    from effuse.data import folders

    assert folders.__name__ == "effuse.data.folders"
    with pytest.raises(ImportError, match="cannot import name 'Fodler'"):
        from effuse.data import Fodler  # noqa: F401


def test_the_first_import_of_a_process_may_be_of_a_class():
    code = "from effuse.data import Folder; from effuse.algorithms import FedAvg; print(Folder.__name__, FedAvg.__name__)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "Folder FedAvg\n"
