"""Detecting code that changes tensors in place that are not its own."""

from typing import Any

from torch import Tensor

from effuse.core.errors import FederationError
from effuse.core.params import Params
from effuse.core.visit import each_params


class WriteGuard:
    """Raises if the code within changed a message in place: found by the tensors' versions, if `thorough` by their bytes."""

    def __init__(self, message: Any, who: str, what: str, thorough: bool = False) -> None:
        self.message, self.who, self.what, self.thorough = message, who, what, thorough

    def __enter__(self) -> None:
        self.versions = [t._version for t in tensors_in(self.message)]
        self.digest = self._digest()

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is None and (
            self.versions != [t._version for t in tensors_in(self.message)] or self.digest != self._digest()
        ):
            raise FederationError(f"{self.who} changed a tensor of {self.what}; copy it first (`tensor.clone()`)")

    def _digest(self) -> str:
        if not self.thorough:
            return ""
        return Params({str(i): t for i, t in enumerate(tensors_in(self.message))}).digest()


def tensors_in(message: Any) -> list[Tensor]:
    return [t for item in each_params(message) for t in (item.tensors if isinstance(item, Params) else [item])]
