"""Which values carry a graph, and what outlives an iteration."""

from __future__ import annotations

import weakref

import pytest

from oomfix.rewrite.text.edits import apply_edits
from oomfix.rules import all_rules


class Saved:
    """A holder, so that a weak reference can tell whether autograd still has the tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


LOOP = """
    import torch
    total = 0.0
    kept = []
    for x, y in loader:
        out = model(x)
        loss = criterion(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        {statement}
"""


@pytest.mark.parametrize(
    "value",
    [
        "loss",
        "loss * x.size(0)",
        "loss.mean()",
        "loss.cpu()",
        "torch.sqrt(loss)",
        "loss.clone()",
        "out.max(1)[0].sum()",
        "out.max(1).values.sum()",
        "-loss",
        "(loss if y is not None else loss)",
        "sum([loss, loss])",
        "{'a': loss}['a']",
        "loss.float()",
        "loss.view(1)",
    ],
)
def test_a_tensor_with_its_graph_is_reported(report, value):
    assert report(LOOP.format(statement=f"total += {value}")) == [("OOM101", 10)]
    assert report(LOOP.format(statement=f"kept.append({value})")) == [("OOM102", 10)]


@pytest.mark.parametrize(
    "value",
    [
        "loss.item()",
        "float(loss)",
        "int(loss)",
        "loss.detach()",
        "loss.detach().cpu() * 2",
        "loss.data",
        "loss.data[0]",
        "loss.cpu().data.numpy()",
        "loss.tolist()",
        "loss.cpu().detach().numpy().mean()",
        "out.argmax(1).eq(y).sum()",
        "(out.max(1)[1] == y).sum()",
        "(out.max(1).indices == y).sum()",
        "(out.argmax(dim=-1) == y).float().mean()",
        "(out > 0.5).float().sum()",
        "len(x)",
        "x.size(0)",
        "out.shape[0]",
        "torch.argmax(out, 1)",
        "torch.max(out, 1)[1]",
        "round(loss.item(), 3)",
        "f'{loss}'",
        "y.float().mean()",
    ],
)
def test_what_carries_no_graph_is_not(report, value):
    assert report(LOOP.format(statement=f"total += {value}")) == []
    assert report(LOOP.format(statement=f"kept.append({value})")) == []


def test_a_helper_is_read_not_its_name(report):
    code = """
        def loss_fn_a(out, y):
            return criterion(out, y).item()

        def metric(out, y):
            return (criterion(out, y) - 1).abs()

        a = b = 0
        for x, y in loader:
            out = model(x)
            loss = criterion(out, y)
            loss.backward()
            a += loss_fn_a(out, y)
            b += metric(out, y)
    """
    assert report(code) == [("OOM101", 13)]


def test_the_same_name_is_two_values_in_two_loops(report):
    code = """
        import torch

        def fit(model, train_loader, val_loader):
            train_loss = val_loss = 0.0
            for x, y in train_loader:
                loss = criterion(model(x), y)
                loss.backward()
                train_loss += loss.item()
            with torch.no_grad():
                for x, y in val_loader:
                    loss = criterion(model(x), y)
                    val_loss += loss
    """
    assert report(code) == []


def test_values_made_without_gradients_carry_none_later(report):
    code = """
        import torch
        kept, total = [], 0
        for x, y in loader:
            with torch.no_grad():
                out = model(x)
            loss = criterion(out, y)
            total += loss
            kept.append(out)
    """
    assert report(code) == []


def test_attributes_and_entries_are_accumulators_too(report):
    code = """
        class Trainer:
            def fit(self, loader):
                self.total = 0
                log = {"loss": 0}
                for x, y in loader:
                    loss = self.criterion(self.model(x), y)
                    loss.backward()
                    self.optimizer.step()
                    self.total += loss
                    log["loss"] += loss
                    log["n"] = len(x)
    """
    assert report(code) == [("OOM101", 9), ("OOM101", 10), ("OOM202", 6)]


def test_a_total_of_one_iteration_is_no_accumulator(report):
    code = """
        for x, y in loader:
            total = 0
            for head in heads:
                total += criterion(head(model(x)), y)
            total.backward()
            optimizer.step()
    """
    assert report(code) == []


def test_meta_learning_sums_tasks_and_backpropagates(report):
    code = """
        for epoch in range(epochs):
            for batch in loader:
                outer_loss = 0.0
                for task in batch:
                    outer_loss = outer_loss + criterion(model(task.x), task.y)
                outer_loss = outer_loss / len(batch)
                outer_loss.backward()
                optimizer.step()
    """
    assert report(code) == []


def test_reinforce_stores_log_probabilities_for_its_backward(report):
    code = """
        class Agent:
            def __init__(self):
                self.policy = Policy()
                self.saved = []

            def act(self, state):
                probs = self.policy(state)
                m = Categorical(probs)
                action = m.sample()
                self.saved.append(m.log_prob(action))
                return action.item()

            def finish(self, returns):
                losses = []
                for log_prob, value in zip(self.saved, returns):
                    losses.append(-log_prob * value)
                self.optimizer.zero_grad()
                loss = torch.cat(losses).sum()
                loss.backward()
                self.optimizer.step()
                del self.saved[:]

        agent = Agent()
        for episode in range(1000):
            for t in range(1000):
                action = agent.act(state)
            agent.finish(rewards)
    """
    assert [code for code, _ in report(code) if code in ("OOM101", "OOM102", "OOM201")] == []


@pytest.mark.parametrize(
    ("first", "second", "freed"),
    [
        ("total += loss", "loss.backward()", True),
        ("loss.backward()", "total += loss", True),
        ("total += loss", "print(loss)", False),
        ("loss.backward(retain_graph=True)", "total += loss", False),
    ],
)
def test_a_backward_before_or_after_the_addition_frees_the_activations(read, first, second, freed):
    script = read(f"""
        total = 0
        for x, y in loader:
            loss = criterion(model(x), y)
            {first}
            {second}
    """)
    (keep,) = script.kept_graphs()
    assert script.trace.frees(keep) is freed


def test_what_stays_alive_is_what_the_rule_says():
    """The claim itself, against torch: a sum keeps activations only where no backward runs through its terms."""
    torch = pytest.importorskip("torch")

    def alive(backward: bool, before: bool) -> int:
        saved: list[weakref.ref] = []
        layer, total = torch.nn.Linear(4, 4), 0

        def pack(tensor):
            kept = Saved(tensor)
            saved.append(weakref.ref(kept))
            return kept

        for _ in range(5):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
                loss = layer(torch.ones(2, 4)).tanh().pow(2).sum()
            if before:
                total = total + loss
            if backward:
                loss.backward()
            if not before:
                total = total + loss
            del loss
        return sum(reference() is not None for reference in saved)

    assert alive(backward=True, before=True) == alive(backward=True, before=False) == 0
    assert alive(backward=False, before=True) > 0


def test_a_sum_that_every_iteration_resets_does_not_outlive_it(report):
    code = """
        part = 0
        for x, y in loader:
            part += criterion(model(x), y)
            print(float(part))
            part = 0
    """
    assert [code for code, _ in report(code)] == ["OOM201"]


def test_a_meter_in_sight_counts_where_it_is_handed_the_tensor(report):
    code = """
        class AverageMeter:
            def __init__(self):
                self.reset()

            def reset(self):
                self.val = self.sum = self.count = 0

            def update(self, val, n=1):
                self.val = val
                self.sum += val * n
                self.count += n

        losses, seen = AverageMeter(), AverageMeter()
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            losses.update(loss, x.size(0))
            seen.update(loss.item(), x.size(0))
    """
    assert report(code) == [("OOM102", 17)]


def test_a_meter_out_of_sight_is_not_judged(report):
    code = """
        from utils import AverageMeter
        losses = AverageMeter()
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            losses.update(loss, x.size(0))
    """
    assert report(code) == []


def test_numpy_arrays_hold_numbers(report):
    code = """
        import numpy as np
        history = np.zeros(100)
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y)
            loss.backward()
            history[i] = loss
            history[0] += loss
    """
    assert report(code) == []


def test_a_discriminator_step_on_detached_samples_keeps_retain_graph_quiet(report):
    code = """
        for real in loader:
            fake = G(z)
            d_loss = D(real).mean() - D(fake).mean()
            d_loss.backward(retain_graph=True)
            d_optimizer.step()
            g_loss = D(fake).mean()
            g_loss.backward()
            g_optimizer.step()
    """
    assert report(code) == []


def test_retain_graph_without_a_second_backward_is_needless_in_each_branch(report):
    code = """
        for i, (x, y) in enumerate(loader):
            loss = criterion(model(x), y)
            if i % 2:
                loss.backward(retain_graph=True)
            else:
                loss.backward()
            optimizer.step()
    """
    assert report(code) == [("OOM103", 4)]


@pytest.mark.parametrize(
    ("loss", "again", "found"),
    [
        ("criterion(model(x), y)", "pass", [("OOM103", 3)]),
        ("criterion(out, y)", "update(other(out, y), optimizer)", []),
    ],
)
def test_retain_graph_in_a_helper_depends_on_the_losses_that_it_is_called_with(report, loss, again, found):
    code = f"""
        def update(loss, optimizer):
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            optimizer.step()

        for x, y in loader:
            out = model(x)
            update({loss}, optimizer)
            {again}
    """
    assert report(code) == found


def test_retain_graph_in_a_helper_that_nothing_calls_is_left_alone(report):
    code = """
        def update(loss, optimizer):
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            optimizer.step()
    """
    assert report(code) == []


@pytest.mark.parametrize("root", ["self.losses[who]", "(sum(penalties) / len(penalties))", "self.parts[0].loss"])
def test_retain_graph_of_what_was_made_out_of_sight_is_left_alone(report, root):
    code = f"""
        class Trainer:
            def backward(self, who, penalties):
                {root}.backward(retain_graph=True)
                self.optimizer.step()

            def fit(self):
                for x, y in self.loader:
                    self.compute(x, y)
                    self.backward("generator", self.penalties)
    """
    assert report(code) == []


def test_truncated_backpropagation_that_detaches_is_clean(report):
    code = """
        hidden = None
        for x, y in loader:
            if hidden is not None:
                hidden = [h.detach() for h in hidden]
            out, hidden = model(x, hidden)
            loss = criterion(out, y)
            loss.backward()
            optimizer.step()
    """
    assert report(code) == []


def test_a_state_carried_by_an_attribute_is_found(report):
    code = """
        class Trainer:
            def fit(self, loader):
                self.hidden = self.model.init_hidden()
                for x, y in loader:
                    out, self.hidden = self.model(x, self.hidden)
                    loss = self.criterion(out, y)
                    loss.backward(retain_graph=True)
                    self.optimizer.step()
    """
    assert report(code) == [("OOM104", 5), ("OOM202", 5)]


@pytest.mark.parametrize(
    ("statement", "edited"),
    [
        ("total = total + loss + x.mean()", "total = total + loss.detach() + x.mean()"),
        ("total = 0.9 * total + 0.1 * loss", "total = 0.9 * total + (0.1 * loss).detach()"),
        ("total += loss if flag else loss.mean()", "total += (loss if flag else loss.mean()).detach()"),
        ("total += (loss + loss)", "total += (loss + loss).detach()"),
        ("total += -loss", "total += (-loss).detach()"),
        ("kept.append(-loss)", "kept.append((-loss).detach())"),
        ("kept.insert(0, loss)", "kept.insert(0, loss.detach())"),
        ("kept = [*kept, loss]", "kept = [*kept, loss.detach()]"),
        ("kept.append(loss if loss > 0 else None)", None),
        ("kept.append(0.0 if flag else loss)", None),
        ("kept += [loss]", None),
        ("kept.append((loss, out))", None),
        ("kept.append({'loss': loss})", None),
        ("kept = kept + [loss]", None),
        ("total = total + loss + out.sum()", None),
    ],
)
def test_detach_is_only_put_on_one_tensor(read, statement, edited):
    code = LOOP.format(statement=statement)
    script = read(code)
    findings = [finding for rule in all_rules() for finding in rule.check(script) if finding.line == 10]
    assert [finding.code for finding in findings] in (["OOM101"], ["OOM102"])
    after = apply_edits(script.source.text, findings[0].edits)
    assert after.splitlines()[9].strip() == (edited or statement)


@pytest.mark.parametrize(
    "detaching",
    [
        "hidden.detach_()",
        "hidden[0].detach_()",
        "for h in hidden: h.detach_()",
        "hidden = tuple([h.detach() for h in hidden])",
        "hidden = (hidden[0].detach(), hidden[1].detach())",
        "hidden = tuple(map(lambda h: h.detach(), hidden))",
        "hidden = hidden.data",
        "hidden = Variable(hidden.data)",
        "hidden = {k: v.detach() for k, v in hidden.items()}",
        "hidden = repackage_hidden(hidden)",
        "h, c = hidden; hidden = (h.detach(), c.detach())",
        "del hidden; hidden = init()",
    ],
)
def test_every_way_to_detach_a_state_is_seen(report, detaching):
    code = f"""
        def repackage_hidden(h):
            return h.detach() if torch.is_tensor(h) else tuple(repackage_hidden(v) for v in h)

        hidden = model.init_hidden(20)
        for x, y in loader:
            {detaching}
            out, hidden = model(x, hidden)
            loss = criterion(out, y)
            loss.backward()
            optimizer.step()
    """
    assert report(code) == []


@pytest.mark.parametrize(
    "statement",
    [
        "mean = loss if mean is None else 0.9 * mean + 0.1 * loss",
        "mean = (mean * 3 + loss) / 4",
        "log['loss'] = log.get('loss', 0) + loss",
    ],
)
def test_running_means_accumulate_too(report, statement):
    code = f"""
        mean, log = None, {{}}
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            {statement}
    """
    assert report(code) == [("OOM101", 6)]


def test_a_mean_that_starts_in_a_branch_accumulates_in_the_other(report):
    code = """
        mean = None
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            if mean is None:
                mean = loss
            else:
                mean = mean * 0.99 + loss * 0.01
    """
    assert report(code) == [("OOM101", 8)]


def test_terms_handed_to_training_out_of_sight_are_not_kept_for_logs(report):
    code = """
        from agents import Agent
        agent = Agent().to(device)
        for episode in range(100):
            log_probs = []
            for t in range(200):
                probs, value = agent.model(state)
                log_probs.append(Categorical(probs).log_prob(action))
            agent.update(log_probs)
    """
    assert report(code) == []


def test_a_loop_in_a_match_is_followed(report):
    code = """
        match args.mode:
            case "train":
                total = 0
                for x, y in loader:
                    loss = criterion(model(x), y)
                    loss.backward()
                    total += loss
    """
    assert report(code) == [("OOM101", 7)]


@pytest.mark.parametrize(
    "rebound",
    [
        "scalars = {}\nscalars['a'] = x[0]\nscalars['b'] = x[1]\nprint(scalars)",
        "for t in y: print(t)\nt = x.grad\nprint(t)",
        "first = x[0]\nprint(first)\nfirst = y[0]",
    ],
)
def test_a_name_that_each_round_binds_before_it_reads_carries_nothing_over(report, rebound):
    code = f"""
        for x, y in loader:
            {rebound.replace(chr(10), chr(10) + " " * 12)}
            loss = criterion(model(x), y)
            loss.backward(retain_graph=True)
            optimizer.step()
    """
    assert [code for code, _ in report(code)] == ["OOM103"]


@pytest.mark.parametrize(
    "leaving", ["return teacher(x)", "return None if x is None else teacher(x)", "teacher(x); return"]
)
def test_what_returns_from_within_no_grad_leaves_gradients_on_for_its_caller(report, leaving):
    code = f"""
        import torch

        def target(x):
            with torch.no_grad():
                {leaving}

        def train(loader):
            total = 0
            for x, y in loader:
                target(x)
                loss = criterion(model(x), y)
                total += loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    """
    assert ("OOM101", 12) in report(code)


def test_the_rounds_of_nested_loops_are_told_apart(report):
    code = """
        import torch

        def penalty(critic, x):
            scores = critic(x)
            gradient = torch.autograd.grad(scores.sum(), x, create_graph=True)[0]
            return gradient.norm()

        for x in loader:
            for _ in range(5):
                loss = critic(x).mean() + penalty(critic, x)
                loss.backward(retain_graph=True)
                optimizer.step()
            generator_loss = -critic(generator(z)).mean()
            generator_loss.backward()
            generator_optimizer.step()
    """
    assert report(code) == [("OOM103", 11)]


@pytest.mark.parametrize(
    ("leaf", "made", "needed"),
    [
        ("nn.Parameter(torch.ones(3))", "base * 2", True),
        ("torch.ones(3, requires_grad=True)", "base * 2", True),
        ("nn.Parameter(torch.ones(3))", "(base * 2).tanh()", True),
        ("torch.ones(3)", "base * 2", False),
        ("nn.Parameter(torch.ones(3))", "base", False),
    ],
)
def test_a_graph_made_of_a_leaf_ahead_of_the_loop_is_needed_in_every_round(report, leaf, made, needed):
    found = report(f"""
        base = {leaf}
        table = {made}
        for x, y in loader:
            loss = criterion(model(table + x), y)
            loss.backward(retain_graph=True)
            optimizer.step()
    """)
    assert ("OOM103" not in dict(found)) is needed


def test_a_graph_of_the_last_round_may_be_needed_behind_the_loop(report):
    code = """
        for x in loader:
            for part in x.chunk(2):
                out = model(part)
                (out.mean() / 2).backward(retain_graph=True)
            out.max().backward()
            optimizer.step()
    """
    assert report(code) == []


@pytest.mark.parametrize("leaving", ["break", "continue"])
def test_what_leaves_the_round_from_within_no_grad_leaves_gradients_on_behind_it(report, leaving):
    code = f"""
    import torch

    def train(model, loader):
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            model.eval()
            with torch.no_grad():
                score = metric(model(x), y)
                if score > best:
                    {leaving}
            model.train()
        model.eval()
        out = model(test_x)
        print(out.max())
    """
    assert report(code) == [("OOM201", 14)]


PPO = """
    import torch

    def update(actor, optimizer, batches, device):
        for states, actions, old, advantages in batches:
            distribution = torch.distributions.Beta(*actor(states))
            ratio = torch.exp(distribution.log_prob(actions) - old)
            bounded = torch.clamp(ratio, 0.9, 1.1)
            loss = {loss}
            loss.backward()
            optimizer.step()
