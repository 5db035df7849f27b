"""Activation checkpointing: less memory, the same gradients, and nothing else that a user could see."""

import copy
import io
import logging
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn

from oomfix import runtime
from oomfix.profile.simulated_card import SimulatedCard
from oomfix.runtime.compat import OutOfMemoryError
from oomfix.runtime.techniques.checkpointing import (
    disable_checkpointing,
    enable_checkpointing,
    is_checkpointed,
    same_gradients,
)


class Block(nn.Module):
    """Residual two-layer block with dropout, as in most networks."""

    def __init__(self, width=16, normalise=False):
        super().__init__()
        self.first = nn.Linear(width, 4 * width)
        self.norm = nn.BatchNorm1d(4 * width) if normalise else nn.Identity()
        self.second = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, scale=1.0):
        return x + scale * self.dropout(self.second(torch.relu(self.norm(self.first(x)))))


class Network(nn.Module):
    def __init__(self, block=Block, depth=4, **arguments):
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([block(**arguments) for _ in range(depth)])
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TimmModel(nn.Module):
    """timm's documented interface: `set_grad_checkpointing(enable=True)`, asserted where there is none."""

    def __init__(self, normalise=False, supported=True):
        super().__init__()
        self.blocks = nn.Sequential(*[Block(normalise=normalise) for _ in range(3)])
        self.grad_checkpointing = False
        self.supported = supported

    def set_grad_checkpointing(self, enable=True):
        assert self.supported or not enable, "gradient checkpointing not supported"
        self.grad_checkpointing = enable

    def forward(self, x):
        return self.blocks(x)


def seeded(build, *args, **kwargs):
    torch.manual_seed(0)
    return build(*args, **kwargs)


def step(model, batch, seed=1):
    """Gradients of one training step, and the state of torch's generator after it."""
    torch.manual_seed(seed)
    model.zero_grad()
    output = model(batch)
    (output if isinstance(output, torch.Tensor) else output[0]).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], torch.get_rng_state()


def assert_bitwise(first, second):
    assert len(first[0]) == len(second[0]) > 0
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert torch.equal(first[1], second[1])


def test_gradients_and_random_state_are_bitwise_those_without():
    model, batch = seeded(Network), torch.randn(32, 8)
    plain = step(model, batch)
    assert enable_checkpointing(model) == [f"blocks.{i}" for i in range(4)]
    assert_bitwise(step(model, batch), plain)
    assert_bitwise(step(model, batch), plain)


def test_activations_are_not_kept():
    model, batch = Network(depth=8), torch.randn(64, 8)

    def held_bytes():
        with SimulatedCard() as card:
            loss = model(batch).sum()
            held = card.current_bytes
            loss.backward()
        return held

    plain = held_bytes()
    enable_checkpointing(model)
    held_bytes()  # the first forward also observes the blocks
    assert held_bytes() < 0.25 * plain
    disable_checkpointing(model)
    assert held_bytes() == plain


def test_nothing_a_user_can_see_changes():
    model = Network(normalise=True)
    before = (
        str(model),
        list(model.state_dict()),
        [name for name, _ in model.named_modules()],
        [sorted(vars(module)) for module in model.modules()],
        [module.__class__.__name__ for module in model.modules()],
    )
    assert enable_checkpointing(model)
    step(model, torch.randn(8, 8))
    assert all(isinstance(block, Block) for block in model.blocks)
    assert before == (
        str(model),
        list(model.state_dict()),
        [name for name, _ in model.named_modules()],
        [sorted(vars(module)) for module in model.modules()],
        [module.__class__.__name__ for module in model.modules()],
    )


