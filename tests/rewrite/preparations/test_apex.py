"""apex's mixed precision goes where every use of it is understood, and stays to the byte where one is not."""

import ast

import pytest

from tests.rewrite.equivalence import assert_same_bits, rewritten, run

SCRIPT = """\
import torch
import torch.nn.functional as F
from torch import nn

fp16 = False
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if fp16:
    try:
        from apex import amp
    except ImportError:
        raise ImportError("apex is missing")
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
x, y = torch.randn(6, 4), torch.tensor([0, 1, 1, 0, 1, 0])
for step in range(3):
    loss = F.cross_entropy(model(x), y)
    if fp16:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
    else:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.6f}")
"""


def test_a_flag_for_apex_becomes_the_runtimes_precision():
    after = rewritten(SCRIPT)
    loop = after.loops[0]
    assert (loop.rewrite, loop.reason, loop.line, loop.end_line) == ("micro-batched", None, 16, 27)
    assert "apex is replaced by the runtime's own mixed precision" in loop.notes
    assert "apex" not in after.text
    assert "\n    memory.unscale_(optimizer)\n" in after.text
    assert_same_bits(run(SCRIPT), run(after.text, preset="off"))
    assert rewritten(after.text).text == after.text


def test_what_apex_was_given_is_kept_where_it_is_another_object():
    text = SCRIPT.replace("amp.initialize(model, optimizer", "amp.initialize(model.cuda(), optimizer")
    assert "\n    model = model.cuda()\n" in rewritten(text).text


def test_the_optimizers_parameters_are_clipped_where_the_script_names_no_others():
    text = SCRIPT.replace("        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n", "")
    found = "clip_grad_norm_([p for group in optimizer.param_groups for p in group['params']], 0.1)"
    assert found in ast.unparse(ast.parse(rewritten(text).text))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    print(f", "    torch.save(amp.state_dict(), 'amp.pt')\n    print(f"),
        ("scaled_loss.backward()\n", "scaled_loss.backward()\n            print(scaled_loss)\n"),
        ("    optimizer.step()\n", "    optimizer.step()\n    print(scaled_loss)\n"),
        ("scale_loss(loss, optimizer)", "scale_loss(loss, optimizer, loss_id=1)"),
        ("import amp\n", "import amp, optimizers\n"),
        ("model, optimizer = amp.init", "model, (optimizer, other) = amp.init"),
    ],
    ids=["saved", "read", "read later", "one of several", "more of apex", "two optimizers"],
)
def test_another_use_of_apex_leaves_the_script_alone(old, new):
    text = SCRIPT.replace(old, new)
    assert text != SCRIPT
    after = rewritten(text)
    assert after.loops[0].rewrite == "none"
    assert "amp.scale_loss" in after.text


def test_a_file_without_a_training_loop_keeps_its_apex():
    text = """\
from apex import amp
from torch import nn


class Module(nn.Module):
    def backward(self, loss, optimizer, use_amp):
        if use_amp:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()

    def configure_apex(self, model, optimizer, level):
        model, optimizer = amp.initialize(model, optimizer, opt_level=level)
        return model, optimizer
"""
    after = rewritten(text)
    assert (after.text, after.loops) == (text, ())


def test_a_loop_whose_network_another_file_gives_to_apex_is_left_alone():
    text = SCRIPT.replace('    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")\n', "")
    after = rewritten(text)
    assert (after.text, after.loops[0].rewrite) == (text, "none")
    assert after.loops[0].reason == "apex does the mixed precision; move it to torch.amp first"


@pytest.mark.parametrize(
    ("call", "rewrite"),
    [
        ("attack(model, x, y, optimizer)", "none"),
        ("attack(model, x, y, opt=optimizer)", "none"),
        ("attack(model, x, y)", "micro-batched"),
        ("adjust(optimizer, step)", "micro-batched"),
    ],
)
def test_a_network_and_its_optimizer_that_another_file_gets_keep_their_apex(call, rewrite):
    """It may scale a loss by what `amp.initialize` noted on them, which fails without."""
    text = SCRIPT.replace("import torch\n", "import torch\nfrom attacks import adjust, attack\n", 1)
    after = rewritten(text + f"    print({call})\n")
    assert after.loops[0].rewrite == rewrite
    assert ("amp.initialize" in after.text) == (rewrite == "none")


def test_a_network_given_to_apex_where_that_may_fail_leaves_the_script_alone():
    """What the handler does besides stays, so that the call would stay with it."""
    text = SCRIPT.replace(
        """\
        from apex import amp
    except ImportError:
        raise ImportError("apex is missing")
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
""",
        """\
        from apex import amp
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    except ImportError:
        fp16 = False
""",
    )
    assert text != SCRIPT
    after = rewritten(text)
    assert (after.text, after.loops[0].rewrite) == (text, "none")
    assert after.loops[0].reason == "apex does the mixed precision; move it to torch.amp first"


def test_what_comes_after_the_import_of_apex_in_its_try_stays():
    text = SCRIPT.replace(
        'raise ImportError("apex is missing")\n',
        'raise ImportError("apex is missing")\n    else:\n        print("mixed precision")\n',
    )
    assert text != SCRIPT
    assert 'print("mixed precision")' in rewritten(text).text


def test_the_import_of_apex_and_its_call_go_together():
    text = SCRIPT.replace(
        """\
    except ImportError:
        raise ImportError("apex is missing")
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
""",
        """\
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    except ImportError:
        raise ImportError("apex is missing")
""",
    )
    assert text != SCRIPT
    after = rewritten(text)
    assert after.loops[0].rewrite == "micro-batched"
    assert "apex" not in after.text
    assert_same_bits(run(text), run(after.text, preset="off"))


FIRST_INTERFACE = """\
import torch
import torch.nn.functional as F
from apex import amp

device = torch.device("cuda")
handle = amp.init(True)
generator, critic = Generator().to(device), Critic().to(device)
optimizer = torch.optim.Adam(critic.parameters())
other = torch.optim.Adam(generator.parameters())
for x in loader:
    optimizer.zero_grad()
    other.zero_grad()
    made = generator(x)
    loss = critic(made.detach()).mean() - critic(x).mean()
    with handle.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    loss = -critic(made).mean()
    with handle.scale_loss(loss, other) as scaled:
        scaled.backward()
    other.step()
"""


def test_networks_run_as_they_are_where_the_first_interface_of_apex_decides_the_precision():
    after = rewritten(FIRST_INTERFACE)
    assert [loop.rewrite for loop in after.loops] == ["in-place"]
    assert "memory.forward(" not in after.text
    plain = FIRST_INTERFACE.replace("from apex import amp\n", "").replace("amp.init(True)", "made_elsewhere")
    assert "memory.forward(" in rewritten(plain).text
