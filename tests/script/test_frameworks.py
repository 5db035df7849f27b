"""Scripts whose backward, step or loop belongs to a framework."""

from __future__ import annotations

import pytest

from oomfix.rules import all_rules


def findings_of(script):
    """The code, line and severity of everything but the notes on bare `zero_grad()`."""
    found = [finding for rule in all_rules() for finding in rule.check(script) if finding.code != "OOM203"]
    return sorted((finding.code, finding.line, finding.severity.value) for finding in found)


@pytest.mark.parametrize(
    ("made", "loss", "backward", "severity"),
    [
        (
            "engine, opt, loader, _ = deepspeed.initialize(model=net)",
            "engine(batch)",
            "engine.backward(loss)",
            "warning",
        ),
        ("engine = deepspeed.initialize(model=net)[0]", "engine(batch)", "engine.backward(loss)", "warning"),
        ("accelerator = Accelerator()", "compute(batch)", "accelerator.backward(loss)", "warning"),
        ("fabric = Fabric()", "compute(batch)", "fabric.backward(loss)", "warning"),
        ("step = unseen()", "compute(batch)", "(loss + compute(batch)).backward()", "warning"),
        ("net = net.cuda()", "net(batch).mean()", "torch.autograd.backward(loss)", "warning"),
        ("net = net.cuda()", "net(batch).mean()", "torch.autograd.backward(loss, retain_graph=True)", "error"),
        ("net = net.cuda()", "net(batch).mean()", "net(batch).mean().backward()", "error"),
    ],
)
def test_a_backward_through_what_is_out_of_sight_frees_it_too(read, made, loss, backward, severity):
    code = f"""
        import deepspeed, torch
        from accelerate import Accelerator
        from lightning import Fabric
        from project import compute, net, unseen
        {made}
        total = 0
        for batch in loader:
            loss = {loss}
            {backward}
            total += loss
    """
    found = [finding for finding in findings_of(read(code)) if finding[0] == "OOM101"]
    assert found == [("OOM101", 10, severity)]


def test_two_losses_made_out_of_sight_may_share_a_graph(report):
    code = """
        for batch in loader:
            first = compute(batch)
            first.backward(retain_graph=True)
            second = compute_other(batch)
            second.backward()
            optimizer.step()
    """
    assert report(code) == []


LIGHTNING = """
    import torch
    import pytorch_lightning as pl

    class Classifier(pl.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net = net
            self.total = 0
            self.outputs = []

        def shared_step(self, batch):
            x, y = batch
            out = self.net(x)
            return out, self.criterion(out, y)

        def {step}(self, batch, index):
            out, loss = self.shared_step(batch)
            self.log("loss", loss)
            {statement}
            return {returned}
"""


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("self.total += loss", "OOM101"),
        ("self.total = self.total + loss", "OOM101"),
        ("self.outputs.append(loss)", "OOM102"),
        ("self.outputs.append({'loss': loss, 'out': out.detach()})", "OOM102"),
        ("self.unseen_list.append(out)", "OOM102"),
    ],
)
@pytest.mark.parametrize("returned", ["loss", "{'loss': loss}"])
def test_a_training_step_is_the_body_of_lightnings_loop(read, statement, code, returned):
    script = read(LIGHTNING.format(step="training_step", statement=statement, returned=returned))
    assert findings_of(script) == [(code, 19, "warning")]


def test_what_a_training_step_does_not_return_keeps_its_activations(read):
    code = LIGHTNING.format(step="training_step", statement="self.total += self.net(batch).sum()", returned="loss")
    assert findings_of(read(code)) == [("OOM101", 19, "error")]


@pytest.mark.parametrize(
    "statement",
    [
        "self.total += loss.item()",
        "self.total = loss",
        "self.outputs.append(loss.detach())",
        "self.accuracy.update(out, batch[1])",
        "self.accuracy(out, batch[1])",
        "self.outputs = [loss]",
        "losses = []; losses.append(loss)",
        "teacher = self.teacher(batch[0])",
        "with torch.no_grad(): self.outputs.append(self.ema(batch[0]))",
        "losses = [self.criterion(head(out), batch[1]) for head in self.heads]; loss = sum(losses)",
    ],
)
def test_a_training_step_that_keeps_nothing_is_silent(read, statement):
    assert findings_of(read(LIGHTNING.format(step="training_step", statement=statement, returned="loss"))) == []


@pytest.mark.parametrize(
    ("imported", "base"),
    [
        ("from transformers import Seq2SeqTrainer", "Seq2SeqTrainer"),
        ("from trl import SFTTrainer as Base", "Base"),
        ("import transformers", "transformers.Trainer"),
    ],
)
@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("self.losses.append(out.loss)", [("OOM102", 8, "warning")]),
        ("self.total += out.loss", [("OOM101", 8, "warning")]),
        ("self.losses.append(out.loss.detach())", []),
        ("self.total += out.loss.item()", []),
        ("self.last = out.loss", []),
    ],
)
def test_compute_loss_is_the_body_of_the_loop_of_transformers(read, imported, base, statement, found):
    code = f"""
        import torch
        {imported}

        class Distilling({base}):
            def compute_loss(self, model, inputs, return_outputs=False):
                out = model(**inputs)
                torch.cuda.synchronize()
                {statement}
                return (out.loss, out) if return_outputs else out.loss
    """
    script = read(code)
    assert findings_of(script) == found
    assert script.loops == []


