"""Networks that are frozen part by part where they are made record nothing."""

from __future__ import annotations

import pytest

FEATURES = """
    import torch
    from torch import nn
    from torchvision.models import vgg16

    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            layers = vgg16(pretrained=True).features
            {made}

        def forward(self, x):
            return {result}

    features = Features().eval()
    for x, y in val_loader:
        print(features(x).sum().item())
"""
SLICES = """self.a = nn.Sequential()
            self.b = nn.Sequential()
            for i in range(4):
                self.a.add_module(str(i), layers[i])
                self.b.add_module(str(i), layers[4 + i])
            for p in self.a.parameters():
                p.requires_grad = False
            """
OTHER_SLICE = "for p in self.b.parameters():\n                p.requires_grad = False"


@pytest.mark.parametrize(
    "made",
    [
        SLICES + OTHER_SLICE,
        SLICES + "self.b.requires_grad_(False)",
        "self.a = layers[:4]\n            self.b = layers[4:]\n            self.a.requires_grad_(False)\n            "
        + OTHER_SLICE,
    ],
)
@pytest.mark.parametrize("result", ["self.b(self.a(x))", "self.b(torch.relu(self.a(x)))"])
def test_a_network_of_frozen_parts_records_nothing(report, made, result):
    assert report(FEATURES.format(made=made, result=result)) == []


@pytest.mark.parametrize(
    ("made", "result"),
    [
        (SLICES, "self.b(self.a(x))"),
        (SLICES + OTHER_SLICE, "self.head(self.b(self.a(x)))"),
        (SLICES + OTHER_SLICE + "\n            self.head = nn.Linear(8, 8)", "self.head(self.b(self.a(x)))"),
        (
            SLICES + OTHER_SLICE + "\n            self.scale = nn.Parameter(torch.ones(8))",
            "self.b(self.a(x)) * self.scale",
        ),
        (SLICES + OTHER_SLICE + "\n            self.b[0] = nn.Linear(8, 8)", "self.b(self.a(x))"),
        (SLICES + OTHER_SLICE + "\n            self.b.requires_grad_(True)", "self.b(self.a(x))"),
        (SLICES + OTHER_SLICE + "\n            self.b.last.requires_grad_(True)", "self.b(self.a(x))"),
    ],
    ids="one not frozen,another part,a head,a parameter of its own,replaced,thawed,partly thawed".split(","),
)
def test_with_a_part_that_trains_it_does(report, made, result):
    found = report(FEATURES.format(made=made, result=result))
    assert [code for code, _ in found] == ["OOM201"]


def test_frozen_parts_let_the_graph_of_what_goes_in_through(report):
    code = (
        FEATURES.format(made=SLICES + OTHER_SLICE, result="self.b(self.a(x))")
        + """
    for x, y in loader:
        out = features(generator(x))
        kept.append(out.mean())
        criterion(out, y).backward()
        optimizer.step()
    """
    )
    assert [code for code, _ in report(code)] == ["OOM102"]


def test_a_network_frozen_under_another_name_before_its_head_was_replaced_records(report):
    code = """
        import torch
        from torch import nn
        from torchvision.models import vgg16

        class Classifier(nn.Module):
            def __init__(self):
                super().__init__()
                net = vgg16(pretrained=True)
                for p in net.parameters():
                    p.requires_grad = False
                net.classes = 10
                {}
                self.net = net

            def forward(self, x):
                return self.net(x)

        classifier = Classifier().eval()
        for x, y in val_loader:
            print(classifier(x).sum().item())
    """
    assert report(code.format("pass")) == []
    assert report(code.format("net.classifier = nn.Linear(8, 10)")) == [("OOM201", 20)]
    assert report(code.format("net.classifier[6] = nn.Linear(8, 10)")) == [("OOM201", 20)]


PARTS = """
    import torch
    from torch.nn import Sequential

    model = torch.load("resnet.pth", map_location="cpu").cuda()
    {freeze}
    {before}
    model = Sequential(*list(model.{parts}())[:-1])
    model.eval()
    for image in images:
        print(model(image))
"""
FROZEN = "for parameter in model.parameters(): parameter.requires_grad = False"


