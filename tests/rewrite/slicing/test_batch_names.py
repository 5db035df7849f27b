"""Which names are parts of the batch, and so given to the function of a loss: not counters, sizes and networks."""

import textwrap

import pytest

from tests.rewrite.equivalence import parts_as_whole, rewritten
from tests.rewrite.small_loops import TOP, apply, assert_trains_the_same


@pytest.mark.parametrize("other", ["", "if y[0]:\n    y = y * 2"])
def test_data_of_the_module_is_an_input_of_a_function_that_trains_on_all_of_it(other):
    text = assert_trains_the_same(f"""\
x, y = loader[0]
{other}

def fit():
    for t in range(3):
        loss = F.cross_entropy(model(x), y.clamp(max=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())

fit()
""")
    assert "def forward(x, y):" in text


def test_the_batch_of_a_loop_around_that_of_a_policy_is_an_input():
    text = assert_trains_the_same("""\
        for x, y in loader:
            weight = torch.ones(())
            for _ in range(2):
                out = model(x)
                loss = (weight * out).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                weight = weight * 0.5
                print(loss.item())
        """)
    assert "def forward(x, weight):" in text


@pytest.mark.parametrize(
    "times",
    ["t = torch.randint(1, 9, (len(x), 1))", "idx = t = torch.rand(len(x), 1)", "t, _ = (lambda: (x[:, :1], 0))()"],
)
def test_times_drawn_for_the_samples_are_an_input_though_they_are_called_as_counters(times):
    text = assert_trains_the_same(f"""\
        for x, y in loader:
            {times}
            out = model(x * t)
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())
        """)
    assert "def forward(x, t, y):" in text


@pytest.mark.parametrize(
    ("header", "made", "inputs"),
    [
        ("for i in range(0, 12, 6):", "idx, y = order[i:i + 6], labels[i:i + 6]", "idx, y"),
        ("for i in range(0, 12, 6):", "y, idx = labels[i:i + 6], order[i:i + 6].long()", "idx, y"),
        ("for y, idx in [(labels[:6], order[:6]), (labels[6:], order[6:])]:", "", "idx, y"),
        ("for n, (idx, y) in enumerate([(order[:6], labels[:6]), (order[6:], labels[6:])]):", "", "idx, y"),
        (
            "for batch in [{'idx': order[:6], 'y': labels[:6]}, {'idx': order[6:], 'y': labels[6:]}]:",
            'idx, y = batch["idx"].long(), batch["y"]',
            "idx, y",
        ),
        ("for idx in order.split(6):", "y = labels[:6]", "idx, y"),
        ("for idx in torch.chunk(order, 2):", "y = labels[:6]", "idx, y"),
        ("for idx in torch.utils.data.BatchSampler(range(12), 6, False):", "y = labels[idx]", "idx, y"),
        ("for idx in minibatches(order.numpy()):", "y = labels[:6]", "idx, y"),
    ],
)
def test_rows_that_are_called_as_a_counter_are_an_input(header, made, inputs):
    text = assert_trains_the_same(f"""\
        def minibatches(rows):
            return [rows[:6], rows[6:]]

        table, order, labels = torch.randn(20, 4), torch.randperm(20)[:12], torch.tensor([0, 1, 1, 0, 1, 0] * 2)
        {header}
            {made}
            loss = F.cross_entropy(model(table[idx]), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())
        """)
    assert f"def forward({inputs}):" in text


@pytest.mark.parametrize(
    ("header", "made"),
    [
        ("for i in range(2):", "x, y = loader[i]"),
        ("for (x, y), i in zip(loader, range(2)):", "pass"),
        ("for x, y in loader:", "i, *ends = 1, 2, 3"),
        ("for x, y in loader:", "*ends, i = 1, x[:3], 2"),
        ("settings = {'i': 2}\n        for x, y in loader:", 'i = settings["i"]'),
    ],
)
def test_a_count_that_comes_with_others_is_no_input(header, made):
    text, _ = apply(f"""\
        {header}
            {made}
            loss = F.cross_entropy(model(x) * i, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """)
    assert "def forward(x, y):" in text


def test_a_count_beside_the_batch_is_no_input():
    text = assert_trains_the_same("""\
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y) / (i + 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())
        """)
    assert "def forward(x, y):" in text


def test_data_of_the_function_around_a_closure_is_an_input():
    text = assert_trains_the_same("""\
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def fit():
            for x, y in loader * 3:
                def closure():
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    return loss

                print(optimizer.step(closure).item())

        fit()
        """)
    assert "def forward(x, y):" in text


def test_what_a_network_is_given_is_an_input_wherever_it_was_bound():
    text = assert_trains_the_same("""\
        critic = nn.Linear(4, 1)
        optimizer.add_param_group({"params": critic.parameters()})

        def step(generator, x, y, scale):
            for _ in range(2):
                noise = x * 0.5
                loss = critic(generator(noise).repeat(1, 2)).mean() - critic(x).mean() * scale
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(loss.item())

        for x, y in loader:
            step(model, x, y, 0.5)
        """)
    assert "def forward(noise, x):" in text