"""


@pytest.mark.parametrize(
    "loss",
    [
        "-torch.min(ratio * advantages, bounded * advantages).mean()",
        "torch.max(-ratio * advantages, -bounded * advantages).sum()",
        "-torch.min(ratio, limit).mean()",
        "-(ratio * advantages).min(bounded * advantages).mean()",
    ],
)
def test_the_smaller_of_two_tensors_carries_the_graphs_of_both(report, loss):
    assert report(PPO.format(loss=loss)) == [("OOM202", 5)]


SHARED = """
    import torch

    class Agent:
        def act(self, state):
            {elsewhere} = torch.tanh(self.actor(state)).detach()
            return {elsewhere}.item()

        def update(self, optimizer):
            for state, action, value in self.memory:
                loss = criterion(self.critic(state, action), value)
                optimizer.zero_grad()
                loss.backward(retain_graph=True)
                optimizer.step()
"""


def test_a_name_computed_in_another_function_is_not_shared_by_the_rounds(report):
    assert ("OOM103", 12) in report(SHARED.format(elsewhere="action"))


@pytest.mark.parametrize(
    ("before", "inside"),
    [("mixed = torch.softmax(weights, 0)", ""), ("mixed = torch.softmax(weights, 0)", "mixed = mixed * x")],
)
def test_a_tensor_computed_before_the_loop_may_be_shared_by_the_rounds(report, before, inside):
    code = f"""
    import torch

    def fit(model, loader, weights, optimizer):
        {before}
        for x, y in loader:
            {inside}
            loss = criterion(model(x * mixed), y)
            loss.backward(retain_graph=True)
            optimizer.step()
    """
    assert ("OOM103", 8) not in report(code)


def test_a_tensor_that_each_round_computes_first_is_not_shared(report):
    code = """
    import torch

    def fit(model, loader, weights, optimizer):
        mixed = torch.softmax(weights, 0)
        show(mixed)
        for x, y in loader:
            mixed = torch.softmax(x, 0)
            loss = criterion(model(mixed), y)
            loss.backward(retain_graph=True)
            optimizer.step()
    """
    assert ("OOM103", 9) in report(code)


@pytest.mark.parametrize("network", ["m", "model", "self.f"])
def test_a_state_that_is_fed_back_needs_the_graph_again(report, network):
    code = f"""
        def train(self, m, model, loader):
            h = None
            for x, y in loader:
                out, h = {network}(x, h)
                loss = F.mse_loss(out, y)
                loss.backward(retain_graph=True)
    """
    assert "OOM103" not in dict(report(code))


@pytest.mark.parametrize("arguments", ["x", "x, h.detach()"])
def test_a_state_that_is_not_fed_back_does_not(report, arguments):
    code = f"""
        def train(m, loader):
            h = None
            for x, y in loader:
                out, h = m({arguments})
                loss = F.mse_loss(out, y)
                loss.backward(retain_graph=True)
    """
    assert ("OOM103", 6) in report(code)


def test_losses_of_one_output_share_its_graph_whatever_made_it(report):
    code = """
        def train(m, loader):
            for x, y in loader:
                out = m(x)
                losses = [f(out, y) for f in functions]
                for loss in losses:
                    loss.backward(retain_graph=True)
    """
    assert "OOM103" not in dict(report(code))


BETWEEN = """
    def train(e, neta, netb, loader):
        for x, y in loader:
            z = {made}
            first = F.mse_loss(neta(z), y)
            second = F.mse_loss(netb(z), y)
            first.backward(retain_graph=True)
            second.backward()
