"""An encoder for any data set: a small convolutional classifier, trained on the real training set."""

import hashlib
import math
from typing import ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from effuse.core.data import Shape, Shard
from effuse.core.fit import Work
from effuse.core.metric import Subject
from effuse.core.model import Net
from effuse.core.params import Params
from effuse.core.rng import Stream, keyed
from effuse.core.solvers import AdamW
from effuse.core.spec import spec, text
from effuse.core.workbench import SERVER
from effuse.machines.eager import Eager
from effuse.metrics.encoders import Encoder, Network
from effuse.metrics.store import Key, Tensors, cached, once
from effuse.tasks.classify import Classify

FEATURES = 64
BATCH = 128
GRID = 4  # the feature map is pooled to this many cells a side, whatever the image
PHASES = ((0.6, 3e-3), (0.3, 6e-4), (0.1, 1e-4))  # (share of the steps, learning rate)


class Convnet(nn.Module):
    """Convolutions at halving resolutions, 64 features, one linear head."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        halvings = max(0, math.ceil(math.log2(shape.side / 8)))
        widths = [width] + [width * 2] * (halvings + 1)
        layers: list[nn.Module] = [*_layer(shape.channels, width)]
        for i, (inputs, outputs) in enumerate(zip(widths, widths[1:])):
            layers += [nn.MaxPool2d(2)] if i < halvings else []
            layers += _layer(inputs, outputs)
        self.trunk = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(GRID), nn.Flatten())
        self.features = nn.Linear(widths[-1] * GRID * GRID, FEATURES)
        self.head = nn.Linear(FEATURES, shape.classes)

    def encode(self, x: Tensor) -> Tensor:
        return F.relu(self.features(self.trunk(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


def _layer(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


@spec
class Classifier(Encoder):
    """A convolutional network trained on the real training set; its 64 penultimate values are the features."""

    preprocessing: ClassVar[str] = "uint8, [-1, 1]"
    has_head: ClassVar[bool] = True
    batch: ClassVar[int] = 500

    width: PositiveInt = 32
    steps: PositiveInt = 200
    epochs: PositiveInt = 3  # steps or epochs, whichever is more
    seed: int = 0

    def identity(self, subject: Subject) -> str:
        # a digest of the weights: training may end in others on another device or with another release
        return once(subject, ("digest", *self.key(subject)), lambda: Params(self.values(subject)).digest())

    def key(self, subject: Subject) -> Key:
        """Everything that its training depends on."""
        return (subject.data, text(self), subject.train.digest)

    def values(self, subject: Subject) -> Tensors:
        """Its weights, trained at their first use and cached between runs."""
        key = self.key(subject)
        name = hashlib.sha256(repr(key).encode()).hexdigest()
        return once(
            subject,
            ("weights", *key),
            lambda: cached(subject.cache, "classifier", (name,), lambda: self.trained(subject).state_dict()),
        )

    def network(self, subject: Subject) -> Network:
        values = self.values(subject)
        net = self.blank(subject.train.shape)
        net.load_state_dict(values)
        net.eval().requires_grad_(False).to(subject.device)

        def run(images: Tensor) -> tuple[Tensor, Tensor]:
            features = net.encode(images.float() * (2.0 / 255.0) - 1.0)
            return features, net.head(features)

        return run

    def blank(self, shape: Shape) -> Convnet:
        with keyed(Stream((self.seed, "classifier", "initial"))):
            return Convnet(shape, self.width)

    def trained(self, subject: Subject) -> Convnet:
        """Train from scratch. On one device, the result depends only on the data and on this spec."""
        machine, task = Eager(subject.device), Classify()
        stream = Stream((self.seed, "classifier", "fit"))
        where = f"the classifier that measures {subject.data}"
        # the caller may have disabled gradients
        with torch.inference_mode(False), torch.enable_grad():
            whole = Shard.whole(subject.train.to(subject.device))
            module = self.blank(subject.train.shape).to(subject.device)
            net = Net(module)
            steps = max(self.steps, self.epochs * math.ceil(len(whole) / BATCH))
            for i, (share, lr) in enumerate(PHASES):
                solver = AdamW(lr=lr, batch=BATCH, steps=max(1, round(share * steps)), weight_decay=0.02)
                key = stream.child(i)
                work = Work(solver=solver, task=task, shard=whole, lr=lr, stream=key, place=SERVER, where=where)
                machine.fit(net, work)
        return module