def test_a_sequence_of_which_the_network_is_given_one_column_after_the_other_is_an_input():
    text = assert_trains_the_same("""\
        def update(sequence):
            state = torch.zeros(len(sequence), 2)
            for start in (0, 2):
                state = state.detach()
                loss = 0
                for t in range(start, start + 2):
                    state = state + model(sequence[:, t])
                    loss = loss + state.pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(loss.item())

        for x, y in loader * 2:
            update(x.unsqueeze(1).repeat(1, 4, 1))
    """)
    assert "forward(start, state, sequence)" in text


def test_what_a_loss_reckons_with_is_an_input_though_the_slice_binds_a_part_of_it_anew():
    text = assert_trains_the_same("""\
        def update(states, actions, old, gains):
            for _ in range(2):
                chosen = model(states).softmax(1).gather(1, actions.view(-1, 1))
                old = old.view(-1, 1)
                loss = (gains.view(-1, 1) * chosen / old).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(loss.item())

        for x, y in loader * 2:
            update(x, y, torch.rand(6) + 0.5, torch.rand(6))
        """)
    assert "def forward(states, actions, old, gains):" in text


def test_what_a_loss_reckons_with_is_an_input_where_the_iteration_binds_nothing():
    text = assert_trains_the_same("""\
        def update(states, actions, gains):
            for _ in range(2):
                chosen = model(states).gather(1, actions[:, None]).squeeze(1)
                loss = (chosen * gains).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(loss.item())

        for x, y in loader:
            update(x, y, torch.ones(len(x)))
        """)
    assert "def forward(states, actions, gains):" in text


@pytest.mark.parametrize(
    ("network", "told"),
    [
        ("model(batch.x.float())", "`batch` may be an object, which is cut where it is a mapping, a named tuple or a "),
        ("model(batch.to(device).x)", None),
        ("model(batch.data)", None),
        ('model(batch["x"])', None),
        ("model(x) + model(batch.x)", None),
    ],
)
def test_a_batch_that_may_be_an_object_of_a_kind_that_is_not_cut_is_named(network, told):
    body = f"for batch in batches:\n    x = batch.x\n    loss = F.cross_entropy({network}, batch.y)\n"
    body += "    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n"
    (loop,) = rewritten(TOP + body).loops
    assert loop.rewrite == "micro-batched"
    assert [note.startswith(told or "") for note in loop.notes] == [True] * bool(told)


def test_sizes_and_modules_are_no_part_of_a_batch_that_the_network_draws_itself():
    text, loops = apply("""\
        WIDTH = 4
        def train():
            for x, y in loader:
                n = x.size(0)
                optimizer.zero_grad()
                loss = model(torch.randn(n, WIDTH)).mean()
                loss.backward()
                optimizer.step()
        """)
    assert loops == [("in-place", "the loss is computed from nothing that could be split")]
    assert "    loss = model(torch.randn(n, WIDTH)).mean()\n        memory.backward(loss)\n" in text
    of_module = apply("""\
        for x, y in loader:
            n = x.size(0)
            loss = model(torch.randn(n, 4)).mean()
            loss.backward()
            optimizer.step()
        """)
    assert of_module[1] == loops


def test_a_second_loss_of_noise_that_it_draws_itself_takes_no_part_of_a_batch():
    text = assert_trains_the_same("""\
        WIDTH = 4
        for x, y in loader * 2:
            n = x.size(0)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            fooled = -model(torch.randn(n, WIDTH)).mean()
            fooled.backward()
            optimizer.step()
            print(loss.item(), fooled.item())
        """)
    assert "    fooled = memory.forward_backward(forward_2)\n" in text


@pytest.mark.parametrize(("star", "given"), [("*inputs", "x, x + 1"), ("**inputs", "a=x, b=x + 1")])
def test_parameters_that_gather_arguments_are_parts_of_the_batch(star, given):
    text = assert_trains_the_same(f"""\
        class Pair(nn.Linear):
            def forward(self, a, b):
                return super().forward(a) + super().forward(b)

        model = Pair(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        def step(target, {star}):
            optimizer.zero_grad()
            loss = F.cross_entropy(model({star}), target)
            loss.backward()
            optimizer.step()
            print(loss.item())

        for x, y in loader * 3:
            step(y, {given})
        """)
    assert "memory.forward_backward(forward, inputs, target)" in text


@pytest.mark.parametrize(
    "head",
    [
        "for n, c in loader * 3:",
        "for n, c in loader * 3:\n    n, c = n.to('cpu'), c.to('cpu')",
        "for batch in loader * 3:\n    n, c = batch[0].to('cpu'), batch[1].to('cpu')",
        "for batch in loader * 3:\n    n = batch[0].to('cpu')\n    c = batch[1]",
    ],
)
def test_data_that_is_called_like_a_counter_and_asked_like_a_tensor_is_an_input(head):
    text = assert_trains_the_same(
        f"{head}\n    out = model(n.view(-1, 4))\n    loss = F.cross_entropy(out, c) + n.mean() * 0\n"
        "    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n    print(loss.item())\n"
    )
    assert "    def forward(n, c):\n" in text


