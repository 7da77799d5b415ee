"""What a trace has in place of training: answers without values, and its backend."""

from __future__ import annotations

from dataclasses import fields

import torch
import torch.distributed as dist

from weft.estimate.stand_ins import HOST_READS, balanced_counts, one_document, trace_backend
from weft.estimate.trace import fake_world
from weft.models.host_reads import document_starts, read_counts
from weft.optim.soap import is_basis_due
from weft.parallel.backend import DEVICE_BACKEND
from weft.parallel.expert_dispatch import is_positive_on_any_rank


def test_stand_ins_answer_reads_of_fake_tensors() -> None:
    with fake_world(0, 2) as recorder:
        assert recorder.mode is not None
        with recorder.mode, recorder:
            counts_PE = torch.zeros(2, 3, dtype=torch.int64)
            assert read_counts([counts_PE, counts_PE], 8) == 2 * [2, 2, 1, 1, 1, 1]
            assert not is_positive_on_any_rank(counts_PE.sum())
            assert document_starts(counts_PE) == [0, 3]
            assert not is_basis_due(torch.zeros(()), 3)
    reads = {read_counts, is_positive_on_any_rank, document_starts, is_basis_due}
    assert set(HOST_READS) == reads


def test_stand_ins_are_answers_of_tensors_with_values() -> None:
    counts_E = torch.tensor(balanced_counts([torch.zeros(3)], 8))
    assert read_counts([counts_E], 8) == counts_E.tolist()
    assert counts_E.sum() == 8
    documents_BT = torch.zeros(3, 5, dtype=torch.int64)
    assert one_document(documents_BT) == document_starts(documents_BT)
    assert [is_basis_due(torch.tensor(float(n)), 3) for n in (1, 2, 3, 4)] == [1, 0, 0, 1]


def test_trace_backend_replaces_each_function_of_the_device() -> None:
    with fake_world(0, 2) as recorder:
        backend = trace_backend(recorder, "cuda", compiled=True)
        for field in fields(backend):
            assert getattr(backend, field.name) is not getattr(DEVICE_BACKEND, field.name)
        rows = torch.arange(2)[None]
        groups = [backend.create_group("cpu", rows, axis) for axis in ("tp", "cp")]
        assert len({group.group_name for group in groups}) == 2  # and not that of the world
        assert all(group is not dist.group.WORLD for group in groups)
        host = backend.empty_on_host(torch.zeros(3, 2), False)
        assert recorder.host_storages == {recorder.register(host)}