"""


def test_two_networks_share_the_graph_of_what_a_third_made_for_them(report):
    assert "OOM103" not in dict(report(BETWEEN.format(made="e(x)")))


@pytest.mark.parametrize("made", ["x", "x.cuda()", "prepare(x)", "e(x).detach()"])
def test_two_networks_share_no_graph_through_data(report, made):
    assert ("OOM103", 6) in report(BETWEEN.format(made=made))


def test_a_graph_made_before_the_loop_by_another_network_is_needed_in_every_round(report):
    code = """
        def train(model, encoder, loader, support):
            made = {network}(support)
            for x, y in loader:
                loss = F.mse_loss(model(x) @ made, y)
                loss.backward(retain_graph=True)
    """
    assert "OOM103" not in dict(report(code.format(network="encoder")))
    assert ("OOM103", 5) in report(code.format(network="prepare"))


def test_a_backward_for_each_row_of_an_output_needs_the_graph_again(report):
    assert not report("""
        def update(pi, optimizer, observed, state, rewards):
            values, _ = pi(observed, state)
            chosen = values.gather(2, actions)
            for reward, row in zip(reversed(rewards), reversed(chosen)):
                loss = -torch.log(row) * reward
                loss.mean().backward(retain_graph=True)
            optimizer.step()
    """)


def test_a_backward_for_each_batch_does_not(report):
    assert [
        line
        for code, line in report("""
        def update(policy, optimizer, batches):
            for observed, reward in zip(batches, rewards):
                loss = -torch.log(policy(observed)) * reward
                loss.mean().backward(retain_graph=True)
                optimizer.step()
    """)
        if code == "OOM103"
    ] == [4]


def test_a_backward_in_a_comprehension_may_share_its_graph_with_the_next(report):
    assert not report("""
        class Model:
            def fit(self, loader):
                for x in loader:
                    self.losses = self.calculate(x)
                    self.backward_all()

            def backward_all(self):
                [loss.backward(retain_graph=True) for _, loss in self.losses.items()]
    """)


@pytest.mark.parametrize("packed", ["pack_padded_sequence(net(x), lengths, batch_first=True)", "pack_sequence(net(x))"])
def test_the_data_of_packed_sequences_carries_the_graph(report, packed):
    code = f"""
        import torch
        from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

        net = torch.nn.Linear(3, 3).cuda()
        for x, y, lengths in loader:
            scores = {packed}.data
            loss = criterion(scores, y)
            loss.backward()
            optimizer.step()
    """
    assert report(code) == [("OOM202", 6)]
    assert ("OOM201", 6) in report(code.replace("            loss.backward()\n            optimizer.step()\n", ""))


HIGHER = """
    import higher
    import torch

    net = torch.nn.Linear(3, 3).cuda()
    for tasks in loader:
        for x, y in tasks:
            with higher.innerloop_ctx(net, inner) as (fast, steps):
                for _ in range(5):
                    loss = criterion(fast(x), y)
                    steps.step(loss)
                loss = criterion(fast(x), y)
                {backward}
        optimizer.step()
