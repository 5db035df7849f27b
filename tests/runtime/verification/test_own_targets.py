"""Cross entropies that divide by targets of their own are split exactly, each divided by what the whole batch has."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from oomfix import runtime
from oomfix.profile.compat import OutOfMemoryError
from oomfix.profile.simulated_card import SimulatedCard
from tests.runtime.words_and_tasks import (
    CLASSES,
    ROWS,
    TASKS,
    Batch,
    Network,
    batches,
    of_sentences,
    parts_as_whole,
)  # fmt: skip


def ignored(model: nn.Module, batch: Batch) -> torch.Tensor:
    words = model(batch["x"])[0]
    return F.cross_entropy(words.flatten(0, 1), batch["words"].flatten()) + of_sentences(model, batch)


def with_dimensions(model: nn.Module, batch: Batch) -> torch.Tensor:
    words = model(batch["x"])[0].transpose(1, 2)
    return F.cross_entropy(words, batch["words"]) + 0.3 * of_sentences(model, batch)


def words_first(model: nn.Module, batch: Batch) -> torch.Tensor:
    words = model(batch["x"])[0].transpose(0, 1).flatten(0, 1)
    return F.cross_entropy(words, batch["words"].t().flatten()) + of_sentences(model, batch)


def weighted_and_smoothed(model: nn.Module, batch: Batch) -> torch.Tensor:
    weight = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)
    criterion = nn.CrossEntropyLoss(weight, label_smoothing=0.1)
    return criterion(model(batch["x"])[0].flatten(0, 1), batch["words"].flatten()) + of_sentences(model, batch)


def with_a_number(model: nn.Module, batch: Batch) -> torch.Tensor:
    words, _, number, _ = model(batch["x"])
    loss = F.cross_entropy(words.flatten(0, 1), batch["words"].flatten())
    return loss + F.mse_loss(number, batch["number"])


def next_words(model: nn.Module, batch: Batch) -> torch.Tensor:
    words = model(batch["x"])[0][:, :-1]
    return F.cross_entropy(words.flatten(0, 1), batch["words"][:, 1:].flatten()) + of_sentences(model, batch)


def padded_next_words(model: nn.Module, batch: Batch) -> torch.Tensor:
    following = F.pad(batch["words"], (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(model(batch["x"])[0].flatten(0, 1), following.flatten()) + of_sentences(model, batch)


def selected_by_a_mask(model: nn.Module, batch: Batch) -> torch.Tensor:
    active = batch["mask"].flatten() == 1
    words = model(batch["x"])[0].flatten(0, 1)[active]
    return F.cross_entropy(words, batch["slots"].flatten()[active]) + of_sentences(model, batch)


def a_column_for_each_task(model: nn.Module, batch: Batch) -> torch.Tensor:
    tasks = model(batch["x"])[3]
    return sum(F.cross_entropy(tasks[:, task], batch["tasks"][:, task], ignore_index=-1) for task in range(TASKS))


def known_labels_of_each_task(model: nn.Module, batch: Batch) -> torch.Tensor:
    tasks, loss = model(batch["x"])[3], 0
    for task in range(TASKS):
        known = batch["tasks"][:, task] >= 0
        loss = loss + F.cross_entropy(tasks[:, task][known], batch["tasks"][:, task][known])
    return loss


def labels_kept_as_numbers(model: nn.Module, batch: Batch) -> torch.Tensor:
    words = model(batch["x"])[0].flatten(0, 1)
    return F.cross_entropy(words, batch["kept"].long().flatten()) + of_sentences(model, batch)


def likelihoods(model: nn.Module, batch: Batch) -> torch.Tensor:
    words = F.log_softmax(model(batch["x"])[0].flatten(0, 1), -1)
    return nn.NLLLoss()(words, batch["words"].flatten()) + of_sentences(model, batch)


def in_chunks(model: nn.Module, batch: Batch) -> torch.Tensor:
    words = model(batch["x"])[0].flatten(0, 1)
    return runtime.chunked_cross_entropy(words, batch["words"].flatten(), rows=7) + of_sentences(model, batch)


SPLIT = [
    ignored,
    with_dimensions,
    words_first,
    weighted_and_smoothed,
    with_a_number,
    next_words,
    padded_next_words,
    selected_by_a_mask,
    a_column_for_each_task,
    known_labels_of_each_task,
    labels_kept_as_numbers,
    likelihoods,
    in_chunks,
]


def perplexity(model: nn.Module, batch: Batch) -> torch.Tensor:
    return with_dimensions(model, batch).exp()


def contrastive(model: nn.Module, batch: Batch) -> torch.Tensor:
    words, *_ = model(batch["x"])
    embedded = F.normalize(words.mean(1), dim=-1)
    return F.cross_entropy(embedded @ embedded.t(), torch.arange(len(embedded))) + ignored(model, batch)


def half_of_the_labels(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The labels that count are not to be seen in the batch."""
    labels = torch.where(torch.rand(batch["slots"].shape) < 0.5, batch["slots"], -100)
    return F.cross_entropy(model(batch["x"])[0].transpose(1, 2), labels) + of_sentences(model, batch)


