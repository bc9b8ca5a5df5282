"""Accuracy class by class, and domain by domain."""

import torch

from effuse.core.errors import RecipeError
from effuse.core.metric import Measurement, Protocol, Subject
from effuse.core.spec import spec
from effuse.metrics.accuracy import Predictive, share


@spec
class ClassAccuracy(Predictive):
    """The accuracy on each class of the test set: their mean, and the lowest. The protocol has all of them."""

    @property
    def keys(self) -> tuple[str, ...]:
        return ("class_accuracy", "class_accuracy_lowest")

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        test, classes = subject.test, len(subject.test.classes)
        right = torch.bincount(test.labels.cpu()[self.right(subject, test)], minlength=classes).double()
        counts = torch.tensor(test.histogram())
        held = counts > 0  # a class without test images has no accuracy
        shares = right[held] / counts[held]
        names = [name for name, there in zip(test.classes, held.tolist()) if there]
        protocol: Protocol = {
            "split": "test",
            "images": len(test),
            "classes": len(names),
            "accuracies": ", ".join(f"{name} {share:.4f}" for name, share in zip(names, shares.tolist())),
            "data": subject.data,
        }
        values = zip(self.keys, (shares.mean(), shares.min()))
        return {key: Measurement(float(value), protocol) for key, value in values}


@spec
class DomainAccuracy(Predictive):
    """The accuracy on each domain of the test set, a source of a `union`, and their mean."""

    names: tuple[str, ...] = ()  # of the domains, in their order

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.name, *(f"accuracy_{name}" for name in self.names))

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        domains, test = subject.test.domains, subject.test
        right = self.right(subject, test)
        if domains is None or len(found := domains.unique().tolist()) != len(self.names):
            there = 0 if domains is None else len(domains.unique())
            raise RecipeError(f"domain_accuracy: {len(self.names)} names for {there} domains; use union(...), and name each")
        shares = {f"accuracy_{name}": share(right[domains.cpu() == domain]) for name, domain in zip(self.names, found)}
        protocol: Protocol = {"split": "test", "images": len(test), "domains": len(shares), "data": subject.data}
        values = {self.name: sum(shares.values()) / len(shares), **shares}
        return {key: Measurement(value, protocol) for key, value in values.items()}
