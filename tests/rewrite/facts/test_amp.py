"""Autocast and loss scaling of the script, handed over to the manager."""

import textwrap

import pytest

from tests.rewrite.equivalence import assert_same_bits, rewritten, run
from tests.rewrite.small_loops import TOP, apply

AMP = """\
from torch.cuda.amp import GradScaler, autocast
scaler = GradScaler(enabled=args.amp)
for x, y in loader:
    optimizer.zero_grad()
    with autocast(enabled=args.amp):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
torch.save({"scaler": scaler.state_dict()}, "last.pt")
"""


def test_amp_is_folded_and_its_flag_and_checkpoint_lines_stay():
    text, forms = apply(AMP)
    assert forms == [("micro-batched", None)]
    assert 'with memory.autocast("cuda", enabled=args.amp):' in text
    assert "scaler = memory.scaler\n" in text
    assert '{"scaler": scaler.state_dict()}' in text
    assert text.count("memory.unscale_(optimizer)") == 1
    assert "scaler.update" not in text
    assert "torch.cuda.amp" not in text


@pytest.mark.parametrize("package", ["torch", "torch.cuda"])
def test_an_import_of_the_module_of_amp_goes_with_its_last_use(package):
    device = '"cuda", ' if package == "torch" else ""
    script = AMP.replace("from torch.cuda.amp import GradScaler, autocast", f"from {package} import amp")
    script = script.replace("GradScaler(", f"amp.GradScaler({device}").replace("autocast(", f"amp.autocast({device}")
    text, forms = apply(script)
    assert forms == [("micro-batched", None)]
    assert "import amp" not in text
    text, _ = apply(script.replace("import amp", "import amp, random"))
    assert "import random\n" in text
    text, _ = apply(script + "print(amp)\n")
    assert "import amp\n" in text
    text, _ = apply(script.replace("import amp", "import amp as precision").replace("amp.", "precision."))
    assert "precision" not in text


@pytest.mark.parametrize("package", ["torch.amp", "torch.cuda.amp"])
@pytest.mark.parametrize("name", [None, "amp"])
def test_an_import_of_the_module_of_amp_by_its_path_goes_with_its_last_use(package, name):
    line, script = amp_by_its_path(package, name)
    text, forms = apply(script)
    assert forms == [("micro-batched", None)]
    assert "torch.amp" not in text and "torch.cuda.amp" not in text
    newer = line.replace(".cuda", "")
    text, _ = apply(f"{script}print({name or package}.custom_fwd)\n")
    assert f"\n{newer}\n" in text or f"\n{line}\n" in text
    text, _ = apply(script.replace(line, f"{line}, random"))
    assert f"\n{newer}, random\n" in text


def test_an_import_of_amp_that_alone_brings_torch_stays():
    _, script = amp_by_its_path("torch.amp", None)
    assert "import torch.amp\n" in rewritten(TOP.replace("import torch\n", "") + script).text


def amp_by_its_path(package: str, name: str | None) -> tuple[str, str]:
    """An import of the module of mixed precision, and a script that uses it so."""
    line, used = (f"import {package} as {name}", name) if name else (f"import {package}", package)
    device = '"cuda", ' if package == "torch.amp" else ""
    script = AMP.replace("from torch.cuda.amp import GradScaler, autocast", line)
    script = script.replace("GradScaler(", f"{used}.GradScaler({device}")
    return line, script.replace("autocast(", f"{used}.autocast({device}")


def test_the_update_of_a_scale_that_tells_of_skipped_steps_stays():
    steps = "    scaler.step(optimizer)\n    scaler.update()\n"
    asked = f"    scale = scaler.get_scale()\n{steps}    skipped = scale > scaler.get_scale()\n"
    text, _ = apply(AMP.replace(steps, asked))
    assert asked.replace("scaler.step", "memory.step") in text


