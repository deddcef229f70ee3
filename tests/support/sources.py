"""A logit source that does what a test asks of it."""

import os
import signal
import time

import numpy as np

from receipts.errors import NonFiniteError
from teacher.process.sources import LogitBlock

WIDTH = 11


class Source:
    """Logits that say where they stand; `fault` says what goes wrong in the second example."""

    def __init__(self, *, threads, fault=""):
        self.threads, self.fault = threads, fault

    def describe(self):
        seen = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "SECRET_OF_THE_PARENT", "EXTRA")}
        return {"engine": "test", "threads": self.threads, "seen": seen}

    @staticmethod
    def answer(question, spec, on_progress):
        return {"echo": question, "spec": spec}

    def blocks(self, plan):
        print("chatter on stdout", flush=True)
        for index, example in enumerate(plan.examples):
            at = 0
            for call, length in enumerate(example.calls):
                if index == 1:
                    self.misbehave()
                logits = np.full((length, WIDTH), index * 100 + at, dtype=np.float32)
                position = at + (1 if self.fault == "shifted" and index else 0)
                yield LogitBlock(example=index, call=call, position=position, logits=logits)
                at += length
        if self.fault == "extra":
            yield LogitBlock(example=1, call=0, position=0, logits=np.zeros((1, WIDTH), np.float32))

    def misbehave(self):
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "exit":
            os._exit(9)
        if self.fault == "raises":
            raise ValueError("something odd")
        if self.fault == "ours":
            raise NonFiniteError("layer 3: expected finite values, got NaN", layer=3)
        if self.fault == "hangs":
            time.sleep(600)


class Unstable:
    """An engine whose logits are new every time."""

    def __init__(self, *, threads, gguf, max_sequence_tokens, max_call_tokens, width):
        self.width = width

    def describe(self):
        return {"engine": "unstable"}

    def blocks(self, plan):
        rng = np.random.default_rng()
        for index, example in enumerate(plan.examples):
            at = 0
            for call, length in enumerate(example.calls):
                logits = rng.standard_normal((length, self.width)).astype(np.float32)
                yield LogitBlock(example=index, call=call, position=at, logits=logits)
                at += length
