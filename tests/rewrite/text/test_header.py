"""Where the runtime is imported and the manager made, and under which names."""

import textwrap

import pytest

from tests.rewrite.equivalence import rewritten
from tests.rewrite.small_loops import TOP


def test_names_that_the_file_uses_are_not_taken():
    result = rewritten(
        TOP
        + textwrap.dedent("""\
        memory = runtime = forward = None
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        """)
    )
    assert "from oomfix import runtime as oomfix_runtime\n" in result.text
    assert 'gpu_memory = oomfix_runtime.preset("16gb")\n' in result.text
    assert "gpu_memory.forward_backward(forward_batch, x, y)" in result.text


@pytest.mark.parametrize(
    "bound",
    [
        "import memory",
        "def memory():\n        pass",
        "class memory:\n        pass",
        'match {}:\n        case {"memory": memory}:\n            pass',
        "match {}:\n        case {**memory}:\n            pass",
        "match []:\n        case [*memory]:\n            pass",
    ],
)
def test_names_that_a_function_binds_and_never_reads_are_not_taken(bound):
    loop = """
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    """
    result = rewritten(f"{TOP}\ndef train():\n    {bound}\n{loop}")
    assert "gpu_memory.forward_backward(" in result.text


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        (
            "import torch\n\nfrom .data import loader",
            "import torch\nfrom oomfix import runtime\n\nfrom .data import loader",
        ),
        (
            "import torch\nfrom torch import nn\n\nfrom data import loader",
            "import torch\nfrom oomfix import runtime\nfrom torch import nn\n\nfrom data import loader",
        ),
        ("import torch\nimport data, os", "import torch\nimport data, os\nfrom oomfix import runtime"),
        (
            "import torch, numpy\n\nfrom data import loader\nfrom model import Net",
            "import torch, numpy\nfrom oomfix import runtime\n\nfrom data import loader\nfrom model import Net",
        ),
        (
            "import torch, sys\nsys.path.append(str())\nfrom data import loader",
            "import torch, sys\nsys.path.append(str())\nfrom data import loader\nfrom oomfix import runtime",
        ),
        (
            "from numpy import array\nimport torch\n\nfrom . import data",
            "from numpy import array\nimport torch\nfrom oomfix import runtime\n\nfrom . import data",
        ),
        (
            "from torch import nn\nfrom data import loader",
            "from torch import nn\nfrom data import loader\nfrom oomfix import runtime",
        ),
    ],
)
def test_the_runtime_is_imported_among_what_is_installed(imports, expected):
    body = "for x, y in loader:\n    loss = model(x, y)\n    loss.backward()\n    optimizer.step()\n"
    text = rewritten(f"import os\n\n{imports}\n{body}").text
    assert text.startswith(f'import os\n\n{expected}\n\nmemory = runtime.preset("16gb")\n\nfor x')


def test_a_module_that_does_without_torch_does_so_after_apply():
    """The runtime imports torch: its import stands where torch's own may fail."""
    optional = textwrap.dedent("""\
        import math

        try:
            import torch
            from torch import nn
        except ImportError:  # pragma: no cover
            torch = None
        import os


        def train(model, loader):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
        """)
    result = rewritten(optional)
    needed = rewritten("import torch\n" + optional)
    assert needed.text.count('\nmemory = runtime.preset("16gb")\n') == 1
    assert [loop.rewrite for loop in result.loops] == ["micro-batched"]
    assert result.text.startswith(
        "import math\n\ntry:\n    import torch\n    from torch import nn\n    from oomfix import runtime\n\n"
        '    memory = runtime.preset("16gb")\nexcept ImportError:  # pragma: no cover\n    torch = None\nimport os\n'
    )
    assert rewritten(result.text).text == result.text


@pytest.mark.parametrize(
    ("imported", "name"),
    [
        ("from oomfix import runtime", "runtime"),
        ("from oomfix import runtime as gpu", "gpu"),
        ("import oomfix.runtime", "oomfix.runtime"),
        ("import oomfix.runtime as gpu", "gpu"),
    ],
)
def test_a_runtime_that_the_module_imports_itself_is_not_imported_again(imported, name):
    body = (
        "for x, y in loader:\n    optimizer.zero_grad()\n    F.mse_loss(model(x), y).backward()\n    optimizer.step()\n"
    )
    text = rewritten(f"{imported}\n{TOP}{body}").text
    assert text.count("oomfix") == 1 + name.count("oomfix")
    assert f'\n\nmemory = {name}.preset("16gb")\n' in text


@pytest.mark.parametrize("below", ["\n", "# the command line\n", "\n# the command line\n"])
def test_imports_that_are_commented_out_below_the_others_stay_with_them(below):
    body = "for x, y in loader:\n    loss = model(x, y)\n    loss.backward()\n    optimizer.step()\n"
    out = "# import models.mlp as mlp\n#from models import vit\n"
    text = rewritten(f"import os\n\nimport torch\n\nimport models.ae as ae\n{out}{below}{body}").text
    made = f'memory = runtime.preset("16gb")\n{"" if below.startswith(chr(10)) else chr(10)}{below}for x'
    assert f"import torch\nfrom oomfix import runtime\n\nimport models.ae as ae\n{out}\n{made}" in text
    text = rewritten(f"import torch\n{out}{below}{body}").text
    assert text.startswith(f"import torch\n{out}from oomfix import runtime\n\n{made}")
