"""The device that a script trains on: what is decided, decided otherwise, and never asked for."""

from __future__ import annotations

import pytest

EITHER = 'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")'


def trains_on_cuda(read, *lines: str) -> bool:
    top = "\n".join(["import os, torch", *lines])
    loop = "for x, y in loader:\n    criterion(model(x.to(device)), y).backward()\n    optimizer.step()\n"
    return read(f"{top}\n{loop}").devices.may_be_cuda


@pytest.mark.parametrize(
    "lines",
    [
        (EITHER, 'device = "cpu"', "model = Net().to(device)"),
        (EITHER, "size = 32", "print(size)", 'device = torch.device("cpu")', "model = Net().to(device)"),
        (EITHER, "def put(x):\n    return x.to(device)", 'device = "cpu"', "model = Net().to(device)"),
        ("if torch.cuda.is_available():\n    device = 'cuda'\nelse:\n    device = 'cpu'", "device = 'cpu'"),
        ('device = "cuda"', 'device = "cuda:1"', 'device = "cpu"'),
        ('device = "cpu"', "torch.cuda.manual_seed_all(0)", "torch.cuda.empty_cache()"),
        ('device = "cpu"', "print(f'{device}, not cuda: {torch.cuda.is_available()}')", "print('no GPU', device)"),
        ("USE_GPU = True", "device = 'mps' if torch.backends.mps.is_available() and USE_GPU else 'cpu'"),
        ('device = "cpu"', 'os.environ["CUDA_VISIBLE_DEVICES"] = "0"'),
        ('os.environ["CUDA_VISIBLE_DEVICES"] = ""', EITHER, "model = Net().to(device)"),
        ('os.environ["CUDA_VISIBLE_DEVICES"] = "-1"', EITHER, "model = Net().to(device)"),
    ],
)
def test_a_device_that_is_decided_otherwise_before_anything_asks_for_it_is_not_used(read, lines):
    assert not trains_on_cuda(read, *lines)


@pytest.mark.parametrize(
    "lines",
    [
        (EITHER, "model = Net().to(device)", 'device = "cpu"'),
        (EITHER, 'if args.cpu:\n    device = "cpu"'),
        ('device = "cpu"', 'if torch.cuda.is_available():\n    device = "cuda"'),
        ('device = "cuda"', 'device = "cpu"', 'device = "cuda:1"'),
        ('device = "cuda"', "device = device or 'cpu'"),
        ('device = "cpu"', "model = Net().cuda()"),
        ("USE_GPU = True", "device = 'mps' if USE_GPU else 'cpu'", "trainer = Trainer(gpu=USE_GPU)"),
        ('device = "cpu"', "torch.cuda.set_device(0)"),
        ('cpu_device = torch.device("cpu")', "device = args.device"),
        ('os.environ["CUDA_VISIBLE_DEVICES"] = "0"', EITHER),
        ('if args.cpu:\n    os.environ["CUDA_VISIBLE_DEVICES"] = ""', EITHER),
    ],
)
def test_any_other_decision_may_be_for_the_gpu(read, lines):
    assert trains_on_cuda(read, *lines)


@pytest.mark.parametrize(
    ("lines", "may"),
    [
        ("if device is None:\n        device = torch.device('cpu')", True),
        (
            "try:\n        device = next(net.parameters()).device\n    except StopIteration:\n        device = 'cpu'",
            True,
        ),
        ("device = 'cpu'", False),
    ],
)
@pytest.mark.parametrize("star", ["", "*, "])
def test_what_a_parameter_becomes_where_nothing_is_given_is_for_the_caller_to_change(read, lines, may, star):
    code = f"""
import torch

def fit(net, {star}device=None):
    {lines}
    net.to(device)
    for x, y in loader:
        criterion(net(x.to(device)), y).backward()
        optimizer.step()
"""
    assert read(code).devices.may_be_cuda is may


def test_a_device_decided_again_in_the_constructor_is_the_later_one(read):
    code = """
        import torch

        class Trainer:
            def __init__(self):
                self.device = torch.device("cuda")
                self.device = torch.device("cpu")
                self.model = Net().to(self.device)
    """
    assert not read(code).devices.may_be_cuda
    moved = code.rstrip() + ".cuda()"
    assert read(moved).devices.may_be_cuda


