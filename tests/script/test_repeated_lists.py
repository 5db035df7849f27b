"""`[0] * 5`: a list to be filled holds the graphs of what is written into it."""

from __future__ import annotations

import pytest

TERMS = """
    import torch

    def train(net, loader, optimizer, criterion):
        net.cuda()
        for x, y in loader:
            heads = net(x.cuda())
            terms = {made}
            for i in range(5):
                terms[i] = criterion(heads[i], y.cuda())
            sum(terms).backward()
            optimizer.step()
"""
KEPT = """
    import torch

    def train(net, loader, optimizer, criterion):
        sums = {made}
        for x, y in loader:
            for i, out in enumerate(net(x)):
                loss = criterion(out, y)
                loss.backward()
                sums[i] += {added}
            optimizer.step()
        return sums
"""


@pytest.mark.parametrize("made", ["[0] * 5", "5 * [None]", "[0.0, 0.0] * len(heads)"])
def test_a_loss_of_what_was_written_into_it_goes_through_the_network(report, made):
    assert report(TERMS.format(made=made)) == [("OOM202", 6)]


@pytest.mark.parametrize(("added", "found"), [("loss", [("OOM101", 9)]), ("loss.item()", []), ("loss.detach()", [])])
def test_what_is_added_to_its_entries_is_kept_with_its_graph(report, added, found):
    assert [one for one in report(KEPT.format(made="[0] * 5", added=added)) if one[0] == "OOM101"] == found


@pytest.mark.parametrize("made", ["0 * 5", "'-' * 5"])
def test_a_product_is_no_list(report, made):
    assert report(TERMS.format(made=made)) == []


@pytest.mark.parametrize(
    ("made", "put", "found"),
    [
        ("[None] * count", "outputs[i] = out", []),  # one for each network
        ("[]", "outputs.append(out)", [("OOM102", 9)]),
    ],
)
def test_what_is_written_into_it_makes_it_no_longer(report, made, put, found):
    code = f"""
        import torch

        def evaluate(networks, loader, count):
            for x, y in loader:
                outputs = {made}
                for i in range(count):
                    networks[i].eval()
                    out = networks[i](x.cuda())
                    {put}
                print(sum(outputs).argmax(1))
    """
    assert [one for one in report(code) if one[0] == "OOM102"] == found