"""


def test_a_copy_of_a_network_whose_steps_are_differentiated_trains(report):
    assert report(HIGHER.format(backward="loss.backward()")) == [("OOM202", 9), ("OOM202", 11)]


def test_a_copy_of_a_network_is_fitted_through_its_own_steps(report):
    """In a test its last loss is only printed; nothing says how it is fitted without gradients."""
    assert ("OOM201", 9) not in report(HIGHER.format(backward="print(loss.item())"))


@pytest.mark.parametrize(("rows", "found"), [("out[i : i + 4]", []), ("self.chosen(i)", [("OOM103", 8)])])
def test_a_graph_of_which_each_round_takes_a_slice_is_needed_by_the_next(report, rows, found):
    reported = report(f"""
        import torch

        def backward_in_chunks(out, y):
            out = out.view(-1, 9)
            for i in range(0, len(y), 4):
                loss = criterion({rows}, y[i])
                loss /= len(y)
                loss.backward(retain_graph=True)
    """)
    assert [finding for finding in reported if finding[0] == "OOM103"] == found


def test_a_helper_that_was_followed_often_enough_gives_back_what_goes_in(report):
    code = (
        """
        import torch

        def repeat(tensor):
            return tensor.reshape(-1)

        def train(fold):
            for x, y in fold:
                out = model(x.cuda())
                loss = criterion(repeat(out), y)
                loss.backward()
                optimizer.step()

        def main():
    """
        + "        train(fold)\n    " * 14
    )
    assert report(code) == [("OOM202", 8)]


def test_a_backward_goes_through_a_draw(report):
    code = """
        import torch

        encoder, decoder = Encoder().cuda(), Decoder().cuda()
        for x in loader:
            mean, deviation = encoder(x.cuda())
            loss = criterion(decoder(torch.normal(mean, deviation)), x)
            loss.backward()
            optimizer.step()
    """
    assert report(code) == [("OOM202", 5), ("OOM202", 6)]


RETAINED = """
    def sensitivity(net, samples):
        {before}
        {around}
            for sample in samples:
                out = net(sample)
                out.backward(gradient=direction, retain_graph=True)
                table[sample] = read(net, direction)
            {after}
        return table