@pytest.mark.parametrize(
    ("moved", "may_be"), [("x.device", False), ("other.device", False), ("args.device", True), ("gpu", True)]
)
def test_where_another_tensor_is_says_nothing(read, moved, may_be):
    code = f"""
        import torch
        for x, y in loader:
            mask = torch.ones(4).to({moved})
            criterion(model(x, mask), y).backward()
            optimizer.step()
    """
    assert read(code).devices.may_be_cuda is may_be


@pytest.mark.parametrize(
    ("moved", "cuda"), [('to("cpu")', False), ("to('cpu')", False), ("to(torch.float32)", False), ("to(place)", True)]
)
def test_a_device_that_nothing_is_moved_to_is_no_gpu(read, moved, cuda):
    loop = f"for x, y in loader:\n    criterion(model(x.{moved}), y).backward()\n    optimizer.step()\n"
    assert read(f"import torch\n{EITHER}\n{loop}").devices.may_be_cuda is cuda


SEEDED = "if torch.cuda.is_available():\n    torch.cuda.manual_seed_all(0)"


@pytest.mark.parametrize(
    ("lines", "cuda"),
    [
        ((SEEDED,), False),
        ((SEEDED, "model.cuda()"), True),
        (('"""Not for the GPU."""',), False),
        (('print("Training on GPU")',), False),
        (('print(f"on the {gpu}")',), True),
        (('os.environ["CUDA_VISIBLE_DEVICES"] = "0"',), False),
        (('os.environ["CUDA_VISIBLE_DEVICES"] = "0"', "model.cuda()"), True),
        (("from config import SIZE, USE_CUDA", "print(SIZE)"), False),
        (("from config import SIZE, USE_CUDA", "if USE_CUDA: print(SIZE)"), True),
        (("target = y.to(out.dtype)",), False),
        (('device = torch.device("cuda:0")', "# model = model.to(device)"), False),
        (('device = torch.device("cuda:0")', "model = model.to(device)"), True),
        (('device = torch.device("cuda:0")  # the first', "model = model.to(device)  # device"), True),
        (("target = y.to(out)",), True),
    ],
)
def test_what_puts_nothing_on_a_gpu_says_nothing_of_one(read, lines, cuda):
    loop = "for x, y in loader:\n    criterion(model(x), y).backward()\n    optimizer.step()\n"
    assert read("\n".join(["import torch", *lines, loop])).devices.may_be_cuda is cuda


@pytest.mark.parametrize(
    ("lines", "cuda"),
    [
        (("device = x.device", "mask = torch.rand(4, device=device)"), False),
        (("dev = x.device", "mask = torch.rand(4).to(dev)"), False),
        (("rows, device = x.shape[0], x.device", "mask = torch.rand(rows, device=device)"), False),
        (("device = x.device", "model.to(device)", "device = args.device"), True),
        (("device = args.device", "mask = torch.rand(4, device=device)"), True),
        (("device = model.device", "mask = torch.rand(4, device=device)"), True),
        (("device = x.device", "mask = torch.rand(4, device=device)", "x = x.cuda()"), True),
        (("device = x.device", "if str(device) == 'cuda': pass"), True),
    ],
)
def test_a_name_for_where_another_tensor_is_says_nothing_either(read, lines, cuda):
    body = "\n".join(f"    {line}" for line in lines)
    code = f"import torch\nfor x, y in loader:\n{body}\n    criterion(model(x), y).backward()\n    optimizer.step()\n"
    assert read(code).devices.may_be_cuda is cuda


@pytest.mark.parametrize("used", ["x.to(s.device)", "torch.zeros(2, device=s.device)", "device = s.device"])
@pytest.mark.parametrize(("made", "cuda"), [("from settings import Settings as s", True), ("s = torch.ones(1)", False)])
def test_the_device_of_imported_settings_is_that_of_no_tensor(read, made, used, cuda):
    code = f"import torch\n{made}\n{used}\nfor x, y in loader:\n    criterion(model(x), y).backward()\n"
    assert read(code).devices.may_be_cuda is cuda


def test_a_device_that_a_function_is_given_may_be_the_gpu(read):
    code = """
        import torch

        def masked(x):
            device = x.device
            return torch.rand(4, device=device)

        def train(net, loader, device):
            for x, y in loader:
                criterion(net(masked(x)), y).backward()
                optimizer.step()
    """
    assert read(code).devices.may_be_cuda


@pytest.mark.parametrize(("base", "may"), [("Template", True), ("Own", False), ("torch.nn.Module", False)])
def test_a_base_class_of_another_file_may_read_the_device_that_nothing_here_does(read, base, may):
    code = f"""
import torch
from elsewhere import Template

class Own:
    pass

class Learner({base}):
    def __init__(self):
        self.device = torch.device("cuda")

    def fit(self):
        for x, y in loader:
            criterion(self.net(x), y).backward()
            optimizer.step()
"""
    assert read(code).devices.may_be_cuda is may


