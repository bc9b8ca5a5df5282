"""Several clients at a time: the same bits in the same order, and an end when answers are no longer wanted."""

import contextlib
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from toy import ALGORITHMS, ToyUnet, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.core.errors import TrainingError
from effuse.core.params import Params
from effuse.core.recipe import Evaluate
from effuse.core.solvers import SGD
from effuse.core.workbench import SERVER
from effuse.diffusion.samplers import Ancestral
from effuse.fast.speed import machines_for
from effuse.machines.eager import Eager
from effuse.runs.driver import run
from effuse.runs.folder import RunFolder
from effuse.transport import simulator
from effuse.transport.slots import AHEAD, in_slots

CPU = torch.device("cpu")
PARALLEL = ToyUnet(dropout=0.0)  # a network with dropout draws from torch's one default generator, so it works alone


def test_answers_come_in_order_and_few_are_held():
    """Client 0 is the slowest; the others get AHEAD answers a worker ahead of it and no further."""
    started, gate = [], threading.Event()

    def job(worker, client):
        started.append(client)
        if client == 0:
            assert gate.wait(10)
        return client * 10

    answers = in_slots(job, range(20), ["a", "b"], [None, None], threads=1)

    def open_later():
        while len(started) < 2 * AHEAD:
            time.sleep(0.001)
        time.sleep(0.05)
        assert len(started) == 2 * AHEAD
        gate.set()

    opener = threading.Thread(target=open_later)
    opener.start()
    assert list(answers) == [(k, k * 10) for k in range(20)]
    opener.join()


def test_a_worker_has_one_client_at_a_time_and_its_own_number_of_threads():
    busy, seen = set(), set()

    def job(worker, client):
        assert worker not in busy
        busy.add(worker)
        seen.add(torch.get_num_threads())
        time.sleep(0.002)
        busy.remove(worker)

    before = torch.get_num_threads()
    assert len(list(in_slots(job, range(12), ["a", "b", "c"], [None] * 3, threads=3))) == 12
    assert seen == {3} and torch.get_num_threads() == before


class OnGpu(torch.Tensor):
    """A tensor that records on which stream it is read."""

    is_cuda = True

    def record_stream(self, stream):
        self.readers = stream


def test_every_gpu_tensor_of_an_answer_is_recorded_on_the_servers_stream(monkeypatch):
    """The server may free an answer while a kernel that reads it is still queued; CPU tensors are not recorded."""
    stream = types.SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the server's")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())

    def job(worker, client):
        return {
            "a": torch.ones(1).as_subclass(OnGpu),
            "b": Params({"w": torch.ones(2).as_subclass(OnGpu)}),
            "c": torch.ones(3),
        }, "3_1"

    for _, (reply, _) in in_slots(job, range(3), ["a", "b"], [stream] * 2):
        assert reply["a"].readers == reply["b"]["w"].readers == "the server's"


def test_jobs_under_way_are_stopped_when_one_fails():
    stopped, ended = threading.Event(), []

    def job(worker, client):
        if client == 0:
            raise TrainingError("no")
        ended.append(stopped.wait(10))

    with pytest.raises(TrainingError):
        list(in_slots(job, range(9), ["a", "b"], [None, None], threads=1, stop=stopped.set))
    assert all(ended) and len(ended) < 8, "other jobs are never started"


def test_a_stopped_fit_ends_at_its_next_step():
    recipe = toy_recipe(model=PARALLEL, threads=2).resolved(toy_recipe().data.load("train"))
    machine = machines_for(recipe, CPU, 40)[1]
    machine.meter.stopped = True
    with pytest.raises(KeyboardInterrupt):
        machine.meter.trained(1)


@pytest.mark.parametrize(
    ("clients", "threads", "model", "speed", "slots", "each"),
    [
        (3, 2, PARALLEL, "auto", 2, 1),
        (3, 8, PARALLEL, "auto", 3, 2),
        (3, 1, PARALLEL, "auto", 1, None),
        (1, 2, PARALLEL, "auto", 1, None),
        (3, 2, PARALLEL, "eager", 1, None),
        (3, 2, ToyUnet(), "auto", 1, None),
    ],
)
def test_how_many_at_a_time(clients, threads, model, speed, slots, each):
    recipe = toy_recipe(clients=clients, threads=threads, model=model, speed=speed)
    machines = machines_for(recipe.resolved(recipe.data.load("train")), CPU, 40)
    assert [m.threads for m in machines] == [each] * slots and len({id(m.meter) for m in machines}) == 1


# one of each kind also passes its messages through the wire format; that loopback has the simulator's bits is tested of all
LOOPED = (
    "client state",
    "sent once",
    "localonly",
    "fedphd, pruned in the middle",
    "fedddpm+",
    "feddiff, two kinds of networks",
    "two tasks in one job",
)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_at_a_time_equal_one(name, tmp_path, monkeypatch):
    """A client computes on one thread and the server on two, in both runs; and two clients did work at once."""
    algorithm = ALGORITHMS[name]
    together, most, places, fit = [], [], set(), Eager.fit

    def recording(machine, net, work):
        together.append(work.place)
        places.add(work.place)
        most.append(len(together))
        time.sleep(0.01)
        result = fit(machine, net, work)
        together.remove(work.place)
        return result

    monkeypatch.setattr(Eager, "fit", recording)
    options = {"algorithm": algorithm, "model": PARALLEL, "evaluate": Evaluate(grid=2), "sampler": Ancestral(batch=4)}
    with monkeypatch.context() as patch:
        patch.setattr(simulator, "in_slots", one_by_one)
        alone = run(toy_recipe(**options, threads=2), tmp_path / "alone")
    assert bool(most) == (name not in ("nearest mean", "fed3r"))  # they train nothing
    assert max(most, default=1) == 1
    for engine in ("simulator", "loopback") if name in LOOPED else ("simulator",):
        both = run(toy_recipe(**options, threads=2), tmp_path / engine, engine=engine)
        assert both.weights_sha256 == alone.weights_sha256 and both.metrics == alone.metrics
        assert both.images == alone.images
        assert {record.at_a_time for record in RunFolder(tmp_path / engine).records()} == {2}
    assert max(most, default=2) == 2 or SERVER in places and len(places) == 1


def one_by_one(job, clients, workers, streams, threads, stop):
    """One client at a time, in a thread with the number of threads of a slot."""
    with ThreadPoolExecutor(1, initializer=lambda: torch.set_num_threads(threads)) as pool:
        for client in clients:
            yield client, pool.submit(job, workers[0], client).result()


def test_a_loss_that_explodes_in_a_slot_is_reported(tmp_path):
    recipe = toy_recipe(algorithm=FedAvg(local=SGD(lr=1e30, batch=8, steps=5)), model=PARALLEL, threads=2)
    with pytest.raises(TrainingError, match="round 1, client 0, job 'train': the loss became"):
        run(recipe, tmp_path / "run")