"""


@pytest.mark.parametrize(
    ("before", "around", "after", "needless"),
    [
        ("table = torch.zeros(8)", "if True:", "table = torch.abs(table).mean(0)", True),
        ("table = net.weight.abs().mean(0)", "if True:", "pass", False),
        ("table = torch.zeros(8)", "for _ in range(2):", "table = torch.abs(table).mean(0)", False),
    ],
)
def test_what_is_computed_when_the_loop_has_ended_is_not_older_than_it(report, before, around, after, needless):
    code = RETAINED.format(before=before, around=around, after=after)
    assert (("OOM103", 6) in report(code)) is needless


SHOWN = """
    def explain(loader):
        for x, y in loader:
            out = model(x)
            first = criterion(out, y)

            def clicked(event):
                {made}
                {loss}.backward(retain_graph=True)
                show(x.grad[event.row])

            {handed}
"""


@pytest.mark.parametrize(
    ("made", "loss"),
    [
        ("pass", "first"),
        ("pass", "criterion(out[event.row], y)"),
        ("loss = other_criterion(out[event.row])", "loss"),
    ],
)
@pytest.mark.parametrize("handed", ["figure.connect('click', clicked)", "figure.connect(on_click=clicked)"])
def test_what_is_called_back_may_go_through_an_older_graph_more_than_once(report, made, loss, handed):
    assert not [one for one in report(SHOWN.format(made=made, loss=loss, handed=handed)) if one[0] == "OOM103"]


@pytest.mark.parametrize(
    ("loss", "handed"),
    [("criterion(model(x), y)", "figure.connect('click', clicked)"), ("criterion(out, y)", "clicked(event)")],
)
def test_it_goes_through_a_graph_of_its_own_once(report, loss, handed):
    assert ("OOM103", 8) in report(SHOWN.format(made="pass", loss=loss, handed=handed))


def test_an_optimizer_may_call_its_closure_again_on_the_same_graph(report):
    code = """
        for x, y in loader:
            optimizer = torch.optim.LBFGS(model.parameters())
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            optimizer.step(lambda: loss.backward(retain_graph=True))
    """
    assert not [one for one in report(code) if one[0] == "OOM103"]


COPIED_BY_ROW = """
    import torch

    encoder, decoder = Encoder().cuda(), Decoder().cuda()
    for x, y in loader:
        states = encoder(x)
        context = {made}
        for i in range(len(x)):
            {written}
        criterion(decoder(context), y).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    "written", ["context[i][0] = states[i][-1]", "context[0][i] = states[i]", "context[i][0][1] = states[i].sum()"]
)
def test_a_tensor_carries_the_graph_of_what_is_written_into_a_row_of_it(report, written):
    found = report(COPIED_BY_ROW.format(made="torch.zeros(len(x), 1, 8)", written=written))
    assert found == [("OOM202", 5), ("OOM202", 9)]


