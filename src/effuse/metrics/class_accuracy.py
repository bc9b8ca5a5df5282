"""Accuracy class by class, and domain by domain."""

import torch

from effuse.core.errors import RecipeError
from effuse.core.metric import Measurement, Metric, Outlook, Protocol, Subject
from effuse.core.spec import spec
from effuse.metrics.accuracy import BATCH, share_right


@spec
class ClassAccuracy(Metric):
    """The accuracy on each class of the test set: their mean, and the lowest. The protocol has all of them."""

    @property
    def keys(self) -> tuple[str, ...]:
        return ("class_accuracy", "class_accuracy_lowest")

    def ready(self, outlook: Outlook) -> None:
        if not outlook.classifies:
            raise _no_classifier()

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        if subject.predict is None:
            raise _no_classifier()
        test, classes = subject.test, len(subject.test.classes)
        right = torch.zeros(classes, dtype=torch.float64)
        for images, labels in zip(test.images.split(BATCH), test.labels.cpu().split(BATCH)):
            hits = subject.predict(test.floats(images.to(subject.device))).argmax(dim=1).cpu() == labels
            right += torch.bincount(labels[hits], minlength=classes)
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
class DomainAccuracy(Metric):
    """The accuracy on each domain of the test set, a source of a `union`, and their mean."""

    names: tuple[str, ...] = ()  # of the domains, in their order

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.name, *(f"accuracy_{name}" for name in self.names))

    def ready(self, outlook: Outlook) -> None:
        if not outlook.classifies:
            raise _no_classifier()

    def measure(self, subject: Subject) -> dict[str, Measurement]:
        domains, test = subject.test.domains, subject.test
        if subject.predict is None:
            raise _no_classifier()
        if domains is None or len(found := domains.unique().tolist()) != len(self.names):
            there = 0 if domains is None else len(domains.unique())
            raise RecipeError(f"domain_accuracy: {len(self.names)} names for {there} domains; use union(...), and name each")
        shares: dict[str, float] = {}
        for name, domain in zip(self.names, found):
            part = test.rows((domains == domain).nonzero().flatten())
            scores = [subject.predict(part.floats(x.to(subject.device))).cpu() for x in part.images.split(BATCH)]
            shares[f"accuracy_{name}"] = share_right(torch.cat(scores), part.labels)
        protocol: Protocol = {"split": "test", "images": len(test), "domains": len(shares), "data": subject.data}
        values = {self.name: sum(shares.values()) / len(shares), **shares}
        return {key: Measurement(value, protocol) for key, value in values.items()}


def _no_classifier() -> RecipeError:
    return RecipeError("class_accuracy: this model does not classify; train it with task=classify(), or measure fid")
