"""A run: its rounds, and after each the evaluation, the record and the checkpoint."""

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from effuse.core.algorithm import FEDERATE, Server
from effuse.core.capabilities import Personal, Prepares
from effuse.core.data import Dataset
from effuse.core.errors import RunError, TrainingError
from effuse.core.federation import SETUP_T, Federation
from effuse.core.files import cache_folder, parsed
from effuse.core.ledger import TRAINING
from effuse.core.metric import Measurement
from effuse.core.recipe import Recipe
from effuse.core.rng import stream
from effuse.core.spans import span
from effuse.core.visit import placed
from effuse.core.workbench import SERVER
from effuse.fast import keep, machines_for
from effuse.runs.average import MovingAverage
from effuse.runs.evaluation import Evaluator, evaluation_calls
from effuse.runs.finish import finish
from effuse.runs.folder import Checkpoint, RunFolder, Unevaluated
from effuse.runs.observer import Observer
from effuse.runs.records import ClientRecord, Result, RoundRecord, Seconds, Traffic, made, plain
from effuse.transport.context import Engine, EngineContext
from effuse.transport.plan import Plan
from effuse.transport.state import Snapshots
from effuse.transport.write_guard import WriteGuard

CHECKPOINT_SHARE = 0.1  # of the time since the last checkpoint that writing one may take


class FinishedRound(NamedTuple):
    """A finished round."""

    server: Server
    t: int
    phase: str
    federated: int  # federated rounds up to here
    evaluate: bool  # whether the model is evaluated after this round
    over: bool  # whether this was the last round


def rounds_of(recipe: Recipe, fed: Federation, server: Server, t: int, federated: int) -> Iterator[FinishedRound]:
    """Run the rounds one after another, from round `t` on."""
    algorithm = recipe.algorithm

    while not recipe.over(server, federated):
        fed.begin(t, federated)
        phase = server.phase
        watch = WriteGuard(server, f"the server program of {algorithm.name}", "the state it was handed")
        with span("aggregate"), watch:
            after = algorithm.round(server, fed)
        fed.close()
        server = after
        federated += phase == FEDERATE
        last = recipe.over(server, federated)
        due = phase == FEDERATE and recipe.evaluate.every and federated % recipe.evaluate.every == 0
        yield FinishedRound(server, t, phase, federated, bool(last or due), last)
        t += 1


