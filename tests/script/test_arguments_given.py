"""What a function of the file does with what it is given, however that is written."""

import pytest

TRAINING = """
    import torch
    from torch import nn

    model = nn.Linear(2, 2)
    criterion = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    {definition}

    for x, y in loader:
        loss = criterion(model(x), y)
        {call}
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("parameters", "body", "call"),
    [
        ("loss", "loss.backward()", "run(loss)"),
        ("loss, /, **more", "loss.backward()", "run(loss, loss=1)"),
        ("n, *, loss", "loss.backward()", "run(1, loss=loss)"),
        ("*losses", "sum(losses).backward()", "run(loss)"),
        ("**losses", "sum(losses.values()).backward()", "run(loss=loss)"),
        ("n, loss", "loss.backward()", "run(*(1, loss))"),
        ("a, b, loss", "loss.backward()", "run(*sizes, loss)"),
        ("n, loss", "loss.backward()", "run(**{'n': 1, 'loss': loss})"),
    ],
)
def test_a_backward_in_a_helper_goes_through_what_the_call_gives(read, parameters, body, call):
    definition = f"def run({parameters}): {body}"
    (loop,) = read(TRAINING.format(definition=definition, call=call)).loops
    assert len(loop.forwards) == 1


def test_a_class_method_is_given_its_class_first(read):
    definition = "class Steps:\n        @classmethod\n        def run(cls, loss): loss.backward()"
    (loop,) = read(TRAINING.format(definition=definition, call="Steps.run(loss)")).loops
    assert len(loop.forwards) == 1


KEEPING = """
    import torch
    from torch import nn

    model = nn.Linear(2, 2)
    criterion = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    history = []

    {definition}

    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        {call}
"""


@pytest.mark.parametrize(
    ("definition", "call"),
    [
        ("def keep(held, loss): held.append(loss)", "keep(history, loss)"),
        ("def keep(*, held, loss): held.append(loss)", "keep(held=history, loss=loss)"),
        ("def keep(a, b, held, loss): held.append(loss)", "keep(*(1, 2), history, loss)"),
    ],
)
def test_a_list_is_as_old_in_a_helper_as_where_it_is_called(report, definition, call):
    code = KEEPING.format(definition=definition, call=call)
    assert "OOM102" in [code for code, _ in report(code)]


@pytest.mark.parametrize("given", ["model, loader", "net=model, loader=loader"])
def test_a_network_that_each_round_hands_over_is_made_by_it(read, given):
    code = """
        import torch
        from torch import nn

        def train(net, loader):
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            for x, y in loader:
                loss = nn.functional.mse_loss(net(x), y)
                loss.backward()
                optimizer.step()
            return net(x).sum()

        for fold in range(5):
            model = nn.Linear(2, 2)
            train(GIVEN).backward()
    """
    assert [loop.line for loop in read(code.replace("GIVEN", given)).loops] == [6]
