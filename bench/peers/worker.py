"""One peer in one weight format, in a process of its own: reads requests, one JSON object a line,
from standard input and answers each with one line. run.py starts it; see README.md.

A peer is a class with

    FORMATS                 its name for each of our weight formats that it has
    Peer(checkpoint, format, threads, cache)
                            `cache` is a directory for converted files
    ENVIRONMENT             optional, for some formats: environment variables it needs
    start(batch, capacity)  makes room for so many sequences of so many tokens
    forward(tokens, position)
                            runs tokens [batch, T], which stand at position, position + 1, ... of
                            their sequences; computes the logits after the last of them
    logits()                those logits of the first sequence, float32 [vocab]

A peer without such steps has prefill() and decode() in the place of Meter's.

T is 1, or position is 0. What lies at or after `position` is forgotten.
"""

import importlib
import json
import sys
import time
from pathlib import Path

import numpy as np

from checkpoint import Checkpoint

PEERS = {  # name: (module, class)
    "llama.cpp": ("peer_llama_cpp", "LlamaCpp"),
    "ctranslate2": ("peer_ctranslate2", "CTranslate2"),
    "torch": ("peer_torch", "Eager"),
    "torch-compile": ("peer_torch", "Compiled"),
    "onnxruntime": ("peer_onnxruntime", "OnnxRuntime"),
}

PATIENCE = 15  # seconds: what takes longer is not repeated


def peer_class(name):
    module, attribute = PEERS[name]
    return getattr(importlib.import_module(module), attribute)


class Meter:
    def __init__(self, peer, vocab_size):
        self.peer = peer
        self.vocab_size = vocab_size
        self.prepared = None

    def tokens(self, batch, length):
        return np.random.default_rng(1).integers(0, self.vocab_size, (batch, length), np.int32)

    def prefill(self, batch, length):
        prompt = self.tokens(batch, length)

        def run():
            self.peer.forward(prompt, 0)

        return run, 1

    def decode(self, batch, context, steps):
        tokens = self.tokens(batch, context + steps)
        self.peer.forward(tokens[:, :context], 0)

        def run():
            for i in range(context, context + steps):
                self.peer.forward(tokens[:, i : i + 1], i)

        return run, steps

    def timed(self):
        start = time.perf_counter()
        seconds = self.run()
        return 1e3 * (seconds or time.perf_counter() - start) / self.per

    def measure(self, phase, batch, repetitions, **lengths):
        """Milliseconds of each repetition, per prompt or per step."""
        if self.prepared != (phase, batch):
            self.peer.start(batch, sum(lengths.values()))
            # A peer with no forward() of its own to call measures itself.
            prepare = getattr(self.peer, phase, getattr(self, phase))
            self.run, self.per = prepare(batch, **lengths)
            self.prepared = (phase, batch)
            self.timed()  # compiles, touches memory
        times = [self.timed()]
        while len(times) < repetitions and times[0] * self.per < 1e3 * PATIENCE:
            times.append(self.timed())
        return times

    def logits(self, ids):
        self.prepared = None
        self.peer.start(1, len(ids))
        self.peer.forward(np.array([ids], np.int32), 0)
        return self.peer.logits()


def main():
    name, weight_format, model, cache, threads = sys.argv[1:]
    # Libraries print to standard output; the answers must not mix with that.
    answers, sys.stdout = sys.stdout, sys.stderr
    checkpoint = Checkpoint(model)
    peer = peer_class(name)(checkpoint, weight_format, int(threads), Path(cache))
    meter = Meter(peer, checkpoint.vocab_size)
    for line in sys.stdin:
        request = json.loads(line)
        if "ids" in request:
            answer = [float(x) for x in meter.logits(request["ids"])]
        else:
            answer = meter.measure(**request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