@pytest.mark.parametrize(
    ("decided", "may"),
    [("device = 0", True), ("device = pick()", True), ("device = 'mps'", False), ("seed = 0", False)],
)
def test_a_cpu_that_is_taken_where_no_condition_holds_decides_nothing(read, decided, may):
    code = f"""
        import torch
        device = torch.device("cpu")
        if torch.cuda.is_available():
            {decided}
        net = Net().to(device)
        for x, y in loader:
            criterion(net(x.to(device)), y).backward()
            optimizer.step()
    """
    assert read(code).devices.may_be_cuda is may


FOLLOWING = """
import torch

def solve(x, start):
    {used}
    return x.to(start)

model = Net()
for x, y in loader:
    criterion(model(solve(x, y)), y).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("used", "may"),
    [
        ("steps = start.shape[0]", False),
        ("start = torch.zeros(8)", False),
        ("start = Variable(torch.Tensor([1.0]))", False),
        ("print(start)", True),
        ("print(start.shape); print(start.device)", True),
    ],
)
def test_what_follows_a_tensor_asks_for_no_gpu(read, used, may):
    assert read(FOLLOWING.format(used=used)).devices.may_be_cuda is may


@pytest.mark.parametrize(
    ("made", "may"),
    [
        ("Net(cuda=False)", False),
        ("Net(use_gpu=False)", False),
        ("Net(cuda=True)", True),
        ("Net(cuda=settings.cuda)", True),
        ("Net(qml.device('default.qubit', wires=2))", False),
        ("Net(torch.device('cuda'))", True),
    ],
)
def test_a_gpu_that_is_switched_off_or_simulated_is_none(read, made, may):
    code = f"""
        import torch
        import pennylane as qml
        net = {made}
        for x, y in loader:
            criterion(net(x), y).backward()
            optimizer.step()
    """
    assert read(code).devices.may_be_cuda is may


@pytest.mark.parametrize(
    ("lines", "may"),
    [
        ("self.device = 'cpu'", False),
        ("self.device = torch.device('cpu')", False),
        ("self.cpu_device = 'cpu'\n        self.device = device", True),
        ("self.device = 'cpu'\n    def to(self, device):\n        self.device = device\n    def make(self):", True),
        ("self.device = 'cuda' if torch.cuda.is_available() else 'cpu'", True),
    ],
)
def test_an_object_that_is_told_to_stay_on_the_processor_does(read, lines, may):
    init = f"def __init__(self, device):\n        {lines}\n        self.model = Net().to(self.device)\n"
    assert trains_on_cuda(read, f"class Agent:\n    {init}") is may


@pytest.mark.parametrize(
    ("made", "cuda"),
    [
        ("Manager()", True),
        ("Manager(rows)", False),  # what holds tensors is where they are
        ("Manager(x=rows)", False),
        ("make()", False),
        ("rows.clone()", False),
    ],
)
def test_the_device_of_an_object_that_is_made_of_nothing_is_that_of_no_tensor(read, made, cuda):
    code = f"""
        import torch
        from project import Manager, Net, make

        held = {made}
        net = Net().to(held.device)
        for x, y in loader:
            criterion(net(x), y).backward()
            optimizer.step()
    """
    assert read(code).devices.may_be_cuda is cuda


DEVICES = """
    import torch
    from simulation import {made}, Agent

    devices = []
    for device_id in range(8):
        device = {made}(device_id=device_id)
        devices.append(device)
    agents = [Agent(num_devices=len(devices)) for _ in devices]
    for agent in agents:
        state, wanted = replay.sample(64)
        loss = criterion(agent.critic({given}), wanted)
        loss.backward()
        agent.optimizer.step()
"""


@pytest.mark.parametrize(
    ("made", "given", "cuda"),
    [
        ("EdgeDevice", "state", False),
        ("EdgeDevice", "state.to(args.device)", True),
        ("EdgeDevice", "torch.zeros(8, device=where)", True),
        ("EdgeDevice", "state.cuda()", True),
        ("device", "state", True),
        ("get_device", "state", True),
    ],
)
def test_the_devices_that_a_script_is_about_are_none_of_torch(read, made, given, cuda):
    assert read(DEVICES.format(made=made, given=given)).devices.may_be_cuda is cuda


AGENT = """
    import torch

    class Agent:
        def __init__(self, size, device={default}):
            self.device = device
            self.net = Net(size).to(device)

        def learn(self, loader):
            for x, y in loader:
                criterion(self.net(x.to(self.device)), y.to(self.device)).backward()
                self.optimizer.step()
                {more}

    def evaluate(agent, loader, device):
        return [agent.net(x.to(device)) for x in loader]

    torch.cuda.manual_seed_all(0)
    {made}
