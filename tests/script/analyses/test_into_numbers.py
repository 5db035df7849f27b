"""Forwards of which nothing but numbers is left: they are looked at, and nothing goes back through them."""

from __future__ import annotations

import pytest

TRAINING = """
    import torch
    import matplotlib.pyplot as plt

    for step in range(1000):
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        {look}
"""


@pytest.mark.parametrize(
    "look",
    [
        "test_loss = criterion(model(z), y).item()",
        "hits += (model(z).argmax(1) == y).float().mean().item()",
        "out = model(z); correct = out.argmax(1).eq(y).sum(); accuracies.append(float(correct) / len(y))",
        "loss = criterion(model(z), y); print(step, loss)",
        "loss = torch.nn.CrossEntropyLoss(reduction='sum')(model(z), y); print(loss.item())",
        "print(FocalLoss(2.0)(model(z), y).item())",
        "loss = criterion(model(z), y)\n        if step % 9 == 0: print(f'{loss:.3f}')",
        "_, best = torch.max(model(z), 1); rate = (best == y).sum().item() / len(y)",
        "gap = torch.abs(y - model(z)).max(); wandb.log({'gap': gap})",
        "writer.add_scalar('loss', criterion(model(z), y), step)",
        "plt.plot(z, model(z).detach().numpy())",
        "losses = [criterion(model(part), y).item() for part in z]",
        "rows = [row.tolist() for row in model(z)]",
        "save_image(model(z), 'x.png')",
        "images = model(z).detach(); vutils.save_image(vutils.make_grid(images), 'x.png')",
        "writer.add_images('made', model(z), step)",
        "if criterion(model(z), y) < best: break",
    ],
)
def test_what_becomes_numbers_in_a_training_iteration_needs_no_graph(report, look):
    assert ("OOM201", 9) in report(TRAINING.format(look=look))


@pytest.mark.parametrize(
    "look",
    [
        # targets, weights and samples: what comes of them is trained on
        "soft = model(z).detach()",
        "best = model(z).argmax(1); criterion(other(x), best).backward()",
        "fake = model(z); criterion(critic(fake.detach()), y).backward()",
        "out = model(z); losses.append(out.detach())",
        "cache[step] = model(z).detach()",
        "self.last = model(z).detach()",
        "remember(model(z).detach())",
        "print(make_learner(0.1)(model(z), y).item())",
        # read at the end of one round, trained on in the next
        "print(x.sum().item()); x = model(z).detach()",
        "best = target_net(z).max().item(); criterion(other(x), y + best).backward()",
        "chance = model(z).softmax(1); criterion(other(x), log(chance).detach()).backward()",
        "print(f'{model.count_weights():.2e}')",
        # a look at its graph
        "out = model(z); print(out.grad_fn.next_functions[0][0])",
        "print(model(z).requires_grad)",
        # nothing of it is read: a look at shapes, or at what hooks do
        "print(model(z).shape)",
        "out = model(z); size = out.size(0)",
        "model(z)",
        "_ = model(z)",
        "loss = criterion(model(z), y); loss.backward(); print(loss.item())",
        "with torch.no_grad(): print(criterion(model(z), y).item())",
    ],
)
def test_what_may_be_trained_on_in_the_iteration_is_left_alone(report, look):
    assert ("OOM201", 9) not in report(TRAINING.format(look=look))


ASKED = """
    import torch

    def {name}(model, x, y):
        out = model(x)
        {rest}

    for epoch in range(9):
        out = model(inputs)
        loss = criterion(out, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        {call}
"""


@pytest.mark.parametrize("call", ["print(accuracy(model, x, y))", "pass"])
@pytest.mark.parametrize(
    "rest",
    [
        "return (out.argmax(1) == y).float().mean().item()",
        "best = out.argmax(1)\n        return [names[i] for i in best.tolist()]",
        "words = []\n        for row in out: words.append(names[row.argmax().item()])\n        return ' '.join(words)",
    ],
)
def test_a_function_without_a_loop_that_gives_numbers_needs_no_graph(report, rest, call):
    assert ("OOM201", 4) in report(ASKED.format(name="accuracy", rest=rest, call=call))


@pytest.mark.parametrize("rest", ["return out", "return out.argmax(1)", "return out.detach()", "self.out = out.data"])
def test_a_function_that_gives_tensors_may_make_targets(report, rest):
    code = ASKED.format(name="targets", rest=rest, call="criterion(other(x), targets(model, x, y)).backward()")
    assert ("OOM201", 4) not in report(code)