class Run:
    """One run in progress."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        engine: Engine,
        device: torch.device,
        workers: int | None,
        train: Dataset,
        test: Dataset,
        observer: Observer,
        privacy: Plan | None = None,  # None: the clients are at their sites, which plan for themselves
        warm: RunFolder | None = None,  # the run whose preparation a new run takes over
    ) -> None:
        torch.set_num_threads(recipe.threads)
        self.lock = ExitStack()  # of the folder, if this run is to release it
        self.recipe, self.folder, self.observer, self.warm = recipe, folder, observer, warm
        with span("data"):
            train = train.to(device)
        self.machines = machines_for(recipe, device, len(train))
        self.machine = self.machines[0]
        self.plan = privacy or Plan(recipe, {}, ())
        protections = self.plan.protections
        self.fed = engine(EngineContext(recipe, train, self.machines, workers, folder.path, observer.said, protections))
        self.fed.on_reply = lambda client, reply: observer.replied(self.fed.federated, client, getattr(reply, "loss", None))
        self.fed.on_wait = observer.waiting
        self.bench_state = Snapshots(folder.path / "server", run=folder.digest)
        self.evaluator = Evaluator(recipe, train, test, self.fed.workbench, cache_folder())
        self.average = MovingAverage(recipe)
        self.seconds = 0.0
        self.metrics: dict[str, Measurement] = {}
        self.unevaluated = False  # the rounds were copied from another run, and only the evaluation is left
        self.digests: list[str] = []
        self.pending: RoundRecord | None = None  # of a round whose evaluation was interrupted
        self.evaluation_seconds = math.inf  # of the last evaluation; before the first, it may take any time
        self.checked, self.spent = time.monotonic(), 0.0  # when the last checkpoint was written, and how long that took

    def complete(self) -> Result:
        """Run from the last checkpoint, or from the start, to the result."""
        try:
            with self.lock, self.fed:
                result = self._complete()
        except TrainingError:  # the machines are intact: the next cell of a table can use their recordings
            keep(self.machines)
            raise
        keep(self.machines)
        return result

    def _complete(self) -> Result:
        algorithm, recipe, fed = self.recipe.algorithm, self.recipe, self.fed
        self.seconds -= time.monotonic()
        server, t, federated = self._start()
        sent = fed.ledger.report()[TRAINING]["bytes"]["total"]
        closed, waits = federated, self.pending
        if waits is not None:  # its round is closed after this
            sent, closed = sent - waits.traffic.bytes.total, federated - (waits.phase == FEDERATE)
        self.observer.started(recipe, str(self.folder.path), closed, self.machine.meter, sent)
        if self.pending is not None:  # the run was interrupted in the evaluation of a round
            self._record(self.pending, server, federated, recipe.over(server, federated))
        self.checked, started = time.monotonic(), time.monotonic()
        trained, evaluated = self.machine.meter.images, self.machine.meter.evaluations
        last = algorithm.deliver(server)
        for done in rounds_of(recipe, fed, server, t, federated):
            prepared = self._prepares(server) and not self._prepares(done.server)
            server, model = done.server, algorithm.deliver(done.server)
            if model.arch != last.arch and model.arch.whole() == last.arch.whole():  # pruned: free the wider one's memory
                for machine in self.machines:
                    machine.forget(last.arch)
            with span("aggregate"):
                if not model.params.finite():
                    raise TrainingError(
                        f"round {done.t + 1}: the new model holds a non-finite number; lower the learning rate or set clip"
                    )
                if done.federated:  # phases before the first federated round are not averaged
                    self.average.add(server, model, new=model is not last)
            last = model
            about, traffic = self._about(done, trained, evaluated), Traffic.from_json(fed.ledger.close(), "the ledger")
            seconds = time.monotonic() - started
            record = RoundRecord(**about, traffic=traffic, seconds=Seconds(round=seconds, total=seconds))
            t, federated = done.t + 1, done.federated
            if done.evaluate:
                # an evaluation that takes long is not lost, nor is the training before it
                if done.over or self._worth_it(self.evaluation_seconds):
                    self._checkpoint(server, t, federated, record=record)
                self._record(record, server, federated, done.over)
            else:
                self._close(record)
            if done.over or prepared or self._worth_it(0.0):
                self._checkpoint(server, t, federated, prepared)
                self.observer.phase("training")
            started, trained, evaluated = time.monotonic(), self.machine.meter.images, self.machine.meter.evaluations
        if self.unevaluated:
            self._evaluate(server, federated, over=True)
        with span("checkpoint"):
            return self._finish(server, t, federated)

    def _start(self) -> tuple[Server, int, int]:
        fed, recipe = self.fed, self.recipe
        saved = self.folder.load_checkpoint()
        if saved is not None:
            self._recognise(saved.server)
            self.average.model, self.average.models = placed(saved.ema, self.machine.device), saved.averaged
            self.seconds += saved.seconds
            fed.restore(saved.snapshots, saved.received)
            fed.ledger.restore(saved.ledger)
            metrics, self.digests = json.loads(saved.metrics), list(saved.digests)
            self.metrics = {name: made(m, Measurement, "the checkpoint") for name, m in (metrics or {}).items()}
            self.unevaluated = metrics is None
            fed.workbench.state = placed(self.bench_state.read(saved.workbench), self.machine.device)
            if isinstance(saved, Unevaluated):
                record = parsed(saved.record.encode(), self.folder.path / "checkpoints")
                self.pending = RoundRecord.from_json(record, "the checkpoint")
            self.folder.cut(saved.lines)
            return placed(saved.server, self.machine.device), saved.t, saved.federated
        self.folder.cut(0)
        fed.begin(SETUP_T, 0)
        initial = recipe.model.initial(stream(recipe.seed, SETUP_T, "model", 0, SERVER, "initial")).to(self.machine.device)
        server = recipe.algorithm.setup(initial, fed)
        fed.close()
        return (server, 0, 0) if self.warm is None else self._taken_over(server, self.warm)

    def _prepares(self, server: Server) -> bool:
        algorithm = self.recipe.algorithm
        return isinstance(algorithm, Prepares) and algorithm.prepares(server)

    def _taken_over(self, server: Server, other: RunFolder) -> tuple[Server, int, int]:
        """The state after the preparation of another run, whose rounds, traffic and time then count as this run's."""
        algorithm, saved = self.recipe.algorithm, other.load_prepared()
        assert isinstance(algorithm, Prepares)
        server = algorithm.prepared(server, placed(saved.server, self.machine.device))
        self.folder.copy_rounds(other, saved.lines)
        self.fed.ledger.restore(saved.ledger)
        self.seconds += saved.seconds
        self._checkpoint(server, saved.t, saved.federated, prepared=True)
        return server, saved.t, saved.federated

    def _recognise(self, server: Server) -> None:
        """Refuse a server state of another type than this version's algorithm uses."""
        algorithm = self.recipe.algorithm
        kind = algorithm.round.__annotations__.get("server", Server)
        if not isinstance(server, kind):
            raise RunError(
                f"{self.folder.path}: its checkpoint holds a {type(server).__name__}, but {algorithm.name} now needs a "
                f"{kind.__name__}; finish it with the version of effuse that began it, or start a new run"
            )

    def _about(self, done: FinishedRound, trained: int, evaluated: int) -> dict[str, Any]:
        """The fields of a round's record that describe its training."""
        log = self.fed.log
        about: dict[str, Any] = {"t": done.t, "phase": done.phase, "federated": done.federated, "loss": log.loss}
        about["images"] = self.machine.meter.images - trained
        about["evaluations"] = self.machine.meter.evaluations - evaluated
        if self.machine.device.type == "cuda":
            about["gpu_bytes"] = torch.cuda.max_memory_reserved()
            torch.cuda.reset_peak_memory_stats()
        about["updates"] = {str(client): seen for client, seen in log.updates.items()} or None
        answered = sorted(log.reported.keys() | log.seconds.keys())
        about["clients"] = {str(k): ClientRecord(log.reported.get(k), log.seconds.get(k)) for k in answered} or None
        return about | {"at_a_time": self.fed.at_a_time, "noted": log.noted or None, "silent": sorted(log.silent) or None}

    def _record(self, record: RoundRecord, server: Server, federated: int, over: bool) -> None:
        """Evaluate the model after a round, and write the round's line."""
        began, calls = time.monotonic(), self.machine.meter.evaluations
        self._evaluate(server, federated, over)
        self.evaluation_seconds = time.monotonic() - began
        evaluation = Traffic.from_json(self.fed.ledger.close(), "the ledger").evaluation
        whole = dataclasses.replace(
            record,
            metrics={name: m.value for name, m in self.metrics.items()},
            measuring=self.machine.meter.evaluations - calls,
            traffic=dataclasses.replace(record.traffic, evaluation=evaluation),
            seconds=Seconds(round=record.seconds.round, total=record.seconds.total + self.evaluation_seconds),
        )
        self._close(whole)

    def _close(self, record: RoundRecord) -> None:
        self.folder.append(record)
        self.observer.closed(record)

    def _evaluate(self, server: Server, federated: int, over: bool) -> None:
        algorithm = self.recipe.algorithm
        owners = len(list(algorithm.owners(server, self.fed))) if isinstance(algorithm, Personal) else 0
        averaged = algorithm.averages if isinstance(algorithm, Personal) else self.average.model is not None
        self.observer.phase("evaluating")
        self.observer.evaluating(evaluation_calls(self.recipe, owners, averaged))
        picture = self.folder.path / "samples" / f"round-{federated:05d}.png"
        with span("evaluate"):
            self.metrics, self.digests = self.evaluator.evaluate(self.fed, server, self.average.model, picture)
            if over:
                self.metrics |= self.evaluator.evaluate_kept(server)
        if self.evaluator.note is not None:
            self.observer.said(f"note: {self.evaluator.note}")

    def _worth_it(self, ahead: float) -> bool:
        """Whether a checkpoint takes at most a tenth of the time since the last one and of the seconds ahead."""
        return self.spent <= CHECKPOINT_SHARE * (time.monotonic() - self.checked + ahead)

    def _checkpoint(
        self, server: Server, t: int, federated: int, prepared: bool = False, record: RoundRecord | None = None
    ) -> None:
        """Write a checkpoint; one that is followed by an evaluation holds the round's record."""
        self.observer.phase("checkpoint")
        before = time.monotonic()
        with span("checkpoint"):
            self._write_checkpoint(server, t, federated, prepared, record)
        self.checked = time.monotonic()
        self.spent = self.checked - before

    def _write_checkpoint(self, server: Server, t: int, federated: int, prepared: bool, record: RoundRecord | None) -> None:
        fed, state = self.fed, self.fed.workbench.state
        workbench = f"{t}" if state else None
        if workbench is not None:
            self.bench_state.write(workbench, state)
        fed.settle()
        holds: dict[str, Any] = {
            "t": t,
            "federated": federated,
            "server": server,
            "ema": self.average.model,
            "averaged": self.average.models,
            "snapshots": dict(fed.snapshots),
            "received": {name: tuple(sorted(clients)) for name, clients in fed.received.items()},
            "workbench": workbench,
            "ledger": fed.ledger.saved(),
            "metrics": json.dumps(plain(self.metrics)),
            "digests": self.digests,
            "lines": self.folder.rounds.stat().st_size if self.folder.rounds.exists() else 0,
            "seconds": self.elapsed(),
        }
        if record is None:
            checkpoint = Checkpoint(**holds)
        else:
            checkpoint = Unevaluated(**holds, record=json.dumps(record.to_json(), allow_nan=False))
        self.folder.save_checkpoint(checkpoint, prepared)
        self.bench_state.prune({workbench}, workbench)
        fed.durable = dict(fed.snapshots)

    def _finish(self, server: Server, t: int, federated: int) -> Result:
        self.observer.phase("saving")
        known = {"rounds": federated, "metrics": self.metrics, "privacy": self.plan.spent(t)}
        ledger, seconds = self.fed.ledger.report(), self.elapsed
        result = finish(self.folder, self.recipe, server, self.average.model, self.digests, ledger, seconds, **known)
        self.observer.finished(result)
        return result

    def elapsed(self) -> float:
        """The seconds of this run so far, those before an interruption included."""
        return self.seconds + time.monotonic()
