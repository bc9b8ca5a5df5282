"""What replies must look like: jobs that cannot be done on shapes are reported, and errors of an algorithm are raised."""

import dataclasses

import pytest
import torch
from fake import FakeChannel, run_over
from odd_job import ToyOddJob
from toy import ADAM, ALGORITHMS, SYNTHESIS, toy_recipe

from effuse.algorithms.fedavg import FedAvg, Update
from effuse.algorithms.fedddpm import AuxOnly
from effuse.algorithms.shared.synthesis import Upload
from effuse.core.algorithm import job_of, on_client
from effuse.core.errors import WireError
from effuse.core.message import message
from effuse.core.model import Model
from effuse.core.params import Params
from effuse.core.rng import Stream
from effuse.core.spec import spec
from effuse.core.workbench import Client
from effuse.transport.flower.expectation import UNKNOWN_LIMIT, Expectation, Form


@message(name="toy.parts")
class Renamed:
    """Parts by name, and perhaps what a client kept."""

    parts: dict[str, Params]
    before: Params | None
    weight: float


def expected_of(how, resumed=False, times=1):
    """What is expected of the job's reply, the model that is sent, and the reports."""
    recipe = toy_recipe(algorithm=ToyOddJob(local=ADAM, how=how))
    recipe = recipe.resolved(recipe.data.load("train"))
    job, reports = job_of(recipe.algorithm, "train"), []
    expectation = Expectation(recipe, 2, reports.append)
    for seed in range(times):
        model = recipe.model.initial(Stream(("expectation test", seed)))
        expected = expectation.of(job, job.arguments(model=model), resumed)
    return expected, model, reports


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("item", "RuntimeError: Tensor.item() cannot be called on meta tensors"),
        ("numpy", "TypeError: can't convert meta device"),
        ("where", "NotImplementedError: "),
        ("state", "KeyError: 'past'"),
        ("popped", "KeyError: 'past'"),
        ("refusal", "FederationError: too few images"),
    ],
)
def test_a_job_that_cannot_be_done_on_shapes_is_reported_once_and_its_replies_are_limited(how, why):
    """A reply of unknown shapes may have four times the bytes of what was sent, and 64 MiB."""
    expected, model, reports = expected_of(how, times=3)
    (line,) = reports
    assert line.startswith("job 'train' cannot be done on shapes, so its replies are checked by type and size alone")
    assert why in line
    assert not expected.forms and expected.limit == 4 * 4 * model.params.numel + UNKNOWN_LIMIT
    expected.check(Update(model, 1.0, 0.0))


@pytest.mark.parametrize("how", ["attribute", "key", "value", "none", "forgotten"])
def test_an_algorithms_own_error_is_raised(how):
    """`key` reads a dictionary of its own, and `none` reads state that was never there: neither counts as missing state."""
    with pytest.raises((AttributeError, KeyError, ValueError)) as caught:
        expected_of(how)
    assert caught.value.__notes__ == ["in job 'train' of toy_odd_job, done on shapes before its orders go out"]


def test_the_state_from_before_a_resumption_is_unknown():
    """Where a client may have state that the resumed server does not know, a missing key may explain an error."""
    expected, _, reports = expected_of("none", resumed=True)
    assert not expected.forms and "AttributeError" in reports[0]
    with pytest.raises(AttributeError):
        expected_of("attribute", resumed=True)  # this job reads no state


def test_the_run_log_reports_it_and_the_run_goes_on(tmp_path):
    run_over(FakeChannel(tmp_path / "sites", 3), toy_recipe(algorithm=ToyOddJob(local=ADAM)), tmp_path / "run")
    log = (tmp_path / "run" / "federation.log").read_text()
    assert log.count("job 'train' cannot be done on shapes") == 1


def test_an_algorithms_error_is_raised_before_an_order_goes_out(tmp_path):
    channel = FakeChannel(tmp_path / "sites", 3)
    with pytest.raises(AttributeError, match="parameters_of_it"):
        run_over(channel, toy_recipe(algorithm=ToyOddJob(local=ADAM, how="attribute")), tmp_path / "run")
    assert channel.orders == []


