"""What outlives an iteration with its graph, in the many ways in which things are put away."""

from __future__ import annotations

import pytest

from oomfix.rules import all_rules

LOOP = """
    import numpy as np
    import torch
    kept, log, total = [], {{}}, torch.zeros(100)
    array, counts = np.zeros(100), torch.zeros(100, dtype=torch.long)
    for i, (x, y) in enumerate(loader):
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        {statement}
"""


def kept(found):
    """What is found about graphs, without what is said of the forward."""
    return [(code, line) for code, line in found if code.startswith("OOM1")]


@pytest.mark.parametrize(
    "statement",
    [
        "kept.insert(0, loss)",
        "kept.append(loss)",
        "kept.extend([loss, out])",
        "kept.extend([part for part in out])",
        "kept.extend(out)",
        "kept = [*kept, loss]",
        "kept = [loss, *kept]",
        "kept = (*kept, loss)",
        "log = {**log, i: loss}",
        "log[i] = loss",
        "log.setdefault('loss', []).append(loss)",
        "log.update({i: loss})",
        "total[i] = loss",
        "total[2 * i : 2 * i + 2] = out.mean(1)",
        "if i % 10 == 0: kept.append(loss)",
        "kept.append(loss if loss > 0 else None)",
        "kept.append(0.0 if y is None else loss)",
        "kept[i:] = [loss]",
        "kept.append(out.max(1)[0])",
        "kept.append(out.max(1))",
        "kept.append(out.to(torch.float64))",
        "kept.append(out.to('cpu', torch.float16))",
        "total = torch.cat([total, out])",
        "total = torch.cat((total, out.cpu()), dim=0)",
        "total = out if total is None else torch.vstack((total, out))",
    ],
)
def test_a_kept_graph_is_found_however_it_is_put_away(report, statement):
    assert kept(report(LOOP.format(statement=statement))) == [("OOM102", 10)]


@pytest.mark.parametrize(
    "statement",
    [
        "kept.insert(0, loss.detach())",
        "kept = [*kept, loss.item()]",
        "log = {**log, i: float(loss)}",
        "total[i] = loss.item()",
        "total.data[i] = loss",
        "total.detach()[i] = loss",
        "array[i] = loss",
        "counts[i] = loss",
        "kept.append(loss.item() if loss > 0 else None)",
        "kept.append(loss if isinstance(loss, float) else loss.item())",
        "kept.append(loss.item() if torch.is_tensor(loss) else loss)",
        "kept.append(out.to(torch.int64))",
        "kept.append(out.to('cpu', torch.uint8))",
        "kept.append(out.to(dtype=torch.long))",
        "kept.append(out.type(torch.LongTensor))",
        "kept.append(out.round().int())",
        "kept.append(out > 0)",
        "kept.append(out.gt(0).float())",
        "kept.append((out > 0) & (y > 0))",
        "kept.append(~(out > 0))",
    ],
)
def test_what_is_put_away_without_a_graph_is_not(report, statement):
    assert kept(report(LOOP.format(statement=statement))) == []


@pytest.mark.parametrize(
    "statement", ["losses = [*losses, loss]", "losses.insert(0, loss)", "losses[i] = loss", "losses = (*losses, loss)"]
)
def test_what_is_backpropagated_together_later_is_a_term_and_not_kept(report, statement):
    code = f"""
        import torch
        for x in loader:
            losses = {"torch.zeros(4)" if "[i]" in statement else "[]"}
            for i, part in enumerate(x.chunk(4)):
                loss = model(part).mean()
                {statement}
            total = {"losses.sum()" if "[i]" in statement else "torch.stack(losses).sum()"}
            total.backward()
            optimizer.step()
    """
    assert kept(report(code)) == []


SUMS = """
    import torch
    total, sums = torch.zeros(()), {}
    for key, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        STATEMENT
"""


@pytest.mark.parametrize(
    "statement",
    [
        "total.add_(loss)",
        "total.sub_(loss, alpha=-1)",
        "total = sum([total, loss])",
        "total = sum((loss, total))",
        "total = torch.add(total, loss)",
        "sums[key] = sums.get(key, 0) + loss",
        "sums[key] = sums[key] + loss",
        "sums[key] += loss",
        "if 'loss' not in sums: sums['loss'] = 0\n        sums['loss'] += loss",
        "if 'loss' not in sums: sums['loss'] = 0\n        sums['loss'] = sums['loss'] + loss",
    ],
)
def test_what_is_added_up_is_an_accumulation_wherever_the_total_is(report, statement):
    line = 7 + statement.count("\n")
    assert kept(report(SUMS.replace("STATEMENT", statement))) == [("OOM101", line)]


@pytest.mark.parametrize(
    "statement",
    [
        "total.add_(loss.detach())",
        "total.add_(1)",
        "x.add_(loss)",
        "sums[key] = 0 + loss.item()",
        "sums['loss'] = 0; sums['loss'] += loss",
        "if 'loss' not in sums: sums['loss'] = 0\n        sums['loss'] += loss.item()",
    ],
)
def test_what_is_added_without_a_graph_or_within_a_batch_is_not(report, statement):
    assert kept(report(SUMS.replace("STATEMENT", statement))) == []


FLAGGED = """
    def parts_of(out, y, several):
        if several:
            first, second = criterion(out, y), penalty(out)
        else:
            first = second = 0.0
        return criterion(out, y) + first, first, second

    def train(model, loader, optimizer, several, kept):
        total = 0.0
        for x, y in loader:
            loss, first, second = parts_of(model(x), y, several)
            loss.backward()
            optimizer.step()
            STATEMENT
        total = total / len(loader)
        log["first"].append(total)
"""


