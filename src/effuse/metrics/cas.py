"""The classification accuracy score of Ravuri and Vinyals, 2019: train on samples, test on real images."""

import dataclasses

import torch
from pydantic import PositiveInt

from effuse.core.data import Dataset, Shard
from effuse.core.fit import Work
from effuse.core.metric import Measurement, Metric, Outlook, Protocol, Subject
from effuse.core.model import Arch, Net
from effuse.core.rng import Stream
from effuse.core.solvers import AdamW, Solver
from effuse.core.spec import spec, text
from effuse.core.workbench import SERVER
from effuse.machines.eager import Eager
from effuse.metrics.accuracy import Accuracy, require_labels
from effuse.models.resnet import Cnn
from effuse.tasks.classify import Classify


@spec
class Cas(Metric):
    """The accuracy on real test images of a classifier that was trained on labelled samples of the model only."""

    n: PositiveInt = 5000
    arch: Arch = Cnn()
    solver: Solver = AdamW(lr=1e-3, batch=128, epochs=20)
    seed: int = 0

    def ready(self, outlook: Outlook) -> None:
        require_labels(self, outlook.conditional)

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        samples = subject.samples(self.n)
        require_labels(self, samples.labels is not None)
        assert samples.labels is not None
        data = Dataset(samples.bytes().to(subject.device), samples.labels.to(subject.device), subject.train.classes)
        machine, stream, owner = subject.machine or Eager(subject.device), Stream((self.seed, "cas")), object()
        with torch.inference_mode(False), torch.enable_grad():
            net = machine.load(self.arch.resolved(data.shape).initial(stream.child("initial")).to(subject.device), owner)
            work = Work(
                solver=self.solver,
                task=Classify(),
                shard=Shard.whole(data),
                lr=self.solver.lr,
                stream=stream.child("fit"),
                place=SERVER,
                where="the classifier that is trained on samples",
            )
            machine.fit(net, work)
        found = Accuracy().measure(_of(subject, net))["accuracy"]
        machine.release(owner)
        protocol: Protocol = {**found.protocol, "trained_on": self.n, "arch": text(self.arch), "solver": text(self.solver)}
        return {"cas": Measurement(found.value, protocol)}


def _of(subject: Subject, net: Net) -> Subject:
    """The same subject with that network's predictions."""

    def predict(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scores: torch.Tensor = net.eval()(x.to(subject.device))
            return scores.cpu()

    return dataclasses.replace(subject, predict=predict)
