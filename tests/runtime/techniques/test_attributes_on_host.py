"""Tensors that modules keep as attributes, in host memory: same values, same gradients, nothing written unseen."""

import copy
import io
import weakref

import pytest
import torch
from torch import nn

from oomfix.runtime.calls.kept_state import KeptState
from oomfix.runtime.techniques import offloading
from oomfix.runtime.techniques.attributes_on_host import attributes_on_host
from tests.torch_versions import needs_counts_of_holders


class Attention(nn.Module):
    """Keeps its map, which a loss may read; `table` was made before any forward."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.table = torch.ones(8)
        self.map = None

    def forward(self, x):
        scores = (self.project(x) @ x.transpose(-2, -1) * self.table).softmax(-1)
        self.map = scores * 1
        return scores @ x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x + sum(block.map for block in self.blocks)


@pytest.fixture(autouse=True)
def on_card(monkeypatch):
    """Lets tensors on the CPU count as on a card."""
    monkeypatch.setattr(offloading, "_on_accelerator", lambda tensor: True)


@pytest.fixture
def x():
    return torch.randn(2, 8, 8, dtype=torch.double)


def waiting(model):
    """Where each map came from, of those that wait on the host."""
    return [getattr(vars(block)["map"], "_oomfix_device", None) for block in model.blocks]


@needs_counts_of_holders
def test_gradients_through_what_is_read_back_are_bitwise_those_without(x):
    model = Model().double()
    twin = copy.deepcopy(model)
    twin(x).square().sum().backward()
    with attributes_on_host(model.modules(), min_bytes=0) as moved:
        output = model(x)
    output.square().sum().backward()
    assert moved.moved_bytes >= 3 * 2 * 8 * 8 * 8
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


@needs_counts_of_holders
def test_the_map_leaves_the_card_when_its_module_is_done(x):
    model, alive = Model().double(), []
    blocks = model.blocks

    def look(module, args):
        # as the third block begins, the first two are done
        alive.extend(vars(block)["map"] for block in blocks[:2])

    blocks[2].register_forward_pre_hook(look)
    with torch.no_grad(), attributes_on_host(model.modules(), min_bytes=0):
        x2 = x
        for block in blocks:
            x2 = block(x2)
    assert [hasattr(value, "_oomfix_device") for value in alive] == [True, True]


@needs_counts_of_holders
def test_an_attribute_is_read_on_its_device_with_its_values_also_later(x):
    model = Model().double()
    with torch.no_grad(), attributes_on_host(model.modules(), min_bytes=0):
        model.blocks[0](x)
        assert waiting(model)[0] == x.device
    plain = Attention().double()
    plain.load_state_dict(model.blocks[0].state_dict())
    plain(x)
    assert torch.equal(model.blocks[0].map, plain.map.detach())
    assert not hasattr(model.blocks[0].map, "_oomfix_device")
    assert model.blocks[0].project.weight.device == model.blocks[0].map.device
    assert model.blocks[0].table is vars(model.blocks[0])["table"]
    with pytest.raises(AttributeError, match="no_such"):
        _ = model.blocks[0].no_such


@needs_counts_of_holders
def test_what_a_reader_writes_in_place_is_kept(x):
    block = Attention().double()
    with torch.no_grad(), attributes_on_host([block], min_bytes=0):
        block(x)
        block.map.zero_()
        # another forward ends, which moves the map once more
        nn.Identity()(x)
        assert hasattr(vars(block)["map"], "_oomfix_device")
    assert not block.map.any()


def test_a_tensor_that_somebody_else_holds_stays(x):
    """The output is the attribute: a later layer that writes it in place writes the attribute too."""

    class Kept(nn.Module):
        def forward(self, x):
            self.features = x * 2
            return self.features

    class Viewed(nn.Module):
        def forward(self, x):
            self.features = x * 2
            return self.features.flatten()

    for module in (Kept(), Viewed()):
        chain = nn.Sequential(module, nn.ReLU(inplace=True))
        with torch.no_grad(), attributes_on_host(chain.modules(), min_bytes=0):
            output = chain(x)
        assert torch.equal(module.features.flatten(), output.flatten())
        assert not (module.features < 0).any()


def test_what_autograd_keeps_is_not_moved(x):
    """Moving would free nothing, and backward would find the tensor on the card all the same."""

    class Squared(nn.Module):
        def forward(self, x):
            self.features = x * 2
            return self.features.square()

    module = Squared()
    with attributes_on_host([module], min_bytes=0) as moved:
        module(x.requires_grad_())
    assert moved.moved_bytes == 0


def test_tables_that_were_there_before_stay(x):
    block = Attention().double()
    table = id(block.table)
    with torch.no_grad(), attributes_on_host([block], min_bytes=0):
        block(x)
    assert id(vars(block)["table"]) == table


def test_small_tensors_stay(x):
    block = Attention().double()
    with torch.no_grad(), attributes_on_host([block]) as moved:
        block(x)
    assert moved.moved_bytes == 0


def test_nothing_keeps_the_moved_tensor_alive(x):
    block = Attention().double()
    with torch.no_grad():
        with attributes_on_host([block], min_bytes=0):
            block(x)
        reference = weakref.ref(block.map)
        with attributes_on_host([block], min_bytes=0):
            block(x)
    assert reference() is None


def test_models_are_copied_and_saved_with_what_waits(x):
    block = Attention().double()
    with torch.no_grad(), attributes_on_host([block], min_bytes=0):
        block(x)
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    loaded, twin = torch.load(file, weights_only=False), copy.deepcopy(block)
    assert torch.equal(twin.map, block.map)
    assert torch.equal(loaded.map, block.map)


def test_a_class_that_has_plans_for_the_name_is_left_alone(x):
    class Watched(nn.Module):
        @property
        def features(self):
            return self.__dict__["features"]

        def forward(self, x):
            self.__dict__["features"] = x * 2
            return x

    module = Watched()
    with torch.no_grad(), attributes_on_host([module], min_bytes=0) as moved:
        module(x)
    assert moved.moved_bytes == 0
    assert isinstance(vars(Watched)["features"], property)


@needs_counts_of_holders
def test_what_waits_is_not_copied_to_be_put_back(x):
    """A forward that is new to the runtime keeps the state of its modules, but not what nobody can write."""
    block = Attention().double()
    with torch.no_grad(), attributes_on_host([block], min_bytes=0):
        block(x)
    state = KeptState([block])
    state.keep(True, block.forward)
    assert [place.name for place in state._kept] == ["Attention.table"]
