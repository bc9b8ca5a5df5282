"""Pages of results: what they show is what the committed run files say, by the rules that they state."""

import json
import re
import shutil
from pathlib import Path

import pytest

from effuse.recipes import find_recipe

ROOT = Path(__file__).parent.parent.parent
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "tools" / "results")
    import costs
    import pages
    import runs
    import text
    import verdicts

PAGES = [file.name for file in sorted(runs.RESULTS.glob("*.md"))]


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of what the pages are computed from, which a test may change."""
    unused = shutil.ignore_patterns("rounds.jsonl", "feddiffuse-*.png", "fedddpm-*.png", "fedphd-*.png", "feddifrc-*.png")
    shutil.copytree(runs.RESULTS, tmp_path / "results", ignore=unused)
    (tmp_path / "notes").mkdir()
    shutil.copy(runs.RESULTS.parent / "notes" / "results-feddiffuse.md", tmp_path / "notes")
    monkeypatch.setattr(runs, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def changed(file: Path, old: str, new: str) -> None:
    before = file.read_text()
    assert old in before
    file.write_text(before.replace(old, new, 1))


def test_pages_and_pictures_show_what_the_run_files_say():
    assert pages.wrong() == []


def test_a_number_changed_by_hand_is_found_on_every_page(copy):
    """The last number with a decimal in the computed parts of each page gets a digit more: 12.4 becomes 112.4."""
    for name in PAGES:
        page = (copy / name).read_text()
        part = [one for one in pages.MARKED.finditer(page) if re.search(r"\d\.\d", one[0])][-1]
        at = part.start() + [*re.finditer(r"\d\.\d", part[0])][-1].start()
        (copy / name).write_text(f"{page[:at]}1{page[at:]}")
    assert [line.split()[0] for line in pages.wrong()] == PAGES
    assert pages.wrong(write=True) == pages.wrong() == []


def test_an_edited_run_file_is_found(copy):
    """One classifier's accuracy becomes 0: its page, the table of claims and the picture show another one."""
    file = copy / "feddiff.private_comparison" / "class_means-0" / "result.json"
    result = json.loads(file.read_text())
    result["metrics"]["accuracy"]["value"] = 0.0
    file.write_text(json.dumps(result))
    assert [line.split()[0] for line in pages.wrong()] == ["README.md", "feddiff.md", "traffic-feddiff.png"]


def test_an_edited_notebook_is_found_where_run_files_were_not_kept(copy):
    changed(copy.parent / "notes" / "results-feddiffuse.md", "| 43.2 |", "| 33.2 |")
    assert [line.split()[0] for line in pages.wrong()] == ["README.md", "feddiffuse.md"]


def test_a_figure_in_prose_is_found_and_a_setting_is_not(copy):
    changed(copy / "fedphd.md", "## The comparison\n", "## The comparison\n\nOurs is 3.5 ahead, at `lr=0.1`.\n")
    changed(
        copy / "feddiff.md",
        "## Digits without privacy\n",
        "## Digits without privacy\n\nRates of `0.1`, as [here](a-0.1.md).\n",
    )
    assert pages.wrong() == ['fedphd.md has a figure that is not computed: "Ours is 3.5 ahead, at ."']


def test_a_computed_part_that_no_page_shows_is_named(copy):
    changed(copy / "feddiff.md", "<!-- computed: nearest means -->", "")
    assert pages.wrong()[-1] == "no page shows nearest means"


def test_a_run_of_another_seed_and_a_gap_are_refused(copy):
    """Differences are taken seed by seed, so the second of two runs must be the second seed of both."""
    table = copy / "feddiff.private_comparison"
    changed(table / "class_means-1" / "manifest.json", '"seed": "1"', '"seed": "7"')
    with pytest.raises(SystemExit, match="its manifest has seed 7, its name 1"):
        pages.wrong()
    shutil.rmtree(table / "nearest_mean-0")
    with pytest.raises(SystemExit, match="nearest_mean-0 is missing, but a later seed is there"):
        runs.runs("feddiff.private_comparison/nearest_mean", range(5))


