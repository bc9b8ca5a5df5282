"""Imports point one way, so that every package can be understood without those above it."""

import ast
from pathlib import Path

import pytest

import effuse

ROOT = Path(effuse.__file__).parent
HOUSE = ROOT.parent.parent
# each package imports only itself and those below it
ORDER = [
    "cli",
    "tools",
    "report",
    "runs",
    "transport",
    "recipes",
    "algorithms",
    "privacy",
    "pruning",
    "metrics",
    "fast",
    "machines",
    "models",
    "diffusion",
    "tasks",
    "data",
    "core",
]
DOOR = "effuse.fast"  # the only module of fast/ that other packages may import
BACKWARD = Path("machines/eager.py")  # the one file that calls `.backward()`
FILES = {path.relative_to(ROOT): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}


def imported(path: Path) -> set[str]:
    """The effuse modules that a file imports, wherever it does so."""
    found = set()
    for node in ast.walk(FILES[path]):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{a.name}" for a in node.names]
        found |= {module(n) for n in names if n.startswith("effuse.")}
    return found


def module(name: str) -> str:
    """The module of a dotted name, whose last word may be something in it."""
    place = ROOT.joinpath(*name.split(".")[1:])
    return name if place.is_dir() or place.with_suffix(".py").is_file() else name.rpartition(".")[0]


def room(name: str) -> str:
    return f"{name}.".split(".")[1]


@pytest.mark.parametrize("package", ORDER)
def test_imports_point_one_way(package):
    allowed = {*ORDER[ORDER.index(package) :], ""}  # `effuse/__init__.py` imports effuse modules only within functions
    for path in FILES:
        if path.parts[0] == package:
            wrong = sorted(name for name in imported(path) if room(name) not in allowed)
            assert not wrong, f"{path} imports {wrong}"


def test_every_package_has_its_place():
    packages = {p.parent.name for p in ROOT.glob("*/__init__.py")}
    assert packages == set(ORDER)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_the_documents_give_the_same_order(page):
    assert ", ".join(ORDER) in " ".join((HOUSE / page).read_text().split())


def test_fast_is_imported_through_one_module():
    for path in FILES:
        inside = {name for name in imported(path) if name.startswith(f"{DOOR}.")}
        assert path.parts[0] == "fast" or not inside, f"{path} imports {sorted(inside)}; {DOOR} gives what others need"


def test_algorithms_import_only_fedavg_and_shared_ones():
    for path in FILES:
        if path.parts[0] == "algorithms":
            others = {name for name in imported(path) if room(name) == "algorithms"}
            free = "effuse.algorithms.shared", "effuse.algorithms.fedavg"
            wrong = sorted(name for name in others if not f"{name}.".startswith(tuple(f"{f}." for f in free)))
            assert not wrong, f"{path} imports {wrong}"


def test_one_file_calls_backward_and_nothing_unpickles_or_evaluates():
    backward = set()
    for path, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "dill", "cloudpickle", "joblib"} & set(names), f"{path} imports {names}"
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "torch.load", "os.system", "__import__"), f"{path} calls {called}"
                backward |= {path} if called.endswith(".backward") else set()
                options = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert options.get("shell") != "True" and options.get("allow_pickle") != "True", f"{path}: {options}"
    assert backward == {BACKWARD}


def test_every_message_has_an_explicit_name():
    """A bare `@message` is named after its module and class, so moving the file would change saved data."""
    for path, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bare = [d for d in node.decorator_list if ast.unparse(d) == "message"]
                assert not bare, f"{path}: give {node.name} a name: @message(name=...)"