@pytest.mark.parametrize("step", ["validation_step", "test_step", "predict_step"])
def test_lightning_evaluates_without_gradients(read, step):
    script = read(LIGHTNING.format(step=step, statement="self.outputs.append(loss)", returned="loss"))
    assert findings_of(script) == []


def test_a_backward_by_hand_counts_in_lightning_and_its_step_is_no_loop_of_the_file(read):
    script = read("""
        from lightning import LightningModule

        class Gan(LightningModule):
            def training_step(self, batch, index):
                d_opt, g_opt = self.optimizers()
                loss = self.critic(batch).mean()
                self.manual_backward(loss)
                d_opt.step()
                self.d_losses.append(loss)
                loss = self.critic(self.generator(batch)).mean()
                loss.backward()
                g_opt.step()
                self.g_losses.append(loss)
    """)
    assert findings_of(script) == [("OOM102", 9, "warning"), ("OOM102", 13, "warning")]
    assert script.loops == []


FITTED = """
    import torch
    {imported}
    from networks import Network

    model = Network()
    trainer = {trainer}
    {fit}
    out = model(batch)
    print(out.argmax(1))
"""
LIGHTNINGS = [
    ("import pytorch_lightning as pl", "pl.Trainer(max_epochs=3)", "trainer.fit(model, loader)"),
    ("import lightning as L", "L.Trainer()", "trainer.fit(model, loader)"),
    ("from lightning.pytorch import Trainer", "Trainer()", "trainer.fit(model, loader)"),
    ("from transformers import Seq2SeqTrainer", "Seq2SeqTrainer(model=model)", "trainer.train()"),
    ("from trl import SFTTrainer", "SFTTrainer(model)", "trainer.train(resume_from_checkpoint=True)"),
]


@pytest.mark.parametrize(("imported", "trainer", "fit"), LIGHTNINGS)
def test_a_forward_behind_a_frameworks_training_evaluates(read, imported, trainer, fit):
    code = FITTED.format(imported=imported, trainer=trainer, fit=fit)
    assert findings_of(read(code)) == [("OOM201", 8, "warning")]
    quiet = code.replace("out = model(batch)", "with torch.no_grad(): out = model(batch)")
    assert findings_of(read(quiet)) == []


@pytest.mark.parametrize(
    ("imported", "trainer", "fit"),
    [
        ("import pytorch_lightning as pl", "pl.Trainer()", "trainer.tune(model)"),
        ("from sklearn.svm import SVC", "SVC()", "trainer.fit(x, y)"),
        ("from networks import Trainer", "Trainer()", "trainer.fit(model, loader)"),
    ],
)
def test_a_forward_behind_something_else_may_be_anything(read, imported, trainer, fit):
    assert findings_of(read(FITTED.format(imported=imported, trainer=trainer, fit=fit))) == []


def test_a_forward_that_is_trained_through_behind_a_fit_is_no_evaluation(read):
    imported, trainer, fit = LIGHTNINGS[0]
    code = FITTED.format(imported=imported, trainer=trainer, fit=fit)
    assert findings_of(read(code.replace("print(out.argmax(1))", "criterion(out, y).backward()"))) == []
    other = code.replace("trainer.fit(model, loader)", "trainer.fit(other, loader)\n    def show(x): return model(x)")
    assert findings_of(read(other.replace("out = model(batch)", "out = 0"))) == []


def test_what_a_class_of_the_file_loads_from_a_checkpoint_is_its_network(read):
    code = (
        LIGHTNING.format(step="training_step", statement="pass", returned="loss")
        + """
        def forward(self, x):
            return self.net(x)

    def train(loader, batch):
        trainer = pl.Trainer()
        trainer.fit(Classifier(net), loader)
        best = Classifier.load_from_checkpoint("best.ckpt")
        accuracy = (best(batch).argmax(1) == 1).float().mean()
        return accuracy
    """
    )
    assert findings_of(read(code)) == [("OOM201", 29, "warning")]


LITE = """
    import torch
    from {package} import {base}

    class Training({base}):
        def run(self, net, loader):
            net, optimizer = self.setup(net, torch.optim.Adam(net.parameters()))
            for x, y in loader:
                loss = criterion(net(x.cuda()), y)
                {backward}
                optimizer.step()
"""


@pytest.mark.parametrize(
    ("package", "base"), [("pytorch_lightning.lite", "LightningLite"), ("lightning.fabric", "Fabric")]
)
def test_a_loop_in_a_class_of_fabric_leaves_the_precision_to_it(report, package, base):
    assert report(LITE.format(package=package, base=base, backward="self.backward(loss)")) == []


def test_one_in_a_class_of_something_else_does_not(report):
    assert report(LITE.format(package="project", base="Base", backward="loss.backward()")) == [("OOM202", 8)]