@pytest.mark.parametrize(
    ("made", "written"),
    [
        ("torch.zeros(len(x), 1, 8)", "context[i][0] = states[i].detach()"),
        ("torch.zeros(len(x), 1, 8)", "rows[i][0] = states[i]"),
        ("make_context(x)", "context[i][0] = states[i]"),
    ],
)
def test_a_row_without_a_graph_or_of_something_else_brings_none(report, made, written):
    assert report(COPIED_BY_ROW.format(made=made, written=written)) == [("OOM202", 9)]


DISTANCES = """
    import torch
    from layers import {name}
    from model import Net

    distance = {name}(2)
    for a, b, c in loader:
        first, second = model(a), model(b)
        loss = {name}(0.2).forward(first, second, c)
        loss.backward()
        optimizer.step()
    for a, b in test_loader:
        with torch.no_grad():
            first, second = model(a), model(b)
        kept.append(distance.forward(first, second).numpy())
"""


@pytest.mark.parametrize("name", ["PairwiseDistance", "CosineSimilarity", "TripletLoss"])
def test_the_forward_of_what_only_compares_outputs_is_none_of_a_network(read, name):
    script = read(DISTANCES.format(name=name))
    assert [forward.node.lineno for forward in script.trace.forwards.values()] == [7, 7, 13, 13]
    assert len(script.trace.backpropagated) == 2


