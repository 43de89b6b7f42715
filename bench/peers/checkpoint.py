"""A GPT-2 checkpoint as Hugging Face writes it: config.json and model.safetensors."""

import json
from pathlib import Path

from safetensors.numpy import load_file

LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


class Checkpoint:
    """Weights are float32 arrays; linear ones are [in, out], the head is `wte` [vocab, width]."""

    def __init__(self, directory):
        directory = Path(directory)
        config = json.loads((directory / "config.json").read_text())
        self.n_layer = config["n_layer"]
        self.n_head = config["n_head"]
        self.n_embd = config["n_embd"]
        self.n_inner = config.get("n_inner") or 4 * self.n_embd
        self.n_positions = config["n_positions"]
        self.epsilon = config["layer_norm_epsilon"]
        self.tensors = {
            name.removeprefix("transformer."): tensor.astype("float32", copy=False)
            for name, tensor in load_file(directory / "model.safetensors").items()
        }
        self.vocab_size = self["wte.weight"].shape[0]

    def __getitem__(self, name):
        return self.tensors[name]

    def layer(self, i, name):
        return self.tensors[f"h.{i}.{name}"]
