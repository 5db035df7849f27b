"""The parts of README.md that are made from the code: the screen of an audit and the table of rules.

python -m bench.readme            # rewrites them
python -m bench.readme --check    # exits 1 where they differ, and says which
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from oomfix.audit import Auditor
from oomfix.config import Configuration, Flags
from oomfix.pages import markdown_table, pages
from oomfix.pipeline import Pipeline
from oomfix.report.rich import layout
from oomfix.rules import all_rules

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
SCRIPT = "fixtures/retinopathy/train.py"
LEAKS = "OOM1"  # the rules whose findings are shown: few enough to be read at once
WIDTH = 100


def screen() -> str:
    """What `oomfix audit` prints of the leaks of a fixture on a terminal of 100 columns, without its colours."""
    auditor = Auditor(all_rules())
    codes = [rule.code for rule in auditor.rules]
    report = Pipeline(auditor, Configuration(Flags(select=(LEAKS,)), codes), use_cache=False).audit([SCRIPT])
    lines = ("".join(span.text for span in line).rstrip() for line in layout(report, WIDTH))
    return "```text\n" + f"$ oomfix audit --select {LEAKS} {SCRIPT}\n" + "\n".join(lines) + "\n```"


def blocks() -> dict[str, str]:
    """The text that belongs between each pair of markers."""
    return {"screen": screen(), "rules": markdown_table(pages(all_rules()))}


def block_pattern(name: str) -> re.Pattern[str]:
    """Matches a block with its markers; its group is what stands between them."""
    return re.compile(rf"(?<=<!-- {name}: start -->\n).*?(?=\n<!-- {name}: end -->)", re.DOTALL)


def main() -> int:
    """Rewrite or check the blocks; the exit status."""
    os.chdir(ROOT)
    text = README.read_text(encoding="utf-8")
    stale = []
    for name, block in blocks().items():
        pattern = block_pattern(name)
        (current,) = pattern.findall(text)
        if current != block:
            stale.append(name)
            text = pattern.sub(lambda _, block=block: block, text)
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"README.md: the block {name!r} is not what the code makes; run `python -m bench.readme`")
        return 1 if stale else 0
    README.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