def test_a_saved_model_names_only_the_users_own_classes():
    model = seeded(Network)
    enable_checkpointing(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    assert b"oomfix" not in pickle.dumps(model.blocks[0]).replace(__name__.encode(), b"")
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    assert all(type(block) is Block for block in loaded.blocks)
    assert_bitwise(step(loaded, torch.ones(4, 8)), step(model, torch.ones(4, 8)))


def test_a_deep_copy_trains_its_own_weights_and_is_checkpointed_too():
    model, batch = seeded(Network, depth=8), torch.randn(64, 8)
    enable_checkpointing(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    expected = seeded(Network, depth=8)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.mul_(0.5)
    assert_bitwise(step(twin, batch), step(expected, batch))
    assert all(parameter.grad is None for parameter in model.parameters())
    with SimulatedCard() as card:
        loss = twin(batch).sum()
        held = card.current_bytes
        del loss
        loss = expected(batch).sum()
        assert held < 0.25 * card.current_bytes
        del loss


def test_a_deep_copy_uses_the_users_own_deepcopy():
    class Copied(Block):
        def __deepcopy__(self, memo):
            twin = Copied()
            twin.copied = True
            return twin

    model = Network(block=Copied)
    enable_checkpointing(model)
    assert all(block.copied and isinstance(block, Copied) for block in copy.deepcopy(model).blocks)


def test_subclass_hooks_of_the_users_class_do_not_fire():
    registered = []

    class Registered(Block):
        def __init_subclass__(cls, **kwargs):
            registered.append(cls)

    enable_checkpointing(Network(block=Registered))
    assert registered == []


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_statistics_are_updated_once(momentum):
    model, batch = seeded(Network, normalise=True), torch.randn(32, 8)
    for block in model.blocks:
        block.norm.momentum = momentum
    plain_model = copy.deepcopy(model)
    enable_checkpointing(model)
    for seed in range(3):
        assert_bitwise(step(model, batch, seed), step(plain_model, batch, seed))
    for (name, buffer), expected in zip(model.named_buffers(), plain_model.buffers(), strict=True):
        assert torch.equal(buffer, expected), name
    assert model.blocks[0].norm.num_batches_tracked == 3


def test_keyword_arguments_and_frozen_blocks_pass():
    class Keyword(Network):
        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x=x, scale=0.5)
            return self.head(x)

    model, batch = seeded(Keyword), torch.randn(16, 8)
    model.stem.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    plain = step(model, batch)
    enable_checkpointing(model)
    assert_bitwise(step(model, batch), plain)


def test_random_numbers_of_python_and_numpy_are_drawn_again():
    class StochasticDepth(Block):
        def forward(self, x, scale=1.0):
            scale = random.random() + float(np.random.rand())
            return super().forward(torch.tanh(scale * x))

    model, batch = seeded(Network, block=StochasticDepth, depth=6), torch.randn(16, 8)

    def seeded_step():
        random.seed(3)
        np.random.seed(3)
        return *step(model, batch), random.getstate(), np.random.get_state()[1].tolist()

    plain = seeded_step()
    enable_checkpointing(model)
    for _ in range(2):
        checkpointed = seeded_step()
        assert_bitwise(checkpointed, plain)
        assert checkpointed[2:] == plain[2:]


class Drawing(Block):
    """Draws from every generator, counts its runs, and updates statistics."""

    def __init__(self):
        super().__init__(normalise=True)
        self.runs = 0

    def forward(self, x, scale=1.0):
        self.runs += 1
        return super().forward(torch.tanh((random.random() + float(np.random.rand())) * x))


def penalised(model, batch):
    """A gradient penalty differentiates its own backward."""
    batch = batch.clone().requires_grad_()
    loss = model(batch).square().mean()
    (gradient,) = torch.autograd.grad(loss, batch, create_graph=True)
    (loss + gradient.square().sum()).backward()


def retained(model, batch):
    output = model(batch)
    output.square().mean().backward(retain_graph=True)
    output.sin().mean().backward()


def taken_twice(model, batch):
    output, parameters = model(batch), list(model.parameters())
    first = torch.autograd.grad(output.square().mean(), parameters, retain_graph=True)
    second = torch.autograd.grad(output.sin().mean(), parameters)
    for parameter, a, b in zip(parameters, first, second, strict=True):
        parameter.grad = a - 3 * b


@pytest.mark.parametrize("backwards", [penalised, retained, taken_twice], ids=lambda run: run.__name__)
def test_several_backwards_go_through_one_forward(backwards):
    reference = seeded(Network, block=Drawing).train()
    model, batch = copy.deepcopy(reference), torch.randn(16, 8)
    enable_checkpointing(model)
    for _ in range(2):
        states = []
        for net in (reference, model):
            net.zero_grad()
            random.seed(3)
            np.random.seed(3)
            torch.manual_seed(3)
            backwards(net, batch)
            states.append((random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()))
        assert states[0] == states[1]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    assert all(map(torch.equal, model.buffers(), reference.buffers()))
    assert [block.runs for block in model.blocks] == [2] * 4


def test_attributes_change_as_often_as_forward_runs():
    class Counting(Block):
        def __init__(self):
            super().__init__()
            self.calls, self.norms, self.last = 0, [], None

        def forward(self, x, scale=1.0):
            self.calls += 1
            self.norms.append(x.detach().norm().item())
            self.last = super().forward(x, scale)
            return self.last

    model = Network(block=Counting)
    enable_checkpointing(model)
    for _ in range(3):
        outputs = []
        hooks = [
            block.register_forward_hook(lambda module, args, output, seen=outputs: seen.append(output))
            for block in model.blocks
        ]
        step(model, torch.randn(4, 8))
        assert all(block.last is output for block, output in zip(model.blocks, outputs, strict=True))
        for hook in hooks:
            hook.remove()
    assert all(block.calls == 3 and len(block.norms) == 3 for block in model.blocks)


def writes_input(self, x, scale=1.0):
    x = x.mul_(1.5)
    return x + self.second(torch.tanh(self.first(x)))


def writes_buffer(self, x, scale=1.0):
    self.seen.add_(1)
    return x + self.seen * self.second(torch.tanh(self.first(x)))


def replaces_buffer(self, x, scale=1.0):
    self.seen = self.seen + 1
    return x + self.seen * self.second(torch.tanh(self.first(x)))


def writes_parameter(self, x, scale=1.0):
    with torch.no_grad():
        self.teacher.weight.mul_(0.9)
    return x + self.second(torch.tanh(self.first(x))) + self.teacher(x)


@pytest.mark.parametrize(
    ("forward", "what"),
    [(writes_input, "input"), (writes_buffer, "buffers"), (replaces_buffer, "buffers")],
)
def test_a_block_that_writes_what_it_reads_stays_as_it_was_and_says_so(forward, what, caplog):
    class Writing(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

    Writing.forward = forward
    model, batch = seeded(Network, block=Writing), torch.randn(16, 8)
    plain_model = copy.deepcopy(model)
    enable_checkpointing(model)
    with caplog.at_level(logging.WARNING, logger="oomfix"):
        for _ in range(2):
            assert_bitwise(step(model, batch), step(plain_model, batch))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain_model.buffers(), strict=True))
    assert [record.getMessage() for record in caplog.records] == [
        f"a Writing is not checkpointed: it writes its {what}"
    ] * 4