@pytest.mark.parametrize(("statement", "found"), [("total += first", [("OOM101", 14)]), ("total += float(first)", [])])
def test_a_term_that_a_flag_makes_a_number_is_a_tensor_otherwise(read, statement, found):
    script = read(FLAGGED.replace("STATEMENT", statement))
    findings = [finding for rule in all_rules() for finding in rule.check(script)]
    assert kept((finding.code, finding.line) for finding in findings) == found
    assert [finding.edits for finding in findings if finding.code == "OOM101"] == [()] * len(found)


def test_a_sum_kept_for_each_epoch_may_be_a_number_and_has_no_edit(read):
    code = """
        for epoch in range(10):
            total = 0.0
            for x, y in loader:
                loss = criterion(model(x), y)
                loss.backward()
                total += loss
            total = total / len(loader)
            history.append(total)
            if flag: extra = criterion(model(x), y)
            else: extra = 0.0
            extra = extra / 2
            history.append(extra)
    """
    findings = [finding for rule in all_rules() for finding in rule.check(read(code)) if finding.code == "OOM102"]
    assert [(finding.line, bool(finding.edits)) for finding in findings] == [(8, True), (12, False)]


STEPWISE = """
    import torch

    def train(encoder, head, x, y, optimizer):
        {before}
        outputs = torch.zeros(300, 8, device=device)
        for i in range(x.size(0)):
            out = encoder(x[i])
            outputs[i] = out[0, 0]
        {after}
        return 0
"""
LEARN = "loss = criterion(head(x), y); loss.backward(); optimizer.step()"


def test_what_the_steps_of_one_sample_leave_goes_with_the_function(report):
    assert kept(report(STEPWISE.format(before="pass", after=LEARN))) == []


@pytest.mark.parametrize("before", ["pass", LEARN])
def test_what_a_function_keeps_without_a_backward_to_come_grows(report, before):
    assert kept(report(STEPWISE.format(before=before, after="pass"))) == [("OOM102", 8)]


def test_a_backward_in_every_round_makes_no_step_of_the_function(report):
    code = STEPWISE.format(before="pass", after="pass").replace("outputs[i]", f"{LEARN}; outputs[i]")
    assert kept(report(code)) == [("OOM102", 8)]


@pytest.mark.parametrize(
    "statement",
    [
        "total = torch.cat([total, out.detach()])",
        "total = torch.cat([total, out.argmax(1)])",
        "total = torch.cat([y, out])",
        "total = torch.cat(parts(total, out))",
    ],
)
def test_a_concatenation_of_something_else_keeps_nothing(report, statement):
    assert kept(report(LOOP.format(statement=statement))) == []


WITHOUT_GRADIENTS = """
    import torch
    import torch.nn.functional as F
    kept, total, sums, pair = [], torch.zeros(100), 0, (0.0, 0.0)
    for x, y in loader:
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        with {context}:
            {statement}
"""
OPERATIONS = [
    "total += loss",
    "sums += loss",
    "sums = sums + loss",
    "sums -= loss * 2",
    "total.add_(loss)",
    "total[len(kept)] = loss",
    "total[: len(y)] = out.mean(1)",
    "kept.append(out - y)",
    "kept.append(out.sigmoid())",
    "kept.append(F.mse_loss(out, y))",
    "kept = torch.cat([kept, out])",
]


@pytest.mark.parametrize("statement", OPERATIONS)
def test_an_operation_without_gradients_gives_no_graph(report, statement):
    assert kept(report(WITHOUT_GRADIENTS.format(context="torch.no_grad()", statement=statement))) == []
    found = kept(report(WITHOUT_GRADIENTS.format(context="torch.enable_grad()", statement=statement)))
    assert [line for _, line in found] == [10]


@pytest.mark.parametrize(
    "statement",
    ["kept.append(loss)", "kept += [loss]", "kept = [*kept, loss]", "kept[:0] = [loss]"],
)
def test_what_is_only_put_away_without_gradients_keeps_its_graph(report, statement):
    assert kept(report(WITHOUT_GRADIENTS.format(context="torch.no_grad()", statement=statement))) == [("OOM102", 10)]


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("sums, seen = sums + loss, seen + 1", [("OOM101", 10)]),
        ("sums, seen = sums + loss.item(), seen + loss", [("OOM101", 10)]),
        ("sums, seen = sums + loss.item(), seen + 1", []),
        ("sums, seen = seen + loss, sums + 1", []),
        ("pair = (pair[0] * 0.9 + loss, pair[1] * 0.9 + 1)", [("OOM101", 10)]),
        ("pair = [pair[0] + len(x), pair[1] + loss]", [("OOM101", 10)]),
        ("pair = (pair[0] * 0.9 + loss.item(), pair[1] * 0.9 + 1)", []),
        ("pair = (loss, pair[0])", []),
    ],
)
def test_two_sums_at_once_are_two_sums(report, statement, found):
    assert kept(report(WITHOUT_GRADIENTS.format(context="autocast()", statement=statement))) == found


@pytest.mark.parametrize(
    "test",
    [
        "type(loss) == float",
        "type(loss) is int",
        "type(loss) in (int, float)",
        "isinstance(loss, (int, float))",
        "isinstance(loss, int | float)",
        "not (type(loss) != float)",
        "loss is None",
    ],
)
def test_a_test_for_a_number_tells_it_from_a_loss(report, test):
    code = """
        total = 0.0
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            if {}:
                total += loss
            else:
                {}
    """
    assert report(code.format(test, "total += loss.item()")) == []
    assert report(code.format(test, "total += loss")) == [("OOM101", 9)]
    assert report(code.format(f"not ({test})", "total += loss")) == [("OOM101", 7)]