TRIED = """\
    try:
        scaler = torch.amp.GradScaler(enabled=args.amp)
    except AttributeError:  # torch below 2.3
        scaler = torch.cuda.amp.GradScaler(enabled=args.amp)
"""


def in_a_function(comment: str = "", end: str = "return model", made: str | None = None) -> str:
    made = made or "    scaler = GradScaler(enabled=args.amp)\n"
    loop = textwrap.indent(AMP[AMP.index("for ") : AMP.index("torch.save")], "    ")
    head = f"from torch.cuda.amp import GradScaler, autocast\ndef train(args):\n    print(args){comment}\n"
    text, _ = apply(f"{head}{made}{loop}    {end}\n")
    return text


def test_a_local_scaler_that_nothing_reads_any_more_is_taken_out():
    assert "def train(args):\n    print(args)\n    for x, y in loader:\n" in in_a_function()
    assert "    scaler = memory.scaler\n" in in_a_function(end="return scaler")
    assert "    # scales\n    scaler = memory.scaler\n" in in_a_function("\n    # scales")
    assert "    scaler = memory.scaler\n" in in_a_function(end="return locals()")


SCALER = "    scaler = GradScaler(enabled=args.amp)"
UNDER_A_TEST = f"""\
    if args.amp:
    {SCALER}
    else:
        scaler = None
"""


@pytest.mark.parametrize(
    "made",
    [
        f"    # mixed precision\n{SCALER}\n",
        f"{SCALER}  # loss scaler\n",
        f"{SCALER} if args.amp else None\n",
        UNDER_A_TEST,
        UNDER_A_TEST[: UNDER_A_TEST.index("    else")],
        f"    # AMP scaler\n{UNDER_A_TEST}",
    ],
)
def test_an_unread_scaler_goes_with_what_is_about_it_alone(made):
    assert "def train(args):\n    print(args)\n    for x, y in loader:\n" in in_a_function(made=made)
    assert "memory.scaler" in in_a_function(made=made, end="return scaler")


@pytest.mark.parametrize(
    "made",
    [
        f"    # model and data\n{SCALER}\n",
        f"    # we need more\n    # than a scaler\n{SCALER}\n",
        f"{SCALER}  # see the paper\n",
        f"{SCALER} if check(args) else None\n",
        UNDER_A_TEST.replace("args.amp:", "check(args):"),
        UNDER_A_TEST.replace("None", "None\n        args.lr = 1"),
    ],
)
def test_an_unread_scaler_stays_with_what_is_about_more(made):
    assert "memory.scaler" in in_a_function(made=made)


def test_names_of_amp_that_torch_itself_has_go_too():
    text, _ = apply(AMP.replace("from torch.cuda.amp import", "from torch import nn, autocast, GradScaler\n#"))
    assert "from torch import nn\n" in text


def test_a_scaler_that_is_tried_in_two_places_of_torch_is_taken_out_with_the_trial():
    assert "def train(args):\n    print(args)\n    for x, y in loader:\n" in in_a_function(made=TRIED)
    assert "except AttributeError:" in in_a_function(made=TRIED, end="return scaler")
    more = TRIED.replace("    except", "        checked = True\n    except")
    assert "    try:\n        scaler = memory.scaler\n        checked = True\n" in in_a_function(made=more)


def test_of_the_blank_lines_around_an_unread_scaler_one_stays():
    scaler = "    scaler = GradScaler(enabled=args.amp)\n"
    loop = textwrap.indent(AMP[AMP.index("for ") : AMP.index("torch.save")], "    ")
    head = "from torch.cuda.amp import GradScaler, autocast\ndef train(args):\n    print(args)\n\n"
    text, _ = apply(f"{head}{scaler}\n    # training\n{loop}")
    assert "    print(args)\n\n    # training\n    for x, y in loader:\n" in text


def test_an_unread_scaler_goes_where_a_function_begins_with_it_too():
    text, _ = apply("""\
        def train():
            scaler = torch.amp.GradScaler("cuda")

            for x, y in loader:
                with torch.autocast("cuda"):
                    loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()


        train()
        """)
    assert "scaler" not in text
    assert "def train():\n    for x, y in loader:\n" in text


