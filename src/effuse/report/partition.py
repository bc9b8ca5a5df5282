"""Who would hold what: a recipe's partition, before anything runs."""

import dataclasses

from effuse.core.data import Dataset
from effuse.core.recipe import Recipe
from effuse.core.spec import text as grammar
from effuse.report.heat import heat
from effuse.report.html import document, paragraph, section, text
from effuse.report.words import plural
from effuse.runs.folder import split_of
from effuse.runs.records import Split


@dataclasses.dataclass(frozen=True)
class Division:
    """A recipe's training data, divided among its clients."""

    name: str
    recipe: Recipe
    classes: tuple[str, ...]
    split: Split

    @classmethod
    def of(cls, recipe: Recipe, name: str) -> "Division":
        """Divide the recipe's data as a run would."""
        train: Dataset = recipe.data.load("train")
        shards = recipe.resolved(train).shards(train)
        return cls(name, recipe, train.classes, split_of(shards))

    def page(self) -> str:
        """The partition as a page."""
        sizes = [sum(row) for row in self.split.labels]
        said = f"{sum(sizes):,} images in {len(self.classes)} classes, {plural(len(sizes), 'client')}"
        rule = grammar(self.recipe.partition, full=False)
        about = paragraph(f"Images of each client and class, divided by {rule}.")
        parts = [
            f"<h1>Partition of {text(self.name)}</h1>",
            paragraph(f"{said}: the smallest has {min(sizes):,} images, the largest {max(sizes):,}.", "verdict"),
            section("Who would hold what", about, heat(self.split, self.classes)),
        ]
        return document(f"effuse: partition of {self.name}", parts, interactive=True)
