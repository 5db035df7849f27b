"""What has a `forward` and no weights, and functions that samplers call."""

from __future__ import annotations

import pytest

NOISING = """
    import torch
    from project import Net, Process

    class Trainer:
        def __init__(self, process):
            self.model, self.process = Net().cuda(), process
            self.{name} = process
            self.optimizer = torch.optim.Adam(self.model.parameters())

        def train(self, loader):
            for images, t in loader:
                {first}, second = self.{name}.forward(images.cuda(), t)
                loss = (self.model({first}, t) - second).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("name", "first", "lines"),
    [
        ("diffuser", "noisy", [13]),
        ("gaussian_diffusion", "x_noised", [13]),
        ("noise_scheduler", "noisy_images", [13]),
        ("diffuser", "features", [12, 13]),
        ("encoder", "noisy", [12, 13]),
    ],
)
def test_a_process_that_adds_noise_has_no_weights(report, name, first, lines):
    assert report(NOISING.format(name=name, first=first)) == [("OOM202", line) for line in lines]


def test_a_process_that_is_moved_where_it_is_made_has_none_either(report):
    code = """
        import torch
        from project import Diffuser

        diffuser = Diffuser(100).to("cuda")
        model.eval()
        for images, t in loader:
            noisy, noise = diffuser.forward(images, t)
            with torch.no_grad():
                print(model(noisy, t))
    """
    assert report(code) == []


CROPPED = """
    import torch
    from project.crops import {made}

    def compare(images, grid):
        crop = {made}()
        out = crop.forward(images.cuda(), grid)
        print(out.sum().item())
"""


@pytest.mark.parametrize(("made", "found"), [("CropFunction", []), ("CropNetwork", [("OOM201", 6)])])
def test_an_autograd_function_that_is_asked_for_its_forward_records_nothing(report, made, found):
    assert report(CROPPED.format(made=made)) == found


SAMPLED = """
    import torch

    def main(model, diffusion, loader):
        model.eval()

        def guided(x, t, y=None):
            return model(x, t, y)

        for shape in loader:
            images = {call}(guided, shape)
            print(images.cpu().numpy())
"""


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("diffusion.p_sample_loop", []),
        ("diffusion.ddim_sample", []),
        ("sampler", []),
        ("draw_with", [("OOM201", 7)]),
        ("scores.resample_with", [("OOM201", 7)]),
    ],
)
def test_samplers_turn_gradients_off_around_what_they_call(report, call, found):
    assert report(SAMPLED.format(call=call)) == found


MEASURED = """
    import torch
    from project import choose

    def validate(model, loader, {name}):
        with torch.no_grad():
            outputs = [(model(x.cuda()), y) for x, y in loader]
        for out, y in outputs:
            print({name}(out, y.cuda()).item())

    def main(args):
        model, {name} = choose(args), choose(args)
        {name}.to("cuda")
        validate(model.cuda(), args.loader, {name})
"""


@pytest.mark.parametrize("name", ["metric", "auroc_metric", "accuracy", "fid", "train_meter"])
def test_a_metric_that_is_moved_to_a_device_is_no_network(report, name):
    assert report(MEASURED.format(name=name)) == []


@pytest.mark.parametrize("name", ["similarity", "geometric_branch", "reparameterizer"])
def test_anything_else_that_is_moved_and_called_is_one(report, name):
    assert report(MEASURED.format(name=name)) == [("OOM201", 8)]


COUNTING = """
    import torch
    from torch import nn

    class OfMembers(nn.Module):
        def __init__(self, {count}):
            super().__init__()
            self.{count} = {count}

        def forward(self, outputs, y):
            parts = torch.chunk(outputs, self.{count}, dim=-1)
            return sum(nn.functional.nll_loss(part.log(), y) for part in parts) / self.{count}

    def test(net, loader):
        net.eval()
        for x, y in loader:
            with torch.no_grad():
                outputs = net(x.cuda())
            print(OfMembers(3)(outputs, y).item())