OWN_SCALER = """\
scaler = torch.amp.GradScaler("cuda")
for i, (x, y) in enumerate(loader):
    with torch.autocast("cuda"):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if i % 4 == 3:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    print(loss.item(), norm)
"""


def test_a_loss_scaler_that_cannot_be_handed_over_stays_and_the_batch_is_split():
    result = rewritten(TOP + OWN_SCALER)
    assert [loop.rewrite for loop in result.loops] == ["micro-batched"]
    assert result.loops[0].notes == (
        "its own precision and loss scaler stay: line 13 clips or reads gradients also where no step follows",
    )
    assert 'runtime.preset("16gb", precision="fp32")' in result.text
    assert result.text.endswith(
        """\

    def forward(x, y):
        with torch.autocast("cuda"):
            loss = F.cross_entropy(model(x), y)
        return scaler.scale(loss), loss

    _, loss = memory.forward_backward(forward, x, y)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if i % 4 == 3:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    print(loss.item(), norm)
""".removeprefix("\n")
    )


def test_a_loop_with_its_own_loss_scaler_that_cannot_be_split_is_left_alone():
    text = TOP + OWN_SCALER.replace("loss = F", "self.out = model(x)\n        loss = F")
    result = rewritten(text)
    assert result.text == text
    assert [loop.rewrite for loop in result.loops] == ["none"]
    assert (result.loops[0].reason or "").endswith(
        "where no step follows; and line 11 changes self, which was made outside of the slice"
    )


def test_a_loss_scaler_that_another_object_uses_stays():
    text, _ = apply("""\
        def ours(scaler):
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast("cuda"):
                    loss = F.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()


        def theirs():
            scaler = torch.amp.GradScaler("cuda")
            surgeon.train(optimizer, scaler=scaler)


        ours(torch.amp.GradScaler("cuda"))
        """)
    assert 'scaler = torch.amp.GradScaler("cuda")\n    surgeon' in text
    assert text.endswith("ours(memory.scaler)\n")


def test_a_mean_over_cards_that_is_divided_and_scaled_by_the_script_is_returned_so():
    text, forms = apply("""\
        for i, (x, y) in enumerate(loader):
            losses = []
            with unseen():
                loss = model(x, y)
            losses.append(loss.mean().item())
            loss = loss.mean() / 4
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if (i + 1) % 4 == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        """)
    assert forms == [("micro-batched", None)]
    assert "return scaler.scale(loss.mean() / 4), loss\n" in text
    assert "_, loss = memory.forward_backward(forward, x, y)\n    losses.append(loss.mean().item())\n" in text


def test_arguments_of_autocast_stay_on_their_lines():
    text, _ = apply("""\
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast(
                device_type="cuda",
                dtype=torch.bfloat16,  # no scaler
            ):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        """)
    kept = ["with memory.autocast(", '    device_type="cuda",', "    dtype=torch.bfloat16,  # no scaler", "):"]
    assert "".join(f"        {line}\n" for line in kept) in text


ASKING = AMP.replace("autocast(enabled=args.amp)", "autocast(enabled=scaler.is_enabled())")


def test_a_scaler_that_is_asked_whether_it_is_enabled_stays_for_its_flag():
    """The manager's is enabled where the card has no bf16, whatever `args.amp` says."""
    text, forms = apply(ASKING)
    assert forms == [("micro-batched", None)]
    assert 'scaler = GradScaler("cuda", enabled=args.amp)\n' in text
    assert 'with memory.autocast("cuda", enabled=scaler.is_enabled()):\n' in text
    assert '{"scaler": memory.scaler.state_dict()}' in text
    assert "memory.unscale_(optimizer)\n" in text and "memory.step(optimizer)\n" in text
    assert "scaler.scale(" not in text and "scaler.update" not in text