def test_loose_tensors_keep_their_numbers_and_are_not_written_on():
    """FedPhD's clients choose an edge by the counts that they are sent, and do not change the message."""
    recipe = toy_recipe(algorithm=ALGORITHMS["fedphd, pruned in the middle"])
    recipe = recipe.resolved(recipe.data.load("train"))
    job, reports = job_of(recipe.algorithm, "choose"), []
    q = torch.zeros(2, recipe.model.shape.classes)
    expected = Expectation(recipe, 2, reports.append).of(job, job.arguments(q=q, scale=1.0))
    layout = ((recipe.model.shape.classes,), torch.float32)
    assert not reports and [form.loose for form in expected.forms] == [{"reply.histogram.counts": layout}] and not q.any()
    with pytest.raises(WireError, match="sets of parameters"):
        expected.check(Params({"a": torch.zeros(1)}))


@spec
class ToyLeast(FedAvg):
    """Clients with fewer than five images send an empty update; the others' second reply also has what they kept."""

    @on_client
    def train(self, client: Client, model: Model) -> Renamed:
        if client.size < 5:
            return Renamed({}, None, 1.0)
        parts = {part: model.part(part) for part in ("encoder", "decoder")}
        before = client.state.get("before")
        client.state["before"] = model.params
        return Renamed(parts, before, 1.0)


def test_a_reply_may_depend_on_how_many_images_and_what_state_a_client_has():
    """None of few images, two parts at first, and what was kept beside them later: each is accepted, and nothing else is."""
    recipe = toy_recipe(algorithm=ToyLeast(local=ADAM))
    recipe = recipe.resolved(recipe.data.load("train"))
    job, model = job_of(recipe.algorithm, "train"), recipe.model.initial(Stream((0,)))
    expectation = Expectation(recipe, 2, [].append)
    expectation.of(job, job.arguments(model=model))
    expected = expectation.of(job, job.arguments(model=recipe.model.initial(Stream((1,)))))
    parts = {part: model.part(part) for part in ("encoder", "decoder")}
    for reply in (Renamed({}, None, 1.0), Renamed(parts, None, 1.0), Renamed(parts, model.params, 1.0)):
        expected.check(reply)
    with pytest.raises(WireError, match="sets of parameters"):
        expected.check(Renamed({"encoder": parts["encoder"]}, None, 1.0))


def test_parameters_are_compared_by_their_place():
    """A client that renames its parts would replace a server's, or stop a median."""
    recipe = toy_recipe(algorithm=ToyLeast(local=ADAM))
    recipe = recipe.resolved(recipe.data.load("train"))
    job, model = job_of(recipe.algorithm, "train"), recipe.model.initial(Stream((0,)))
    expected = Expectation(recipe, 2, [].append).of(job, job.arguments(model=model))
    parts = {f"z{part}": model.part(part) for part in ("encoder", "decoder")}
    with pytest.raises(WireError, match=r"it has parameters at 'reply.parts.zdecoder', expected: .*reply.parts.encoder"):
        Form.of(Renamed({p[1:]: v for p, v in parts.items()}, None, 1.0)).check(Form.of(Renamed(parts, None, 1.0)))
    with pytest.raises(WireError):
        expected.check(Renamed(parts, None, 1.0))


def test_clients_may_keep_different_networks():
    """One client trains a narrow and one a wide network, which both keep: either may come, and no third one."""
    recipe = toy_recipe(algorithm=AuxOnly(**SYNTHESIS, central=ADAM))
    recipe = recipe.resolved(recipe.data.load("train"))
    expectation, shape = Expectation(recipe, 2, [].append), recipe.model.shape
    archs = [dataclasses.replace(recipe.model, width=width) for width in (4, 6, 8)]
    warm_up, upload = (job_of(recipe.algorithm, name) for name in ("warm_up", "upload"))
    for arch in archs[:2]:
        expectation.of(warm_up, warm_up.arguments(arch=arch))
    expected = expectation.of(upload, upload.arguments())
    models = [arch.resolved(shape).initial(Stream((0,))) for arch in archs]
    for model in models[:2]:
        expected.check(Upload(model, 3, None))
    with pytest.raises(WireError, match="its networks are"):
        expected.check(Upload(models[2], 3, None))