@pytest.mark.parametrize("parts", ["children", "modules"])
def test_parts_of_a_frozen_network_are_frozen(report, parts):
    assert report(PARTS.format(freeze=FROZEN, before="pass", parts=parts)) == []
    assert report(PARTS.format(freeze="pass", before="pass", parts=parts)) == [("OOM201", 10)]


def test_a_frozen_network_that_a_call_takes_the_place_of_stays_frozen(report):
    code = """
        import torchvision

        net = torchvision.models.resnet18()
        {freeze}
        net = to_gpu(net)
        net.eval()
        for image in images:
            print(net(image))
    """
    assert report(code.format(freeze=FROZEN.replace("model", "net"))) == []
    assert report(code.format(freeze="pass")) == [("OOM201", 8)]


def test_parts_that_may_be_trained_again_are_not(report):
    thawed = "for part in list(model.children())[6:]:\n        for p in part.parameters(): p.requires_grad = True"
    assert report(PARTS.format(freeze=FROZEN, before=thawed, parts="children")) == [("OOM201", 11)]


@pytest.mark.parametrize("added", ["[nn.Linear(512, 10)]", "list(other.children())", "[head]"])
def test_a_network_of_frozen_parts_and_others_is_not_frozen(report, added):
    code = f"""
        import torch
        from torch import nn

        model = torch.load("resnet.pth", map_location="cpu").cuda()
        other = torch.load("other.pth", map_location="cpu").cuda()
        for parameter in model.parameters(): parameter.requires_grad = False
        model = nn.Sequential(*(list(model.children())[:-1] + {added}))
        model.eval()
        for image in images:
            print(model(image))
    """
    assert report(code) == [("OOM201", 10)]


@pytest.mark.parametrize("thawed", ["part.requires_grad_(True)", "part.requires_grad_()", "part.requires_grad_(late)"])
def test_parts_that_a_method_trains_again_are_not_frozen(report, thawed):
    code = f"""
        import torch

        model = torch.load("resnet.pth", map_location="cpu").cuda()
        for parameter in model.parameters(): parameter.requires_grad = False
        for part in model.modules():
            {thawed}
        model.eval()
        for image in images:
            print(model(image))
    """
    assert report(code) == [("OOM201", 9)]
    assert report(code.replace(thawed, "part.requires_grad_(False)")) == []
    assert report(code.replace(thawed, "part.requires_grad_(requires_grad=False)")) == []


@pytest.mark.parametrize(
    "asked", ["model.apply(init)", "model.register_backward_hook(model.hook)", "model.zero_grad()"]
)
def test_a_network_stays_frozen_whatever_hooks_it_has(report, asked):
    code = f"""
        import torch

        {asked}
        def evaluate(loader):
            for parameter in model.parameters():
                parameter.requires_grad = False
            model.eval()
            for x in loader:
                print(model(x))
    """
    assert report(code) == []


@pytest.mark.parametrize(("made", "found"), [("crnn.CRNN(32)", []), ("build(crnn.head(32))", [("OOM201", 10)])])
def test_a_network_under_the_name_of_its_file_stays_frozen(report, made, found):
    code = f"""
        import torch
        import models.crnn as crnn

        crnn = {made}
        def evaluate(loader):
            for parameter in crnn.parameters():
                parameter.requires_grad = False
            crnn.eval()
            for x in loader:
                print(crnn(x))
        evaluate(loader)
    """
    assert report(code) == found