def test_a_block_that_writes_its_parameters_is_not_run_twice_in_a_step():
    class Teaching(Block):
        def __init__(self):
            super().__init__()
            self.teacher = nn.Linear(16, 16).requires_grad_(False)

    Teaching.forward = writes_parameter
    model, batch = seeded(Network, block=Teaching), torch.randn(16, 8)
    enable_checkpointing(model)
    step(model, batch)
    before = model.blocks[0].teacher.weight.clone()
    step(model, batch)
    assert torch.equal(model.blocks[0].teacher.weight, before * 0.9)


def test_a_buffer_that_blocks_share_can_be_saved_before_them():
    class Shared(Block):
        def forward(self, x, scale=1.0):
            return super().forward(x * self.table)

    model = Network(block=Shared)
    table = torch.ones(16)
    for block in model.blocks:
        block.register_buffer("table", table, persistent=False)
    model.stem.register_forward_hook(lambda module, args, output: output * table)
    enable_checkpointing(model)
    step(model, torch.randn(4, 8))
    assert table._version == 0


def test_a_block_with_a_forward_hook_inside_stays_as_it_was():
    model, features = Network(depth=2), []
    enable_checkpointing(model)
    model.blocks[1].first.register_forward_hook(lambda module, args, output: features.append(output))
    step(model, torch.randn(4, 8))
    assert len(features) == 1


