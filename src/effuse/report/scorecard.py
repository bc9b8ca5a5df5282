"""The release report's contents: seven questions about synthetic medical data, and the privacy promise.

The questions are the seven Cs of Zamzmi et al., 2025; the privacy part answers what NIST SP 800-226 asks. Every answer is a
number of the run or of the release, or says that it was not measured.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from effuse.core.metric import Measurement
from effuse.report.facts import Facts
from effuse.report.words import number, plural

MISSING = "not measured"
STATED = "not stated"
CONGRUENCE = ("fid", "kid", "precision", "conditional_accuracy", "tones", "inception_score")
COVERAGE = ("recall", "diversity", "mix")
UTILITY = ("cas", "accuracy")
MEANING = {  # of a metric, by what its name begins with
    "fid": "distance from real images; lower is better",
    "kid": "distance from real images; 0 is that of other real images",
    "precision": "share of drawn images among real ones; higher is better",
    "recall": "share of real images among drawn ones; higher is better",
    "conditional_accuracy": "share that a classifier takes for the class asked for; higher is better",
    "tones": "distance of the greys from those of real images; lower is better",
    "inception_score": "clear and varied classes; higher is better",
    "diversity": "distance between images of a class; best near that of real ones",
    "cas": "accuracy on real images of a classifier that met these alone; higher is better",
    "accuracy": "share of real test images told right; higher is better",
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One answer: what, its value, and how it was found."""

    what: str
    value: str
    how: str = ""

    @property
    def missing(self) -> bool:
        return self.value.startswith(MISSING)