def hardest_words(model: nn.Module, batch: Batch) -> torch.Tensor:
    words = model(batch["x"])[0].flatten(0, 1)
    each = F.cross_entropy(words, batch["words"].flatten(), reduction="none")
    hard = each.topk(len(each) // 2).indices
    return F.cross_entropy(words[hard], batch["words"].flatten()[hard]) + of_sentences(model, batch)


def run_again_in_backward(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Of the cross entropy that backward computes again, nothing is divided any more."""

    def loss_of(words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(words.transpose(1, 2), batch["words"])

    words = model(batch["x"])[0]
    return checkpoint(loss_of, words, use_reentrant=True) + of_sentences(model, batch)


def tasks_with_a_label(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A part without a label of some task has one cross entropy less."""
    tasks, loss = model(batch["x"])[3], of_sentences(model, batch)
    for task in range(TASKS):
        known = batch["tasks"][:, task] >= 0
        if known.any():
            loss = loss + F.cross_entropy(tasks[:, task][known], batch["tasks"][:, task][known])
    return loss


def over_the_known_words(model: nn.Module, batch: Batch) -> torch.Tensor:
    labels = batch["words"]
    if (labels < 0).float().mean() > 0.5:  # another loss where most are masked
        labels = batch["slots"]
    return F.cross_entropy(model(batch["x"])[0].transpose(1, 2), labels) + of_sentences(model, batch)


WHOLE = [
    perplexity,
    contrastive,
    hardest_words,
    over_the_known_words,
]


@pytest.mark.parametrize("micro_batches", [2, 5])
@pytest.mark.parametrize("loss", SPLIT)
def test_each_is_divided_by_its_targets_in_the_whole_batch(loss, micro_batches):
    assert parts_as_whole(loss, micro_batches) == micro_batches


def test_labels_that_the_batch_does_not_show_are_counted_in_a_run_ahead():
    assert parts_as_whole(half_of_the_labels, 3) == 3


@pytest.mark.parametrize("loss", WHOLE)
def test_what_the_batch_does_not_show_runs_whole(loss):
    assert parts_as_whole(loss, 3) is None


@pytest.mark.parametrize("loss", [run_again_in_backward, tasks_with_a_label])
def test_what_only_some_calls_show_has_the_gradients_of_the_whole_batch(loss):
    parts_as_whole(loss, 6)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_one_that_hides_in_a_checkpoint_runs_whole_though_first_batches_have_all_its_targets(use_reentrant):
    """What hides keeps to its mean, which is one over samples only as long as each has as many targets."""

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        def of_words(words: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(words.transpose(1, 2), batch["words"])

        words, *_, tasks = model(batch["x"])
        hidden = checkpoint(of_words, words, use_reentrant=use_reentrant)
        return hidden + F.cross_entropy(tasks[:, 1], batch["tasks"][:, 1], ignore_index=-1)

    data = batches(6)
    for batch in data[:2]:
        batch["words"] = batch["slots"]
    parts_as_whole(loss, 3, data)


def test_shorter_sequences_may_lack_the_column_of_the_labels():
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        """Of the last word, which is another column where sentences are shorter."""
        words = model(batch["x"])[0]
        return F.cross_entropy(words[:, -1], batch["slots"][:, -1]) + with_a_number(model, batch)

    data = batches(6)
    for batch, words in zip(data, (6, 6, 3, 6, 2, 4), strict=True):
        for name in ("x", "words", "slots"):
            batch[name] = batch[name][:, :words]
    assert parts_as_whole(loss, 3, data) == 3


def test_the_first_batch_that_has_labels_out_of_proportion_is_split_too(caplog):
    """It shows what no check has seen, and is checked before it goes on in parts."""
    data = batches(3)
    for batch in data[:2]:
        batch["tasks"] = batch["tasks"].clamp(min=0)
    parts_as_whole(a_column_for_each_task, 3, data)
    assert "run whole" not in caplog.text


@pytest.mark.parametrize("factor", ["samples", "targets"])
def test_a_mean_over_targets_times_a_number_is_no_sum_though_first_batches_have_as_many_of_each_sample(factor):
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        times = len(batch["words"]) if factor == "samples" else (batch["words"] != -100).sum()
        return F.cross_entropy(model(batch["x"])[0].transpose(1, 2), batch["words"]) * times

    data = batches(6)
    for batch in data[:2]:
        batch["words"] = batch["slots"]
    parts_as_whole(loss, 3, data)


def test_a_window_is_averaged_as_over_whole_batches():
    def gradients(micro_batches: int) -> list[torch.Tensor]:
        runtime.reset()
        torch.manual_seed(0)
        model = Network().double()
        memory = runtime.preset("16gb", precision="fp32", micro_batches=micro_batches)
        memory.prepare(model)
        for batch in memory.accumulate(batches(3), 3):
            memory.forward_backward(lambda **batch: ignored(model, batch), **batch)
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    torch.testing.assert_close(gradients(4), gradients(1), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("loss", [ignored, tasks_with_a_label])
def test_an_evaluation_that_does_not_fit_is_split_too(loss):
    data = batches(3)
    data[2]["tasks"][ROWS // 2 :] = -1  # a part of it has no cross entropy of any task

    def losses(most_rows: int) -> list[Any]:
        runtime.reset()
        torch.manual_seed(0)
        model = Network().double()
        memory = runtime.preset("16gb", precision="fp32")
        memory.prepare(model)

        def evaluated(**batch: torch.Tensor) -> torch.Tensor:
            if len(batch["x"]) > most_rows:
                raise OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
            return loss(model, batch)

        found = []
        for batch in data:
            try:
                found.append(memory.evaluate(evaluated, **batch))
            except runtime.DoesNotFitError:
                found.append(None)
        return found

    whole, seen = losses(ROWS), losses(ROWS // 2)
    assert seen[1] is not None
    for expected, value in zip(whole, seen, strict=True):
        if value is not None:
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)


def test_a_model_of_transformers_for_pretraining_that_does_not_fit_is_split():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.BertForPreTraining(config).double()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 64, (16, 24), generator=generator)
    chosen = torch.rand(16, 24, generator=generator) < torch.rand(16, 1, generator=generator) / 2
    batch = {
        "input_ids": ids,
        "labels": ids.masked_fill(~chosen, -100),
        "next_sentence_label": torch.randint(0, 2, (16,), generator=generator),
    }
    expected = model(**batch).loss
    expected.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    memory = runtime.preset("16gb", precision="fp32")
    memory.prepare(model)
    with SimulatedCard(4 * 2**20):
        loss = memory.forward_backward(lambda **batch: model(**batch).loss, **batch)
    (report,) = memory.report().forwards
    assert report.largest == 8
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], gradients, rtol=1e-9, atol=1e-12)


def test_a_call_whose_parts_show_targets_of_their_own_is_checked_for_them_at_once(caplog):
    """In the rows that are checked first, known labels and samples are in proportion."""
    data, generator = batches(4), torch.Generator().manual_seed(9)
    for batch in data:
        batch["known"] = torch.rand(ROWS, generator=generator) < 0.6
        batch["kinds"] = torch.randint(0, 2, (ROWS,), generator=generator)

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        known, sentences = batch["known"], model(batch["x"])[1]
        of_known = F.cross_entropy(sentences[known], batch["follows"][known])
        return of_known + F.cross_entropy(sentences, batch["kinds"])

    assert parts_as_whole(loss, 2, data) == 2
    assert not caplog.text