@pytest.mark.parametrize(
    "test", ["isinstance(part, torch.Tensor)", "torch.is_tensor(part)", "isinstance(part, Tensor)"]
)
@pytest.mark.parametrize(
    ("otherwise", "found"),
    [
        ("total[name] += part", []),
        ("total[name] += part; count += 1", []),
        ("total[name] += sum(part)", [("OOM101", 12)]),
    ],
)
def test_what_is_no_tensor_adds_no_graph_where_it_is_added_as_it_is(report, test, otherwise, found):
    code = f"""
        import torch
        from torch import Tensor
        for x, y in loader:
            losses = criterion(model(x), y)
            losses["all"].backward()
            optimizer.step()
            for name, part in losses.items():
                if {test}:
                    total[name] += part.item()
                else:
                    count += 1
                    {otherwise}
    """
    assert report(code) == found


@pytest.mark.parametrize(
    "test", ["type(loss) == dict", "type(loss) in known", "isinstance(loss, (float, torch.Tensor))", "f(loss, float)"]
)
def test_any_other_test_tells_nothing(report, test):
    code = f"""
        total = 0.0
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            if {test}:
                total += loss
    """
    assert report(code) == [("OOM101", 7)]


@pytest.mark.parametrize("step", ["x = x - beta[i] * noise", "x += noise", "x = x + net(x, i)"])
def test_a_sample_that_goes_into_the_network_again_is_no_total(report, step):
    code = """
        import torch

        def sample(net, beta):
            net.eval()
            x = torch.randn(4, 3)
            for i in range(10):
                noise = net(x, i)
                STEP
            return x
    """
    found = report(code.replace("STEP", step))
    assert kept(found) == []
    assert ("OOM201", 7) in found


LEARNER = """
    import torch

    class Learner:
        def __init__(self, net, optimizer):
            self.net, self.optimizer = net, optimizer
            self.losses, self.total = [], torch.zeros(1)
            self.empty()

        def empty(self):
            self.counts = []

        def learn(self, x, y):
            loss = criterion(self.net(x), y)
            {before}
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            {statement}
            {after}

        def finish(self):
            self.losses = []
"""


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("self.losses.append(loss)", ["OOM102"]),
        ("self.losses += [loss]", ["OOM102"]),
        ("self.total += loss", ["OOM101"]),
        ("self.total = self.total + loss", ["OOM101"]),
        ("self.losses.append(loss)\n            if len(self.losses) > 99: self.losses.clear()", ["OOM102"]),
        ("self.losses.append(loss.detach())", []),
        ("self.total += loss.item()", []),
    ],
)
def test_a_step_whose_loop_is_elsewhere_keeps_what_it_leaves_on_its_object(report, statement, found):
    code = LEARNER.format(before="pass", statement=statement, after="pass")
    assert [code for code, _ in kept(report(code))] == found


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ("for x, y in loader: learner.learn(x, y)", ["OOM102"]),
        ("for x, y in loader: Learner(net, optimizer).learn(x, y)", []),
    ],
)
def test_an_object_that_lives_for_one_iteration_takes_what_is_left_on_it_along(report, calls, found):
    code = LEARNER.format(before="pass", statement="self.losses.append(loss)", after="pass")
    code += f"""
    learner = Learner(net, optimizer)
    {calls}
"""
    assert [code for code, _ in kept(report(code))] == found


@pytest.mark.parametrize(
    ("before", "statement", "after"),
    [
        ("self.losses = []", "self.losses.append(loss)", "pass"),
        ("pass", "self.losses.append(loss)", "print(torch.stack(self.losses).mean()); self.losses = []"),
        ("pass", "self.losses.append(loss)", "self.losses.clear()"),
        ("pass", "self.losses.append(loss)", "del self.losses[:]"),
        ("pass", "self.losses.append(loss)", "self.finish()"),
        ("self.losses.append(loss); loss = sum(self.losses)", "pass", "pass"),
    ],
)
def test_what_each_step_takes_off_again_or_trains_with_is_not_kept(report, before, statement, after):
    assert kept(report(LEARNER.format(before=before, statement=statement, after=after))) == []


ONCE = """
    import torch

    class Learner:
        def __init__(self, net):
            self.net, self.losses = net, []

        def fit(self, loader):
            for x, y in loader:
                loss = criterion(self.net(x), y)
                loss.backward()
                self.optimizer.step()
            self.losses.append(loss)

    {calls}
"""


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ("pass", []),
        ("Learner(net).fit(loader)", []),
        ("for task in tasks: Learner(net).fit(task)", []),
        ("learner = Learner(net); learner.fit(first); learner.fit(second)", [("OOM102", 12)]),
    ],
)
def test_a_method_that_runs_the_whole_training_keeps_where_it_is_called_again(report, calls, found):
    assert kept(report(ONCE.format(calls=calls))) == found


PARTS = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
            self.norms = nn.ModuleDict()
            self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

        def forward(self, x):
            {forward}
            return x

    total = 0.0
    model = Net()
    for x, y in val_loader:
        total += criterion(model(x), y)
