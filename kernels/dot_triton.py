"""The matrix product of every kernel, and the one place that knows of the interpreter.

Triton's interpreter multiplies bfloat16 operands wrongly (seen with triton 3.6 and 3.9), so under
TRITON_INTERPRET=1 they are converted to float32 first. Compiled kernels keep their type, and with it the
tensor cores.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction


@triton.jit
def _probe():
    pass


IS_INTERPRETED = isinstance(_probe, InterpretedFunction)
UPCAST_DOT = tl.constexpr(IS_INTERPRETED)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b, accumulated in float32; float32 operands are multiplied in full precision."""
    if UPCAST_DOT:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")