def test_an_error_while_a_block_is_observed_leaves_no_trace():
    class Failing(Block):
        fails = True

        def forward(self, x, scale=1.0):
            self.note = x
            output = super().forward(x, scale)
            if self.fails:
                raise OutOfMemoryError("CUDA out of memory.")
            return output

    model, batch = seeded(Network, block=Failing, normalise=True), torch.randn(16, 8)
    enable_checkpointing(model)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    with pytest.raises(OutOfMemoryError):
        model(batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert not hasattr(model.blocks[0], "note")
    assert model.blocks[0].norm.num_batches_tracked == 0
    Failing.fails = False
    assert_bitwise(step(model, batch), step(seeded(Network, block=Failing, normalise=True), batch))


def test_same_gradients_tells_a_sound_block_from_one_that_reads_hidden_state():
    class Hidden(Block):
        draws = np.random.default_rng(0)

        def forward(self, x, scale=1.0):
            return super().forward(x, float(self.draws.random()))

    class Unseen(Block):
        def forward(self, x, scale=1.0):
            x.data.mul_(1.5)  # does not count as a write for autograd
            return super().forward(x)

    sound = seeded(Network, normalise=True)
    unsound = [seeded(Network, block=Hidden), seeded(Network, block=Unseen)]
    rows, target = torch.randn(2, 8), torch.tensor([0, 2])
    buffers, state = [b.clone() for b in sound.buffers()], torch.get_rng_state()
    for model in (sound, *unsound):
        enable_checkpointing(model)

        def forward(x, y, model=model):
            output = model(x)
            return nn.functional.cross_entropy(output, y), output

        assert same_gradients(model, forward, rows, target) is (model is sound)
        assert same_gradients(model, forward, x=rows, y=target) is (model is sound)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(sound.buffers(), buffers, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_same_gradients_leaves_checkpointing_on():
    model, batch = Network(depth=8), torch.randn(64, 8)
    enable_checkpointing(model)
    assert same_gradients(model, lambda x: model(x).sum(), batch[:2])
    with SimulatedCard() as card:
        loss = model(batch).sum()
        held = card.current_bytes
        disable_checkpointing(model)
        plain_loss = model(batch).sum()
        assert held < 0.25 * (card.current_bytes - held)
        del loss, plain_loss


def test_enabling_twice_or_disabling_without_changes_nothing():
    model = Network()
    disable_checkpointing(model)
    first = enable_checkpointing(model)
    assert enable_checkpointing(model) == first
    disable_checkpointing(model)
    assert all(type(block) is Block for block in model.blocks)


@pytest.mark.parametrize("policy", ["off", "if-needed"])
def test_other_policies_do_nothing_yet(policy):
    model = Network()
    assert enable_checkpointing(model, policy) == []
    assert all(type(block) is Block for block in model.blocks)


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="model: got list, expected a "):
        enable_checkpointing([])
    with pytest.raises(ValueError, match="policy: got 'yes', expected 'off', 'if-needed' or 'on'"):
        enable_checkpointing(Network(), "yes")


# Which blocks


def stage(depth):
    return nn.Sequential(*[Block() for _ in range(depth)])


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()), []),
        (nn.Sequential(Block(), nn.LSTM(16, 16)), []),
        (nn.Sequential(Block(), nn.ReLU(), Block()), ["0", "2"]),
        (nn.ModuleDict({"a": stage(2), "b": stage(3)}), ["a.0", "a.1", "b.0", "b.1", "b.2"]),
        (nn.Sequential(*[stage(4) for _ in range(4)]), [f"{i}.{j}" for i in range(4) for j in range(4)]),
        (
            nn.ModuleList([nn.ModuleList([Block(), nn.Sequential(Block(), nn.ReLU())]) for _ in range(2)]),
            ["0.0", "1.0", "0.1", "1.1"],
        ),
        (
            nn.Transformer(8, 2, 2, 2),
            [f"{part}.layers.{i}" for part in ("encoder", "decoder") for i in (0, 1)],
        ),
    ],
)
def test_repeated_blocks_are_chosen(model, expected):
    assert sorted(enable_checkpointing(model)) == sorted(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every": 2}, [0, 2, 4]),
        ({"every": 3}, [0, 3]),
        ({"skip_last": 1}, [0, 1, 2, 3, 4]),
        ({"every": 2, "skip_last": 2}, [0, 2]),
        ({"skip_last": 7}, []),
    ],
)
def test_some_of_the_blocks_are_checkpointed_with_the_same_gradients(options, expected):
    model, batch = seeded(Network, depth=6), torch.randn(32, 8)
    plain = step(model, batch)
    assert enable_checkpointing(model, **options) == [f"blocks.{index}" for index in expected]
    assert [index for index, block in enumerate(model.blocks) if type(block) is not Block] == expected
    assert_bitwise(step(model, batch), plain)