"""


@pytest.mark.parametrize(
    ("default", "made"),
    [
        ("'cpu'", "agent = Agent(8, device='cpu'); agent.learn(data); evaluate(agent, data, 'cpu')"),
        ("'cpu'", "agent = Agent(8); agent.learn(data); evaluate(agent, data, torch.device('cpu'))"),
        ("None", "agent = Agent(8, 'cpu'); evaluate(agent, data, device='mps')"),
        ("'cpu'", "other = Agent(4, 'mps'); agent = Agent(8); evaluate(agent, data, 'cpu')"),
    ],
)
def test_a_script_that_makes_everything_for_the_cpu_runs_there(read, default, made):
    assert not read(AGENT.format(default=default, made=made, more="pass")).may_run_on_cuda


@pytest.mark.parametrize(
    ("default", "made", "more"),
    [
        ("'cpu'", "pass", "pass"),  # for others to make
        ("'cpu'", "agent = Agent(8, device='cpu'); agent.learn(data)", "pass"),  # `evaluate` is for others
        ("'cuda'", "agent = Agent(8); evaluate(agent, data, 'cpu')", "pass"),
        ("'cpu'", "agent = Agent(8, args.place); evaluate(agent, data, 'cpu')", "pass"),
        ("'cpu'", "agent = Agent(8, **settings); evaluate(agent, data, 'cpu')", "pass"),
        ("'cpu'", "agent = Agent(*settings); evaluate(agent, data, 'cpu')", "pass"),
        ("'cpu'", "one = Agent(8); two = Agent(8, 'cuda:1'); evaluate(one, data, 'cpu')", "pass"),
        ("'cpu'", "agent = Agent(8); evaluate(agent, data, 'cpu')", "self.move(args.device)"),
        ("'cpu'", "agent = Agent(8); evaluate(agent, data, 'cpu')", "self.device = choose()"),
        ("'cpu'", "agent = Agent(8); agent.evaluate(agent, data)", "pass"),
    ],
)
def test_what_one_call_gives_or_nobody_calls_may_be_for_the_gpu(read, default, made, more):
    assert read(AGENT.format(default=default, made=made, more=more)).may_run_on_cuda


OPTIONS = """
    import argparse, torch

    parser = argparse.ArgumentParser()
    parser.add_argument("-g", "--gpu", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.1)
    {parsed}
    {read}
    net = Net(8)
    for x, y in torch.utils.data.DataLoader(data):
        criterion(net(x), y).backward()
        optimizer.step()
"""


@pytest.mark.parametrize("read_in_vain", ["GPU = args.gpu", "pass", "rate = args.rate", "print(args.rate)"])
def test_an_option_that_nothing_reads_puts_nothing_on_a_gpu(read, read_in_vain):
    assert not read(OPTIONS.format(parsed="args = parser.parse_args()", read=read_in_vain)).may_run_on_cuda


@pytest.mark.parametrize(
    ("parsed", "read_then"),
    [
        ("args = parser.parse_args()", "GPU = args.gpu; start(GPU)"),
        ("args = parser.parse_args()", "start(args.gpu)"),
        ("args = parser.parse_args()", "start(args)"),
        ("args = parser.parse_args()", "start(**vars(args))"),
        ("start(parser.parse_args())", "pass"),
        ("parser.run()", "pass"),
    ],
)
def test_one_that_something_reads_may(read, parsed, read_then):
    assert read(OPTIONS.format(parsed=parsed, read=read_then)).may_run_on_cuda


def test_an_option_with_the_name_of_a_module_of_torch_is_not_read_with_it(read):
    asked = "args = parser.parse_args(); print(torch.cuda.is_available()); device = 'cpu'"
    options = OPTIONS.replace("--gpu", "--cuda").format(parsed=asked, read="pass")
    assert not read(options).may_run_on_cuda
    assert read(options.replace("criterion(net(x)", "criterion(net(x.to(args.cuda))")).may_run_on_cuda


@pytest.mark.parametrize("decided", ["device = 'cpu'", "device = torch.device('cuda'); device = torch.device('cpu')"])
def test_one_that_other_files_may_read_moves_nothing_here_where_the_device_is_decided(read, decided):
    parsed = f"{decided}; args = parser.parse_args(); data = load(args)"
    assert not read(OPTIONS.format(parsed=parsed, read="pass")).may_run_on_cuda


HELD = """
    import torch

    class Buffer:
        def __init__(self, size, device):
            self.device = {taken}

        def sample(self):
            return torch.as_tensor(self.rows, device=self.device)

    class Agent:
        def __init__(self):
            self.device = {own}
            self.net = Net().to(self.device)
            self.buffer = Buffer(64, {given})

        def update(self):
            for state in self.buffer.sample():
                loss = self.net(state).mean()
                loss.backward()
                self.optimizer.step()
