"""Pictures of a run's frozen features: t-SNE of images, K-means and principal axes of the maps of a denoiser."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from effuse.core.data import Dataset
from effuse.core.errors import RecipeError
from effuse.core.rng import Stream
from effuse.report.panels import COLOURS, MARKS, Panel, maps, scatter

Picture = Literal["tsne", "pca", "kmeans"]
WORDS: Mapping[Picture, str] = {"tsne": "t-SNE", "pca": "principal axes", "kmeans": "K-means"}
MOST = 1000  # images in a panel
ROWS = 8  # images whose maps are shown
CLUSTERS = 5
WARNING = "Made from real images: show it only to those who may see them. No release and no report takes it."


class Seen(NamedTuple):
    """Features of held-out images, of one stage at one time step."""

    title: str
    features: Tensor  # images x channels; of maps images x channels x side x side


def chosen(n: int, most: int, stream: Stream) -> Tensor:
    """At most so many of `n` rows, at random, in order."""
    return torch.from_numpy(stream.numpy().permutation(n)[:most]).sort().values


def points(kind: Picture, title: str, found: Sequence[Seen], labels: Tensor, names: Sequence[str], seed: int) -> str:
    """A panel for each stage and step: images by t-SNE, or by their first two principal axes."""
    place = nearby if kind == "tsne" else along_axes
    groups = labels.cpu().numpy()
    most = np.argsort(-np.bincount(groups, minlength=len(names)), kind="stable")[:MARKS]
    seen = np.isin(groups, most)
    panels = [Panel(one.title, place(one.features.double().cpu().numpy()[seen], seed)) for one in found]
    how = "t-SNE of standardised features" if kind == "tsne" else "the first two principal axes"
    notes = [f"Each point is one of {int(seen.sum()):,} held-out training images; {how}, seed {seed}.", WARNING]
    if len(names) > MARKS:
        notes.insert(1, f"{MARKS} of {len(names)} classes are shown, those with most images.")
    across = sum(step_of(one) == step_of(found[0]) for one in found)
    return scatter(title, panels, across, groups[seen].tolist(), names, notes)


def nearby(x: np.ndarray, seed: int) -> np.ndarray:
    """t-SNE to two dimensions, of standardised features. One thread, so that a seed gives the same picture."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    if len(x) < 3:
        raise RecipeError(f"--picture tsne: {len(x)} images have no neighbourhood; raise --share")
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # features without variance
        perplexity = min(30.0, (len(x) - 1) / 3)
        start: Any = "pca" if x.shape[1] > 1 else "random"
        found: np.ndarray = TSNE(init=start, perplexity=perplexity, random_state=seed).fit_transform(standard(x))
    return found


def standard(x: np.ndarray) -> np.ndarray:
    """Features of mean zero and variance one; those without variance are zero."""
    centred, s = x - x.mean(0), x.std(0)
    return centred / np.where(s > 1e-9, s, 1.0)


def along_axes(x: np.ndarray, seed: int, axes: int = 2) -> np.ndarray:
    """The first principal axes of centred features; the largest entry of each axis is positive."""
    centred = x - x.mean(0)
    rows = np.linalg.svd(centred, full_matrices=False)[2][:axes]
    rows = rows * np.sign(rows[np.arange(len(rows)), np.abs(rows).argmax(1)])[:, None]
    found = centred @ rows.T
    return np.pad(found, ((0, 0), (0, axes - found.shape[1])))


def shown(labels: Tensor, classes: int, stream: Stream) -> Tensor:
    """Rows of images whose maps are shown: one of each class in turn, at random."""
    order = torch.from_numpy(stream.numpy().permutation(len(labels)))
    turns: list[tuple[int, int, int]] = []
    taken = [0] * classes
    for place, row in enumerate(order.tolist()):
        label = int(labels[row])
        turns.append((taken[label], label, place))
        taken[label] += 1
    return order[[place for _, _, place in sorted(turns)[:ROWS]]]


def mapped(kind: Picture, title: str, found: Sequence[Seen], data: Dataset, seed: int) -> str:
    """A row for each image: the image, then each stage's positions by cluster, or by three axes as red, green and blue."""
    parts = fused(found)
    colour = _clusters if kind == "kmeans" else _axes
    columns = [colour(one.features.double().cpu().numpy(), seed) for one in parts]
    squares = zip(_as_bytes(data.floats(data.images)), *columns)
    lines = [(data.classes[int(label)], row) for label, row in zip(data.labels, squares)]
    what = f"{CLUSTERS} clusters of the positions of a column" if kind == "kmeans" else "three principal axes of a column"
    return maps(title, ["image", *(one.title for one in parts)], lines, [f"Colours: {what}, seed {seed}.", WARNING])


def step_of(one: Seen) -> str:
    """The time step in a title, if there is one."""
    return one.title.partition(", ")[2]


def fused(found: Sequence[Seen]) -> list[Seen]:
    """The stages of each time step, and where there are several, all enlarged to the largest and put together."""
    parts: list[Seen] = []
    for step in dict.fromkeys(map(step_of, found)):
        stages = [one for one in found if step_of(one) == step]
        parts += stages
        if len(stages) > 1:
            side = max(one.features.shape[-1] for one in stages)
            larger = [F.interpolate(one.features, size=side, mode="bilinear", align_corners=False) for one in stages]
            scaled = [x / x.square().mean().sqrt().clamp_min(1e-9) for x in larger]
            parts.append(Seen(f"fused, {step}", torch.cat(scaled, dim=1)))
    return parts


def _positions(x: np.ndarray) -> np.ndarray:
    return x.transpose(0, 2, 3, 1).reshape(-1, x.shape[1])


def _clusters(x: np.ndarray, seed: int) -> np.ndarray:
    """K-means of all positions of all images: images x side x side x 3 bytes."""
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    rows = _positions(x)
    n = min(CLUSTERS, len(np.unique(rows, axis=0)))
    with threadpool_limits(1):
        labels = KMeans(n_clusters=n, n_init=10, random_state=seed).fit_predict(rows)
    palette = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in COLOURS], dtype=np.uint8)
    found: np.ndarray = palette[labels].reshape(len(x), *x.shape[2:], 3)
    return found


def _axes(x: np.ndarray, seed: int) -> np.ndarray:
    """The first three principal axes of all positions of all images as red, green and blue."""
    values = along_axes(_positions(x), seed, axes=3)
    low, high = np.quantile(values, 0.01, axis=0), np.quantile(values, 0.99, axis=0)
    inside = np.clip((values - low) / np.where(high > low, high - low, 1.0), 0.0, 1.0)
    found: np.ndarray = np.round(255 * inside).astype(np.uint8).reshape(len(x), *x.shape[2:], 3)
    return found


def _as_bytes(images: Tensor) -> list[np.ndarray]:
    """Images in [-1, 1] as side x side x 3 bytes."""
    coloured = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
    pixels: Any = ((coloured + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return [p.permute(1, 2, 0).cpu().numpy() for p in pixels]