"""


@pytest.mark.parametrize(
    "forward",
    [
        "for layer in self.layers: x = layer(x)",
        "for layer, other in zip(self.layers, self.layers[1:]): x = layer(x)",
        "for i, layer in enumerate(self.layers): x = layer(x)",
        "for i in range(3): x = self.layers[i](x)",
        "x = torch.stack([layer(x) for layer in self.layers])",
        "x = self.head[0](x)",
        "x = self.norms[name](x)",
    ],
)
def test_each_part_of_a_list_of_networks_makes_a_graph(report, forward):
    assert kept(report(PARTS.format(forward=forward))) == [("OOM101", 18)]


def test_parts_of_a_list_of_something_else_make_none(report):
    assert kept(report(PARTS.format(forward="for shift in self.shifts: x = shift(x)"))) == []


COUNTED = """
    import torch

    def step(model, x, y, optimizer):
        out = model(x)
        loss = criterion(out, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        {changed}
        return result, out.argmax(1)

    def epoch(model, loader, optimizer):
        total = {{"loss": 0.0, "correct": 0}}
        for x, y in loader:
            result, guess = step(model, x, y, optimizer)
            total["loss"] += result["{key}"]
"""
WRITTEN = 'result = {"loss": loss, "correct": accuracy(out.argmax(1), y), "size": 8}'


@pytest.mark.parametrize(
    ("changed", "key", "kept"),
    [
        (WRITTEN, "loss", True),
        (WRITTEN, "correct", False),
        (WRITTEN, "size", False),
        (f"{WRITTEN}; result['size'] = out.mean()", "size", True),
        ("result = {name: loss for name in names}", "correct", True),
    ],
)
def test_an_entry_of_a_dict_is_what_it_was_written_with(report, changed, key, kept):
    assert (("OOM101", 16) in report(COUNTED.format(changed=changed, key=key))) is kept


@pytest.mark.parametrize(("key", "kept"), [("loss_term", True), ("metric", False), ("mean_accuracy", False)])
def test_a_metric_among_the_outputs_of_a_network_may_be_a_number(report, key, kept):
    reported = report(f"""
        history = []
        for inputs in loader:
            outputs = model(**inputs)
            history.append({{"value": outputs["{key}"]}})
            outputs["loss"].backward()
    """)
    assert (("OOM102", 4) in reported) is kept


@pytest.mark.parametrize("end", ["print(history)", "return history", "return history, model"])
def test_an_average_of_each_epoch_is_kept_in_a_list_that_a_function_returns(report, end):
    reported = report(f"""
        def train(model, loader, optimizer):
            history = []
            for epoch in range(9):
                total = 0.0
                for x, y in loader:
                    loss = criterion(model(x), y)
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    total += loss
                    optimizer.step()
                history.append(total / len(loader))
            {end}
    """)
    assert [one for one in reported if one[0] != "OOM202"] == [("OOM101", 9), ("OOM102", 11)]


@pytest.mark.parametrize(("name", "kept"), [("test", True), ("unroll", False)])
def test_a_test_in_between_keeps_what_a_part_of_the_loss_does_not(report, name, kept):
    reported = report(f"""
        def {name}(x, y):
            loss = 0
            for t in range(20):
                loss += criterion(model(x[:, t]), y[:, t])
            return loss.data

        for epoch in range(10):
            x, y = next(batches)
            criterion(model(x), y).backward()
            optimizer.step()
            print({name}(x, y))
    """)
    assert (("OOM101", 4) in reported) is kept


@pytest.mark.parametrize(("leaf", "kept"), [("net(x).requires_grad_().cuda()", True), ("net(x).cuda()", False)])
def test_a_leaf_that_is_made_to_require_gradients_starts_a_graph(report, leaf, kept):
    reported = report(f"""
        import torch
        criterion = torch.nn.CrossEntropyLoss()
        total = 0
        for x, y in loader:
            with torch.no_grad():
                out = {leaf}
            loss = criterion(out, y)
            total += loss
            loss.backward()
            optimizer.step()
    """)
    assert (("OOM101", 8) in reported) is kept


CRITERION = """
    import torch
    from torch import nn

    def make():
        class TwoLoss(nn.Module):
            def forward(self, out, y):
                far = (out - y).abs().mean()
                {result}
        return TwoLoss()

    criterion = make().cuda()
    for epoch in range(9):
        parts = {{}}
        for x, y in loader:
            loss, named = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            for name, value in named.items():
                parts[name] = parts.get(name, 0.0) + value
"""


@pytest.mark.parametrize(
    ("result", "line"),
    [
        ("return far, {'far': far.item()}", None),
        ("named = {'far': far.item(), 'n': 1}; return far, named", None),
        ("return far, {'far': far}", 19),
        ("return far, {'far': far.item(), 'near': -far}", 19),
        ("return far, far.square()", 19),
    ],
)
def test_what_a_criterion_of_the_file_gives_beside_the_loss_is_read_in_its_code(report, result, line):
    found = [place for code, place in report(CRITERION.format(result=result)) if code == "OOM101"]
    assert found == ([] if line is None else [line])


STEPS = """
    import torch

    def validate(encoder, decoder, loader):
        total = 0.0
        for batch, target in loader:
            total += step(encoder, decoder, batch, target)
        return total

    def step(encoder, decoder, batch, target):
        encoder.eval(), decoder.eval()
        code, hidden = encoder(batch)
        word, outputs = target[0], torch.zeros(9, 4, 100)
        for t in range(9):
            out, state = decoder(word, {state}, code)
            hidden = state
            outputs[t] = out
            word = target[t]
        return criterion(outputs, target).item()
"""


def test_the_steps_of_a_sequence_are_one_graph(report):
    assert [code for code, _ in report(STEPS.format(state="hidden"))] == ["OOM104", "OOM201", "OOM201"]


def test_steps_that_hand_nothing_on_are_graphs_of_their_own(report):
    assert kept(report(STEPS.format(state="code[t]"))) == [("OOM102", 16)]


WITHIN_BATCHES = """
    import torch

    def validate(decoder, loader):
        every = []
        for words in {source}:
            outs, total, state = [], 0, None
            for word in words:
                out, state = decoder(word, {state})
                loss = criterion(out, word)
                {statement}
                {then}
"""


@pytest.mark.parametrize("statement", ["outs.append(out)", "total += loss", "total = loss + total"])
@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, False),
        ({"state": "None"}, True),
        ({"then": "loss.backward(retain_graph=True)"}, True),
    ],
)
def test_what_the_steps_of_a_batch_leave_in_a_test_goes_with_the_batch(report, statement, changes, found):
    filled = {"source": "loader", "state": "state", "then": "pass", "statement": statement} | changes
    lines = [line for code, line in kept(report(WITHIN_BATCHES.format(**filled))) if code != "OOM104"]
    assert lines == ([10] if found else [])


@pytest.mark.parametrize(("statement", "found"), [("outs.append(out)", []), ("total += loss", [("OOM101", 10)])])
def test_what_is_not_called_a_batch_may_be_a_stream_of_batches_whose_losses_are_summed(report, statement, found):
    code = WITHIN_BATCHES.format(source="streams", state="state", then="pass", statement=statement)
    assert [one for one in kept(report(code)) if one[0] != "OOM104"] == found


def test_what_outlives_the_batch_does_not(report):
    code = WITHIN_BATCHES.format(source="loader", state="state", then="pass", statement="every.append(out)")
    assert ("OOM102", 10) in report(code)


LISTED = """
    import numpy as np
    import torch
    from losses import TwoLoss

    criterion = TwoLoss()
    for epoch in range(9):
        parts = {{"far": [], "near": []}}
        for x, y in loader:
            loss, named = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            parts["far"].append(named["far"])
        print({read})
"""


@pytest.mark.parametrize("read", ["np.mean(parts['far'])", "np.array(parts['far']).std()"])
def test_what_numpy_is_given_requires_no_gradients(report, read):
    assert kept(report(LISTED.format(read=read))) == []


def test_neither_does_a_sum_that_numpy_is_given(report):
    summed = LISTED.replace('parts["far"].append(', "total += (").replace("for epoch", "total = 0\n    for epoch")
    assert [code for code, _ in report(summed.format(read="np.round(total)"))].count("OOM101") == 0
    assert [code for code, _ in report(summed.format(read="total"))].count("OOM101") == 1


@pytest.mark.parametrize("read", ["sum(parts['far'])", "torch.stack(parts['far']).mean()", "np.mean(loss.item())"])
def test_what_others_are_given_may(report, read):
    assert kept(report(LISTED.format(read=read))) == [("OOM102", 12)]


ANEW_IN_A_LOOP = """
    import torch

    model = build().cuda().train()
    for x, y in loader:
        outputs = model(x)
        for i, part in enumerate(outputs):
            if {test}:
                {first}
            else:
                {second}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(first_term.item())
"""
ANEW, ADDED = "first_term = loss = criterion(part, y)", "first_term += criterion(part, y); loss = loss + other(part, y)"


@pytest.mark.parametrize(
    ("test", "first", "second"), [("i == 0", ANEW, ADDED), ("i > 0", ADDED, ANEW), ("i != 0", ADDED, ANEW)]
)
def test_a_sum_that_the_first_round_of_a_loop_within_starts_anew_is_that_of_an_iteration(report, test, first, second):
    found = report(ANEW_IN_A_LOOP.format(test=test, first=first, second=second))
    assert [finding for finding in found if finding[0] == "OOM101"] == []


@pytest.mark.parametrize("test", ["i == 1", "flag == 0", "len(part) == 0", "i >= 0", "i == 0 == flag"])
def test_a_sum_that_may_go_on_is_a_total(report, test):
    found = report(ANEW_IN_A_LOOP.format(test=test, first=ANEW, second=ADDED))
    assert [finding for finding in found if finding[0] == "OOM101"] == [("OOM101", 10)]


def test_what_the_first_batch_of_an_epoch_starts_anew_grows_over_the_epoch(report):
    found = report("""
        for epoch in range(9):
            for i, (x, y) in enumerate(loader):
                out = model(x)
                criterion(out, y).backward()
                optimizer.step()
                if i == 0:
                    kept = out
                else:
                    kept = torch.cat((kept, out), dim=0)
    """)
    assert found == [("OOM102", 9)]


@pytest.mark.parametrize(("taken", "found"), [("model(x)", []), ("list(model(x))", [7]), ("[model(x)]", [7])])
def test_a_list_takes_what_a_network_gives_which_may_be_a_list_of_tags(report, taken, found):
    code = f"""
        def validate(model, loader):
            model.eval()
            tags = []
            for x in loader:
                out = model(x)
                print(out)
                tags += {taken}
            return tags
    """
    assert [line for code, line in report(code) if code in ("OOM101", "OOM102")] == found


@pytest.mark.parametrize(
    "read",
    ["np.array(losses)", "plt.plot(np.asarray(losses))", "np.mean(losses)", "np.save('log', losses)", "losses"],
)
def test_a_loss_that_a_backward_runs_on_has_a_graph_whatever_numpy_is_given(report, read):
    code = f"""
        import numpy as np
        import torch

        losses = []
        for epoch in range(9):
            for x, y in loader:
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss)
        print({read})
    """
    assert kept(report(code)) == [("OOM102", 11)]


ARRAY_OF_TERMS = """
    import numpy as np
    import torch

    for episode in range(99):
        terms, rewards = [], []
        while not done:
            action, log_probability = sample(policy(torch.as_tensor(state)))
            state, reward, done, _ = env.step(action)
            terms.append(log_probability)
            rewards.append(reward)
        {loss}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    "loss",
    [
        "loss = np.array(rewards) * np.array(terms); loss = -np.sum(loss) / 4",
        "loss = -np.sum(np.array(rewards) * np.array(terms))",
        "loss = -np.dot(np.array(terms), rewards).mean()",
        "loss = -sum(terms)",
    ],
)
def test_an_array_of_terms_is_trained_through(report, loss):
    assert [found for found in report(ARRAY_OF_TERMS.format(loss=loss)) if found[0] != "OOM202"] == []


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ("log = History()", []),
        ("log = metrics.History(3)", []),
        ("logs = {'train': Meter(), 'test': Meter()}; log = logs['train']", []),
        ("log = load_history(); log = log['train']", [("OOM102", 7)]),
        ("log = collections.UserList()", [("OOM102", 7)]),
        ("log = load_history()", [("OOM102", 7)]),
    ],
)
def test_an_object_of_a_class_out_of_sight_keeps_what_it_likes(report, made, found):
    code = f"""
        import torch
        from elsewhere import History, Meter, load_history, metrics

        {made}
        for x, y in loader:
            loss = criterion(model(x), y)
            log.append(loss)
            loss.backward()
            optimizer.step()
    """
    assert kept(report(code)) == found