STYLE = """
    import torch
    from torchvision import models

    network = models.vgg16(pretrained=True).cuda()
    for parameter in network.parameters():
        parameter.requires_grad = False
    image = {image}
    optimizer = torch.optim.Adam([image])
    for step in range(100):
        loss = criterion(network.features[:20](image), target) + criterion(network.features[0](target), target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("image", "found"),
    [
        ("torch.tensor(photo, requires_grad=True)", [("OOM202", 10)]),
        ("torch.tensor(photo, requires_grad=False)", []),
        ("torch.tensor(photo)", []),
    ],
)
def test_a_frozen_network_is_trained_through_where_what_goes_in_is_trained(report, image, found):
    assert report(STYLE.format(image=image)) == found


ATTACK = """
    import torch

    def attack(model, image, target):
        model.eval().cuda()
        for parameter in model.parameters():
            parameter.requires_grad = False
        change = torch.zeros(1, 3, 8, 8)
        {asked}
        optimizer = torch.optim.Adam([{optimized}])
        for step in range(100):
            loss = criterion(model(torch.tanh({given})), target)
            loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("asked", "given", "found"),
    [
        ("change.requires_grad = True", "image + change", [("OOM202", 11)]),
        ("change.requires_grad_()", "image + change", [("OOM202", 11)]),
        ("image.requires_grad = True", "image", [("OOM202", 11)]),
        ("change.requires_grad = True", "image", []),
        ("change.requires_grad = False", "image + change", []),
        ("change.requires_grad = image.requires_grad", "image + change", []),
    ],
)
def test_a_frozen_network_is_trained_through_where_gradients_of_its_input_are_switched_on(report, asked, given, found):
    optimized = "image" if asked.startswith("image") else "change"
    assert report(ATTACK.format(asked=asked, given=given, optimized=optimized)) == found


BY_A_HELPER = """
    import torch
    from models import Generator

    def set_trainable(model, flag=True):
        for p in model.parameters():
            p.requires_grad = {flag}

    generator = Generator().cuda()
    for step, x in enumerate(loader):
        {before}
        loss = discriminator(generator(x)).mean()
        loss.backward()
        optimizer.step()
        {after}
        if step % 100 == 0:
            generator.eval()
            writer.add_image("sample", generator(noise), step)
"""


@pytest.mark.parametrize(
    ("flag", "before", "after", "found"),
    [
        ("flag", "set_trainable(generator, True)", "set_trainable(generator, False)", []),
        ("flag", "set_trainable(generator)", "set_trainable(generator, flag=False)", []),
        ("flag", "set_trainable(generator, False)", "set_trainable(generator)", [("OOM201", 17)]),
        ("flag", "set_trainable(generator)", "set_trainable(generator, frozen)", [("OOM201", 17)]),
        ("flag", "set_trainable(generator)", "set_trainable(discriminator, False)", [("OOM201", 17)]),
        ("not flag", "set_trainable(generator, False)", "set_trainable(generator)", []),
    ],
)
def test_a_helper_that_is_told_freezes_a_network(report, flag, before, after, found):
    reported = report(BY_A_HELPER.format(flag=flag, before=before, after=after))
    assert [one for one in reported if one[0] == "OOM201"] == found


EACH = """
    import torch

    def evaluate(encoder, classifier, data):
        nets = [encoder, classifier]
        for net in nets:
            for parameter in net.parameters():
                {frozen}
        print(classifier(encoder(data)).argmax())

    def train(encoder, classifier, loader):
        for x, y in loader:
            with torch.autocast("cuda", torch.bfloat16):
                loss = criterion(classifier(encoder(x)), y)
            loss.backward()
            optimizer.step()
            evaluate(encoder, classifier, x)
"""


@pytest.mark.parametrize(
    ("frozen", "found"),
    [
        ("parameter.requires_grad = False", []),
        ("if parameter.requires_grad: parameter.requires_grad = False", []),
        ("if parameter.ndim > 1: parameter.requires_grad = False", [("OOM201", 8)]),
        ("parameter.requires_grad = True", [("OOM201", 8)]),
    ],
)
def test_networks_of_a_list_are_frozen_one_by_one(report, frozen, found):
    assert report(EACH.format(frozen=frozen)) == found


def test_networks_of_a_list_are_known_by_what_is_done_to_each(report):
    code = """
        import torch

        for each in (sage, top):
            each.train()
        for nodes, y in batches:
            criterion(top(sage(nodes.cuda())), y).backward()
            optimizer.step()
    """
    assert report(code) == [("OOM202", 6)]


LAYER_BY_LAYER = """
    import torch
    from torch import nn
    from torchvision import models

    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = models.vgg19(pretrained=True).features[:9]
            {frozen}

        def place(self, devices):
            for i, layer in enumerate(self.net):
                self.net[i] = layer.to(devices[i])

        def forward(self, x):
            for i in range(9):
                x = self.net[i](x)
            return x

    features = Features()
    features.eval()
    features.place(["cuda"] * 9)
    for image in style_images:
        print(features(image).mean().item())
"""


