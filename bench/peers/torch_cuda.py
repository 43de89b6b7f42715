"""PyTorch on a GPU: GPT-2 in bfloat16 with every operation of a pass in one CUDA graph.

    python3 torch_cuda.py CHECKPOINT CASE...

A case is BATCH:CONTEXT, a decode step, or BATCHxTOKENS, prompts from their beginning. Prints a line
of JSON for each: median, least and greatest microseconds of a pass. --compile lets torch.compile
fuse what it can first, which takes about a minute a case.
"""

import json
import statistics
import sys

import torch
import torch.nn.functional as F

from checkpoint import LINEARS, Checkpoint

DTYPE = torch.bfloat16
STEPS, REPEATS = 20, 9


class Model:
    def __init__(self, checkpoint):
        def load(array):
            return torch.tensor(array).to("cuda", DTYPE)

        c = self.checkpoint = checkpoint
        self.wte, self.wpe = load(c["wte.weight"]), load(c["wpe.weight"])
        self.ln_f = [load(c["ln_f." + part]) for part in ("weight", "bias")]
        self.layers = []
        for i in range(c.n_layer):
            norms = [
                [load(c.layer(i, f"{name}.{part}")) for part in ("weight", "bias")]
                for name in ("ln_1", "ln_2")
            ]
            linears = [
                (
                    load(c.layer(i, name + ".weight").T).contiguous(),
                    load(c.layer(i, name + ".bias")),
                )
                for name in LINEARS
            ]
            self.layers.append((norms, linears))

    def start(self, batch, context):
        c = self.checkpoint
        shape = (batch, c.n_head, context, c.n_embd // c.n_head)
        self.caches = [torch.randn(2, *shape, device="cuda").to(DTYPE) for _ in self.layers]
        self.tokens = torch.randint(0, c.vocab_size, (batch, 1), device="cuda")
        self.position = torch.tensor([context - 1], device="cuda")

    def start_prompts(self, batch, length):
        self.tokens = torch.randint(0, self.checkpoint.vocab_size, (batch, length), device="cuda")
        self.position = torch.arange(length, device="cuda")

    def norm(self, x, parameters):
        return F.layer_norm(x, x.shape[-1:], *parameters, self.checkpoint.epsilon)

    def forward(self, attend):
        """The tokens that come next; attend(layer, q, k, v) is what they see of each other."""
        x = F.embedding(self.tokens, self.wte) + F.embedding(self.position, self.wpe)
        batch, length, width = x.shape
        for i, (norms, linears) in enumerate(self.layers):
            qkv, out, up, down = linears
            q, k, v = (
                part.view(batch, length, self.checkpoint.n_head, -1).transpose(1, 2)
                for part in F.linear(self.norm(x, norms[0]), *qkv).split(width, -1)
            )
            y = attend(i, q, k, v)
            x = x + F.linear(y.transpose(1, 2).reshape(batch, length, width), *out)
            hidden = F.gelu(F.linear(self.norm(x, norms[1]), *up), approximate="tanh")
            x = x + F.linear(hidden, *down)
        logits = F.linear(self.norm(x[:, -1], self.ln_f), self.wte)
        return logits.argmax(-1, keepdim=True)

    def step(self):
        """The token at the last position of the cache; leaves the next one in self.tokens."""

        def attend(layer, q, k, v):
            cache = self.caches[layer]
            cache[0].index_copy_(2, self.position, k)
            cache[1].index_copy_(2, self.position, v)
            return F.scaled_dot_product_attention(q, cache[0], cache[1])

        self.tokens.copy_(self.forward(attend))

    def prompts(self):
        """The tokens that come next, and the keys and values, which stay where they were made."""
        kept = []

        def attend(layer, q, k, v):
            kept.append((k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return self.forward(attend), kept


def graph_of(step):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def microseconds(graph):
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(STEPS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / STEPS)
    return times


def main():
    compiled = "--compile" in sys.argv
    path, *cases = (argument for argument in sys.argv[1:] if argument != "--compile")
    torch.set_grad_enabled(False)
    model = Model(Checkpoint(path))
    for case in cases:
        prompts = "x" in case
        batch, context = map(int, case.split("x" if prompts else ":"))
        (model.start_prompts if prompts else model.start)(batch, context)
        run = model.prompts if prompts else model.step
        times = microseconds(graph_of(torch.compile(run, dynamic=False) if compiled else run))
        print(
            json.dumps(
                {
                    "case": case,
                    "median_us": statistics.median(times),
                    "least_us": min(times),
                    "greatest_us": max(times),
                }
            ),
            flush=True,
        )


main()
