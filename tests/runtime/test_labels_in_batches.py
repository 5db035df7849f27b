"""The labels of cross entropies are found in a batch: behind lists, in them, and where programs leave some out."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oomfix.runtime.batches.outputs import Unforeseen
from oomfix.runtime.verification.own_targets import Labels, Noted, OwnMeans
from tests.runtime.words_and_tasks import ROWS, TASKS, Batch, batches, of_sentences, parts_as_whole


def of_words(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"])[0].transpose(1, 2), batch["words"]) + of_sentences(model, batch)


def with_pieces(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Of samples in pieces, of which a few rows hold fewer than the batch."""
    return of_words(model, {**batch, "x": torch.stack([piece["x"] for piece in batch["pieces"]])})


def with_layers(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return of_words(model, {**batch, "x": sum(batch["layers"]["of x"])})


def with_labels_in_pieces(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Labels of sentences that are not padded yet."""
    labels = [piece["words"] for piece in batch["pieces"]]
    words = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    return F.cross_entropy(model(batch["x"][:, : words.shape[1]])[0].transpose(1, 2), words) + of_sentences(
        model, batch
    )


@pytest.mark.parametrize("micro_batches", [5, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", [with_pieces, with_layers, with_labels_in_pieces])
def test_labels_are_found_behind_lists_that_differ_in_length_and_in_them(caplog, loss, micro_batches):
    data: list[Any] = []
    for number, batch in enumerate(batches(6)):
        x, lengths = batch["x"], batch["mask"].sum(1).tolist()
        pieces = [
            {"x": row, "words": row_of_words[:length]}
            for row, row_of_words, length in zip(x, batch["words"], lengths, strict=True)
        ]
        layers = {"of x": [x / (number + 2)] * (number + 2)}
        data.append({"pieces": pieces, "layers": layers} | batch)
    assert parts_as_whole(loss, micro_batches, data) == micro_batches
    assert "run whole" not in caplog.text


def of_those(model: nn.Module, batch: Batch, count: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of the labels that count alone."""
    return F.cross_entropy(model(batch["x"])[0][count], labels[count]) + of_sentences(model, batch)


def without_0(model: nn.Module, batch: Batch) -> torch.Tensor:
    return of_those(model, batch, batch["padded"] != 0, batch["padded"])


def without_255(model: nn.Module, batch: Batch) -> torch.Tensor:
    return of_those(model, batch, batch["void"] != 255, batch["void"])


def from_1_on(model: nn.Module, batch: Batch) -> torch.Tensor:
    labels = batch["from 1 on"] - 1
    words = F.cross_entropy(model(batch["x"])[0].transpose(1, 2), labels, ignore_index=-1)
    return words + of_sentences(model, batch)


def with_0_ignored(model: nn.Module, batch: Batch) -> torch.Tensor:
    labels = batch["padded"].masked_fill(batch["padded"] == 0, -100)
    return F.cross_entropy(model(batch["x"])[0].transpose(1, 2), labels) + of_sentences(model, batch)


@pytest.mark.parametrize("micro_batches", [2, 5])
@pytest.mark.parametrize(
    ("loss", "name", "first", "none"),
    [
        (without_0, "padded", 0, 0),
        (with_0_ignored, "padded", 0, 0),
        (without_255, "void", 0, 255),
        (from_1_on, "from 1 on", 1, 0),
    ],
)
def test_labels_that_a_program_leaves_out_itself_are_not_counted(loss, name, first, none, micro_batches):
    data = []
    for batch in batches(6):
        labels = (batch["slots"] + first).masked_fill(batch["words"] < 0, none)
        data.append({"x": batch["x"], "follows": batch["follows"], name: labels})
    assert parts_as_whole(loss, micro_batches, data) == micro_batches


def test_labels_are_those_that_a_program_has_to_do_least_with():
    """The others with a mask are the same here."""
    batch = {("all",): [torch.tensor([0, 0])], ("some",): [torch.tensor([0, -100])]}
    with Noted(batch) as noted:
        F.cross_entropy(torch.zeros(2, 3), batch["some",][0])
    assert noted.places() == (Labels(("some",)),)


def test_a_check_on_rows_without_a_label_leaves_what_is_known_as_it_was(caplog):
    """At the second call few samples have a label of the first task; those before it were split, and rightly."""

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        tasks = model(batch["x"])[3]
        of_each = [F.cross_entropy(tasks[:, t], batch["tasks"][:, t], ignore_index=-1) for t in range(TASKS)]
        return torch.stack(of_each).sum()

    data = batches(2)
    data[1]["tasks"] = torch.full((ROWS, TASKS), -1)
    data[1]["tasks"][[6, 11], 0] = torch.tensor([1, 3])
    data[1]["tasks"][[0, 1, 2, 3, 4, 8, 9], 1] = torch.tensor([2, 1, 1, 4, 0, 3, 1])
    data[1]["tasks"][2, 2] = 1
    assert parts_as_whole(loss, 2, [{"x": batch["x"], "tasks": batch["tasks"]} for batch in data]) == 2
    assert "run whole" not in caplog.text


def test_a_mean_by_hand_beside_a_cross_entropy_is_counted_first(caplog):
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        each = F.cross_entropy(model(batch["x"])[0].transpose(1, 2), batch["slots"], reduction="none")
        return (each * batch["mask"]).sum() / batch["mask"].sum() + of_sentences(model, batch)

    assert parts_as_whole(loss, 4, batches(3)) == 4
    assert "to count these first" in caplog.text


def test_a_part_that_lacks_a_cross_entropy_is_told_from_one_with_other_targets():
    labels = Labels(("labels",))
    means = OwnMeans([labels, labels], {("labels",): [torch.zeros(4)]}, 4)
    with means.part(2):
        F.cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))
    with pytest.raises(Unforeseen, match="other cross entropies"):
        means.expect_all()