def test_some_blocks_of_a_model_with_a_switch_are_wrapped_themselves():
    model = TimmModel()
    assert enable_checkpointing(model, skip_last=1) == ["blocks.0", "blocks.1"]
    assert not model.grad_checkpointing


def test_a_switch_that_takes_all_blocks_is_not_thrown_for_some():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16, n_positions=8))
    with pytest.raises(ValueError, match=r"every, skip_last: the model is of transformers, whose own switch takes all"):
        enable_checkpointing(model, every=2)
    with pytest.raises(ValueError, match=r"every, skip_last: 0 is of transformers"):
        enable_checkpointing(nn.Sequential(model), skip_last=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every: got 0, expected a whole number of at least 1"),
        ({"every": True}, "every: got True, expected a whole number of at least 1"),
        ({"skip_last": -1}, "skip_last: got -1, expected a whole number of at least 0"),
    ],
)
def test_counts_of_blocks_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        enable_checkpointing(Network(), **options)


def test_a_forward_set_on_the_instance_is_left_alone():
    model = Network(depth=3)
    model.blocks[0].forward = model.blocks[0].forward
    assert enable_checkpointing(model) == ["blocks.1", "blocks.2"]


# Switches of the libraries


def test_timm_models_use_their_own_switch():
    model = nn.Sequential(TimmModel(), nn.Linear(16, 2))
    assert enable_checkpointing(model) == ["0"]
    assert model[0].grad_checkpointing
    assert all(type(block) is Block for block in model[0].blocks)
    disable_checkpointing(model)
    assert not model[0].grad_checkpointing


def test_a_switch_that_the_user_threw_stays():
    model = TimmModel()
    model.set_grad_checkpointing()
    assert enable_checkpointing(model) == [""]
    disable_checkpointing(model)
    assert model.grad_checkpointing


@pytest.mark.parametrize("model", [TimmModel(normalise=True), TimmModel(supported=False)])
def test_blocks_are_used_where_the_switch_would_count_batches_twice_or_is_none(model):
    assert enable_checkpointing(model) == ["blocks.0", "blocks.1", "blocks.2"]
    assert not model.grad_checkpointing


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64)
    return BertForSequenceClassification(config), {"input_ids": torch.arange(24).view(2, 12)}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.arange(24).view(2, 12)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=3, n_head=2, n_positions=16)), {
        "input_ids": tokens,
        "labels": tokens,
    }


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    size = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    model = ViTForImageClassification(ViTConfig(**size, image_size=16, patch_size=4))
    return model, {"pixel_values": torch.randn(2, 3, 16, 16)}


