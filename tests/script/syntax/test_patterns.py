"""`Pattern`: regular expressions that are compiled when they are first used."""

import re

from oomfix.script.syntax.patterns import Pattern


def test_a_pattern_is_compiled_when_it_is_first_asked_and_once(monkeypatch):
    compiled = []
    compile_it = re.compile
    monkeypatch.setattr(re, "compile", lambda *given: compiled.append(given) or compile_it(*given))
    pattern = Pattern("loss", re.IGNORECASE)
    assert compiled == []
    assert pattern.search("total_Loss")
    assert not pattern.match("total_Loss")
    assert compiled == [("loss", re.IGNORECASE)]


def test_a_pattern_answers_as_a_compiled_one_does():
    text = "loss_1, loss_22"
    pattern, compiled = Pattern(r"loss_(\d+)"), re.compile(r"loss_(\d+)")
    assert pattern.findall(text) == compiled.findall(text)
    assert [found.span() for found in pattern.finditer(text)] == [found.span() for found in compiled.finditer(text)]
    assert pattern.sub(r"\1", text) == compiled.sub(r"\1", text)
    assert pattern.fullmatch(text) is None
    assert pattern.fullmatch("loss_22")[1] == "22"