@pytest.mark.parametrize(
    ("values", "found"), [("[], []", 1), ("Meter(), Meter()", 0), ("Meter(), []", 1), ("list(), list()", 1)]
)
def test_a_dict_of_such_objects_holds_no_lists(report, values, found):
    first, second = values.split(", ")
    code = f"""
        import torch
        from elsewhere import Meter

        logs = {{"train": {first}, "test": {second}}}
        for x, y in loader:
            loss = criterion(model(x), y)
            logs["train"].append(loss)
            loss.backward()
            optimizer.step()
    """
    assert len(kept(report(code))) == found


BESIDE = """
    from losses import Criterion
    criterion, total, kept = Criterion(), 0.0, []
    for x, y in loader:
        loss, {beside} = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        {statement}
"""


@pytest.mark.parametrize(
    ("beside", "statement", "found"),
    [
        ("other", "total += other", [("OOM101", 7)]),
        ("dictionary", "total += dictionary['all']", [("OOM101", 7)]),
        ("parts", "kept.append(parts)", [("OOM102", 7)]),
        ("log_likelihood", "total += log_likelihood", [("OOM101", 7)]),
        # numbers, perhaps
        ("loss_dict", "total += loss_dict['all']", []),
        ("logs", "kept.append(logs)", []),
        ("num_right", "total += num_right", []),
        ("n_correct", "total += n_correct", []),
        ("nonpadded_tokens", "total += nonpadded_tokens", []),
        ("accuracy", "kept.append(accuracy)", []),
    ],
)
def test_what_a_loss_out_of_sight_gives_for_the_log_may_hold_no_graph(report, beside, statement, found):
    assert kept(report(BESIDE.format(beside=beside, statement=statement))) == found


