"""Measure that this device multiplies in true F32, and refuse to be a teacher when it does not.

A setting that should turn reduced precision off is a promise; the product of a known pair is evidence. The limits
below were fixed from the error of F32 itself, before any run:

- Products: summing K terms one after another in F32 grows a relative error of about sqrt(K) * 2**-24, which is
  2.7e-6 at K = 2048. Blocked sums do better (3.7e-7 in NumPy, 9.1e-7 on an H200); TF32 gives 2.1e-4 there and BF16
  2.4e-3, both far outside.
- Functions: exp and sigmoid of x amplify a rounding of their argument by |x|, their condition number, so their
  error is counted in units of (1 + |x|) * 2**-23, and that of rsqrt in units of 2**-23. F32 libraries stay within 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from receipts.errors import PrecisionError

_K = 2048
PRODUCT_LIMIT = float(np.sqrt(_K)) * 2.0**-24
FUNCTION_LIMIT_UNITS = 4.0

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Measured relative errors against F64.

    Attributes:
        product: Frobenius error of a [96, 2048] by [2048, 160] product.
        vector_product: the same for one row, which other kernels compute.
        function_units: worst error of exp, rsqrt and sigmoid, in the units of the module docstring.
    """

    product: float
    vector_product: float
    function_units: float


def _known_pair() -> tuple[Array, Array]:
    # Activations use all 24 bits of F32; weights are BF16 values, as in the teacher.
    rng = np.random.default_rng(20_35)
    activation = rng.standard_normal((96, _K)).astype(np.float32)
    weight = rng.standard_normal((160, _K)).astype(np.float32)
    weight = (weight.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return activation, weight


def _mlx_product(activation: Array, weight: Array) -> Array:
    from teacher.backend.device import mx

    return np.array(mx.array(activation) @ mx.array(weight).T)


def _relative(actual: npt.NDArray[Any], expected: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def _function_units() -> float:
    from teacher.backend import functions
    from teacher.backend.device import mx

    x = np.linspace(-30.0, 30.0, 4001, dtype=np.float32)
    positive = np.geomspace(1e-6, 1e6, 4001, dtype=np.float32)
    wide = x.astype(np.float64)
    condition = 1.0 + np.abs(wide)
    cases = (
        (functions.exp(mx.array(x)), np.exp(wide), condition),
        (functions.sigmoid(mx.array(x)), 1.0 / (1.0 + np.exp(-wide)), condition),
        (mx.rsqrt(mx.array(positive)), 1.0 / np.sqrt(positive.astype(np.float64)), 1.0),
    )
    return max(float(np.max(np.abs(np.array(got) / want - 1.0) / units)) for got, want, units in cases) * 2.0**23


def measure(product: Callable[[Array, Array], Array] = _mlx_product) -> Precision:
    """Measure products and functions against F64.

    Args:
        product: computes activation @ weight.T, [n, K] and [m, K] to [n, m]; MLX's own unless a test replaces it.
    """
    activation, weight = _known_pair()
    exact = activation.astype(np.float64) @ weight.astype(np.float64).T
    return Precision(
        product=_relative(product(activation, weight), exact),
        vector_product=_relative(product(activation[:1], weight), exact[:1]),
        function_units=_function_units(),
    )


def verify_precision(precision: Precision) -> None:
    """Refuse a device whose F32 is not F32.

    Raises:
        PrecisionError: names the measured error, the limit and what usually explains it.
    """
    for label, value in (("product", precision.product), ("row product", precision.vector_product)):
        if not value <= PRODUCT_LIMIT:  # written so that NaN is refused too
            raise PrecisionError(
                f"teacher {label}: expected a relative error of at most {PRODUCT_LIMIT:.1e} (true F32), got"
                f" {value:.1e}; the device rounds its inputs (TF32 gives about 2e-4, BF16 about 2e-3), and the"
                " teacher does not run as source precision like that",
                expected=PRODUCT_LIMIT,
                actual=value,
            )
    if not precision.function_units <= FUNCTION_LIMIT_UNITS:
        raise PrecisionError(
            f"teacher exp, sigmoid and rsqrt: expected errors of at most {FUNCTION_LIMIT_UNITS:g} units in the last"
            f" place, got {precision.function_units:.1f}",
            expected=FUNCTION_LIMIT_UNITS,
            actual=precision.function_units,
        )
