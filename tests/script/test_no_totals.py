"""What is added up or put together in a loop, and is no log: a loss, a sample in the making, what goes with a batch."""

from __future__ import annotations

import pytest


@pytest.fixture
def kept(report):
    """What is found to be kept, with its lines."""
    return lambda code: [one for one in report(code) if one[0] in ("OOM101", "OOM102")]


FLOW = """
    import torch

    class Flow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Block()
            self.blocks = torch.nn.ModuleList([Block() for _ in range(4)])

        def forward(self, x, reverse=False):
            if reverse:
                return self.first.backward(x)
            total = 0
            {loop}
                    total = total + gain
            return x, total

        def encode(self, x):
            code, _ = self.forward(x)
            return code
"""


@pytest.mark.parametrize(
    ("loop", "found"),
    [
        ("for layer in self.blocks:\n                    x, gain = layer(x)", []),
        (
            "for block in self.blocks:\n                for layer in block:\n                    x, gain = layer(x)",
            [],
        ),
        ("for part in x:\n                    _, gain = self.blocks[0](part)", [("OOM101", 15)]),
    ],
)
def test_what_the_layers_of_a_network_give_one_after_the_other_is_one_graph(kept, loop, found):
    assert kept(FLOW.format(loop=loop)) == found


WINDOW = """
    for i, (x, y) in enumerate(loader):
        part = criterion(model(x), y)
        if i % 8:
            if fresh:
                {total} = part
                fresh = False
            else:
                {total} += part
        else:
            fresh = True
            (loss / 8).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
"""


@pytest.mark.parametrize(("total", "found"), [("loss", []), ("seen", [("OOM101", 8)])])
def test_what_other_rounds_of_the_loop_backpropagate_is_a_loss(kept, total, found):
    assert kept(WINDOW.format(total=total)) == found


GROWN = """
    import torch

    def predict(model, start, n):
        model.eval()
        words, seen = start, start
        for i in range(n):
            out = model(words)[:, -1:]
            {grown}
        return seen
"""


@pytest.mark.parametrize(
    ("grown", "found"),
    [
        ("words = torch.cat((words, out), dim=1)", []),
        ("seen = torch.cat((seen, out), dim=1)", [("OOM102", 8)]),
    ],
)
def test_a_sequence_that_goes_into_the_network_again_is_in_the_making(kept, grown, found):
    assert kept(GROWN.format(grown=grown)) == found


MEMORY = """
    class Memory:
        def __init__(self):
            self.chances = []

        def clear_memory(self):
            del self.chances[:]

    memory = Memory()
    for x, y in loader:
        out = model(x)
        memory.chances.append(out)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        {then}
"""


@pytest.mark.parametrize(
    ("then", "found"),
    [("memory.clear_memory()", []), ("memory.shrink()", [("OOM102", 11)]), ("pass", [("OOM102", 11)])],
)
def test_what_each_round_empties_keeps_nothing(kept, then, found):
    assert kept(MEMORY.format(then=then)) == found


DECODED = """
    import torch

    def validate(decoder, {source}):
        for words in tqdm({source}):
            total, state = 0, None
            for word in words:
                out, state = decoder(word, state)
                total += criterion(out, word)
            print(total.item())
"""


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("loader", []),
        ("loader_val", []),
        ("dataloader_valid", []),
        ("test_loader2", []),
        ("valid_dl", []),
        ("loaders", [("OOM101", 8)]),
        ("streams", [("OOM101", 8)]),
    ],
)
def test_a_loader_is_known_by_its_name(kept, source, found):
    assert kept(DECODED.format(source=source)) == found


BESIDE = """
    import torch
    for epoch in range(9):
        kept, total = [], 0
        for x, y in loader:
            {given} = net(x, y)
            loss.backward()
            optimizer.step()
            {keep}
"""


@pytest.mark.parametrize(
    ("given", "keep", "found"),
    [
        ("loss, state", 'kept.append(state["loss"])', []),
        ("loss, state", 'kept.append(state["logits"])', [("OOM102", 8)]),
        ("loss, losses", 'kept.append(losses["class_loss"])', [("OOM102", 8)]),
        ("loss, out, true, total_seen", "total += true", []),
        ("loss, out, right", "kept.append(out)", [("OOM102", 8)]),
        ("loss, out, right", "total += right", []),
        ("loss, out, rest", "total += rest", [("OOM101", 8)]),
    ],
)
def test_what_comes_beside_a_loss_for_a_log_may_be_a_number(kept, given, keep, found):
    assert kept(BESIDE.format(given=given, keep=keep)) == found


def test_a_loss_in_what_a_network_gives_alone_has_its_graph(kept):
    code = BESIDE.format(given="out", keep='kept.append(out["loss"])').replace("loss.backward", 'out["loss"].backward')
    assert kept(code) == [("OOM102", 8)]


SAMPLED = """
    import torch

    class Sampler:
        def sample(self, x):
            self.net.eval()
            kept = []
            for {each}:
                kept.append(self.net({part}))
            {end}
"""
ONE_BY_ONE = {"each": "i in range(x.size(0))", "part": "x[i].unsqueeze(0)"}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"end": "return torch.cat(kept)"}, []),
        ({"end": "return x, kept"}, []),
        ({"each": "i in range(x.shape[0])", "part": "x[i:i + 1]", "end": "return kept"}, []),
        ({"each": "x in self.test_loader", "part": "x", "end": "return kept"}, [("OOM102", 8)]),
        ({"each": "i in range(len(x))", "end": "return kept"}, [("OOM102", 8)]),
        ({"each": "i in range(9)", "end": "return kept"}, [("OOM102", 8)]),
        ({"end": "self.kept = kept"}, [("OOM102", 8)]),
    ],
)
def test_what_a_function_gives_for_a_batch_sample_by_sample_is_the_batch_of_its_result(kept, changed, found):
    assert kept(SAMPLED.format(**ONE_BY_ONE | changed)) == found


@pytest.mark.parametrize(
    ("keep", "found"),
    [("loss.cpu()", []), ("loss.to(host)", []), ("loss", [("OOM102", 8)]), ("loss.view(1)", [])],
)
def test_what_is_moved_without_gradients_has_no_graph_where_it_comes_from_a_gpu(kept, keep, found):
    code = f"""
    import torch
    kept = []
    for x, y in loader:
        loss = criterion(net(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            kept.append({keep})
    """
    assert kept(code) == found