def test_a_frozen_network_that_is_run_layer_by_layer_records_nothing(report):
    assert report(LAYER_BY_LAYER.format(frozen="self.net.requires_grad_(False)")) == []
    assert report(LAYER_BY_LAYER.format(frozen="self.net.eval()")) == [("OOM201", 24)]


FROZEN_BY_A_HELPER = """
    import torch
    import timm

    def set_requires_grad(nets, flag=False):
        {listed}
            for parameter in net.parameters():
                parameter.requires_grad = flag

    net, other = timm.create_model("resnet50"), timm.create_model("resnet18")
    set_requires_grad({given})
    net.eval()
    for x, y in val_loader:
        print(net(x).argmax(1))
"""
LISTED = (
    "for net in nets if isinstance(nets, list) else [nets]:",
    "if not isinstance(nets, list):\n            nets = [nets]\n        for net in nets:",
    "nets = nets if isinstance(nets, (list, tuple)) else [nets]\n        for net in nets:",
)


@pytest.mark.parametrize("listed", LISTED)
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("net", False),
        ("net, False", False),
        ("[net, other], False", False),
        ("net, True", True),
        ("other", True),
        ("[other]", True),
    ],
)
def test_a_helper_that_takes_one_network_or_a_list_freezes_what_it_is_given(report, listed, given, found):
    code = FROZEN_BY_A_HELPER.format(listed=listed, given=given)
    assert [code for code, _ in report(code)] == (["OOM201"] if found else [])


@pytest.mark.parametrize(
    ("loop", "found"),
    [
        ("for p in net.parameters():\n        p.detach_()", []),
        ("for p in net.head.parameters():\n        p.detach_()", ["OOM201"]),
        ("for p in net.parameters():\n        p.detach()", ["OOM201"]),
    ],
)
def test_parameters_that_are_detached_in_place_record_nothing(report, loop, found):
    code = f"""
    import torch

    net = build_net()
    {loop}
    net.eval()
    for x, y in val_loader:
        print(net(x).argmax(1))
    """
    assert [code for code, _ in report(code)] == found


LAYERS = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.fc = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.fc(self.encoder(x))

    net, other = Net(), Net()
    for p in {frozen}.parameters():
        p.requires_grad = False
    net.eval()
    for x, y in val_loader:
        features = {asked}
"""


@pytest.mark.parametrize(
    ("frozen", "asked", "found"),
    [
        ("net", "net.encoder(x)", []),
        ("net", "net.fc(net.encoder(x))", []),
        ("net.fc", "net.encoder(x)", ["OOM201"]),
        ("other", "net.encoder(x)", ["OOM201"]),
        ("net", "net.encoder(x)\n        net.encoder.thaw()", ["OOM201"]),
        ("net", "net.encoder(x)\n        net.release()", ["OOM201"]),
    ],
)
def test_a_layer_of_a_frozen_network_records_nothing(report, frozen, asked, found):
    assert [code for code, _ in report(LAYERS.format(frozen=frozen, asked=asked))] == found


@pytest.mark.parametrize(
    ("source", "found"), [("ultralytics/yolov5", []), ("pytorch/vision", ["OOM201"]), ("{path}", ["OOM201"])]
)
def test_a_detector_of_the_hub_turns_gradients_off_itself(report, source, found):
    code = f"""
    import torch

    net = torch.hub.load("{source}", "custom")
    while True:
        print(net(camera.read()).argmax(1))
    """
    assert [code for code, _ in report(code)] == found


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ('"ultralytics/yolov5", "yolov5s"', []),
        ('repo_or_dir="ultralytics/yolov5", model="yolov5s"', []),
        ('"ultralytics/yolov5", "yolov5s", autoshape=False', ["OOM202"]),
    ],
)
def test_a_detector_of_the_hub_is_trained_without_its_wrapper(report, given, found):
    code = f"""
    import torch

    net = torch.hub.load({given}).cuda()
    for x, y in loader:
        loss = loss_of(net(x), y)
        loss.backward()
        optimizer.step()
    """
    assert [code for code, _ in report(code)] == found


IMAGE = """
    import torch
    import torchvision

    net = torchvision.models.vgg19().features.cuda().eval()
    net.requires_grad_(False)

    def stylize(image):
        image = resize(image).clamp(0, 1)
        {asked}
        optimizer = torch.optim.Adam([image])
        for i in range(100):
            loss = criterion(net(image))
            loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize("asked", ["image.requires_grad_()", "image = image.detach(); image.requires_grad_(True)"])
