"""Loaders of rewritten loops page-lock their batches where all that leads to them is seen to stay on the CPU."""

import pytest

from oomfix.rewrite.apply import apply_to
from oomfix.rewrite.options import Options
from oomfix.rules import all_rules
from oomfix.source import Source
from tests.rewrite.equivalence import assert_same_bits, rewritten, run

SCRIPT = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split
from torchvision import datasets, transforms

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(48, 3).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = datasets.FakeData(44, (3, 4, 4), 3, transforms.ToTensor())
loader = DataLoader(rows, batch_size=8, shuffle=True)
for x, y in loader:
    x, y = x.to(device), y.to(device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x.flatten(1)), y)
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.10f}")
"""
MADE = "rows = datasets.FakeData(44, (3, 4, 4), 3, transforms.ToTensor())\n"
LOADER = "loader = DataLoader(rows, batch_size=8, shuffle=True)\n"
PINNED = "loader = DataLoader(rows, batch_size=8, shuffle=True, pin_memory=True)\n"
MOVED = "    x, y = x.to(device), y.to(device)\n"
IN_FUNCTIONS = SCRIPT.replace("for x, y in loader", "def train(batches, other):\n  for x, y in batches").replace(
    "\n    ", "\n      "
)


def after(*changes: tuple[str, str], script: str = SCRIPT) -> str:
    """The rewritten script, with parts of it replaced ahead."""
    for old, new in changes:
        assert old in script
        script = script.replace(old, new)
    return rewritten(script).text


def test_a_loader_whose_data_stays_on_the_cpu_page_locks_its_batches():
    text = after()
    assert PINNED in text
    assert rewritten(text).text == text


def test_page_locked_batches_train_the_same():
    pytest.importorskip("torchvision")
    assert_same_bits(run(SCRIPT), run(rewritten(SCRIPT).text, preset="off"))


def test_the_manager_is_made_behind_the_imports_that_follow_a_loader():
    top, rest = SCRIPT.split("\ndevice =")
    rest = rest.replace(MADE, "").replace(LOADER, "")
    text = rewritten(f"{top}{MADE}{LOADER}import json\n\ndevice ={rest}").text
    assert PINNED in text
    assert text.index("runtime.preset") > text.index("import json")


def test_the_summary_names_the_loader():
    (loop,) = rewritten(SCRIPT).loops
    assert loop.notes == ("pin_memory=True for the loader in line 10",)


@pytest.mark.parametrize(
    "made",
    [
        "rows = datasets.CIFAR10(config.root, transform=transforms.ToTensor(), download=config.download)\n",
        "rows = datasets.ImageFolder('data', transforms.Compose([transforms.Resize(size), transforms.ToTensor()]))\n",
        "parts = [transforms.ToTensor(), transforms.Normalize(config.mean, config.std)]\n"
        "whole = transforms.Compose(transforms=parts)\nrows = datasets.MNIST(root='data', transform=whole)\n",
        "transforms = transforms.Compose([transforms.ToTensor()])\n"
        "rows = datasets.MNIST('data', transform=transforms)\n",
        "rows, rest = random_split(datasets.SVHN('data', transform=transforms.ToTensor()), [30, 14])\n",
        "whole = datasets.SVHN('data', 'train', transforms.ToTensor())\nprint(len(whole), whole.classes, whole[0])\n"
        "rows = Subset(whole, range(30))\n",
        "if config.cifar:\n    rows = datasets.CIFAR10('data', True, None)\nelse:\n    rows = datasets.SVHN('data')\n",
        "rows, tests = datasets.CIFAR10('data'), datasets.CIFAR10('data', train=False)\n",
        "from torchvision.transforms import v2\n"
        "rows = datasets.MNIST('data', transform=v2.RandomApply([v2.ToTensor()]))\n",
        "whole = datasets.SVHN('data')\nnames = whole.classes\n"
        "rows = Subset(whole, range(30))\nrows = Subset(rows, range(9))\n",
        "import torchvision\nrows = torchvision.datasets.MNIST('data', transform=torchvision.transforms.ToTensor())\n",
        "class Flip:\n    def __init__(self, transform):\n        self.transform = transform\n\n\n" + MADE,
    ],
    ids="folder files list rebound split subset branches pair v2 twice full-names self".split(),
)
def test_data_sets_of_torchvision(made):
    assert PINNED in after((MADE, f"import config\n{made}"))


@pytest.mark.parametrize(
    "made",
    [
        "from data import rows\n",
        "from data import MNIST\nrows = MNIST('data')\n",
        "class MNIST(datasets.MNIST):\n    pass\n\n\nrows = MNIST('data')\n",
        "class Rows(Dataset):\n    def __getitem__(self, index):\n        return self.x[index]\n\n\nrows = Rows()\n",
        "rows = TensorDataset(torch.randn(44, 5), torch.zeros(44).long())\n",
        "rows = datasets.MNIST(*given)\n",
        "rows = datasets.MNIST('data', **given)\n",
        "rows = datasets.MNIST('data', True, flip)\n",
        "rows = datasets.MNIST('data', transform=transforms.Compose(**given))\n",
        "rows = datasets.MNIST('data', transform=flip)\n",
        "rows = datasets.ImageFolder('data', loader=read)\n",
        "rows = datasets.MNIST('data', transform=transforms.Lambda(lambda x: x.to(0)))\n",
        "rows = datasets.MNIST('data', transform=transforms.Compose([transforms.ToTensor(), flip]))\n",
        "rows = datasets.MNIST('data', transform=transforms.RandomApply(p=0.5, transforms=[flip]))\n",
        "rows = datasets.MNIST('data', transform=transforms.functional.hflip)\n",
        "parts = [transforms.ToTensor()]\nparts.append(flip)\n"
        "rows = datasets.MNIST('data', transform=transforms.Compose(parts))\n",
        "parts = [transforms.ToTensor()]\nparts[0] = flip\n"
        "rows = datasets.MNIST('data', transform=transforms.Compose(parts))\n",
        "def make(rows=datasets.MNIST('data')):\n    return DataLoader(rows)\n\n\nrows = make().dataset\n",
        "for rows in [datasets.MNIST('data')]:\n    pass\n",
        "rows = datasets.MNIST('data')\nif len(rows) > 50:\n    rows = unseen(rows)\n",
        "rows = rows\n",
        f"{MADE}rows.transform = model\n",
        f"{MADE}rows.transforms.transform.transforms.append(model)\n",
        f"{MADE}rows.targets[0] = torch.zeros(1).cuda()\n",
        f"{MADE}setattr(rows, 'targets', model)\n",
        f"{MADE}vars(rows).update(transform=model)\n",
        f"{MADE}import helpers\nhelpers.prepare(rows)\n",
        f"{MADE}same = rows\n",
        f"{MADE}datasets.FakeData.__getitem__ = unseen\n",
        f"from data import datasets\n{MADE}",
        f"datasets = unseen\n{MADE}",
        f"torch.set_default_device('cuda')\n{MADE}",
        f"import torchvision\ntorchvision.set_video_backend('cuda')\n{MADE}",
        f"torch.set_default_tensor_type(torch.cuda.FloatTensor)\n{MADE}",
        f"import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\n{MADE}",
        f"card = torch.device('cuda:1')\n{MADE}",
        f"rank = 0\ncard = torch.device(f'cuda:{{rank}}')\n{MADE}",
    ],
)
def test_data_that_may_be_elsewhere_leaves_the_loader_as_it_is(made):
    assert LOADER in after((MADE, made))


@pytest.mark.parametrize(
    "change",
    [
        "loader.dataset.transform = model\n",
        "loader.dataset.transform.transforms.append(model)\n",
        "loader.dataset.targets[:] = [torch.zeros(1).cuda()]\n",
        "setattr(loader.dataset, 'transform', model)\n",
    ],
)
def test_data_that_is_changed_where_its_loader_holds_it_leaves_the_loader_as_it_is(change):
    assert LOADER in after((LOADER, LOADER + change))


def test_another_card_is_no_hindrance_where_it_is_made_the_current_one():
    made = "card = torch.device('cuda:1')\ntorch.cuda.set_device(card)\n"
    assert PINNED in after((MADE, made + MADE))


@pytest.mark.parametrize(
    "arguments",
    [
        "rows, batch_size=8, pin_memory=False",
        "rows, batch_size=8, **options",
        "*given, batch_size=8",
        "rows, batch_size=8, collate_fn=list",
        "rows, 8, True, None, None, 0, list",
        "rows, batch_size=None",
        "batch_size=8",
    ],
)
def test_a_call_that_says_otherwise_or_more_is_left_as_it_is(arguments):
    made = f"loader = DataLoader({arguments})\n"
    assert made in after((LOADER, made))


@pytest.mark.parametrize(
    "moved",
    [
        "    x, y = x.cuda(), y.cuda(non_blocking=True)\n",
        "    x = x.to('cuda', non_blocking=True)\n",
        "    x, y = [part.to(device) for part in (x, y)]\n",
        "    batch = (x, y)\n    x = batch[0].view(-1, 48).to(device=device)\n",
        "    if len(x) > 1:\n        x = x.cuda()\n",
        "    from torch.autograd import Variable\n    x, y = Variable(x).cuda(), Variable(y.cuda())\n",
    ],
)
def test_batches_are_moved_in_several_ways(moved):
    assert PINNED in after((MOVED, moved))


@pytest.mark.parametrize(
    "moved",
    [
        "",
        "    x = x.float().to(device)\n",
        "    x = x.double()\n    x = x.to(device)\n",
        "    if len(x) > 1:\n        x = x.double()\n    x = x.to(device)\n",
        "    x = x.to(torch.float32)\n",
        "    x = x.cuda(rank)\n",
        "    z = torch.randn(8, 5).to(device)\n",
        "    z = x.new_zeros(size=(5,), device=device)\n",
        "    x = x.to('cpu')\n",
    ],
)
def test_batches_that_are_not_moved_as_the_loader_gives_them(moved):
    assert LOADER in after((MOVED, moved))


@pytest.mark.parametrize("write", ["x += 1", "x[0] = 0", "x.clamp_(0, 1)", "torch.neg(x, out=x)"])
def test_a_batch_that_is_written_into_behind_its_move_is_not_page_locked(write):
    """The copy out of page-locked memory may still be under way."""
    moved = "    on_card = x.to(device, non_blocking=True)\n"
    assert LOADER in after((MOVED, f"{moved}    {write}\n"))
    assert PINNED in after((MOVED, f"    {write}\n{moved}"))
    assert PINNED in after((MOVED, f"    x = x.to(device, non_blocking=True)\n    {write}\n"))


def test_a_device_that_is_made_of_its_own_name():
    assert PINNED in after((MADE, f"device = torch.device(device)\n{MADE}"))


def test_a_script_on_the_cpu_is_left_as_it_is():
    cpu = ('torch.device("cuda" if torch.cuda.is_available() else "cpu")', 'torch.device("cpu")')
    assert LOADER in after(cpu)
    assert LOADER in after(cpu, (MADE, "other = torch.ones(1).cuda()\n" + MADE))


@pytest.mark.parametrize(
    ("made", "call"),
    [
        ("", "train(loader, 0)"),
        ("", "train(other=0, batches=loader)"),
        ("loaders = {'train': loader, 'val': None}\n", "train(loaders['train'], 0)"),
        ("loaders = [loader, None]\n", "train(loaders[config.number], 0)"),
        ("def get():\n    return loader, 0\n\n\nfirst, second = get()\n", "train(first, second)"),
        ("shown = tqdm(enumerate(loader if config.short else other))\n", "train(shown, 0)"),
        ("class Run:\n    def __init__(self, loader):\n        self.loader = loader\n\n    def all(self):\n"
         "        train(self.loader, 0)\n\n\n", "Run(loader).all()"),
        ("class Run:\n    def all(self, batches):\n        train(batches, 0)\n\n\n", "Run().all(loader)"),
    ],
    ids="given keyword dictionary list returned shown attribute method".split(),
)  # fmt: skip
def test_a_loader_is_followed_into_the_function_that_trains(made, call):
    assert PINNED in after(script=f"{IN_FUNCTIONS}\n\nimport config\n{made}{call}\n")


def test_a_function_that_unpacks_what_it_returns_ends_the_search():
    endless = "def get():\n    first, last = get()\n    return first\n\n\n"
    assert LOADER in after(script=f"{IN_FUNCTIONS}\n{endless}train(get(), 0)\n")


def test_another_loader_of_the_same_tuple_or_dictionary_is_left_as_it_is():
    held = "tests = DataLoader(rows)\n\n\ndef get():\n    return {'train': loader, 'tests': tests}, tests\n\n\n"
    text = after(script=f"{IN_FUNCTIONS}\n{held}loaders, last = get()\ntrain(loaders['train'], 0)\n")
    assert PINNED in text
    assert "tests = DataLoader(rows)\n" in text


def test_what_only_evaluates_is_left_as_it_is():
    held = f"{LOADER}test_loader = DataLoader(rows, batch_size=8)\n"
    tested = "with torch.no_grad():\n    for x, y in test_loader:\n        model(x.to(device).flatten(1))\n"
    text = after((LOADER, held), script=SCRIPT + tested)
    assert PINNED in text
    assert "test_loader = DataLoader(rows, batch_size=8)\n" in text


@pytest.mark.parametrize(
    "kept",
    [
        "batches = list(loader)\n",
        "batches = [batch for batch in loader]\n",
        "import itertools\nbatches = itertools.cycle(loader)\n",
    ],
)
def test_a_loader_whose_batches_are_all_kept_is_left_as_it_is(kept):
    assert LOADER in after((LOADER, LOADER + kept))


def test_loops_that_stay_keep_their_loaders():
    apart = SCRIPT.replace("    loss.backward()\n", "    accelerator.backward(loss)\n")
    own = (
        "for x in torch.zeros(5, 8, 5):\n    loss = model(x.cuda()).mean()\n    loss.backward()\n    optimizer.step()\n"
    )
    after = rewritten(f"from accelerate import Accelerator\naccelerator = Accelerator()\n{apart}{own}")
    assert [loop.rewrite for loop in after.loops] == ["none", "micro-batched"]
    assert LOADER in after.text


def test_local_fixes_alone_leave_loaders_as_they_are():
    source = Source.from_bytes("train.py", SCRIPT.encode())
    assert apply_to(source, all_rules(), Options("16gb", runtime=False)).text == SCRIPT


def test_a_preset_of_ones_own_may_do_without_page_locked_memory():
    assert LOADER in rewritten(SCRIPT, pin_memory=False).text


@pytest.mark.parametrize(
    ("before", "changed"),
    [
        ("DataLoader(\n    rows,\n    batch_size=8,\n)", "DataLoader(\n    rows,\n    batch_size=8,\n    {},\n)"),
        ("DataLoader(\n    rows,\n    batch_size=8\n)", "DataLoader(\n    rows,\n    batch_size=8,\n    {}\n)"),
        (
            "DataLoader(\n    rows,\n    batch_size=8  # rows\n)",
            "DataLoader(\n    rows,\n    batch_size=8,  # rows\n    {}\n)",
        ),
        (
            "DataLoader(\n    rows,\n    batch_size=8,  # rows\n)",
            "DataLoader(\n    rows,\n    batch_size=8,  # rows\n    {},\n)",
        ),
        ("DataLoader(rows,\n    batch_size=8)", "DataLoader(rows,\n    batch_size=8,\n    {})"),
        ("DataLoader(\n    rows, batch_size=8\n)", "DataLoader(\n    rows, batch_size=8, {}\n)"),
        ("DataLoader(rows, batch_size=8,)", "DataLoader(rows, batch_size=8, {},)"),
        ("DataLoader(rows,batch_size=8)", "DataLoader(rows,batch_size=8,{})"),
        ("DataLoader(rows, batch_size=(8))", "DataLoader(rows, batch_size=(8), {})"),
        ("DataLoader(rows)", "DataLoader(rows, {})"),
    ],
)
def test_the_argument_is_written_in_the_layout_of_the_call(before, changed):
    text = after((LOADER, f"loader = {before}\n"))
    assert f"loader = {changed.format('pin_memory=True')}\n" in text
    assert rewritten(text).text == text


def test_spaces_around_the_equals_sign_are_those_of_the_call():
    text = after((LOADER, "loader = DataLoader(rows, batch_size = 8)\n"))
    assert "loader = DataLoader(rows, batch_size = 8, pin_memory = True)\n" in text


def test_a_line_that_would_get_longer_than_those_of_the_file_is_broken():
    call = "loader = DataLoader(rows, batch_size=8, shuffle=True, num_workers=0, drop_last=False)"
    text = after((LOADER, f"{call}\n"))
    arguments = call[len("loader = DataLoader(") : -1]
    assert f"loader = DataLoader(\n    {arguments}, pin_memory=True\n)\n" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("num_workers=2, prefetch_factor=8", "num_workers=2, prefetch_factor=2, pin_memory=True"),
        ("num_workers=2, prefetch_factor=1", "num_workers=2, prefetch_factor=1, pin_memory=True"),
        ("num_workers=2, prefetch_factor=k", "num_workers=2, prefetch_factor=k, pin_memory=True"),
        ("prefetch_factor=8, sampler=s", "prefetch_factor=8, sampler=s, pin_memory=True"),
        ("prefetch_factor=8, collate_fn=c", "prefetch_factor=2, collate_fn=c"),
        ("prefetch_factor=8, persistent_workers=k, collate_fn=c",) * 2,
    ],
)
def test_batches_fetched_ahead_come_down_to_those_of_the_preset(arguments, expected):
    text = after((LOADER, f"loader = DataLoader(rows, {arguments})\n"))
    assert f"loader = DataLoader(rows, {expected})\n" in text