LOSS_OBJECT = """
    class Trainer:
        def __init__(self, loss, model, optimizer):
            self.loss, self.model, self.optimizer = loss, model, optimizer

        def step(self, x, y):
            loss = self.loss
            for i, out in enumerate(self.model(x)):
                loss.eval_batch(out, y[:, i])
            loss.backward()
            self.optimizer.step()
            return loss.{value}()

        def run(self, loader):
            total = 0.0
            for x, y in loader:
                total += self.step(x, y)
"""


@pytest.mark.parametrize(("value", "found"), [("mean", [("OOM101", 16)]), ("get_loss", []), ("get_value", [])])
def test_what_is_asked_of_a_loss_object_may_be_a_number(report, value, found):
    assert kept(report(LOSS_OBJECT.format(value=value))) == found


DECODING = """
    import torch

    def evaluate(decoder, loader):
        every = []
        for {batch} in {source}:
            done, words = [], torch.zeros(1)
            {steps}
                scores = decoder(words)
                {kept}.extend(scores[0])
            words = done
        return every
"""


@pytest.mark.parametrize(
    ("batch", "source", "steps", "into", "found"),
    [
        ("x", "loader", "while True:", "done", []),
        ("x", "tqdm(loader)", "while len(done) < 5:", "done", []),
        ("x", "loader", "while True:", "every", [("OOM102", 9)]),
        ("x", "range(5)", "while True:", "done", [("OOM102", 9)]),
        ("x", "loader", "for part in x:", "done", [("OOM102", 9)]),
    ],
)
def test_what_decodes_a_batch_step_by_step_goes_with_the_batch(report, batch, source, steps, into, found):
    code = DECODING.format(batch=batch, source=source, steps=steps, kept=into)
    assert kept(report(code)) == found


STARTED_ANEW = """
    import torch
    total, losses = 0, []
    for epoch in range(9):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            {statement}
            {inner}
        print(total, losses)
        {outer}
"""


WAYS = [
    ("total += loss", "total = 0"),
    ("losses.append(loss)", "losses = []"),
    ("losses.append(loss)", "losses.clear()"),
]


@pytest.mark.parametrize(("statement", "anew"), WAYS)
def test_what_each_epoch_starts_anew_keeps_the_graphs_of_an_epoch(report, statement, anew):
    found = kept(report(STARTED_ANEW.format(statement=statement, inner="pass", outer=anew)))
    assert [line for _, line in found] == [9]