def test_a_frozen_network_records_for_an_image_that_asks_for_gradients(report, asked):
    assert report(IMAGE.format(asked=asked)) == [("OOM202", 12)]


def test_it_records_nothing_for_one_that_does_not(report):
    assert report(IMAGE.format(asked="image.requires_grad_(False)")) == []


@pytest.mark.parametrize(("image", "found"), [("image", [("OOM202", 12)]), ("other", [])])
@pytest.mark.parametrize("value", [True, False])
def test_so_it_does_for_one_that_is_set_to_ask_for_them(report, image, found, value):
    code = IMAGE.format(asked=f"{image}.requires_grad = {value}")
    assert report(code) == (found if value else [])


THAWED = """
    import torch
    from project import Net, adapters_of

    net, other = Net().cuda(), Net().cuda()
    {frozen}
    chosen = []
    {trained}
    optimizer = torch.optim.Adam(chosen)
    for x, y in loader:
        loss = criterion(net(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
"""
ALL_FROZEN = ["for p in net.parameters():\n        p.requires_grad = False", "net.requires_grad_(False)"]
BY_NAME = """for name, p in net.named_parameters():
        if "adapter" in name:
            {train}
            chosen.append(p)"""
LISTED = "chosen = {listed}\n    for p in chosen:\n        p.requires_grad_({value})"


@pytest.mark.parametrize("frozen", ALL_FROZEN)
@pytest.mark.parametrize(
    ("trained", "records"),
    [
        (BY_NAME.format(train="p.requires_grad = True"), True),
        (BY_NAME.format(train="p.requires_grad_()"), True),
        (BY_NAME.format(train="p.requires_grad = False"), False),
        (BY_NAME.format(train="other.requires_grad = True"), False),
        (BY_NAME.replace("net", "other").format(train="p.requires_grad = True"), False),
        (LISTED.format(listed="adapters_of(net)", value=True), True),
        (LISTED.format(listed="[p for name, p in net.named_parameters() if 'adapter' in name]", value=True), True),
        (LISTED.format(listed="adapters_of(net)", value=False), False),
        (LISTED.format(listed="adapters_of(other)", value=True), False),
    ],
)
def test_a_network_some_of_whose_weights_are_trained_again_records(report, frozen, trained, records):
    found = [code for code, _ in report(THAWED.format(frozen=frozen, trained=trained))]
    assert found == (["OOM202"] if records else [])


SORTED = """
    import torch
    from project import Net

    net = Net().cuda()
    {loop}
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad])
    for x, y in loader:
        loss = criterion(net(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("sorted_by", "records"),
    [
        ("p.requires_grad = False\n        if 'head' in name:\n            p.requires_grad = True", True),
        ("p.requires_grad_(False)\n        if 'head' in name:\n            p.requires_grad_()", True),
        ("p.requires_grad = True\n        if 'norm' in name:\n            p.requires_grad = False", True),
        ("p.requires_grad = False\n        if 'head' in name:\n            heads.append(p)", False),
        ("p.requires_grad = False\n        if 'head' in name:\n            head.requires_grad = True", False),
    ],
)
def test_a_network_whose_weights_one_loop_sorts_records_where_it_trains_some(report, sorted_by, records):
    code = SORTED.format(loop=f"for name, p in net.named_parameters():\n        {sorted_by}")
    assert ("OOM202" in {name for name, _ in report(code)}) is records


def test_a_helper_that_freezes_all_or_trains_a_part_leaves_a_network_that_may_train(report):
    code = """
        import torch

        def unfreeze(model, stage):
            if stage < 5:
                for name, p in model.named_parameters():
                    p.requires_grad = False
                    if name.startswith(f"layer{stage}"):
                        p.requires_grad = True
            else:
                for p in model.parameters():
                    p.requires_grad = False
            return model

        def validate(model, stage, loader):
            model = unfreeze(model, stage)
            for x, y in loader:
                print(criterion(model(x), y).item())
    """
    assert ("OOM201", 17) in report(code)


TUNED = """
    import torch

    def tune(net, loader, val_loader, optimizer):
        for parameter in net.parameters():
            parameter.requires_grad = False
        {thawed}
        for x, y in loader:
            loss = criterion(net(x.cuda()), y.cuda())
            loss.backward()
            optimizer.step()
        net.eval()
        for x, y in val_loader:
            print(net(x.cuda()).argmax(1))