def test_a_counter_is_no_input():
    text = assert_trains_the_same("""\
        for i, (x, y) in enumerate(loader * 3):
            loss = F.cross_entropy(model(x), y) * min(1.0, i / 2 + 0.5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(i, loss.item())
        """)
    assert "    def forward(x, y):\n" in text


@pytest.mark.parametrize("counter", ["i", "task"])
def test_a_counter_is_no_input_whatever_it_is_called_and_what_it_picks_columns_of_is_one(counter):
    text = assert_trains_the_same(f"""\
        for x, y in loader:
            y = torch.stack((y, 1 - y), 1).float()
            for {counter} in range(2):
                out = model(x)[:, {counter}]
                target = y[:, {counter}]
                loss = F.mse_loss(out, target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print({counter}, loss.item())
        """)
    assert "def forward(x, y):" in text


def test_a_loss_that_takes_nothing_but_a_counter_stays_in_place():
    text, loops = apply("""\
        class Trainer:
            def fit(self, model, optimizer):
                for inner in range(3):
                    loss = F.cross_entropy(model(self.inputs), self.labels) * self.rate**inner
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        """)
    assert "memory.backward(loss)" in text
    assert loops == [("in-place", "the loss is computed from nothing that could be split")]


def test_labels_that_are_read_by_columns_are_an_input_though_they_are_called_as_a_counter():
    text = assert_trains_the_same("""\
        def train(x, t):
            optimizer.zero_grad()
            loss = 0
            for c in range(2):
                loss += F.mse_loss(model(x)[:, c], t[:, c])
            loss.backward()
            optimizer.step()
            return loss.item()

        for x, y in loader:
            print(train(x, torch.stack((y, 1 - y), 1).float()))
        """)
    assert "def forward(x, t):" in text


@pytest.mark.parametrize("name", ["t", "idx"])
def test_what_is_taken_out_of_a_batch_with_others_is_of_its_samples(name):
    text = TOP + textwrap.dedent(f"""\
        def step(batch):
            x, y, {name} = batch
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if len(y):
                loss = loss + F.mse_loss(model(x), {name})
            loss.backward()
            optimizer.step()

        for x, y in loader * 3:
            step((x, y, torch.randn(6, 2)))
        """)
    after = rewritten(text)
    assert f"forward_backward(forward, x, y, {name})" in after.text
    assert parts_as_whole(text, after.text, rewritten(text, micro_batches=3).text) == 3


@pytest.mark.parametrize(
    "made",
    [
        "scale = config.scale",
        "scale = config['loss']['scale']",
        "scale = 0.5 if model.training else 0.25",
        "scale = -float(config.scale)",
        "rows, scale = x.shape",
        "scale = np.shape(x)[1]",
        "scale, other = 0.5, x.sum()",
        "scale = 0\n    scale += 1",
    ],
)
def test_a_number_that_is_made_for_each_batch_is_no_input(made):
    text = assert_trains_the_same(f"""\
import types
import numpy as np

class Config(types.SimpleNamespace):
    def __getitem__(self, name):
        return {{"scale": 0.5}}

config = Config(scale=0.5)

def scaled(out, scale):
    return out * scale

for x, y in loader:
    {made}
    loss = F.cross_entropy(scaled(model(x), scale), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
""")
    assert "def forward(x, y):" in text


@pytest.mark.parametrize(
    ("parameter", "inputs"),
    [
        ("scale=0.5", "x, y"),
        ("scale: float", "x, y"),
        ("scale: int = None", "x, y"),
        ("teacher_forcing_ratio", "x, y"),
        # a replay buffer may give one for each sample
        ("gamma", "x, scale, y"),
        ("scale", "x, scale, y"),
        ("scale=None", "x, scale, y"),
        ("scale: torch.Tensor", "x, scale, y"),
    ],
)
def test_a_number_that_a_step_is_given_is_no_input(parameter, inputs):
    name = parameter.partition(":")[0].partition("=")[0]
    text = assert_trains_the_same(f"""\
        def scaled(out, scale):
            return out * scale

        def train(x, y, {parameter}):
            loss = F.cross_entropy(scaled(model(x), {name}), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())

        for x, y in loader:
            train(x, y, 0.5)
        """)
    assert f"def forward({inputs.replace('scale', name)}):" in text


def test_a_number_that_is_bound_to_data_as_well_is_an_input():
    text = assert_trains_the_same("""\
        def train(x, y, scale=1.0):
            scale = y.float() * scale
            loss = (F.cross_entropy(model(x), y, reduction="none") * scale).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())

        for x, y in loader:
            train(x, y)
        """)
    assert "def forward(x, y, scale):" in text


def test_what_a_function_is_given_is_an_input_though_it_is_called_like_settings():
    text = assert_trains_the_same("""\
        def train(*args):
            x, y = args
            scale = args[1]
            loss = (F.cross_entropy(model(x), y, reduction="none") * scale).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss.item())

        for x, y in loader:
            train(x, y)
        """)
    assert "def forward(x, y, scale):" in text
