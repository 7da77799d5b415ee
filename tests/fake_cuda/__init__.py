"""One rank's training step on fake CUDA tensors, with a PyTorch that is built for CPUs.

A fake tensor has a shape, a dtype and a device, but no memory and no values.  A CPU build of
PyTorch cannot run autograd on fake ``cuda`` tensors, because it asks the CUDA library for the
current device and stream.  `guard.cpp` answers these questions, and `tests.fake_cuda.device`
replaces the few functions of ``torch.cuda`` that a step calls.  Then weft's own code runs the step
that a GPU would run: CUDA's branches, its attention kernels, float8 products with their checks of
layouts, and torch.compile up to the code that inductor receives.

`tests.fake_cuda.step` counts what a step of a recipe does.  Nothing is timed, and values are
missing: this shows that code is captured, fused or waited for, not that it is fast or right.

Nothing here may be imported together with real CUDA: every step runs in a separate process
(``python -m tests.fake_cuda RECIPE``).
"""