"""


@pytest.mark.parametrize(
    "thawed",
    [
        'for name, p in net.named_parameters():\n            if "head" in name: p.requires_grad = True',
        'for name, p in net.named_parameters():\n            if name[0] == "h": p.requires_grad_()',
        'for name, p in net.named_parameters():\n            p.requires_grad = "head" in name',
        "for p in list(net.parameters())[-2:]: p.requires_grad = True",
        "for p, kept in zip(net.parameters(), trained): p.requires_grad = kept",
        "for i, p in enumerate(net.parameters()):\n            if i > 7: p.requires_grad = True",
        "for i, p in enumerate(net.parameters()):\n            if i: pass\n            else: p.requires_grad = True",
        "unfreeze(net, 2)",
        "if late: helpers.thaw_layers(net)",
    ],
)
def test_a_network_some_of_whose_parameters_train_again_records(report, thawed):
    assert [code for code, _ in report(TUNED.format(thawed=thawed))] == ["OOM201", "OOM202"]


@pytest.mark.parametrize(
    "thawed",
    [
        'for name, p in net.named_parameters():\n            if "head" in name: p.requires_grad = False',
        'for name, p in net.named_parameters():\n            if "head" in name: print(name)',
        "for p in list(net.parameters())[-2:]: p.requires_grad = False",
        "for p in list(other.parameters())[-2:]: p.requires_grad = True",
        'for name, p in net.named_parameters():\n            if late: p.requires_grad = "head" in other',
        "unfreeze(other, 2)",
        "freeze(net, 2)",
    ],
)
def test_one_of_which_nothing_trains_again_records_nothing(report, thawed):
    assert report(TUNED.format(thawed=thawed)) == []


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ('p.requires_grad = False\n            if "head" in name: p.requires_grad = True', ["OOM201"]),
        ('if "head" in name: continue\n            p.requires_grad = False', ["OOM201"]),
        ("p.requires_grad = False\n            print(name)", []),
        ("if p.requires_grad: p.requires_grad = False", []),
    ],
)
def test_a_loop_that_leaves_some_parameters_trained_freezes_no_network(report, body, found):
    code = f"""
        import torch

        def evaluate(net, loader):
            for name, p in net.named_parameters():
                {body.replace("            ", "                ")}
            for x, y in loader:
                print(net(x.cuda()).argmax(1))
    """
    assert [code for code, _ in report(code)] == found


ENSEMBLE = """
    import torch

    def train(net, models, loader):
        {frozen}
        for x, y in loader:
            parts = []
            for member in models:
                parts.append(member(x.cuda()))
            with torch.autocast("cuda", torch.bfloat16):
                loss = criterion(net(torch.cat(parts, 1)), y)
            loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("frozen", "found"),
    [
        ("for one in models:\n            for p in one.parameters():\n                p.requires_grad = False", []),
        ("for one in models: one.requires_grad_(False)", []),
        ("for one in models: one.requires_grad_(True)", ["OOM202"]),
        ("for one in others: one.requires_grad_(False)", ["OOM202"]),
        ("for i, one in enumerate(models):\n            if i: one.requires_grad_(False)", ["OOM202"]),
        ("for one in models:\n            if not one.trains: one.requires_grad_(False)", ["OOM202"]),
    ],
)
def test_networks_are_frozen_where_a_loop_freezes_every_one(report, frozen, found):
    assert [code for code, _ in report(ENSEMBLE.format(frozen=frozen))] == found
