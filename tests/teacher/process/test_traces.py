"""Traces: what is written is read, what is missing is named, and a rounded stream is known."""

import numpy as np
import pytest

from receipts.errors import EngineFailedError
from support.plans import plan_of
from teacher.process.traces import Trace, TraceWriter

PLAN = plan_of(((1, 2, 3), (2, 1)), ((4, 5), (2,)))


def written(folder, values, *, operation=True):
    writer = TraceWriter(folder, layers=2, width=4, plan=PLAN)
    for first, stop in ((0, 2), (2, 3), (3, 5)):
        for layer in range(-1, 2):
            writer.residual(layer, first, values[layer + 1, first:stop])
        writer.final_norm(first, values[3, first:stop])
        if operation:
            writer.operation("decay", first, values[4, first:stop, :3])
    return writer


@pytest.fixture
def values():
    return np.random.default_rng(1).normal(size=(5, 5, 4)).astype(np.float32)


def test_what_is_written_is_read(tmp_path, values):
    trace = Trace(tmp_path, written(tmp_path, values).finish())
    for layer in range(-1, 2):
        assert np.array_equal(trace.residual(layer), values[layer + 1])
    assert np.array_equal(trace.final_norm(), values[3])
    assert np.array_equal(trace.operation("decay"), values[4][:, :3])
    assert trace.operation("beta") is None


def test_rows_that_were_not_told_are_missed(tmp_path, values):
    writer = written(tmp_path, values, operation=False)
    writer.operation("decay", 0, values[4, :2, :3])
    with pytest.raises(EngineFailedError, match="expected operation decay of 5 tokens, got 2"):
        writer.finish()


@pytest.mark.parametrize(("zeros", "kind"), [(0, None), (12, None), (13, "float16 or TF32"), (16, "bfloat16")])
def test_a_stream_of_narrower_values_is_known_whatever_the_embedding_is(tmp_path, values, zeros, kind):
    values[1:3] = (values[1:3].view(np.uint32) >> zeros << zeros).view(np.float32)
    assert Trace(tmp_path, written(tmp_path, values).finish()).narrowest() == kind
