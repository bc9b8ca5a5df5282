"""Imports point one way, so that every room of the house can be understood without those above it."""

import ast
from pathlib import Path

import effuse

ROOT = Path(effuse.__file__).parent
# each package may import itself and those to its right
ORDER = ["cli", "engines", "recipes", "algorithms", "privacy", "pruning", "metrics", "fast", "models", "data", "diffusion", "core"]
SAME_FLOOR = {"privacy", "pruning", "metrics", "fast", "models", "data", "diffusion"}


def imported(path: Path) -> set[str]:
    """The effuse packages that a file imports, wherever it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
        found |= {n.split(".")[1] for n in names if n.startswith("effuse.") and (ROOT / n.split(".")[1]).is_dir()}
    return found


def test_imports_point_one_way():
    for path in ROOT.rglob("*.py"):
        package = path.relative_to(ROOT).parts[0]
        if package not in ORDER or path.name == "layout.py":  # which goes to `fast` with all that is recorded
            continue
        allowed = set(ORDER[ORDER.index(package) :]) | (SAME_FLOOR if package in SAME_FLOOR else set())
        assert imported(path) <= allowed, f"{path.relative_to(ROOT)} imports {sorted(imported(path) - allowed)}"


def test_every_package_has_its_place():
    packages = {p.name for p in ROOT.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert packages == set(ORDER)


def test_an_algorithm_imports_no_other_algorithm_than_fedavg():
    for path in (ROOT / "algorithms").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("effuse.algorithms."):
                assert node.module == "effuse.algorithms.fedavg", f"{path.name} imports {node.module}"


def test_only_the_machine_calls_backward_and_nothing_unpickles_or_evaluates():
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "dill", "cloudpickle", "joblib"} & set(names), f"{path.name} imports {names}"
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "torch.load", "os.system", "__import__"), f"{path.name} calls {called}"
                assert path == ROOT / "core" / "eager.py" or not called.endswith(".backward"), f"{path.name} calls {called}"
                options = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert options.get("shell") != "True" and options.get("allow_pickle") != "True", f"{path.name}: {options}"


def test_a_message_is_named_by_what_it_is_and_not_by_where_it_stands():
    """A bare `@message` makes its name of module and class, so that moving the file would change what is saved."""
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bare = [d for d in node.decorator_list if ast.unparse(d) == "message"]
                assert not bare, f"{path.name}: give {node.name} a name: @message(name=...)"
