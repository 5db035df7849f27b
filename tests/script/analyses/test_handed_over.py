"""Training of networks that other files make, and put where they run."""

from __future__ import annotations

import pytest

FUNCTION = """
    import torch

    def train(model, loader, optimizer, criterion):
        for x, y in loader:
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
"""
TRAINER = """
    import torch

    class Trainer:
        def __init__(self, network, loader):
            self.network = network
            self.loader = loader
            self.optimizer = torch.optim.Adam(network.parameters())

        def fit(self):
            for x, y in self.loader:
                loss = torch.nn.functional.mse_loss(self.network(x), y)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "code",
    [
        FUNCTION,
        TRAINER,
        FUNCTION.replace("        for x", "        model = torch.compile(model)\n        for x"),
        FUNCTION.replace("import torch\n", "import torch\n    from os import path\n"),
        # a function in between, which nothing calls either
        FUNCTION + "\n    def train_all(model, loaders):\n        for loader in loaders:\n"
        "            train(model, loader, make(model), torch.nn.MSELoss())\n",
        # tensors that another file puts where they belong
        FUNCTION.replace("import torch\n", "import torch\n    from data import as_variable\n").replace(
            "model(x)", "model(x, as_variable(torch.zeros(4).long()))"
        ),
        # what is fetched from where it was made
        FUNCTION.replace("model(x)", "model(x).cpu() - torch.zeros(4)"),
        FUNCTION + "            print(model(x).detach().cpu().numpy())\n",
        FUNCTION + "            print(model(x).detach().cpu().numpy(), loss.to(y).data.numpy())\n",
        # arrays of what may never have left the CPU
        FUNCTION + "            print(y.numpy())\n",
    ],
)
def test_a_network_that_is_handed_over_may_run_on_a_gpu(read, code):
    assert read(code).may_run_on_cuda


@pytest.mark.parametrize(
    "code",
    [
        FUNCTION + "\n    train(Net(), loader, optimizer, criterion)\n",
        FUNCTION.replace("        for x", "        model = Net()\n        for x"),
        FUNCTION.replace("        for x", '        device = "cpu"\n        for x'),
        TRAINER.replace("self.network = network", "self.network = build(network)"),
        TRAINER + "\n    Trainer(Net(), loader).fit()\n",
        # two networks, of which one is made here
        FUNCTION.replace("model(x)", "critic(model(x))").replace(
            "        for x", "        critic = Net()\n        for x"
        ),
        # tensors of its own, on the CPU
        FUNCTION.replace("model(x)", "model(x, torch.zeros(4))"),
        FUNCTION.replace("import torch\n", "import torch\n    from data import as_variable\n").replace(
            "model(x)", "model(as_variable(x), torch.zeros(4))"
        ),
        FUNCTION.replace("model(x)", "model(x, numpy.asarray(torch.zeros(4)))"),
        # arrays of what was computed, which no tensor on a GPU gives
        FUNCTION + "            print(model(x).detach().numpy())\n",
        FUNCTION + "            total += loss.data.numpy()\n",
        # nothing is trained
        FUNCTION.replace("loss.backward()", "print(loss)"),
        FUNCTION.replace("optimizer.step()", "print(x.grad)"),
    ],
)
def test_a_network_that_is_made_here_and_put_nowhere_runs_on_the_cpu(read, code):
    assert not read(code).may_run_on_cuda
