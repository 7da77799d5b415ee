"""Reads of the host return values, and fake tensors have no answer of their own."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.models.host_reads import document_starts, read_counts


def test_read_counts_returns_the_values_of_all_tensors() -> None:
    counts = [torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [7, 8]])]
    assert read_counts(counts, 10) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert read_counts([torch.tensor(9)], 0) == [9]


def test_document_starts_are_those_of_runs_of_equal_ids() -> None:
    ids_BT = torch.tensor([[3, 3, 1, 3], [3, 0, 0, 0], [2, 2, 2, 2]])
    assert document_starts(ids_BT) == [0, 2, 3, 4, 5, 8]


def test_fake_tensors_have_no_answer() -> None:
    with FakeTensorMode():
        ids_BT = torch.zeros(2, 3, dtype=torch.int64)
        with pytest.raises(RuntimeError):
            read_counts([ids_BT], 6)
        with pytest.raises(RuntimeError):
            document_starts(ids_BT)