@pytest.mark.parametrize(("statement", "anew"), WAYS)
def test_what_each_batch_starts_anew_keeps_none(report, statement, anew):
    assert kept(report(STARTED_ANEW.format(statement=statement, inner=anew, outer="pass"))) == []


BEAMS = """
    import torch

    def evaluate(decoder, {source}):
        for x in {source}:
            per_batch = []
            for t in range(9):
                per_step = []
                for beam in beams:
                    {into}.append(decoder(beam))
                beams = select(beams, {into})
"""


@pytest.mark.parametrize(
    ("source", "into", "found"),
    [
        ("loader", "per_step", []),
        ("loader", "per_batch", [("OOM102", 9)]),
        ("images", "per_step", [("OOM102", 9)]),
    ],
)
def test_what_a_step_of_decoding_collects_goes_with_the_step(report, source, into, found):
    assert kept(report(BEAMS.format(source=source, into=into))) == found


@pytest.mark.parametrize(
    "averaged",
    ["beta * mean + (1 - beta) * loss", "(1 - beta) * loss + beta * mean", "(mean * step + loss) / (step + 1)"],
)
def test_a_running_mean_keeps_each_loss(report, averaged):
    code = f"""
    import torch

    def search(model, loader, beta, step):
        mean = 0
        for x, y in loader:
            loss = criterion(model(x), y)
            mean = {averaged}
            loss.backward()
            optimizer.step()
    """
    assert kept(report(code)) == [("OOM101", 7)]


BETWEEN = """
    import torch

    def train(model, val_x, val_y):
        for step in range(1000):
            loss = criterion(model(draw()), y)
            loss.backward()
            optimizer.step()
            {given}_loss = 0
            for i in range(len({given}_x)):
                {given}_loss += criterion(model({given}_x[i]), {given}_y[i])
            {then}
"""


@pytest.mark.parametrize(
    ("given", "then", "found"),
    [
        ("val", "log(val_loss.item())", [("OOM101", 10)]),
        ("val", "val_loss.backward()", []),
        ("other", "other_loss.backward()", []),
    ],
)
def test_a_test_within_an_iteration_keeps_the_losses_that_it_sums_up(report, given, then, found):
    assert kept(report(BETWEEN.format(given=given, then=then))) == found


TUPLES = """
    import torch

    def improve(actor, critic, batches):
        optimizer, kept = torch.optim.Adam(actor.parameters()), []
        for batch in batches:
            chances = []
            for x in batch:
                chances.append(actor(x))
            kept.{put}
            for gains, {old} in kept:
                loss = (critic(gains) - gains).square().mean(){term}
                loss.backward()
                optimizer.step()
"""


@pytest.mark.parametrize(
    ("put", "old", "term", "found"),
    [
        ("append((batch.gains, chances))", "old", "", [8, 9]),
        ("append([torch.ones(3), chances])", "old", " * torch.stack(old).detach().mean()", [8, 9]),
        ("append((batch.gains, chances))", "old", " * torch.stack(old).mean()", []),
        ("append((chances, batch.gains))", "old", "", []),
        ("append((batch.gains, 1, chances))", "_, old", " * sum(old)", []),
        ("append((batch.gains, chances)); kept.append((gains, other))", "old", " * sum(old)", []),
    ],
)
def test_what_is_put_into_a_list_by_tuples_comes_out_item_by_item(report, put, old, term, found):
    assert kept(report(TUPLES.format(put=put, old=old, term=term))) == [("OOM102", line) for line in found]


DECLARED = """
    import torch

    def update(loss, optimizer):
        loss.backward()
        optimizer.step()

    def train(model, loader, optimizer, criterion):
        {declared}
        sums = {{}}
        for x, y in loader:
            with torch.autocast("cuda", torch.bfloat16):
                loss, parts = criterion(model(x), y)
            update(loss, optimizer)
            for name, part in parts.items():
                sums[name] = sums.get(name, 0.0) + part
"""


@pytest.mark.parametrize("declared", ["parts: dict[str, float] = {}", "parts: Dict[str, int | float]"])
def test_what_is_declared_as_numbers_beside_a_loss_keeps_no_graph(report, declared):
    assert report(DECLARED.format(declared=declared)) == []


@pytest.mark.parametrize(
    "declared",
    ["parts: dict[str, torch.Tensor] = {}", "parts: dict[str, Tensor | float] = {}", "other: dict[str, float] = {}"],
)
def test_what_may_be_tensors_does(report, declared):
    assert report(DECLARED.format(declared=declared)) == [("OOM101", 15)]


@pytest.mark.parametrize(
    ("keep", "then", "codes"),
    [
        ("outs = torch.cat((outs, out))", "print(attention(outs).argmax())", []),
        ("outs.append(out)", "print(attention(x, torch.stack(outs)).argmax())", []),
        ("outs.append(out)", "print(len(outs))", ["OOM102"]),
        ("outs.append(out)", "print(attention(out).argmax(), len(outs))", ["OOM102"]),
    ],
)
def test_what_an_evaluation_keeps_for_another_network_is_no_log(report, keep, then, codes):
    code = f"""
        import torch

        def train(encoder, attention, loader, optimizer):
            encoder.train()
            attention.train()
            for x, y in loader:
                criterion(attention(encoder(x)), y).backward()
                optimizer.step()

        def evaluate(encoder, attention, sentence, outs):
            for x in sentence:
                out = encoder(x)
                {keep}
            {then}
    """
    assert [code for code, _ in kept(report(code))] == codes


