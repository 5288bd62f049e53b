"""Flags from the host's side: how a thread that copies rows itself raises a flag, and looks at one.

For flags in the memory of the CPU, where kernels are interpreted. The interpreter's atomic operations are those of the
processor, and what a thread calls here is what an interpreted kernel does, without the launch of one: the interpreter
can run but one kernel of a process at a time.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fusedcomm.kernels._triton import triton

interpreter = triton._C.libtriton.interpreter
_YES = np.array([True])
_NOTHING = np.array([0], dtype=np.int32)


def raise_flag(flags: Tensor, index: int, epoch: int) -> None:
    """Sets `flags[index]` to `epoch`; whoever sees it there sees all that this thread wrote before.

    A release, as `flags.publish` does one: on x86 stores become visible in their order anyway, on ARM they need not.
    """
    address = np.array([flags.data_ptr() + index * flags.element_size()], dtype=np.uint64)
    value = np.array([epoch], dtype=np.int32)
    interpreter.atomic_rmw(interpreter.RMW_OP.XCHG, address, value, _YES, interpreter.MEM_SEMANTIC.RELEASE)


def is_up(flags: Tensor, index: int, epoch: int) -> bool:
    """Whether `flags[index]` is not behind `epoch`; if so, this thread sees what was written before it rose.

    An acquire, as in `flags.wait`. Like epochs, the difference wraps.
    """
    address = np.array([flags.data_ptr() + index * flags.element_size()], dtype=np.uint64)
    (flag,) = interpreter.atomic_rmw(interpreter.RMW_OP.ADD, address, _NOTHING, _YES, interpreter.MEM_SEMANTIC.ACQUIRE)
    return (int(flag) - epoch) % 2**32 < 2**31