@pytest.mark.parametrize("build", [bert, gpt2, vit])
def test_transformers_train_the_same_in_less_memory_and_pickle(build):
    torch.manual_seed(0)
    model, batch = build()
    model.train()
    use_cache = getattr(model.config, "use_cache", None)

    def step_and_held_bytes():
        torch.manual_seed(1)
        model.zero_grad()
        with SimulatedCard() as card:
            output = model(**batch)
            (output[0].square().mean() if output[0].dim() else output[0]).backward(retain_graph=True)
            held = card.current_bytes
            del output
        return [parameter.grad.clone() for parameter in model.parameters()], held

    plain, plain_bytes = step_and_held_bytes()
    assert enable_checkpointing(model) == [""]
    assert not getattr(model.config, "use_cache", False)
    checkpointed, held_bytes = step_and_held_bytes()
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))
    assert held_bytes < plain_bytes
    torch.save(model, io.BytesIO())
    copy.deepcopy(model)
    disable_checkpointing(model)
    assert getattr(model.config, "use_cache", None) == use_cache
    assert step_and_held_bytes()[1] == plain_bytes


def test_the_manager_takes_checkpointing_off_a_model_whose_gradients_it_changes(caplog):
    class Hidden(Block):
        draws = np.random.default_rng(0)

        def forward(self, x, scale=1.0):
            return super().forward(x, float(self.draws.random()))

    runtime.reset()
    memory = runtime.preset("16gb", checkpointing="on")
    sound, unsound = (memory.prepare(seeded(Network, block=block)) for block in (Block, Hidden))
    weights = [parameter.clone() for parameter in unsound.parameters()]
    for model in (sound, unsound):
        memory.forward_backward(lambda x, model=model: model(x).pow(2).mean(), torch.randn(4, 8))
    assert is_checkpointed(sound)
    assert not is_checkpointed(unsound)
    assert caplog.text.count("is not checkpointed, because that changes its gradients") == 1
    assert all(torch.equal(a, b) for a, b in zip(unsound.parameters(), weights, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_blocks_are_checkpointed_under_any_precision(precision, caplog):
    runs = []

    class Counted(Block):
        def forward(self, x, scale=1.0):
            runs.append(len(x))
            return super().forward(x, scale)

    runtime.reset()
    memory = runtime.preset("16gb", checkpointing="on", precision=precision, split="never")
    model = memory.prepare(seeded(Network, block=Counted))

    def forward(x):
        if len(x) < 4:
            raise ValueError("too few")  # so that the blocks first run in a training step, not in a check
        return model(x).pow(2).mean()

    for _ in range(3):  # the third is no call to explore
        runs.clear()
        memory.forward_backward(forward, torch.randn(4, 8))
    assert "forward hooks" not in caplog.text
    assert runs == [4] * 2 * len(model.blocks)  # once in forward, once in backward


def kept_bytes(model, x):
    """What a forward keeps for its backward besides weights; its gradients are left in the model."""
    kept = {}

    def keep(tensor):
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x).square().mean()
    loss.backward()
    return sum(kept.values())


@pytest.mark.parametrize("normalise", [False, True])
def test_blocks_that_were_compiled_one_by_one_are_checkpointed(relative_error, normalise):
    torch.compiler.reset()
    reference, x = Network(normalise=normalise).double(), torch.randn(32, 8).double()
    for block in reference.blocks:
        block.dropout.p = 0.0
    models = [copy.deepcopy(reference) for _ in range(2)]
    for model in models:
        model.blocks = nn.ModuleList(torch.compile(block, backend="aot_eager") for block in model.blocks)
    plain, checkpointed = models
    assert enable_checkpointing(checkpointed) == [f"blocks.{number}._orig_mod" for number in range(4)]
    kept = kept_bytes(checkpointed, x) / kept_bytes(plain, x)
    if torch.__version__ >= "2.13" or (torch.__version__ >= "2.6" and not normalise):
        # torch 2.3 keeps nearly all of it, and 2.6 would update statistics twice
        assert kept < 0.4
    kept_bytes(reference, x)
    assert relative_error(checkpointed, reference) < 1e-12
    for ours, theirs in zip(checkpointed.buffers(), reference.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    disable_checkpointing(checkpointed)
    assert not is_checkpointed(checkpointed)
    torch.compiler.reset()
