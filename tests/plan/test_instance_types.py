"""The table of EC2 instance types."""

from __future__ import annotations

from weft.plan.instance_types import find_instance_type, load_instance_types


def test_instance_types_are_consistent() -> None:
    for name, instance in load_instance_types().items():
        assert instance.efa >= 1, name
        assert 25 <= instance.gbps / instance.efa <= 400, name
        assert instance.protocol in ("", "RDMA", "SENDRECV")
    p5 = find_instance_type("ml.p5.48xlarge")
    assert p5 is not None
    assert (p5.efa, p5.bandwidth, p5.gpudirect) == (32, 400e9, True)
    assert find_instance_type("m7i.large") is None