def test_the_forward_of_anything_else_is_one(read):
    lines = [forward.node.lineno for forward in read(DISTANCES.format(name="Projection")).trace.forwards.values()]
    assert lines == [7, 7, 8, 13, 13, 14]


@pytest.mark.parametrize("mapping", ["dict", "collections.OrderedDict", "OrderedDict"])
def test_a_step_that_puts_weights_into_a_mapping_leaves_its_graph_in_them(report, mapping):
    code = f"""
        import collections
        import torch
        from collections import OrderedDict
        for x, y, query, target in loader:
            weights = {mapping}(net.named_parameters())
            loss = criterion(net(x.cuda(), weights), y)
            gradients = torch.autograd.grad(loss, weights.values(), create_graph=True)
            weights = {mapping}((name, w - 0.1 * g) for (name, w), g in zip(weights.items(), gradients))
            criterion(net(query.cuda(), weights), target).backward()
    """
    assert report(code) == [("OOM202", 6), ("OOM202", 9)]


STATE_OUT_OF_SIGHT = """
    from project import Net
    net = Net().cuda()
    optimizer = torch.optim.Adam(net.parameters())
    for epoch in range(9):
        {epoch}
        for x, y in loader:
            {batch}
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            loss.backward(retain_graph=True)
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("set_state", "needed"),
    [
        ("net.hidden = net.init_hidden()", True),
        ("net.reset_states()", True),
        ("other.reset_states()", False),
        ("net.epoch = epoch", False),
        ("net.load_state_dict(weights)", False),
        ("hidden = net.init_hidden()", False),
    ],
)
def test_a_network_out_of_sight_may_hand_on_the_state_that_it_begins_with(report, set_state, needed):
    code = STATE_OUT_OF_SIGHT.format(epoch=set_state, batch="pass")
    assert ("OOM103" not in dict(report(code))) is needed


@pytest.mark.parametrize("set_state", ["net.hidden = net.init_hidden()", "net.reset_states()"])
def test_it_hands_on_none_where_each_batch_begins_with_another(report, set_state):
    assert ("OOM103", 10) in report(STATE_OUT_OF_SIGHT.format(epoch=set_state, batch=set_state))
