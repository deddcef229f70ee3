"""Sources whose processes misbehave: noise on the message pipe, children left behind, ends that never come."""

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from receipts.errors import HarnessError
from teacher.process.sources import LogitBlock

WIDTH = 11


def message_pipe():
    """The number of the worker's own message pipe."""
    return json.loads(Path(sys.argv[1]).read_text())["messages_fd"]


def frame(head, body=b""):
    """A frame's bytes, right or wrong."""
    head = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<IQ", len(head), len(body)) + head + body


BLOCK = {"type": "block", "example": 0, "call": 0, "position": 0, "rows": 1, "width": WIDTH, "more": False}
NOISE = {
    "text": b"Segmentation fault (core dumped)\n",
    "no header": frame(b"{not json"),
    "unknown type": frame({"type": "gossip"}),
    "another message": frame({"type": "answer"}, b"1"),
    "a field missing": frame({"type": "block", "example": 0}),
    "too few bytes": frame(BLOCK, b"\0" * (4 * WIDTH - 4)),
    "closing facts of another form": frame({"type": "done"}, b"[1]"),
    "half a message": frame(BLOCK, b"\0" * 4 * WIDTH)[:40],
}


class Quiet:
    """Logits of zero; what goes wrong is the subclass's."""

    def __init__(self, *, threads):
        self.threads = threads

    def describe(self):
        return {"engine": "faulty"}

    def blocks(self, plan):
        for index, example in enumerate(plan.examples):
            at = 0
            for call, length in enumerate(example.calls):
                yield LogitBlock(example=index, call=call, position=at, logits=np.zeros((length, WIDTH), np.float32))
                at += length


class Noisy(Quiet):
    """Writes to the message pipe behind the worker's back, then ends at once."""

    def __init__(self, *, threads, noise):
        super().__init__(threads=threads)
        self.noise = noise

    def blocks(self, plan):
        os.write(message_pipe(), NOISE[self.noise])
        os._exit(9)


class Deaf(Quiet):
    """Does not hear a polite end, and never comes to one of its own."""

    def blocks(self, plan):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        yield next(super().blocks(plan))
        while True:
            time.sleep(600)


class Silent(Quiet):
    """Closes the message pipe and stays."""

    def blocks(self, plan):
        os.close(message_pipe())
        time.sleep(600)


class Lingering(Quiet):
    """Is done, and does not leave: one of its threads works on."""

    def blocks(self, plan):
        threading.Thread(target=time.sleep, args=(600,)).start()
        yield from super().blocks(plan)


class Parent(Quiet):
    """Has a child that holds its stdout; says the child's number."""

    def __init__(self, *, threads):
        super().__init__(threads=threads)
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def describe(self):
        return {"engine": "faulty", "child": self.child.pid}


class Preparing(Quiet):
    """Has layers to do before its first logits."""

    def __init__(self, *, threads):
        super().__init__(threads=threads)
        self.on_progress = lambda done, total, unit: None

    def blocks(self, plan):
        for layer in range(1, 4):
            self.on_progress(layer, 3, "layers")
        yield from super().blocks(plan)


class Colossal(Quiet):
    """One call of more logits than a message holds."""

    def blocks(self, plan):
        rows, width = len(plan.examples[0].token_ids), 3 << 20
        logits = np.broadcast_to(np.arange(rows, dtype=np.float32)[:, None], (rows, width))
        yield LogitBlock(example=0, call=0, position=0, logits=logits)


class BuiltReferences:
    """Builds the PyTorch reference of one folder after another in one process, as starting torch takes seconds."""

    @staticmethod
    def answer(question, spec, on_progress):
        from teacher.sides.reference import TransformersReference

        found = {}
        for folder in question["folders"]:
            try:
                said = TransformersReference(snapshot=folder, threads=1).describe()
                found[folder] = ["", json.dumps({key: said[key] for key in ("tied_embeddings", "ignored_tensors")})]
            except HarnessError as error:
                found[folder] = [type(error).__name__, str(error)]
        return found
