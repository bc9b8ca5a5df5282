"""Trackers are told numbers and nothing private, and one that fails costs nothing."""

import sys
import types

import diffusers  # noqa: F401  (it looks for wandb when it is imported, and must not find a fake)
import pytest
from toy import ADAM, ToyStateful, toy_recipe

from effuse.core.errors import RunError
from effuse.core.recipe import Evaluate
from effuse.diffusion.samplers import Ancestral
from effuse.runs.driver import run
from effuse.runs.observer import Observer
from effuse.runs.trackers import EVENTS, TRACKERS, Several, Sink, Tracker, tracked

RECIPE = toy_recipe(
    algorithm=ToyStateful(local=ADAM), rounds=2, evaluate=Evaluate(grid=2, every=1), sampler=Ancestral(batch=2)
)


class Calls(types.ModuleType):
    """A module that records how its functions are called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


class Heard(Observer):
    def __init__(self) -> None:
        self.words = []

    def said(self, words: str) -> None:
        self.words.append(words)


def watched_run(folder, *names: str) -> Heard:
    heard = Heard()
    with tracked(names, heard) as observer:
        run(RECIPE, folder, observer=observer)
    return heard


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_one_adapter_serves_wandb_and_trackio(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, module := Calls(name))
    made = {"wandb": ["Settings"], "trackio": []}[name]
    if not made:
        module.Settings = None  # trackio has none
    watched_run(tmp_path / "first", name)
    assert [call for call, _, _ in module.calls] == [*made, "init", "log", "log", "finish"]
    quiet = {"console": "off", "x_disable_meta": True, "disable_git": True, "disable_code": True}
    assert [kwargs for call, _, kwargs in module.calls if call == "Settings"] == [quiet] * len(made)
    module.calls = module.calls[len(made) :]
    begun, logged = module.calls[0][2], [(args[0], kwargs["step"]) for _, args, kwargs in module.calls[1:3]]
    assert begun["project"] == "effuse" and begun["name"] == "first" and begun["config"]["rounds"] == "2"
    assert not {"data", "model"} & begun["config"].keys(), "they may name paths"
    assert [step for _, step in logged] == [1, 2] and logged[0][0]["loss"] > 0 and logged[1][0]["round"] == 2
    assert all(type(value) is float for values, _ in logged for value in values.values())


def test_mlflow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", module := Calls("mlflow"))
    watched_run(tmp_path / "run", "mlflow")
    names = ["set_experiment", "start_run", "log_params", "log_metrics", "log_metrics", "end_run"]
    assert [call for call, _, _ in module.calls] == names
    assert max(len(value) for value in module.calls[2][1][0].values()) <= 500
    tags = {"mlflow.user": "effuse", "mlflow.source.name": "effuse"}
    assert module.calls[1][2] == {"run_name": "run", "tags": tags}, "else it sends the account and the program's path"


def test_no_path_of_a_recipe_is_sent(tmp_path):
    """The algorithm, too, may name a folder."""
    told = {}

    class Kept(Sink):
        def begin(self, folder, config):
            told.update(config)

        log = end = lambda *args: None

    class Private:
        def saved(self):
            return {"algorithm": "feddda(guide=from_pretrained(folder='/wards/anna/model'), share=0.5)", "rounds": "2"}

    Tracker("wandb", Kept()).started(Private(), str(tmp_path), 0, None, 0)
    assert told == {"algorithm": "feddda(guide=from_pretrained(folder='...'), share=0.5)", "rounds": "2"}


def test_tensorboard_writes_event_files_that_it_can_read(tmp_path):
    watched_run(tmp_path / "run", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2] and events.Scalars("round")[1].value == 2
    assert events.Tags()["images"] == [], "pictures stay in the run folder"


class Broken(Sink):
    """Raises everywhere."""

    def begin(self, *args):
        raise ConnectionError("no network \x1b[2J")

    log = end = begin


class BrokenLater(Broken):
    def begin(self, *args):
        pass


@pytest.mark.parametrize("sink", [Broken, BrokenLater])
def test_a_tracker_that_fails_never_stops_a_run(sink, tmp_path):
    heard = Heard()
    with Several([heard, Tracker("wandb", sink(), heard.said)]) as observer:
        result = run(RECIPE, tmp_path / "run", observer=observer)
    assert result.weights_sha256 == run(RECIPE, tmp_path / "plain").weights_sha256
    (warning,) = [words for words in heard.words if words.startswith("warning")]
    assert warning.startswith("warning: --track wandb failed and is left out: ConnectionError: no network \\x1b[2J")


def test_a_module_that_raises_when_it_is_called(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("out of quota")

    module = types.SimpleNamespace(init=refuse, log=refuse, finish=refuse)
    monkeypatch.setitem(sys.modules, "wandb", module)
    assert "out of quota" in "".join(watched_run(tmp_path / "run", "wandb").words)


@pytest.mark.parametrize("name", TRACKERS)
def test_one_that_is_not_installed_is_refused_before_the_run(name, monkeypatch):
    monkeypatch.setitem(sys.modules, TRACKERS[name][1], None)
    with pytest.raises(RunError, match=f"--track {name}: it is not installed; pip install "):
        tracked([name], Observer())


def test_every_event_is_passed_on():
    """A new event of observers must be in the list."""
    assert set(EVENTS) == {name for name in vars(Observer) if not name.startswith("_")}
