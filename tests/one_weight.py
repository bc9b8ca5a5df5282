"""Networks of one weight, whose training steps can be computed by hand, and workbenches to train them."""

import torch
from torch import Tensor, nn

from effuse.core.data import Dataset, Shard
from effuse.core.fit import Work
from effuse.core.model import Arch, Model, Net
from effuse.core.params import Buffers, Params
from effuse.core.rng import Stream, stream
from effuse.core.sampler import Sampler
from effuse.core.solvers import Solver
from effuse.core.spec import spec
from effuse.core.task import Batch, Task
from effuse.core.workbench import Client
from effuse.machines.eager import Eager

HERE = Stream((0, 3, "train", 0, 7, "fit"))
WHERE = "round 3, client 7, job 'train'"


class OneWeight(nn.Module):
    """f(x) = w x + v, where v stays at zero in most tests."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.v = nn.Parameter(torch.zeros(()))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.w * x + self.v)


@spec
class CoreOneWeight(Arch):
    dropout: float = 0.0
    conditional: bool = False

    def build(self) -> nn.Module:
        net = OneWeight()
        net.dropout.p = self.dropout
        return net


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@spec
class CoreNormed(Arch):
    def build(self) -> nn.Module:
        return Normed()


@spec
class CoreTarget(Task):
    """The target output is 3. One random number per image is drawn; the loss uses it only if `noisy`."""

    noisy: bool = False

    def draw(self, n: int, image: torch.Size, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        return {"noise": torch.randn(n, 1, 1, 1, generator=generator)}

    def loss(self, net: Net, batch: Batch) -> Tensor:
        target = 3.0 + batch.drawn["noise"] if self.noisy else 3.0
        return batch.mean((net(batch.x) - target).square())


@spec
class CoreNoise(Sampler):
    """Returns pure noise, after two evaluations of the network."""

    batch: int = 2

    def draw(self, net, task, shape, labels, generator, tick) -> Tensor:
        x = torch.randn(shape, generator=generator)
        for _ in range(2):
            net(torch.zeros(1))
            tick()
        return x if labels is None else x + 100.0 * labels[:, None, None, None]

    def scheduler(self, task: Task) -> None:
        return None


def images(*bytes_: int, flip: bool = False, shift: int = 0, side: int = 1) -> Shard:
    """Images of one colour each: 255 is x = 1, and 0 is x = -1."""
    pixels = torch.tensor(bytes_, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, side, side).contiguous()
    labels = torch.zeros(len(bytes_), dtype=torch.int64)
    return Shard.whole(Dataset(pixels, labels, ("only",), flip=flip, shift=shift))


ONE = images(255)


def model_of(w: float = 0.0, v: float = 0.0, **arch: float) -> Model:
    params = Params({"w": torch.tensor(w), "v": torch.tensor(v)})
    return Model(CoreOneWeight(side=1, channels=1, classes=2, **arch), params, Buffers({}))


def only_w(grads, params, given):
    """A direction that does not change v."""
    return {"w": grads["w"], "v": torch.zeros_like(grads["v"])}


def machine() -> Eager:
    return Eager(torch.device("cpu"))


def work_of(solver: Solver, shard: Shard = ONE, task: Task | None = None, **rest) -> Work:
    values = {
        "solver": solver,
        "task": task or CoreTarget(),
        "shard": shard,
        "lr": solver.lr,
        "stream": HERE,
        "place": 7,
        "where": WHERE,
        "direction": only_w,
    }
    return Work(**values | rest)


def bench(id: int = 7, task: Task | None = None, rounds: int = 10, eager: Eager | None = None) -> Client:
    client = Client(eager or machine(), task or CoreTarget(), rounds, id, ONE)
    client.begin(stream(0, 3, "train", 0, id, ""), federated=2)
    return client
