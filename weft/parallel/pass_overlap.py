"""Overlap of a forward and a backward pass, which hides the exchange of tokens.

Expert parallelism sends tokens to their experts and back (`weft.parallel.expert_parallel`).  Each
layer waits for both exchanges, forward and backward, and has nothing else to compute.  A pipeline
has: another microbatch.  DualPipeV therefore pairs the forward pass of one microbatch with the
backward pass of another, in another stage of the rank (DeepSeek-V3, arXiv:2412.19437, section
3.2.1).  The passes of a pair take turns.  A pass that has started an exchange hands over to the
other, and waits for its rows when it has the turn again:

    forward    attention, router | > send      | experts  | > return    | attention, ...
    backward                     | head  > return         | experts  > send | attention, ...

So an exchange of one pass is under way while the other computes.  Neither computes at the same
time as the other: they are two threads, but one runs at a time, and *where* they switch does not
depend on time.  All ranks therefore start their collectives in the same order, and gradients are
those without overlap, bit by bit.

Two threads, because only a thread can stop in the middle of a block or of autograd.  A pass also
keeps its thread's state: hooks on saved tensors, recomputation, and whether autograd runs.  The
forward pass runs in the main thread, which has the compiler's configuration and receives signals.
On a GPU both use the same stream, and NCCL's collectives run on another.  A pass queues its
exchange, then the other queues its kernels, then the stream waits for the exchange.

The loss of the forward pass is computed after the pair, because the fused loss calls autograd: on a
GPU, autograd's only thread may be the one that waits for its turn.

If a pass fails, the other ends at its next turn, and the pair raises the first error.

*Cost*: a switch takes some microseconds, and each pass needs its temporary memory at the same time
as the other.  Under full recomputation, the backward pass has four exchanges per layer, and the
forward pass two, so half of the backward pass has no partner.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from weft.parallel.expert_dispatch import during_exchange


class OtherPassFailed(BaseException):
    """Ends a pass because the other pass of the pair failed."""


def run_in_turns(main: Callable[[], None], other: Callable[[], None]) -> None:
    """Run two functions, which switch during each exchange of tokens.

    Args:
        main: runs in this thread, and first.
        other: runs in another thread.

    Raises:
        BaseException: the first error of the two; both have ended.
    """
    gates = SimpleQueue[None](), SimpleQueue[None]()  # each function waits at its gate
    errors: list[BaseException] = []
    turn, is_alone = 0, False

    def hand_over() -> None:
        nonlocal turn
        if not is_alone and not errors:
            own, turn = turn, 1 - turn
            gates[turn].put(None)
            gates[own].get()
        if errors:
            raise OtherPassFailed

    @contextmanager
    def ending(next_turn: int) -> Iterator[None]:
        """Record an error, and let the other function run to its end."""
        nonlocal is_alone
        try:
            yield
        except BaseException as error:
            errors.append(error)
        is_alone = True
        gates[next_turn].put(None)

    def run_other() -> None:
        with ending(0):
            gates[1].get()
            if not errors:
                other()

    thread = threading.Thread(target=run_other, name="backward", daemon=True)
    thread.start()
    during_exchange.append(hand_over)
    try:
        with ending(1):
            main()
        thread.join()
    finally:
        during_exchange.remove(hand_over)
    if errors:
        raise errors[0]
