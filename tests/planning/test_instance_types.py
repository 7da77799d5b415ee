"""The table of EC2 instance types."""

from __future__ import annotations

from weft.planning.instance_types import find_instance_type, has_device, load_instance_types


def test_instance_types_are_consistent() -> None:
    for name, instance in load_instance_types().items():
        assert instance.efa >= 1, name
        assert 25 <= instance.gbps / instance.efa <= 400, name
        assert instance.protocol in ("", "RDMA", "SENDRECV")
    p5 = find_instance_type("ml.p5.48xlarge")
    assert p5 is not None
    assert (p5.efa, p5.bandwidth, p5.gpudirect) == (32, 400e9, True)
    assert find_instance_type("m7i.large") is None


def test_devices_of_an_instance_type_are_compared_by_name() -> None:
    p5, p4d = find_instance_type("p5.48xlarge"), find_instance_type("p4d.24xlarge")
    trn2 = find_instance_type("trn2.48xlarge")
    assert p5 is not None
    assert p4d is not None
    assert trn2 is not None
    assert (p5.gpus, p4d.gpus) == (8, 8)
    assert [has_device(p5, name) for name in ("H100", "H100 500W", "H200")] == [True, True, False]
    names = ("p4d", "A100 40GB", "p4de", "A100 80GB")
    assert [has_device(p4d, name) for name in names] == [True, True, False, False]
    assert has_device(trn2, "Trn2")  # not compared
