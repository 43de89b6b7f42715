"""ONNX Runtime: the graph is written here, from the operators its own exporters use for decoders
(packed weights, one attention node that appends to the cache in place)."""

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper, save_model

from checkpoint import LINEARS

MS = "com.microsoft"
BLOCK = 32
INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy_level: integer products


class Graph:
    def __init__(self):
        self.nodes, self.constants = [], []

    def constant(self, name, array):
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def node(self, op, inputs, output, domain="", extra_outputs=(), **attributes):
        outputs = [output, *extra_outputs]
        self.nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **attributes))
        return output

    def norm(self, x, checkpoint, name):
        parts = (f"{name}.weight", f"{name}.bias")
        weights = [self.constant(part, checkpoint[part]) for part in parts]
        return self.node(
            "LayerNormalization", [x, *weights], f"{name}.out", epsilon=checkpoint.epsilon
        )

    def linear(self, x, name, weight, bits):
        """`weight` is [in, out]; bits 0: float32."""
        if not bits:
            return self.node("MatMul", [x, self.constant(name, weight)], f"{name}.out")
        packed, scales = quantise(weight.T, bits)
        return self.node(
            "MatMulNBits",
            [x, self.constant(f"{name}.packed", packed), self.constant(f"{name}.scales", scales)],
            f"{name}.out",
            domain=MS,
            K=weight.shape[0],
            N=weight.shape[1],
            bits=bits,
            block_size=BLOCK,
            accuracy_level=INT8_ACTIVATIONS,
        )


def quantise(weight, bits):
    """[out, in] to unsigned integers around the middle, two in a byte for 4 bits."""
    blocks = weight.reshape(weight.shape[0], -1, BLOCK)
    middle = 1 << (bits - 1)
    scales = np.abs(blocks).max(2) / (middle - 1)
    integers = np.rint(blocks / np.maximum(scales, 1e-20)[..., None]) + middle
    integers = integers.clip(0, 2 * middle - 1).astype(np.uint8)
    if bits == 4:
        integers = integers[..., 0::2] | integers[..., 1::2] << 4
    return integers, scales


def write_model(checkpoint, path, bits, head_bits):
    """Inputs: ids and positions [B, T], seqlens [B] and total as GroupQueryAttention wants them,
    the caches. Output: logits [B, 1, vocab] after the last token."""
    c, g = checkpoint, Graph()
    g.constant("wte", c["wte.weight"])
    g.constant("wpe", c["wpe.weight"])
    g.node("Gather", ["wte", "ids"], "embedded")
    g.node("Gather", ["wpe", "positions"], "placed")
    x = g.node("Add", ["embedded", "placed"], "x")
    shape = ["batch", c.n_head, "capacity", c.n_embd // c.n_head]
    caches = []
    for i in range(c.n_layer):
        h = f"h.{i}"
        names = iter(LINEARS)

        def linear(y, add_bias=True):
            name = f"{h}.{next(names)}"
            bias = g.constant(name + ".bias", c[name + ".bias"])
            y = g.linear(y, name, c[name + ".weight"], bits)
            return g.node("Add", [y, bias], name + ".sum") if add_bias else (y, bias)

        qkv = linear(g.norm(x, c, f"{h}.ln_1"))
        past = [f"{h}.past_k", f"{h}.past_v"]
        present = [f"{h}.present_k", f"{h}.present_v"]
        caches.append((past, present))
        y = g.node(
            "GroupQueryAttention",
            [qkv, "", "", *past, "seqlens", "total"],
            f"{h}.attended",
            domain=MS,
            extra_outputs=present,
            num_heads=c.n_head,
            kv_num_heads=c.n_head,
        )
        x = g.node("Add", [x, linear(y)], f"{h}.middle")
        y, bias = linear(g.norm(x, c, f"{h}.ln_2"), add_bias=False)
        y = g.node("FastGelu", [y, bias], f"{h}.gelu", domain=MS)
        x = g.node("Add", [x, linear(y)], f"{h}.end")
    last = g.constant("last", np.array([-1]))
    x = g.node("Gather", [x, last], "last_x", axis=1)
    g.linear(g.norm(x, c, "ln_f"), "head", c["wte.weight"].T, head_bits)
    g.node("Identity", ["head.out"], "logits")

    def value(name, kind, shape):
        return helper.make_tensor_value_info(name, kind, shape)

    inputs = [
        value("ids", TensorProto.INT64, ["batch", "length"]),
        value("positions", TensorProto.INT64, ["batch", "length"]),
        value("seqlens", TensorProto.INT32, ["batch"]),
        value("total", TensorProto.INT32, [1]),
    ]
    outputs = [value("logits", TensorProto.FLOAT, ["batch", 1, c.vocab_size])]
    for past, present in caches:
        inputs += [value(name, TensorProto.FLOAT, shape) for name in past]
        outputs += [value(name, TensorProto.FLOAT, shape) for name in present]
    graph = helper.make_graph(g.nodes, "gpt2", inputs, outputs, g.constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MS, 1)]
    save_model(helper.make_model(graph, opset_imports=opsets, ir_version=8), str(path))


class OnnxRuntime:
    FORMATS = {"f32": "float32", "q8": "int8 block 32", "q4": "int4 block 32"}
    BITS = {"f32": (0, 0), "q8": (8, 8), "q4": (4, 8)}  # linear weights, head

    def __init__(self, checkpoint, weight_format, threads, cache):
        self.checkpoint = checkpoint
        path = cache / f"{weight_format}.onnx"
        if not path.exists():
            part = path.with_suffix(".part")
            write_model(checkpoint, part, *self.BITS[weight_format])
            part.replace(path)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.session = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])

    def start(self, batch, capacity):
        c = self.checkpoint
        self.batch = batch
        shape = (batch, c.n_head, capacity, c.n_embd // c.n_head)
        self.binding = self.session.io_binding()
        for i in range(c.n_layer):
            for kind in "kv":
                cache = ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
                # The same memory in and out: the node appends in place.
                self.binding.bind_ortvalue_input(f"h.{i}.past_{kind}", cache)
                self.binding.bind_ortvalue_output(f"h.{i}.present_{kind}", cache)
        self.result = ort.OrtValue.ortvalue_from_shape_and_type(
            (batch, 1, c.vocab_size), np.float32
        )
        self.binding.bind_ortvalue_output("logits", self.result)

    def forward(self, tokens, position):
        end = position + tokens.shape[1]
        bind = self.binding.bind_cpu_input
        bind("ids", tokens.astype(np.int64))
        bind("positions", np.tile(np.arange(position, end), (self.batch, 1)))
        bind("seqlens", np.full(self.batch, end - 1, np.int32))
        bind("total", np.array([end], np.int32))
        self.session.run_with_iobinding(self.binding)

    def logits(self):
        return self.result.numpy()[0, 0]
