"""A device of another type than ``cpu`` and ``cuda``, which every machine has: ``hostdev``.

PyTorch names one type of device for packages that bring their own, PrivateUse1.  `device.cpp`
registers such a device.  Its memory is host memory and its operators run on the CPU, so results are
equal to those of a CPU, but every call goes the way of an accelerator: tensors of another device
type, streams and events, an allocator with statistics, copies between host and device, and a
process-group backend of its own, ``hostccl``.

`entry_point` makes PyTorch load it as it loads the package of a vendor: by an entry point of the
group ``torch.backends``.
"""