"""


@pytest.mark.parametrize(("count", "found"), [("num_models", []), ("n_members", []), ("model", [("OOM201", 18)])])
def test_a_module_that_holds_a_number_of_networks_alone_is_none(report, count, found):
    assert report(COUNTING.format(count=count)) == found


ASKED = """
    import torch

    class Run:
        def choose(self, name):
            judge = Judge(name)
            return lambda out, y: judge.eval({given})["acc"]

        def test(self, model, loader, judge):
            with torch.no_grad():
                out = torch.cat([model(x.cuda()) for x in loader])
            print(judge(out, loader.labels).item())
"""


@pytest.mark.parametrize(("given", "found"), [("{'out': out, 'y': y}", []), ("out=out", []), ("", [("OOM201", 11)])])
def test_what_is_given_something_to_evaluate_is_no_network_that_is_switched(report, given, found):
    assert report(ASKED.format(given=given)) == found


PREPARED = """
    import torch

    def embed(feature_extractor, model, loader):
        model.eval()
        for waves in loader:
            inputs = feature_extractor(waves, {given})
            with torch.no_grad():
                out = model(inputs.cuda())
            print(out.argmax(1))
"""


@pytest.mark.parametrize(("given", "found"), [("return_tensors='pt'", []), ("lengths=None", [("OOM201", 6)])])
def test_what_is_asked_for_tensors_of_some_kind_is_no_network(report, given, found):
    assert report(PREPARED.format(given=given)) == found


DETECTED = """
    import torch
    {imported}

    def find(frames, {name}):
        model = Net()
        model.load_state_dict(torch.load("net.pt", map_location="cpu"))
        for frame in frames:
            boxes = {name}(frame{options})[0].boxes
            print(boxes.xyxy.cpu().numpy())

    find(frames, {made})
"""


@pytest.mark.parametrize(
    ("imported", "made", "options", "found"),
    [
        ("from ultralytics import YOLO", 'YOLO("best.pt")', "", []),
        ("from ultralytics import YOLO", 'YOLO("best.pt").to("cuda")', "", []),
        ("import ultralytics", 'ultralytics.RTDETR("best.pt")', "", []),
        ("", "made_elsewhere()", ", conf=0.4", []),
        ("", "made_elsewhere()", ", verbose=False, imgsz=640", []),
        ("", "made_elsewhere()", ", verbose=False", [("OOM201", 8)]),
        ("from ultralytics.nn import Model", "Model()", "", [("OOM201", 8)]),
    ],
)
def test_a_detector_turns_gradients_off_by_itself(report, imported, made, options, found):
    code = DETECTED.format(imported=imported, name="detector", made=made, options=options)
    assert report(code) == found


DRAWN = """
    import torch

    def validate(tools, loader):
        for x, y in loader:
            print(tools.{name}(x))
"""


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("drawModel", []),
        ("draw_model", []),
        ("visualize_net", []),
        ("visualiseModel", []),
        ("profile_model", []),
        ("benchmark_backbone", []),
        ("drawing_model", [("OOM201", 5)]),
        ("score_model", [("OOM201", 5)]),
    ],
)
def test_what_is_done_with_a_network_is_none(report, name, found):
    assert report(DRAWN.format(name=name)) == found


AVERAGED = """
    import torch

    def train(model, ema_model, loader, optimizer):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            {after}
"""


@pytest.mark.parametrize(
    ("after", "lines"),
    [
        ("ema_model(model)", [5]),
        ("ema_model(x)", [5, 9]),
        ("ema_model(model, x)", [5, 9]),
        ("ema_model(x, model=model)", [5, 9]),
    ],
)
def test_what_takes_a_network_and_gives_nothing_runs_none(report, after, lines):
    assert report(AVERAGED.format(after=after)) == [("OOM202", line) for line in lines]
