"""What the constructors of objects make: networks in their mode, and networks of a class that is handed over."""

from __future__ import annotations

import pytest

DETECTOR = """
    import torch

    class Detector:
        def __init__(self, path):
            self.model = Yolo(path)
            {before}
            self.model.{mode}()

        def find(self, image):
            features = self.model(image)
            boxes = []
            for feature in features:
                boxes.extend(decode(feature))
            return len(boxes)
"""


@pytest.mark.parametrize("before", ["pass", "self.model.cuda()", "self.size = 8"])
def test_a_network_stays_in_the_mode_that_its_constructor_switched_it_to(report, before):
    assert report(DETECTOR.format(before=before, mode="eval")) == [("OOM201", 10)]


def test_one_in_training_mode_may_be_trained(report):
    assert report(DETECTOR.format(before="pass", mode="train")) == []


HANDED = """
    import torch

    class Learner(torch.nn.Module):
        def __init__(self, {name}, shape, rate):
            super().__init__()
            self.model = {name}({given})
            self.optimizer = torch.optim.Adam(self.parameters(), rate)

        def learn(self, x, y):
            loss = criterion(self.model(x), y)
            loss.backward()
            self.optimizer.step()

    def main(model):
        model.train()
        for seed in range(3):
            learner = Learner(model, (3, 4), 1e-3)
"""


@pytest.mark.parametrize("given", ["shape", "shape, depth=2"])
@pytest.mark.parametrize("name", ["model", "backbone", "policy_head"])
def test_a_class_that_a_constructor_is_given_is_made_and_not_run(report, name, given):
    assert ("OOM201", 6) not in report(HANDED.format(name=name, given=given))


WRITING = """
    import torch

    def write(lm, token, length):
        hidden = lm.{started}(1)
        text = []
        for _ in range(length):
            out, hidden = lm(token, hidden)
            token = torch.multinomial(torch.softmax(out[-1], -1), 1)
            text.append(token.item())
        return text
"""


@pytest.mark.parametrize(("started", "found"), [("init_hidden", True), ("initHidden", True), ("begin", False)])
def test_what_is_asked_for_its_first_state_is_a_network(report, started, found):
    assert (("OOM201", 7) in report(WRITING.format(started=started))) is found


LOADED = """
    import torch

    class Features(torch.utils.data.Dataset):
        def __init__(self, net, files):
            self.net, self.files = net.{mode}(), files

        def __getitem__(self, index):
            return self.net(read(self.files[index])).squeeze(0).detach()
"""


@pytest.mark.parametrize(("mode", "found"), [("eval", [("OOM201", 8)]), ("train", [])])
def test_a_network_that_is_kept_under_another_name_stays_in_its_mode(report, mode, found):
    assert report(LOADED.format(mode=mode)) == found


SAMPLED = """
    import torch

    def train(G, {average}, D, loader):
        for step, x in enumerate(loader):
            loss = D(G(x)).mean()
            loss.backward()
            optimizer.step()
            if step % 500 == 0:
                save({average}(fixed), step)
"""


@pytest.mark.parametrize(("average", "found"), [("G_ema", True), ("g_ema", True), ("Grid", False)])
def test_the_average_of_a_network_is_run_and_not_made(report, average, found):
    assert (("OOM201", 9) in report(SAMPLED.format(average=average))) is found


@pytest.mark.parametrize(("load", "found"), [("torch.jit.load", [("OOM201", 5)]), ("json.load", [])])
def test_a_script_of_a_network_that_is_loaded_is_a_network(report, load, found):
    code = f"""
        import json, torch

        def predict(path, x):
            scores = {load}(path)
            return scores(x).argmax(1)
    """
    assert report(code) == found


SIZED = """
    import torch
    from torch import nn

    class Net({base}):
        def __init__(self, layers):
            super().__init__()
            self.layers = nn.ModuleList(layers)
            self.stride = [256 / out.shape[-1] for out in self.forward(torch.zeros(1, 3, 256, 256))]

        def forward(self, x):
            return self.pyramid(x)

        def pyramid(self, x):
            outs = []
            for layer in self.layers:
                x = layer(x)
                outs.append(x)
            return outs

    def build(layers):
        print(Net(layers).stride)
"""


@pytest.mark.parametrize(("base", "found"), [("nn.Module", []), ("object", [("OOM201", 16)])])
def test_a_network_that_is_made_may_ask_itself_how_large_its_outputs_are(report, base, found):
    assert report(SIZED.format(base=base)) == found


@pytest.mark.parametrize("name", ["infer_dims", "_set_sizes", "test_output_size"])
def test_a_network_that_asks_its_layers_for_sizes_where_it_is_made_evaluates_nothing(report, name):
    code = f"""
        import torch

        class Walk(torch.nn.Module):
            def __init__(self, encoder):
                super().__init__()
                self.encoder = encoder
                self.{name}()

            def {name}(self):
                out = self.encoder(torch.zeros(1, 3, 64, 64))
                self.size = out.shape[1]
                self.scale = 64 // out.shape[-1]

            def forward(self, frames):
                return self.encoder(frames)

        model = Walk(encoder)
        for frames, target in loader:
            criterion(model(frames), target).backward()
            optimizer.step()
    """
    assert report(code) == []
