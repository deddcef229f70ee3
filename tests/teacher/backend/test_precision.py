import numpy as np
import pytest

from receipts.errors import PrecisionError
from teacher.backend import precision


def test_this_device_multiplies_in_float32():
    measured = precision.measure()
    precision.verify_precision(measured)
    assert 0 < measured.product < precision.PRODUCT_LIMIT
    assert measured.function_units < precision.FUNCTION_LIMIT_UNITS


def keep_bits(x, bits):
    """Round to `bits` explicit bits of mantissa, to nearest even, as a tensor core does to its inputs."""
    drop = 23 - bits
    raw = x.view(np.uint32)
    half = np.uint32((1 << (drop - 1)) - 1)
    odd = (raw >> np.uint32(drop)) & np.uint32(1)
    return ((raw + half + odd) & np.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)).view(np.float32)


@pytest.mark.parametrize(("name", "bits"), [("TF32", 10), ("BF16", 7)])
def test_rounded_inputs_are_refused(name, bits):
    def product(activation, weight):
        return keep_bits(activation, bits) @ keep_bits(weight, bits).T

    with pytest.raises(PrecisionError, match="true F32"):
        precision.verify_precision(precision.measure(product))


def test_a_nan_product_is_refused():
    def product(activation, weight):
        return np.full((activation.shape[0], weight.shape[0]), np.nan, np.float32)

    with pytest.raises(PrecisionError):
        precision.verify_precision(precision.measure(product))


def test_rounded_single_rows_are_refused_even_when_blocks_are_exact():
    def product(activation, weight):
        return (keep_bits(activation, 10) if len(activation) == 1 else activation) @ weight.T

    with pytest.raises(PrecisionError, match="row product"):
        precision.verify_precision(precision.measure(product))
