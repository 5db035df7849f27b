"""Loaders of rewritten loops page-lock their batches where all that leads to them is seen to stay on the CPU."""

import pytest

from oomfix.rewrite.apply import Options, apply_to
from oomfix.rules import all_rules
from oomfix.source import Source
from tests.rewrite.equivalence import assert_same_bits, rewritten, run

SCRIPT = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split


class Rows(Dataset):
    def __init__(self, rows, transform=None):
        self.inputs, self.targets = torch.randn(rows, 5), torch.randint(0, 3, (rows,))
        self.transform = transform

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        x = self.inputs[index]
        return x if self.transform is None else self.transform(x), self.targets[index]


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(5, 3).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = Rows(44)
loader = DataLoader(rows, batch_size=8, shuffle=True)
for x, y in loader:
    x, y = x.to(device), y.to(device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.10f}")
"""
MADE = "rows = Rows(44)\n"
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
    assert_same_bits(run(SCRIPT), run(text, preset="off"))


def test_the_manager_is_made_behind_the_imports_that_follow_a_loader():
    top, rest = SCRIPT[: SCRIPT.index("\n\nclass")], SCRIPT[SCRIPT.index("device =") :]
    rows = "rows = TensorDataset(torch.zeros(44, 5), torch.zeros(44).long())\n"
    text = rewritten(f"{top}{rows}{LOADER}import json\n\n{rest.replace(MADE, '').replace(LOADER, '')}").text
    assert PINNED in text
    assert text.index("runtime.preset") > text.index("import json")


def test_the_summary_names_the_loader():
    (loop,) = rewritten(SCRIPT).loops
    assert loop.notes == ("pin_memory=True for the loader in line 23",)


@pytest.mark.parametrize(
    "made",
    [
        "rows = datasets.CIFAR10(config.root, transform=transforms.ToTensor())\n",
        "rows = datasets.ImageFolder(root='data', transform=transforms.Compose([transforms.ToTensor()]))\n",
        "rows, rest = random_split(Rows(44), [30, 14])\n",
        "rows = TensorDataset(torch.randn(44, 5).float(), torch.zeros(44).to(torch.int64))\n",
        "found = [torch.zeros(5)]\nfound.append(torch.ones(5))\nrows = TensorDataset(torch.stack(found))\n",
        "def noise(x):\n    return x + torch.randn(5)\n\n\nrows = Rows(44, noise)\n",
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--device')\n"
        "args = parser.parse_args()\nargs.device = device\nrows = datasets.FakeData(args.rows)\n",
    ],
    ids=["torchvision", "folder", "split", "tensors", "list", "transform", "command line"],
)
def test_data_whose_making_is_in_sight(made):
    assert PINNED in after((MADE, f"import config\nfrom torchvision import datasets, transforms\n{made}"))


@pytest.mark.parametrize(
    "made",
    [
        "from data import Rows\nrows = Rows(44)\n",
        "import data\nfrom torchvision import datasets\nrows = datasets.CIFAR10('data', transform=data.transform)\n",
        "rows = Rows(44, lambda x: x.cuda())\n",
        "rows = Rows(44, transform=lambda x: x.to(device))\n",
        "rows = Rows(44, transform=lambda x: x.to(0))\n",
        "rows = TensorDataset(torch.randn(44, 5, device=device))\n",
        "rows = TensorDataset(torch.load('rows.pt'))\n",
        "rows = TensorDataset(torch.randn(44, 5).to_sparse())\n",
        "import pickle\nrows = pickle.load(open('rows.pkl', 'rb'))\n",
        "def move(x):\n    return x.cuda()\n\n\nrows = Rows(44, move)\n",
        "def fill(data):\n    data.inputs = data.inputs.to(device)\n\n\nrows = Rows(44)\nfill(rows)\n",
        "found = []\nfound.append(torch.ones(5).cuda())\nrows = TensorDataset(torch.stack(found))\n",
        "rows = Rows(44)\nrows.inputs = rows.inputs.to(device)\n",
        "rows = Rows(44)\nsame = rows\nsame.transform = model\n",
        "rows = Rows(44)\nsetattr(rows, 'inputs', rows.inputs)\n",
        "rows = Rows(44)\nif len(rows) > 50:\n    rows = unseen(rows)\n",
        "import helpers\nrows = Rows(44)\nhelpers.prepare(rows)\n",
        "torch.set_default_device('cuda')\nrows = Rows(44)\n",
        "torch.set_default_tensor_type(torch.cuda.FloatTensor)\nrows = Rows(44)\n",
        "card = torch.device('cuda:1')\nrows = Rows(44)\n",
        "rank = 0\ncard = torch.device(f'cuda:{rank}')\nrows = Rows(44)\n",
    ],
)
def test_data_that_may_be_elsewhere_leaves_the_loader_as_it_is(made):
    assert LOADER in after((MADE, made))


def test_a_data_set_that_moves_what_it_gives_is_left_as_it_is():
    assert LOADER in after(("x = self.inputs[index]", "x = self.inputs[index].cuda()"))


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
        "    x, y = [part.to(device) for part in (x, y)]\n    x = x.view(-1, 5).to(device=device)\n",
        "    from torch.autograd import Variable\n    x, y = Variable(x).cuda(), Variable(y.cuda())\n",
    ],
)
def test_batches_are_moved_in_several_ways(moved):
    assert PINNED in after((MOVED, moved))


def test_a_function_of_the_file_may_move_the_batches():
    helper = "def moved(batch):\n    return [part.to(device) for part in batch]\n\n\n"
    header = "for batch in loader:\n    x, y = moved(batch)\n"
    assert PINNED in after((f"for x, y in loader:\n{MOVED}", header), ("class Rows", f"{helper}class Rows"))


@pytest.mark.parametrize(
    "moved",
    [
        "",
        "    x = x.float().to(device)\n",
        "    x = x.double()\n    x = x.to(device)\n",
        "    x = x.to(torch.float32)\n",
        "    x = x.cuda(rank)\n",
        "    z = torch.randn(8, 5).to(device)\n",
        "    x = x.to('cpu')\n",
    ],
)
def test_batches_that_are_not_moved_as_the_loader_gives_them(moved):
    assert LOADER in after((MOVED, moved))


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
        ("def get():\n    return loader, 0\n\n\nfirst, second = get()\n", "train(first, second)"),
    ],
)
def test_a_loader_is_followed_into_the_function_that_trains(made, call):
    assert PINNED in after(script=f"{IN_FUNCTIONS}\n\n{made}{call}\n")


def test_what_only_evaluates_is_left_as_it_is():
    held = f"{LOADER}test_loader = DataLoader(rows, batch_size=8)\n"
    tested = "with torch.no_grad():\n    for x, y in test_loader:\n        model(x.to(device))\n"
    text = after((LOADER, held), script=SCRIPT + tested)
    assert PINNED in text
    assert "test_loader = DataLoader(rows, batch_size=8)\n" in text


@pytest.mark.parametrize("kept", ["batches = list(loader)\n", "import itertools\nbatches = itertools.cycle(loader)\n"])
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
    assert f"{call[:-1]},\n                    pin_memory=True)\n" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("num_workers=2, prefetch_factor=8", "num_workers=2, prefetch_factor=2, pin_memory=True"),
        ("num_workers=2, prefetch_factor=2", "num_workers=2, prefetch_factor=2, pin_memory=True"),
        ("num_workers=2, prefetch_factor=k", "num_workers=2, prefetch_factor=k, pin_memory=True"),
        ("prefetch_factor=8, sampler=s", "prefetch_factor=8, sampler=s, pin_memory=True"),
        ("prefetch_factor=8, collate_fn=c", "prefetch_factor=2, collate_fn=c"),
        ("prefetch_factor=8, persistent_workers=k, collate_fn=c",) * 2,
    ],
)
def test_batches_fetched_ahead_come_down_to_those_of_the_preset(arguments, expected):
    text = after((LOADER, f"loader = DataLoader(rows, {arguments})\n"))
    assert f"loader = DataLoader(rows, {expected})\n" in text