"""


@pytest.mark.parametrize(
    ("own", "taken", "given", "cuda"),
    [
        ("torch.device('cpu')", "device", "self.device", False),
        ("'cpu'", "device", "'cpu'", False),
        ("torch.device('cpu')", "device", "where", True),
        ("torch.device(name)", "device", "self.device", True),
        ("torch.device('cpu')", "device or default_device", "self.device", True),
    ],
)
def test_what_each_of_two_objects_keeps_and_one_gives_the_other_is_the_processor(read, own, taken, given, cuda):
    assert read(HELD.format(own=own, taken=taken, given=given)).devices.may_be_cuda is cuda


@pytest.mark.parametrize(
    ("chosen", "cuda"),
    [
        ("config['device']", True),
        ("choose()", True),
        ("'cpu'", False),
        ("torch.device('cpu')", False),
    ],
)
def test_what_a_function_calls_a_device_and_hands_on_is_what_it_took_it_from(read, chosen, cuda):
    code = f"""
        import torch

        def update(net, x, y, device):
            criterion(net(x.to(device)), y).backward()

        def train(net, loader, config):
            device = {chosen}
            for x, y in loader:
                update(net, x, y, device)
    """
    assert read(code).devices.may_be_cuda is cuda


FITTED = """
{top}

def fit(net, loader, device):
    net.to(device)
    for x, y in loader:
        criterion(net(x.to(device)), y).backward()
        optimizer.step()

def main(config):
    {own}
    fit(Net(), loader, device)

def again(device):
    fit(Net(), loader, device)

{given}
"""


@pytest.mark.parametrize(
    ("top", "own", "given", "cuda"),
    [
        ("", "device = 'cpu'", "again('cpu')", False),
        ("", "pass", "again('cpu')", False),
        ("", "device = config['device']", "again('cpu')", True),
        ("", "device, seed = config['device'], 0", "again('cpu')", True),
        ("from settings import *", "pass", "again(device)", True),
        ("from settings import device", "pass", "again(device)", True),
    ],
)
def test_what_functions_only_hand_on_from_elsewhere_is_no_decision_for_the_processor(read, top, own, given, cuda):
    assert read(FITTED.format(top=top, own=own, given=given)).devices.may_be_cuda is cuda


@pytest.mark.parametrize(
    ("between", "cuda"),
    [('print("on", device)', False), ("net = Net().to(device)", True), ("log(device)", True)],
)
def test_a_device_that_is_printed_before_it_is_decided_otherwise_is_not_used(read, between, cuda):
    code = f"""
    import torch
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    {between}
    device = torch.device("cpu")
    model = Net().to(device)
    for x, y in loader:
        criterion(model(x.to(device)), y).backward()
        optimizer.step()
    """
    assert read(code).devices.may_be_cuda is cuda


LAYERED = """
    import torch

    class Policy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(4, 2)

        def forward(self, x):
            device = self.first.weight.device
            return self.first(x.to(device))

        def fit(self, loader, optimizer):
            for x, y in loader:
                {loss}.backward()
                optimizer.step()
    {used}
"""


@pytest.mark.parametrize(
    ("used", "loss", "cuda"),
    [
        ("Policy().fit(loader, optimizer)", "criterion(self(x), y)", False),
        ("Policy().to(place).fit(loader, optimizer)", "criterion(self(x), y)", True),
        ("Policy().fit(loader, optimizer)", "criterion(self(x), y.to(self.device))", True),
        ("", "criterion(self(x), y)", True),
    ],
)
def test_the_place_of_a_layer_is_where_its_network_was_put(read, used, loss, cuda):
    assert read(LAYERED.format(used=used, loss=loss)).may_run_on_cuda is cuda