@pytest.mark.parametrize("look", ["print('before', model(x).item())", "first = criterion(model(x), y); print(first)"])
def test_a_look_before_the_training_needs_no_graph(report, look):
    code = f"""
        import torch
        {look}
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()
    """
    assert report(code) == [("OOM201", 2)]
    assert report(f"import torch\nmodel.load_state_dict(torch.load(path, 'cpu'))\n{look}") == []


@pytest.mark.parametrize(("rest", "found"), [("out[0].detach().numpy()", [("OOM201", 4)]), ("out.shape", [])])
def test_a_script_that_makes_a_picture_of_what_a_loaded_network_gives_needs_no_graph(report, rest, found):
    code = f"""
        import torch
        model = torch.load("model.pth", map_location="cpu")
        x = read("image.png")
        out = model(x)
        picture = {rest}
    """
    assert report(code) == found


def test_a_network_that_is_made_under_the_letters_of_its_paper_is_no_forward(report):
    code = """
        import torch
        net = DQN(observation.shape, actions)
        net.load_state_dict(torch.load("net.pth", map_location="cpu"))
        print(net(observation).detach().numpy())
    """
    assert report(code) == [("OOM201", 4)]


def test_a_decoder_that_is_fed_its_own_words_needs_no_graph(report):
    code = """
        import torch

        def translate(encoder, decoder, sentence):
            out, state = encoder(sentence)
            token, words = torch.tensor([[START]]), []
            for _ in range(20):
                scores, state = decoder(token, state)
                best, index = scores.data.topk(1)
                if index.item() == END:
                    break
                words.append(names[index.item()])
                token = index.squeeze().detach()
            return " ".join(words)
    """
    found = report(code + "\n        model.eval()")
    assert [line for code, line in found if code == "OOM201"] == [4, 7]


@pytest.mark.parametrize(
    ("chain", "found"),
    [
        ("numpy()", []),
        ("cpu().numpy()[0]", []),
        ("detach().numpy()", [("OOM201", 5)]),
        ("data.numpy()", [("OOM201", 5)]),
    ],
)
def test_what_numpy_takes_as_it_is_was_made_without_a_graph(report, chain, found):
    code = f"""
        import torch
        autoencoder = load()
        autoencoder.eval()
        for x in test_loader:
            codes = autoencoder(x).{chain}
    """
    assert report(code) == found


DISTANCE = """
    import torch

    policy = Net().cuda()
    optimizer = torch.optim.Adam(policy.parameters())

    def distance(batch):
        moved = policy(batch, noise=True)
        {made}

    for episode in range(100):
        batch = memory.sample()
        loss = criterion(policy(batch), batch)
        loss.backward()
        optimizer.step()
        {asked}
"""
RETURNED = "return (moved - batch).pow(2).sum()"


@pytest.mark.parametrize(
    ("made", "asked", "found"),
    [
        (RETURNED, "far = distance(batch)\n        if far > 1: sigma /= 2", [7]),
        (RETURNED, "print(distance(batch))", [7]),
        (
            "near = batch - moved\n        return near, moved",
            "near, far = distance(batch)\n        print(near, far)",
            [7],
        ),
        ("near = batch - moved\n        return near, moved", "near, kept = distance(batch)\n        keep(kept)", []),
        (RETURNED, "keep(distance(batch))", []),
        (RETURNED, "self.far = distance(batch)", []),
        (RETURNED, "distance(batch)", []),
    ],
)
def test_what_a_function_returns_is_looked_at_where_it_is_asked_for(report, made, asked, found):
    assert [line for code, line in report(DISTANCE.format(made=made, asked=asked)) if code == "OOM201"] == found


@pytest.mark.parametrize("asked", ["memory.forward_backward(forward, x)", "compute(forward, x)", "forward(x)"])
def test_what_a_function_gives_that_is_handed_over_is_not_looked_at_by_its_callers(report, asked):
    code = f"""
        from oomfix import runtime

        memory = runtime.preset("16gb")
        generator, critic = Generator().cuda(), Critic().cuda()

        def forward(x):
            fake = generator(x)
            loss = critic(fake.detach()).mean()
            return loss, loss

        for x in loader:
            loss, log = {asked}
            print(loss.item(), log.item())
            {"pass" if asked == "forward(x)" else "memory.step(optimizer)"}
    """
    lines = [line for code, line in report(code) if code == "OOM201"]
    assert lines == ([7, 8] if asked == "forward(x)" else [])
