"""Trackers as observers: Weights & Biases and trackio, TensorBoard, MLflow.

They are told numbers and the recipe without its data: no images, no paths, and nothing of a single client. A tracker that
fails is given up, and the run goes on.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from effuse.core.errors import RecipeError, RunError, nearest, shown
from effuse.core.grammar import hidden
from effuse.core.machine import Meter
from effuse.core.recipe import Recipe
from effuse.runs.observer import Observer
from effuse.runs.records import RoundRecord

PROJECT = "effuse"
PRIVATE = ("data", "model")  # keys of a recipe that are left out; the others are sent without paths
SENT_BY_MLFLOW = ("mlflow.user", "mlflow.source.name")  # by default the account and the path of the program
LONGEST_PARAMETER = 500  # characters that MLflow takes
EVENTS = ("started", "phase", "evaluating", "waiting", "replied", "said", "closed", "finished")


class Sink(ABC):
    """Where numbers go."""

    @abstractmethod
    def begin(self, folder: Path, config: Mapping[str, str]) -> None:
        """Open a run of the tracker."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record the numbers of a round."""

    @abstractmethod
    def end(self) -> None:
        """Close it, so that nothing is lost."""


class Wandb(Sink):
    """The interface of Weights & Biases, which trackio has too."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def begin(self, folder: Path, config: Mapping[str, str]) -> None:
        settings = getattr(self.module, "Settings", None)  # wandb's alone; by default it sends the command, code and host
        quiet = settings and settings(console="off", x_disable_meta=True, disable_git=True, disable_code=True)
        more = {"settings": quiet} if settings else {}
        self.module.init(project=PROJECT, name=folder.name, config=dict(config), **more)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.module.log(dict(values), step=step)

    def end(self) -> None:
        self.module.finish()


class TensorBoard(Sink):
    """Event files in RUN/tensorboard."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.writer: Any = None

    def begin(self, folder: Path, config: Mapping[str, str]) -> None:
        self.writer = self.module.SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text("recipe", "  \n".join(f"`{key}={value}`" for key, value in config.items()))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def end(self) -> None:
        if self.writer is not None:
            self.writer.close()


class MLflow(Sink):
    """An MLflow run in the experiment `effuse`."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def begin(self, folder: Path, config: Mapping[str, str]) -> None:
        self.module.set_experiment(PROJECT)
        self.module.start_run(run_name=folder.name, tags=dict.fromkeys(SENT_BY_MLFLOW, PROJECT))
        self.module.log_params({key: value[:LONGEST_PARAMETER] for key, value in config.items()})

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.module.log_metrics(dict(values), step=step)

    def end(self) -> None:
        self.module.end_run()


# name -> the sink, the module that it needs, and what installs that
TRACKERS: dict[str, tuple[Callable[[Any], Sink], str, str]] = {
    "wandb": (Wandb, "wandb", "wandb"),
    "trackio": (Wandb, "trackio", "trackio"),
    "tensorboard": (TensorBoard, "torch.utils.tensorboard", "'effuse[tensorboard]'"),
    "mlflow": (MLflow, "mlflow", "mlflow"),
}


class Tracker(Observer):
    """Sends the numbers of every round to a sink, until that fails."""

    def __init__(self, name: str, sink: Sink, say: Callable[[str], None] = lambda words: None) -> None:
        self.name, self.sink, self.say = name, sink, say
        self.begun = self.failed = False

    def started(self, recipe: Recipe, folder: str, first: int, meter: Meter, traffic: int) -> None:
        config = {key: hidden(value) for key, value in recipe.saved().items() if key not in PRIVATE}
        self.begun = True
        self._try(lambda: self.sink.begin(Path(folder), config))

    def closed(self, record: RoundRecord) -> None:
        self._try(lambda: self.sink.log(numbers(record), record.t + 1))

    def __exit__(self, *exception: Any) -> None:
        if self.begun:
            self._try(self.sink.end)

    def _try(self, call: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            call()
        except Exception as error:  # whatever a tracker raises, the run goes on
            self.failed = True
            self.say(
                f"warning: --track {self.name} failed and is left out: {shown(f'{type(error).__name__}: {error}', 300)}"
            )


class Several(Observer):
    """Passes every event on to several observers."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = list(observers)
        for event in EVENTS:
            setattr(self, event, self._passing(event))

    def _passing(self, event: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            for observer in self.observers:
                getattr(observer, event)(*arguments)

        return call

    def __enter__(self) -> Self:
        for observer in self.observers:
            observer.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        for observer in reversed(self.observers):
            observer.__exit__(*exception)


def numbers(record: RoundRecord) -> dict[str, float]:
    """The numbers of a round that a tracker is told."""
    found: dict[str, float | None] = {
        "loss": None if record.alone else record.loss,
        "round": record.federated,
        "images": record.images or None,
        "seconds": record.seconds.round,
        "seconds_total": record.seconds.total,
        "traffic_up": record.traffic.bytes.up,
        "traffic_down": record.traffic.bytes.down,
        **{f"metric/{name}": value for name, value in (record.metrics or {}).items()},
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def tracked(names: Sequence[str], observer: Observer) -> Observer:
    """The observer together with the named trackers; one that is not installed is refused before the run."""
    trackers = []
    for name in names:
        if name not in TRACKERS:
            raise RecipeError(f"--track {name}: there is none; {nearest(name, TRACKERS)}")
        make, module, package = TRACKERS[name]
        try:
            found = importlib.import_module(module)
        except ImportError:
            raise RunError(f"--track {name}: it is not installed; pip install {package}") from None
        trackers.append(Tracker(name, make(found), observer.said))
    return Several([observer, *trackers]) if trackers else observer
