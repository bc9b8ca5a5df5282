"""Start or resume a run: refuse what cannot work, choose an engine, run the rounds."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from effuse.core.data import Dataset
from effuse.core.errors import RecipeError, RunError
from effuse.core.federation import Federation
from effuse.core.recipe import Recipe, read_manifest
from effuse.core.spans import span
from effuse.fast import pick_speed
from effuse.runs.folder import RunFolder
from effuse.runs.observer import Observer
from effuse.runs.records import Result
from effuse.runs.rounds import Run
from effuse.runs.warm import require_same_preparation
from effuse.transport import flower
from effuse.transport.context import Engine, EngineContext
from effuse.transport.device import pick_device
from effuse.transport.loopback import Loopback
from effuse.transport.plan import MANY, plan, releases, stand_in
from effuse.transport.processes import Processes, pick_workers, slots_each
from effuse.transport.refusals import refuse, refuse_apart
from effuse.transport.simulator import InProcess, Simulator, on_disk
from effuse.transport.trial import side_by_side


def _in_process(kind: type[InProcess]) -> Engine:
    def make(context: EngineContext) -> Federation:
        recipe, device = context.recipe, context.machines[0].device
        with span("data"):
            shards = recipe.shards(context.train)
        machines = side_by_side(context.machines, recipe, context.train, context.say)
        snapshots = on_disk(context.folder)
        processes = pick_workers(context.workers, device, recipe.clients)
        if processes == 1:
            fed = kind(recipe, shards, *machines, snapshots=snapshots)
            fed.protect(context.protections)
            return fed
        each = slots_each(len(machines), processes, device)
        for machine in context.machines:
            for arch in recipe.networks:  # the workers record for themselves: free the memory of the trial's recordings
                machine.forget(arch)
        options: dict[str, Any] = {"snapshots": snapshots, "folder": context.folder, "workers": processes, "slots": each}
        return Processes(recipe, shards, machines[0], protections=context.protections, **options)

    return make


def _flower(context: EngineContext) -> Federation:
    flower.require()
    from effuse.transport.flower.local import on_this_machine  # flwr is an extra

    return on_this_machine(context)


ENGINES: dict[str, Engine] = {"simulator": _in_process(Simulator), "loopback": _in_process(Loopback), "flower": _flower}
SERVED = "served"  # the clients are at their sites; `effuse serve` supplies the engine


def run(recipe: Recipe, out: Path, **options: Any) -> Result:
    """Run a recipe in a new folder to its end; the options are those of `begin`."""
    return begin(recipe, out, **options).complete()


def begin(
    recipe: Recipe,
    out: Path,
    *,
    name: str = "",
    engine: str = "simulator",
    device: str = "auto",
    workers: int | None = None,
    observer: Observer | None = None,
    served: Engine | None = None,
    trained: Path | None = None,
    warm: Path | None = None,
) -> Run:
    """A run in a new folder, to be completed.

    It takes over the rounds of `trained`, a finished run of the same training, or the preparation of the run `warm`.
    """
    if served is None and engine not in ENGINES:
        raise RecipeError(f"no engine '{engine}'; valid: {', '.join(ENGINES)}")
    if engine == "flower":
        flower.require()
    _refuse_workers(workers, engine, served)
    chosen = pick_device(device)
    folder = RunFolder(out)
    folder.require_new()
    train, test = _loaded(recipe)
    recipe = recipe.resolved(train)
    digests = {"train": train.digest, "test": test.digest}
    if warm is not None:
        require_same_preparation(recipe, digests, RunFolder(warm))
    # refuse what cannot work before making a folder
    shards = recipe.shards(train) if served is None else []
    refuse(recipe, train, test)
    privacy = plan(recipe, shards) if served is None else None
    if served or engine == "flower":
        refuse_apart(recipe, train)
    if served:  # what every site would refuse; what it costs them, only they know
        releases(recipe, [stand_in(recipe, len(train.classes), MANY)] * recipe.clients)
    pick_speed(recipe, chosen, len(train))
    if train.images.is_meta:
        raise RunError(f"data {recipe.data}: there are labels but no images; it can be checked, not run")
    with ExitStack() as lock:
        lock.enter_context(folder.locked(private=served is not None))  # it will hold models trained on data of the sites
        kind = SERVED if served else engine
        sources = {"trained": trained, "warm": warm}
        more = {"classes": train.classes} | {key: str(path) for key, path in sources.items() if path is not None}
        folder.create(recipe, name, kind, chosen.type, workers, digests, **more)
        if shards:
            folder.write_split(shards)
        if trained is not None:
            folder.inherit(RunFolder(trained))
        observer, make = observer or Observer(), served or ENGINES[engine]
        other = None if warm is None else RunFolder(warm)
        begun = Run(recipe, folder, make, chosen, workers, train, test, observer, privacy, other)
        begun.lock = lock.pop_all()
    return begun


def resume(
    out: Path,
    *,
    device: str | None = None,
    workers: int | None = None,
    observer: Observer | None = None,
    served: Engine | None = None,
) -> Result:
    """Continue a run from its last checkpoint; a finished run returns its result."""
    manifest = read_manifest(Path(out))
    recipe = Recipe.restore(manifest["recipe"])
    engine: Any = manifest.get("engine")
    chosen = pick_device(device) if device else None
    if (engine == SERVED) != (served is not None):
        how = f"effuse serve --resume {out}" if engine == SERVED else f"effuse resume {out}"
        raise RunError(
            f"{out}: this run's clients are {'at their sites' if engine == SERVED else 'all on this machine'}; use `{how}`"
        )
    if served is None and engine not in ENGINES:
        raise RunError(f"{out}: its manifest names the engine {engine!r}; valid: {', '.join(ENGINES)}")
    _refuse_workers(workers, engine, served)
    folder = RunFolder(out)
    with ExitStack() as lock:
        lock.enter_context(folder.locked())
        observer = observer or Observer()
        if folder.result.exists():
            observer.said(f"{out} is already finished")
            return folder.read_result()
        folder.fall_back(observer.said, here=served is None)  # before loading data and waiting for sites
        chosen = chosen or pick_device(manifest.get("device", "auto"))
        train, test = _loaded(recipe)
        for split, found in (("train", train), ("test", test)):
            if found.digest != manifest.get("data_sha256", {}).get(split, found.digest):
                raise RunError(f"{out}: the {split} data has changed since this run started; restore it, or start a new run")
        if served or engine == "flower":
            refuse_apart(recipe, train)
        workers = workers or manifest.get("workers")
        make = served or ENGINES[engine]
        privacy = plan(recipe, recipe.shards(train)) if served is None else None
        begun = Run(recipe, folder, make, chosen, workers, train, test, observer, privacy)
        begun.lock = lock.pop_all()
    return begun.complete()


def _refuse_workers(workers: int | None, engine: str, served: Engine | None) -> None:
    if workers is not None and (served or engine == "flower"):
        raise RecipeError(f"--workers {workers}: with Flower every client has its own process; leave --workers out")


def _loaded(recipe: Recipe) -> tuple[Dataset, Dataset]:
    with span("data"):
        return recipe.data.load("train"), recipe.data.load("test")