def test_means_and_spreads():
    """1, 2, 3: mean 2, deviation 1. One number has no deviation; none is nothing. 3 - 1, 5 - 2; the third has no partner."""
    assert text.mean([-0.04]) == "0.0"
    assert text.seeds([1, 2], 3) == "1.0, 2.0, not run" and text.seeds([], 3) == "not run"
    assert text.mean([1, 2, 3]) == "2.0 ± 1.0"
    assert text.mean([1.25], 2) == "1.25" and text.mean([]) == ""
    assert text.less([3, 5, 9], [1, 2]) == [2, 3]
    assert text.rows(("a", "b"), [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [(15, verdicts.REPRODUCED), (16, verdicts.UNDECIDED), (20, verdicts.UNDECIDED), (21, verdicts.CONTRADICTED)],
)
def test_a_figure_agrees_within_one_joint_deviation(ours, verdict):
    """Printed 10 ± 3, ours ± 4: together 5, so 15 is one of them apart, 20 is two."""
    assert verdicts.near(10, 3, ours, 4) == verdict


def test_a_counted_figure_agrees_within_a_tenth():
    """A tenth of 20 is 2, of 50 is 5."""
    assert verdicts.counted([20, 50], [22, 45]) == verdicts.REPRODUCED
    assert verdicts.counted([20, 50], [20, 44]) == verdicts.CONTRADICTED


@pytest.mark.parametrize(
    ("gains", "standing", "verdict", "answer"),
    [
        ([2, 3, 4], "ahead", "reproduced", "yes"),
        ([-2, -3, -4], "behind", "contradicted", "no"),
        ([0, 1, 2], "not told apart", "undecided", "undecided"),
        ([9], "not told apart", "undecided", "undecided"),
    ],
)
def test_an_order_needs_two_standard_errors(gains, standing, verdict, answer):
    """Deviation 1 of three seeds: an error of 0.577, two are 1.155. Means of 3 and -3 are beyond it, 1 is not."""
    assert verdicts.standing(gains) == standing
    assert verdicts.order(standing) == verdict and verdicts.answer(gains) == answer


def test_one_reversed_order_contradicts_and_small_numbers_can_be_good():
    assert verdicts.order("ahead", "behind") == verdicts.CONTRADICTED
    assert verdicts.order("ahead", "not told apart") == verdicts.UNDECIDED
    assert verdicts.gains([10, 12], [15, 16], lower=True) == [5, 4]
    assert verdicts.gains([10, 12], [15, 16]) == [-5, -4]


def made(results: Path, folder: str, **numbers: float) -> None:
    """A run folder with these numbers; the rest of it is that of a committed run."""
    kept = results / "feddiffuse.ablation-paper" / "plain-2023"
    shutil.copytree(kept, results / folder, ignore=shutil.ignore_patterns("*.png"))
    for file in ("manifest.json", "result.json"):
        held = json.loads((results / folder / file).read_text())
        if file == "manifest.json":
            held["recipe"]["seed"] = folder.rpartition("-")[2]
        else:
            held["metrics"] = {name: {"value": value, "protocol": {}} for name, value in numbers.items()}
        (results / folder / file).write_text(json.dumps(held))
    runs.run.cache_clear()


def test_two_seeds_are_clear_by_more_than_they_differ():
    """2 and 3 are 1 apart, 5 and 8 are 3 apart: the gaps are 3 and 5, and 3 is not above 3. To 6 and 8: 4 and 5, above 2."""
    assert verdicts.clear([2, 3], [5, 8]) == verdicts.UNDECIDED
    assert verdicts.clear([2, 3], [6, 8]) == verdicts.REPRODUCED
    assert verdicts.clear([6, 8], [2, 3]) == verdicts.CONTRADICTED
    assert verdicts.clear([2], [60]) == verdicts.UNDECIDED


def test_fedddpm_at_the_papers_scale_is_judged_if_its_images_are_good(copy):
    """A with 2 and 3 is ahead of FedAvg's 6 and 8, so FedDDPM's 1 and 2 count; with A at 9 and 9 nothing is judged."""
    for seed, (a, avg, ours) in enumerate(((2, 6, 1), (3, 8, 2))):
        made(copy, f"fedddpm.headline-paper/auxiliary-{seed}", fid=50.0, fid_auxiliary=a, unclear_auxiliary=0.02)
        made(copy, f"fedddpm.headline-paper/fedavg-{seed}", fid=avg, fid_real=0.9, unclear=0.03)
        made(copy, f"fedddpm.headline-paper/fedddpm-{seed}", fid=ours, unclear=0.01)
    claim = pages.fedddpm.claims()[0]
    assert claim[1:5] == ["1.91; 5.82", "1.50 ± 0.71; 7.00 ± 1.41", verdicts.REPRODUCED, "paper"]
    assert pages.fedddpm.claims()[1][4] == "a tenth", "FedDDPM+ was not run there"
    assert "| FedDDPM | 1.91 | 1.00, 2.00 | -5.50 ± 0.71 | 1.0 ± 0.0 |" in pages.fedddpm.headline()
    for seed in (0, 1):
        shutil.rmtree(copy / f"fedddpm.headline-paper/auxiliary-{seed}")
        made(copy, f"fedddpm.headline-paper/auxiliary-{seed}", fid=50.0, fid_auxiliary=9, unclear_auxiliary=0.02)
    assert pages.fedddpm.claims()[0][3] == verdicts.NOT_TESTABLE


@pytest.mark.parametrize(
    ("mse", "huber", "averaged", "cause"),
    [
        ((60, 61, 62), (49, 50, 51), 60, "the loss"),  # 11 lower on each seed
        ((60, 61, 62), (50, 50, 51), 60, "unexplained"),  # 10 on the first, which is not more than 10
        ((20, 61, 62), (60, 60, 60), 60, "seeds"),  # 41 and 21 lie between 20 and 62
        ((60, 61, 62), (60, 60, 60), 20, "the noise of the last weights"),
    ],
)
def test_the_cause_of_the_skews(copy, mse, huber, averaged, cause):
    """Both skews get the same numbers; the rules are tried in their order."""
    for seed, *values in zip((2023, 2024, 2025), mse, huber):
        for skew in ("l-skew", "q-skew"):
            for loss, value in zip(("mse", "huber"), values):
                numbers = {"fid_clipped": value, "fid_clipped_ema": averaged}
                made(copy, f"feddiffuse.skews-paper/{skew}-{loss}-{seed}", **numbers)
    assert pages.feddiffuse.cause() == cause
    assert [row[2] for row in pages.feddiffuse.claims()][5:7] != ["60.8, one run †", "39.8, one run †"]
    assert f"The cause, by the rules: {cause}." in pages.feddiffuse.skews()


def test_drawn_images_must_be_good_and_near_real_ones():
    """97 of 99 is near; 96 of 99.5 is 3.5 behind; 95 is below 96 by itself; one seed decides nothing."""
    assert verdicts.close([96, 98], [98, 100]) == verdicts.REPRODUCED
    assert verdicts.close([95, 97], [99, 100]) == verdicts.close([94, 96], [96, 96]) == verdicts.CONTRADICTED
    assert verdicts.close([98], [99, 99]) == verdicts.UNDECIDED


def test_the_goals_of_our_recipe():
    """Two seeds of 10 and 12 deviate by 1.41. Two of them from 11 are 13.83: 14 is beyond, 13.5 is not."""
    assert verdicts.controlled([10, 12], [14, 14]) == "yes"
    assert verdicts.controlled([10, 12], [13.5, 13.5]) == verdicts.controlled([14, 14], [10, 12]) == "no"
    assert verdicts.controlled([14, 14.2], [10, 20]) == "no", "the larger deviation counts"
    assert verdicts.controlled([10], [14, 14]) == verdicts.UNDECIDED
    assert verdicts.within([12, 12], [10, 10], 1.2) == "yes" and verdicts.within([12, 12.2], [10, 10], 1.2) == "no"
    assert verdicts.within([], [10, 10], 1.2) == verdicts.UNDECIDED
    assert verdicts.below([16, 16.7, 15], 16.74) == "yes" and verdicts.below([17, 18, 16.75], 16.74) == "no"
    assert verdicts.below([16, 17, 15], 16.74) == verdicts.below([16, 16], 16.74) == verdicts.UNDECIDED


def test_images_that_a_recipe_trains_on_and_draws():
    """FedDDPM at the paper's scale on CIFAR-10, in millions.

    Clients: 600 rounds, 15 % of 50,000 images, 5 epochs: 22.5. Server: 600 rounds, 5 epochs of 5,000: 15.
    Warm-up: 400 epochs of 50,000: 20. Drawn, in evaluations: 60 times 10,000 images of 1,000 steps: 600, and 5,000 for A: 5.
    MoFedSAM takes two gradients a step.
    """
    recipe = find_recipe('fedddpm(data="cifar10")')[1]
    assert costs.trained(recipe) == pytest.approx((22.5 + 15 + 20) * 1e6)
    assert costs.drawn(recipe) == pytest.approx((600 + 5) * 1e6)
    assert costs.trained(find_recipe('fedddpm.mofedsam(data="cifar10")')[1]) == pytest.approx(45e6)


def test_cells_that_were_run_are_not_counted_among_those_that_were_not():
    """Table 1 of FedDiffuse has four methods, three numbers of clients and three partitions; seven cells were run."""
    assert costs.hours("feddiffuse.table1", None)[0] == 4 * 3 * 3 - 7
