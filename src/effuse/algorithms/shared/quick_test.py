"""FedDDPM+'s QuickTest: a Fréchet distance of a few samples, and its running average (Peng et al., 2025, Algorithm 2)."""

from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from effuse.algorithms.shared.synthesis import AuxiliarySet, Fraction
from effuse.core.data import Shard
from effuse.core.federation import SETUP_T
from effuse.core.metric import Images, Subject
from effuse.core.model import Arch
from effuse.core.prelude import Federation, Model, RecipeError, spec
from effuse.core.rng import stream
from effuse.core.sampler import Sampler
from effuse.core.spec import Spec
from effuse.core.workbench import SERVER
from effuse.metrics.classifier import Classifier
from effuse.metrics.distances import Moments, frechet, moments, solved
from effuse.metrics.encoders import Encoder, Inception

REFERENCE = "quick test reference"  # the reference's moments in `fed.memo`, computed once in a process


@spec
class QuickTest(Spec):
    """Tests whether the global model has stopped improving, by a running average of its distance to a reference."""

    every: PositiveInt = 10  # federated rounds between tests; the first, in round 0, only stores its score
    size: Annotated[int, Field(ge=2)] = 500  # TestSize
    gamma: Fraction = 0.4
    threshold: PositiveFloat = 0.2
    # a server owns no real images and can compare with A; only a simulation has the training set's statistics
    reference: Literal["aux", "oracle"] = "aux"
    encoder: Encoder = Inception()
    # 500 samples give a 2048-dimensional covariance of rank 499; fewer leading components make the score less noisy
    components: PositiveInt | None = None  # None: all dimensions, as printed
    sampler: Sampler | None = None  # None: the one that drew the auxiliary set

    def require(self, arch: Arch, fed: Federation) -> None:
        """Refuse, before any client trains, a test that this federation cannot run."""
        self.encoder.ready()
        if self.reference == "oracle":
            self._pool(fed)
        if self.reference == "aux" and isinstance(self.encoder, Classifier) and not arch.conditional:
            raise RecipeError(
                "algorithm.test.encoder: a classifier needs labels, and what an unconditional model draws has none; "
                "use inception() or pixels(), or reference=oracle"
            )

    def _pool(self, fed: Federation) -> Shard:
        return fed.unprotected_pool("algorithm.test.reference: an oracle compares with")

    def judge(self, average: float | None, score: float) -> tuple[bool, float]:
        """Whether to stop, and the running average after this score."""
        if average is None:
            return False, score
        if abs(average - score) <= self.threshold:
            return True, average
        return False, self.gamma * score + (1 - self.gamma) * average

    def score(self, model: Model, A: AuxiliarySet, sampler: Sampler, fed: Federation) -> float:
        """The Fréchet distance of the model's samples to the reference. Every test starts from the same noise."""
        bench, noise = fed.workbench, stream(fed.seed, SETUP_T, "quick test", 0, SERVER, "samples")
        images = bench.generate(model, self.size, self.sampler or sampler, stream=noise)
        shard = self._pool(fed) if self.reference == "oracle" else A.shard(model.arch.shape.classes, bench.machine.device)
        real = shard.gathered()
        subject = Subject(
            train=real,
            test=real,
            data=f"quick test, {self.reference}",
            device=bench.machine.device,
            samples=images.first,
            memo=fed.memo,
        )
        if REFERENCE not in fed.memo:
            features = self.encoder.encode(Images(real.floats(real.images)).bytes(), subject).features
            fed.memo[REFERENCE] = leading(features.to(subject.device), self.components)
        basis, reference = fed.memo[REFERENCE]
        generated = self.encoder.encode(images.bytes(), subject).features.to(subject.device)
        return frechet(moments(generated.double() @ basis), reference)


def leading(features: Tensor, components: int | None) -> tuple[Tensor, Moments]:
    """The leading principal components of some features, and the features' moments in these."""
    full = moments(features)
    basis = solved(torch.linalg.eigh, full.covariance)[1][:, -(components or features.shape[1]) :]
    return basis, Moments(full.mean @ basis, basis.T @ full.covariance @ basis)
