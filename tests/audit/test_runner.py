"""Many files on several processes: the work is divided so that they end together, and the answer does not show it."""

import os

from oomfix.audit import Auditor
from oomfix.discovery import Found
from oomfix.rules import all_rules
from oomfix.runner import Job, _batches, run

LOAD = "import torch\nx = torch.load(p)\n"


def found(path, text=""):
    path.write_text(text)
    return Found(str(path), os.stat(path), named=False)


def test_the_longest_files_are_begun_first_and_none_is_lost(tmp_path):
    sizes = [10, 300_000, 5, 200_000, 100_000, 7]
    tasks = [(n, Job(found(tmp_path / f"{n}.py", "#" * size), None, None), False) for n, size in enumerate(sizes)]
    batches = [[number for number, _, _ in batch] for batch in _batches(tasks)]
    assert batches == [[1], [3, 4], [0, 5, 2]]


def test_reports_come_in_the_order_of_the_files_whatever_the_processes(tmp_path):
    texts = [LOAD + "# " + "x" * size + "\n" for size in (10, 900_000, 20, 400_000)]
    jobs = [Job(found(tmp_path / f"{n}.py", f"y = {n}\n" * n + text), None, None) for n, text in enumerate(texts)]
    auditor = Auditor(all_rules())
    reports = run(auditor, jobs, processes=2)
    assert [report.findings[0].line for report in reports] == [2, 3, 4, 5]
    assert reports == run(auditor, jobs, processes=1)