def test_a_scaler_that_is_asked_for_its_flag_and_its_scale_tells_that_of_the_manager():
    steps = "    scaler.step(optimizer)\n    scaler.update()\n"
    asked = f"    scale = scaler.get_scale()\n{steps}    skipped = scale > scaler.get_scale()\n"
    text, _ = apply(ASKING.replace(steps, asked))
    assert asked.replace("scaler.step", "memory.step").replace("scaler.", "memory.scaler.") in text


def test_a_scaler_that_is_asked_for_its_flag_and_goes_out_of_sight_stays_the_scripts():
    text, forms = apply(ASKING.replace("scaler.state_dict()", "scaler"))
    assert forms == [("micro-batched", None)]
    assert 'precision="fp32")' in text
    assert "return scaler.scale(loss)\n" in text and "    scaler.step(optimizer)\n    scaler.update()\n" in text


@pytest.mark.parametrize(
    "given",
    ['device_type="cpu", enabled=False', '"cpu", enabled=False', '"cpu"', '"cuda" if on_gpu else "cpu"'],
)
def test_autocast_imported_from_two_places_keeps_the_device_it_is_given(given):
    text, _ = apply(f"""\
        try:
            from torch.amp import GradScaler, autocast
        except ImportError:
            from torch.cuda.amp import GradScaler, autocast
        scaler = GradScaler("cpu")
        for x, y in loader:
            with autocast({given}):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """)
    assert f"with memory.autocast({given}):" in text


def test_autocast_of_two_places_that_is_given_what_may_be_a_device_stays():
    text = """\
        try:
            from torch.amp import autocast
        except ImportError:
            from torch.cuda.amp import autocast
        for x, y in loader:
            with autocast({given}):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """
    assert "with autocast(device.type):" in apply(text.format(given="device.type"))[0]
    assert 'with memory.autocast("cuda", enabled=True):' in apply(text.format(given="True"))[0]


def test_the_side_of_a_flag_that_no_call_takes_still_trains():
    text = TOP + textwrap.dedent("""\
        def fit(scaler, amp=True):
            for x, y in loader:
                with torch.autocast("cpu", enabled=amp):
                    out = model(x)
                    loss = F.cross_entropy(out, y)
                optimizer.zero_grad()
                if amp:
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    loss.backward()
                    optimizer.step()
                print(loss.item(), out.shape)

        def main():
            fit(torch.amp.GradScaler("cpu", enabled=False))

        main()
        globals()["fit"](None, False)
        """)
    after = rewritten(text)
    assert [loop.rewrite for loop in after.loops] == ["micro-batched"]
    assert_same_bits(run(text), run(after.text, preset="off"))


def test_an_import_in_a_function_goes_with_its_last_use():
    text = rewritten("""\
import torch
import torch.nn.functional as F


def train(model, loader, optimizer):
    from torch.cuda.amp import GradScaler, autocast

    try:
        from torch.cuda.amp import custom_fwd
    except ImportError:
        custom_fwd = None
    scaler = GradScaler()
    for x, y in loader:
        optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(model(x.cuda()), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""").text
    assert "GradScaler" not in text and "import autocast" not in text
    assert "def train(model, loader, optimizer):\n    try:\n        from torch.cuda.amp import custom_fwd\n" in text


def test_an_import_in_a_handler_of_a_function_stays_with_the_one_that_it_stands_in_for():
    text = rewritten("""\
import torch
import torch.nn.functional as F


def train(model, loader, optimizer):
    try:
        from torch.amp import autocast
    except ImportError:
        from torch.cpu.amp import autocast_mode

        from torch.cuda.amp import autocast
    for x, y in loader:
        optimizer.zero_grad()
        with autocast("cuda"):
            loss = F.cross_entropy(model(x.cuda()), y)
        loss.backward()
        optimizer.step()
""").text
    assert "with memory.autocast(" in text
    assert text.count("import autocast\n") == 2