@dataclasses.dataclass(frozen=True)
class Question:
    """A part of the scorecard."""

    name: str
    asked: str
    lines: tuple[Line, ...]


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a release holds."""

    images: int = 0
    by_class: Mapping[str, int] = dataclasses.field(default_factory=dict)  # images of each class, by its name
    side: int = 0
    channels: int = 0
    files: Sequence[str] = ()  # data files, relative to the folder
    note: str | None = None  # on images that are close to noise


def scorecard(
    facts: Facts, measured: Mapping[str, Measurement], held: Contents, stated: Mapping[str, str]
) -> list[Question]:
    """The seven Cs of a release; `stated` is what its publisher says of it."""
    whole = {name: m for name, m in measured.items() if "subgroup" not in m.protocol}
    parts = {name: m for name, m in measured.items() if "subgroup" in m.protocol}
    useful = _measured(whole, UTILITY, "use for training: a classifier that met these images alone, on real ones")
    consistent = (
        *_worst(parts),
        *useful,
        Line("use at each site", MISSING, "each site runs effuse worth RUN --metrics '[cas()]'"),
        _seeds(facts),
    )
    return [
        Question("Congruence", "Are the images like real ones?", _measured(whole, CONGRUENCE, "closeness to real images")),
        Question("Coverage", "Are they as varied as real ones?", _measured(whole, COVERAGE, "variety")),
        Question("Constraint", "Do they keep the rules that images of this kind obey?", _constraints(held)),
        Question("Completeness", "Is everything there that a user needs?", _complete(held)),
        Question("Compliance", "May they be published?", _compliance(facts, stated)),
        Question("Comprehension", "Can a user understand how they were made?", _comprehension(facts, stated)),
        Question("Consistency", "Are they as good for every class, subgroup, site and seed?", consistent),
    ]


def not_measured(questions: Iterable[Question], private: Iterable[Line]) -> list[str]:
    """What is asked and nobody measured."""
    asked = [(q.name, line) for q in questions for line in q.lines] + [("Privacy", line) for line in private]
    return [f"{name}: {line.what}" for name, line in asked if line.missing]


def privacy(facts: Facts) -> list[Line]:
    """The privacy promise, and what attacks found, each by its worst figure."""
    return [*_promise(facts), *_attacks(facts.audit)]


def _promise(facts: Facts) -> list[Line]:
    spent = facts.result.privacy if facts.result else None
    if spent is None:
        return [
            Line("differential privacy", "none: the recipe has no budget"),
            Line("outside the guarantee", "everything; a single training image may be visible in the release"),
        ]
    lines = [
        Line("epsilon, the most of any client", number(float(spent["epsilon"])), f"of a budget of {spent['budget']:g}"),
        Line("delta", f"{spent['delta']:g}"),
        Line("unit of privacy", f"one {spent['unit']}, replaced by nothing"),
        Line("accounting", str(spent["accountant"])),
        Line("trust model", "each site adds noise before anything leaves it; the server is not trusted with images"),
        Line("outside the guarantee", str(spent["not_covered"])),
        Line("a person who is at several sites", "the epsilons of these sites add up"),
    ]
    if facts.manifest.get("engine") != "served":
        lines.append(Line("noise", "of a simulation: who knows the seed can draw it again, so it protects nobody"))
    return lines


def _attacks(audit: Mapping[str, Any] | None) -> list[Line]:
    how = "effuse audit RUN, before the release"
    memory, members, bound = ((audit or {}).get(key) for key in ("memorisation", "membership", "one_run"))
    lines = []
    if memory is None:
        lines.append(Line("memorisation", MISSING, how))
    else:
        made, real = memory["generated"], memory["held_out"]
        found = f"{made['below']} of {made['n']:,} images; the lowest score is {number(made['lowest'])}"
        against = f"held-out real images: {real['below']} of {real['n']:,}; a score below {memory['threshold']:g} counts"
        lines.append(Line("memorisation: images too near to a training image", found, against))
    if members is None:
        lines.append(Line("membership", MISSING, how))
    else:
        name, worst = max(members["attacks"].items(), key=lambda item: item[1]["auc"]["high"])
        against = f"{name}; guessing has 0.5; {members['members']:,} members, {members['others']:,} others"
        lines.append(Line("membership: the best attack, upper end of its AUC", number(worst["auc"]["high"]), against))
    if bound is None:
        lines.append(Line("lower bound on epsilon", MISSING, "a recipe with canaries, then effuse audit RUN"))
    else:
        lines.append(Line("lower bound on epsilon", number(bound["epsilon"]), f"{bound['canaries']} canaries"))
    return lines


def _measured(found: Mapping[str, Measurement], names: Sequence[str], what: str) -> tuple[Line, ...]:
    lines = [
        Line(name, number(m.value), _meaning(name) + _protocol(m))
        for name, m in found.items()
        if name.startswith(tuple(names))
    ]
    return tuple(lines) or (Line(what, MISSING, "effuse release --metrics"),)


def _worst(found: Mapping[str, Measurement]) -> tuple[Line, ...]:
    """Of every metric of subgroups, the lowest and the highest."""
    series: dict[str, dict[str, float]] = {}
    for name, m in found.items():
        group = str(m.protocol["subgroup"])
        series.setdefault(name.removesuffix(f"_of_{group}"), {})[group] = m.value
    lines = []
    for name, values in series.items():
        low, high = (pick(values, key=lambda group: values[group]) for pick in (min, max))
        told = f"{number(values[low])} ({low}) to {number(values[high])} ({high})"
        lines.append(Line(f"{name}, lowest and highest", told, f"of {len(values)} classes or subgroups"))
    return tuple(lines) or (Line("quality of each class or subgroup", MISSING, "effuse release --metrics"),)


def _seeds(facts: Facts) -> Line:
    return Line("other seeds", MISSING, f"this is one run, of seed {facts.recipe.get('seed', '0')}")


def _constraints(held: Contents) -> tuple[Line, ...]:
    if not held.images:
        return (Line("images", "none in this release"),)
    return (
        Line("size", f"{held.side}x{held.side} pixels, channels: {held.channels}, 8 bits each", "checked on all"),
        Line("values", "finite before they were rounded", "checked on all"),
        Line("neighbouring pixels", held.note or "agree, as they do in pictures", "their mean correlation"),
        Line("anatomy, physics and other rules of the field", MISSING, "a reader's panel; effuse knows no such rule"),
    )


def _complete(held: Contents) -> tuple[Line, ...]:
    lines = [Line("files", ", ".join([*held.files, "model/"]))]
    if held.by_class:
        fewest = min(held.by_class, key=lambda name: held.by_class[name])
        lines.append(Line("classes", str(len(held.by_class))))
        lines.append(Line("images of the rarest class", f"{held.by_class[fewest]} ({fewest})"))
    elif held.images:
        lines.append(Line("labels", "none: the model takes none"))
    return tuple(lines)


def _compliance(facts: Facts, stated: Mapping[str, str]) -> tuple[Line, ...]:
    spent = facts.result.privacy if facts.result else None
    said = f"epsilon {number(float(spent['epsilon']))} for each {spent['unit']}" if spent else "none"
    return (
        Line("differential privacy", said, "see Privacy"),
        Line("licence", stated.get("license") or STATED),
        Line("legal basis of training on the real images", stated.get("basis") or STATED),
        Line("real images in this folder", "none: every image was drawn by a network", "effuse refuses to release others"),
    )


def _comprehension(facts: Facts, stated: Mapping[str, str]) -> tuple[Line, ...]:
    return (
        Line(
            "training",
            f"{facts.algorithm}, {facts.count('clients')} clients, {plural(facts.rounds, 'round')}",
            "the model card",
        ),
        Line("software", f"effuse {facts.manifest.get('effuse', 'of an unknown version')}"),
        Line("purpose", stated.get("purpose") or STATED),
        Line("not meant for", stated.get("limits") or STATED),
        Line("contact", stated.get("contact") or STATED),
    )


def _protocol(m: Measurement) -> str:
    """How a number was found, in short, with its warning."""
    wanted = ("encoder", "generated", "reference", "split", "trained_on")
    said = ", ".join(f"{key.replace('_', ' ')} {m.protocol[key]}" for key in wanted if key in m.protocol)
    return said + (f"; {m.warning}" if m.warning else "")


def _meaning(name: str) -> str:
    return next((f"{words}; " for start, words in MEANING.items() if name.startswith(start)), "")