@pytest.mark.parametrize(
    ("stored", "codes"), [("out[:, i, :] = member.predict(x)", []), ("outs.append(member.predict(x))", ["OOM102"])]
)
def test_what_the_members_of_an_ensemble_predict_is_the_callers(report, stored, codes):
    code = f"""
        import torch
        from torch import nn

        class Ensemble:
            def __init__(self):
                self.members = list()

            def look(self, x):
                for member in self.members:
                    print(member.forward(x))

            def predict(self, x):
                out, outs = torch.zeros((len(x), 4, 2)), []
                for i, member in enumerate(self.members):
                    {stored}
                return out, outs

        class Member(nn.Module):
            def train_epoch(self, loader):
                for x, y in loader:
                    loss = self.loss(self.forward(x), y)
                    loss.backward()
                    self.optimizer.step()
    """
    assert [code for code, _ in kept(report(code))] == codes


TOLD_BESIDE_THE_LOSS = """
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, x):
            loss = self.layer(x).square().mean()
            {made}
            return loss, info

    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    history = []
    for x in loader:
        loss, info = net(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append({kept})
"""


@pytest.mark.parametrize(
    ("made", "kept", "found"),
    [
        ("info = {'loss': loss.item()}", "info", []),
        ("info = {}; info['loss'] = loss.item()", "info", []),
        ("info = [loss.item()]; info.append(float(loss))", "info", []),
        ("info = {'loss': loss}", "info", [21]),
        ("info = {}; info['loss'] = loss", "info", [21]),
        ("info = {'loss': loss.item()}", "loss", [21]),
    ],
)
def test_a_dict_of_numbers_that_a_forward_gives_beside_a_loss_may_be_kept(report, made, kept, found):
    reported = report(TOLD_BESIDE_THE_LOSS.format(made=made, kept=kept))
    assert [line for code, line in reported if code == "OOM102"] == found


CONVERTED = """
    import torch
    from utils import {function}
    total = 0
    for x, y in loader:
        loss = criterion(model(x), y)
        {ahead}
        loss.backward()
        optimizer.step()
        {behind}
        total += loss
"""


@pytest.mark.parametrize("function", ["scalar", "to_float", "reduced"])
def test_a_loss_made_of_itself_behind_the_backward_may_be_a_number(report, function):
    converted = f"loss = {function}(loss)"
    assert kept(report(CONVERTED.format(function=function, ahead="pass", behind=converted))) == []
    assert kept(report(CONVERTED.format(function=function, ahead=converted, behind="pass"))) == [("OOM101", 10)]


REBOUND = """
    import torch
    from project import Average, step
    kept, meter = [], Average()
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        {between}
        loss.backward()
        optimizer.step()
        meter.add(loss.item())
        {statement}
"""


@pytest.mark.parametrize("value", ["meter.get(clear=True)", "meter.average", "step(i)", "meter.average / 2"])
@pytest.mark.parametrize("statement", ["loss = {}; kept.append(loss)", "if i % 9 == 0: loss = {}; kept.append([loss])"])
def test_a_name_that_is_bound_anew_behind_its_backward_holds_no_graph(report, value, statement):
    code = REBOUND.format(between="pass", statement=statement.format(value))
    assert kept(report(code)) == []


@pytest.mark.parametrize("between", ["loss = step(loss, i)", "if i % 9: loss = step(i); kept.append(loss)"])
def test_ahead_of_its_backward_it_does(report, between):
    code = REBOUND.format(between=between, statement="kept.append(loss)")
    assert kept(report(code))[-1:] == [("OOM102", 10)]


def test_between_two_backwards_it_does(report):
    code = """
        import torch
        from project import first, second
        kept = []
        for x in loader:
            loss = first(x)
            loss.backward()
            loss = second(x)
            kept.append(loss)
            loss.backward()
            optimizer.step()
    """
    assert kept(report(code)) == [("OOM102", 8)]


def test_what_the_next_round_backpropagates_does_as_well(report):
    code = """
        import torch
        from project import step
        loss = step(model, next(batches))
        for i in range(100):
            loss.backward()
            optimizer.step()
            loss = step(model, next(batches))
            kept.append(loss)
    """
    assert kept(report(code)) == [("OOM102", 8)]


def test_a_term_of_a_loss_that_is_bound_anew_with_it_holds_no_graph(report):
    code = """
        import torch
        from project import Average
        kept, meter = [], Average()
        for i, (x, y) in enumerate(loader):
            first, second = criterion(model(x), y), penalty(model)
            loss = first + second
            loss.backward()
            optimizer.step()
            if i % 9 == 0:
                loss, first = meter.get(clear=True)
                kept.append({"loss": loss, "first": first})
    """
    assert kept(report(code)) == []


LAYERS = """
    import torch

    class Extractor:
        def __init__(self, net, wanted):
            self.net, self.wanted = net, wanted
            self.net.eval()

        def __call__(self, x):
            maps = []
            for name, layer in self.net.features._modules.items():
                {run}
                if name in self.wanted:
                    maps.append(x)
            return maps

    def show(net, x):
        print(len(Extractor(net, "34")(x)))
"""


@pytest.mark.parametrize(
    ("run", "found"),
    [
        ("x = layer(x)", []),
        ("x = layer(x, name)", []),
        ("x = layer(self.image)", [("OOM102", 13)]),
        ("x = self.net(x)", [("OOM102", 13)]),
        ("x, y = layer(self.image + 1)", [("OOM102", 13)]),
    ],
)
def test_what_the_layers_of_one_forward_hand_on_is_one_graph(report, run, found):
    assert kept(report(LAYERS.format(run=run))) == found
