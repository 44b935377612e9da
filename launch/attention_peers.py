"""Attention of others, timed as tests/kernels/attend_benchmark.cpp times kvgrid's: the new tokens
of each sequence, every launch over another layer's K and V, medians, outputs checked.

    attention_peers.py PEER < REQUEST        one process a peer; compare_attention starts it

REQUEST is JSON: device ("cuda" or "cpu"), threads, repetitions, and shapes, which are rows of
attend_benchmark's report. On stdout comes one line of JSON with the peer's version or why it is
missing, then one for each shape: times and form, or why it failed. All else goes to stderr. A
process that ends with exit code 0 before the last shape has lost its device: another can go on
behind it.
"""

import collections
import ctypes
import functools
import gc
import importlib
import importlib.util
import itertools
import json
import math
import os
import statistics
import sys
import time
import types

WARM_UP = 3
PILOT = 3
# A graph of launches need not run longer than this to be timed well.
GRAPH_US = 50_000
# Of the free memory, for K and V: some forms make copies of them.
KV_SHARE = 0.35
PAGE = 64
# ||x - reference|| / ||reference|| beyond which a peer computes something else. Below it lies what
# peers lose that add up in 16 bits.
ERROR_BOUND = 0.1


class Missing(Exception):
    """This peer is not here, and why."""


class Unable(Exception):
    """This peer cannot do this shape, and why."""


class Shape:
    """A row of attend_benchmark's report, as far as it says what to do."""

    def __init__(self, row):
        self.lengths = [tokens for count, tokens in row["sequences"] for _ in range(count)]
        self.batch = len(self.lengths)
        self.longest = max(self.lengths)
        # New tokens of each sequence, its last ones: row i sees length - rows + i + 1 tokens.
        self.rows = row["rows"]
        self.window = row["window"]  # tokens that a row sees; None: all
        self.even = min(self.lengths) == self.longest
        self.query_heads = row["query_heads"]
        self.kv_heads = row["kv_heads"]
        self.group = self.query_heads // self.kv_heads
        self.head_dim = row["head_dim"]
        self.format = row["format"]
        self.layers = row["layers"]
        self.launches = row["launches"]


# A way to ask for the attention of a shape. launch(layer) returns the output, heads(output) makes
# it [batch, query heads, rows, head dim], where the rows may be left out if there is one. kv is
# that of the inputs, unless this form reads what is resident in another order.
Form = collections.namedtuple("Form", "name launch heads kv", defaults=[None])
# What is resident for a shape: q as heads() makes the output, kv(layer, sequence) the K and the V
# of one sequence, each [KV heads, tokens, head dim].
Inputs = collections.namedtuple("Inputs", "layers q kv forms")


def first_line(error):
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:200]


class Peer:
    """Measures the fastest of the forms that prepare() makes of a shape. torch keeps the numbers,
    and is the clock on CUDA."""

    format = None  # of K and V, where it is not the shape's
    many_rows = False  # whether there are forms for several new tokens a sequence

    def __init__(self, request):
        self.torch = self.load("torch")
        self.device = request["device"]
        self.repetitions = request["repetitions"]
        self.version = f"torch {self.torch.__version__}"
        if self.device == "cuda" and not self.torch.cuda.is_available():
            raise Missing(f"{self.version} sees no GPU")
        if self.device == "cpu":
            self.torch.set_num_threads(request["threads"])
        self.torch.manual_seed(0)
        self.torch.set_grad_enabled(False)

    @staticmethod
    def load(name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name == name:
                raise Missing(f"{name} is not installed") from None
            raise Missing(first_line(error)) from error
        except (ImportError, OSError) as error:
            raise Missing(first_line(error)) from error

    def prepare(self, shape):
        """Inputs of a shape; Unable where there is no form for it."""
        raise NotImplementedError

    def format_of(self, shape):
        return self.format or shape.format

    def dtype(self, shape):
        names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        if self.format_of(shape) not in names:
            raise Unable(f"no {self.format_of(shape)} K and V")
        return getattr(self.torch, names[self.format_of(shape)])

    def random(self, dtype, *size):
        """Numbers in [-1, 1), as kvgrid's, that repeat with a period that is prime."""
        made = self.torch.empty(size, dtype=dtype, device=self.device)
        flat = made.view(-1)
        period = min(flat.numel(), 33_554_393)
        some = (self.torch.rand(period, device=self.device) * 2 - 1).to(dtype)
        for begin in range(0, flat.numel(), period):
            part = flat[begin:begin + period]
            part.copy_(some[:part.numel()])
        return made

    def layers(self, shape, tokens):
        """How many layers of so many tokens take turns: kvgrid's, as far as memory allows."""
        if self.device == "cuda":
            free = self.torch.cuda.mem_get_info()[0]
        else:
            with open("/proc/meminfo", encoding="ascii") as lines:
                free = next(1024 * int(line.split()[1]) for line in lines
                            if line.startswith("MemAvailable:"))
        size = 2 * tokens * shape.kv_heads * shape.head_dim * self.dtype(shape).itemsize
        if size > KV_SHARE * free:
            raise Unable(f"K and V of {size / 1e9:.1f} GB a layer do not fit")
        return min(shape.layers, int(KV_SHARE * free / size))

    def measure(self, shape):
        """The answer for a shape, of its fastest form."""
        if shape.window is not None:
            raise Unable("windows are not compared")
        if shape.rows > 1 and not self.many_rows:
            raise Unable("several new tokens a sequence are not compared")
        inputs = self.prepare(shape)
        clock = CudaClock if self.device == "cuda" else CpuClock
        best, reasons = None, []
        for form in inputs.forms:
            timer = None  # a graph holds memory
            try:
                timer = clock(self.torch, form, inputs.layers, shape.launches)
                pilot = statistics.median(timer.sample() for _ in range(PILOT))
                self.check(shape, inputs, form)  # a wrong one may be the fastest
                if best is None or pilot < best[0]:
                    best = pilot, form, timer
            except Unable as unable:
                reasons.append(f"{form.name}: {unable}")
            except Exception as error:  # whatever it is, it is the answer
                reasons.append(f"{form.name}: {first_line(error)}")
        if best is None:
            raise Unable("; ".join(reasons))
        _, form, timer = best
        answer = timer.times(self.repetitions)
        return {"form": form.name, "max_rel_error": self.check(shape, inputs, form), **answer}

    def check(self, shape, inputs, form):
        """The error of a form; Unable where it is none of rounding."""
        error = self.error(shape, inputs, form)
        if not error <= ERROR_BOUND:
            raise Unable(f"wrong output: error {error:.1e}")
        return error

    def error(self, shape, inputs, form):
        """The largest error against fp64 among KV heads and rows of the first and the last
        sequence: the first, the middle and the last row, each over the tokens that it sees."""
        layer, worst = inputs.layers - 1, 0.0
        size = (shape.batch, shape.query_heads, shape.rows, shape.head_dim)
        kv = form.kv or inputs.kv
        q, out = inputs.q.reshape(size), form.heads(form.launch(layer)).reshape(size)
        for sequence in {0, shape.batch - 1}:
            for kv_head in {0, shape.kv_heads - 1}:
                k, v = (x[kv_head].double() for x in kv(layer, sequence))
                heads = slice(kv_head * shape.group, (kv_head + 1) * shape.group)
                for row in {0, shape.rows // 2, shape.rows - 1}:
                    seen = shape.lengths[sequence] - shape.rows + row + 1
                    scores = q[sequence, heads, row].double() @ k[:seen].T
                    weights = self.torch.softmax(scores / math.sqrt(shape.head_dim), dim=-1)
                    expected = weights @ v[:seen]
                    error = ((out[sequence, heads, row].double() - expected).norm()
                             / expected.norm()).item()
                    worst = error if math.isnan(error) else max(worst, error)
        return worst

    def release(self):
        """Frees what a shape held. Throws when the device is lost."""
        gc.collect()
        if self.device == "cuda":
            self.torch.cuda.synchronize()
            self.torch.cuda.empty_cache()


class CpuClock:
    """Launches, one by one."""

    def __init__(self, torch, form, layers, _):
        self.torch, self.form, self.layers = torch, form, layers
        self.next = 0
        self.sample()

    def sample(self):
        begin = time.perf_counter()
        self.form.launch(self.next % self.layers)
        self.next += 1
        return 1e6 * (time.perf_counter() - begin)

    def times(self, repetitions):
        times = [self.sample() for _ in range(WARM_UP + repetitions)][WARM_UP:]
        return {"plain_us": statistics.median(times), "graph_us": None}


class CudaClock:
    """Launches one by one, and many in a graph."""

    def __init__(self, torch, form, layers, launches):
        self.torch, self.form, self.layers = torch, form, layers
        for layer in range(2):
            form.launch(layer % layers)
        torch.cuda.synchronize()
        one = self.between(lambda: form.launch(0))
        self.launches = max(2, min(launches, int(GRAPH_US / one) + 1))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for launch in range(self.launches):
                form.launch(launch % layers)
        self.sample()

    def between(self, work):
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end)

    def sample(self):
        return self.between(self.graph.replay) / self.launches

    def times(self, repetitions):
        plain = [self.between(lambda launch=launch: self.form.launch(launch % self.layers))
                 for launch in range(WARM_UP + repetitions)][WARM_UP:]
        graph = [self.sample() for _ in range(WARM_UP + repetitions)][WARM_UP:]
        return {"plain_us": statistics.median(plain), "graph_us": statistics.median(graph)}


class Sdpa(Peer):
    """PyTorch's scaled_dot_product_attention by one of its backends, or by whichever it takes.
    K and V are contiguous: [batch, KV heads, tokens, head dim], or for ragged batches
    [tokens, KV heads, head dim]."""

    many_rows = True
    backend = None  # of torch.nn.attention.SDPBackend

    def __init__(self, request):
        super().__init__(request)
        self.attention = self.load("torch.nn.attention")

    def prepare(self, shape):
        return self.prepare_even(shape) if shape.even else self.prepare_ragged(shape)

    def attend(self, q, k, v, **mask):
        functional = self.torch.nn.functional
        grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        if self.backend is None:
            return functional.scaled_dot_product_attention(q, k, v, **mask, **grouped)
        with self.attention.sdpa_kernel(getattr(self.attention.SDPBackend, self.backend)):
            return functional.scaled_dot_product_attention(q, k, v, **mask, **grouped)

    def prepare_even(self, shape):
        batch, heads, kv_heads, rows, dim = (shape.batch, shape.query_heads, shape.kv_heads,
                                             shape.rows, shape.head_dim)
        layers = self.layers(shape, batch * shape.longest)
        kv = [self.random(self.dtype(shape), 2, batch, kv_heads, shape.longest, dim)
              for _ in range(layers)]
        q = self.random(self.dtype(shape), batch, heads, rows, dim)
        if rows > 1:
            # is_causal counts from the upper left: the first row would see one token.
            name, mask = (("causal", {"is_causal": True}) if rows == shape.longest
                          else self.lower_right(rows, shape.longest))
            forms = [self.even_form(f"query heads, {name}", q, kv, **mask)]
        else:
            forms = [self.even_form("query heads", q, kv)]
            if shape.group > 1:
                forms.append(self.even_form("query heads as rows",
                                            q.view(batch, kv_heads, shape.group, dim), kv))
        return Inputs(layers, q, lambda layer, sequence: kv[layer][:, sequence], forms)

    def lower_right(self, rows, tokens):
        """(name, arguments) for new tokens that are the last ones: row i sees the first
        tokens - rows + i + 1."""
        ones = self.torch.ones(rows, tokens, dtype=self.torch.bool, device=self.device)
        return "lower-right mask", {"attn_mask": ones.tril(tokens - rows)}

    def even_form(self, name, q, kv, **mask):
        return Form(name, lambda layer: self.attend(q, kv[layer][0], kv[layer][1], **mask),
                    lambda out: out)

    def prepare_ragged(self, shape):
        attend = self.ragged_operator(shape)
        torch, batch, group, rows, dim = (self.torch, shape.batch, shape.group, shape.rows,
                                          shape.head_dim)
        total = sum(shape.lengths)
        layers = self.layers(shape, total)
        kv = [self.random(self.dtype(shape), 2, total, shape.kv_heads, dim) for _ in range(layers)]
        q = self.random(self.dtype(shape), batch, shape.query_heads, rows, dim)
        starts = [0]
        for length in shape.lengths:
            starts.append(starts[-1] + length)
        key_starts = torch.tensor(starts, dtype=torch.int32, device=self.device)
        row_starts = torch.arange(batch + 1, dtype=torch.int32, device=self.device)

        def form(name, packed, rows_a_sequence):
            """packed: [batch, rows of a sequence, heads, head dim], as is the output in heads()."""
            begins = row_starts * rows_a_sequence
            flat = packed.reshape(batch * rows_a_sequence, -1, dim)
            return Form(name, lambda layer: attend(flat, kv[layer][0], kv[layer][1], begins,
                                                   key_starts, rows_a_sequence, shape.longest),
                        lambda out: out.view(batch, rows_a_sequence, -1, dim).transpose(1, 2)
                        .reshape(q.shape))

        forms = [form("packed, query heads" if rows == 1 else "packed, query heads, causal",
                      q.transpose(1, 2), rows)]
        if group > 1 and rows == 1:
            forms.append(form("packed, query heads as rows",
                              q.view(batch, -1, group, dim).transpose(1, 2), group))

        def kv_of(layer, sequence):
            tokens = slice(starts[sequence], starts[sequence + 1])
            return kv[layer][:, tokens].transpose(1, 2)

        return Inputs(layers, q, kv_of, forms)

    def ragged_operator(self, shape):
        """(q, k, v, starts of rows, starts of keys, most rows, most keys) -> out."""
        raise Unable("no ragged batches")


class SdpaMath(Sdpa):
    backend = "MATH"


class SdpaFlash(Sdpa):
    backend = "FLASH_ATTENTION"

    def lower_right(self, rows, tokens):
        # Without a mask in memory, which this backend refuses.
        bias = self.load("torch.nn.attention.bias").causal_lower_right(rows, tokens)
        return "lower-right bias", {"attn_mask": bias}

    def ragged_operator(self, shape):
        # What torch.nn.attention.varlen calls. Its causal rows are the last ones.
        operator = self.torch.ops.aten._flash_attention_forward
        causal = shape.rows > 1
        return lambda q, k, v, row_starts, key_starts, most_rows, most_keys: operator(
            q, k, v, row_starts, key_starts, most_rows, most_keys, 0.0, causal, False)[0]


class SdpaCudnn(Sdpa):
    backend = "CUDNN_ATTENTION"

    def ragged_operator(self, shape):
        if shape.rows > 1:
            raise Unable("in ragged batches causal from the upper left only")
        operator = self.torch.ops.aten._cudnn_attention_forward
        return lambda q, k, v, row_starts, key_starts, most_rows, most_keys: operator(
            q, k, v, None, row_starts, key_starts, most_rows, most_keys, True, 0.0, False, False)[0]


class SdpaFp32(Sdpa):
    """The numbers of the shape in fp32: twice the bytes, no conversion."""

    format = "fp32"


class Flex(Peer):
    """PyTorch's FlexAttention, compiled. Ragged batches are padded to the longest sequence, and a
    block mask leaves out what is behind each."""

    def __init__(self, request):
        super().__init__(request)
        self.flex = self.load("torch.nn.attention.flex_attention")
        self.attend = self.torch.compile(self.flex.flex_attention, dynamic=False)
        some = self.random(self.torch.bfloat16, 1, 1, 256, 64)
        try:
            self.attend(some[:, :, :1], some, some)
        except Exception as error:  # no compiler, no Triton: the same for every shape
            raise Missing(f"cannot compile: {first_line(error)}") from error

    def prepare(self, shape):
        self.torch.compiler.reset()  # recompiled too often, it would run without being compiled
        torch, batch, dim = self.torch, shape.batch, shape.head_dim
        layers = self.layers(shape, batch * shape.longest)
        kv = [self.random(self.dtype(shape), 2, batch, shape.kv_heads, shape.longest, dim)
              for _ in range(layers)]
        q = self.random(self.dtype(shape), batch, shape.query_heads, dim)
        mask = None
        if not shape.even:
            lengths = torch.tensor(shape.lengths, device=self.device)
            mask = self.flex.create_block_mask(
                lambda sequence, head, row, key: key < lengths[sequence], batch, None, 1,
                shape.longest, device=self.device)
        rows = q.view(batch, shape.query_heads, 1, dim)
        form = Form("query heads" if shape.even else "padded, block mask",
                    lambda layer: self.attend(rows, kv[layer][0], kv[layer][1], block_mask=mask,
                                              enable_gqa=shape.group > 1),
                    lambda out: out.reshape(batch, -1, dim))
        return Inputs(layers, q, lambda layer, sequence:
                      kv[layer][:, sequence, :, :shape.lengths[sequence]], [form])


class Paged(Peer):
    """Peers that read K and V through a block table, blocks of 64 tokens in permuted order. Their
    causal rows are the last ones."""

    many_rows = True
    blocks_have_heads_first = False  # [block, KV head, token, dim], or [block, token, KV head, dim]

    def prepare(self, shape):
        torch = self.torch
        counts = [-(-length // PAGE) for length in shape.lengths]
        total = sum(counts)
        layers = self.layers(shape, total * PAGE)
        inner = (shape.kv_heads, PAGE) if self.blocks_have_heads_first else (PAGE, shape.kv_heads)
        kv = [self.random(self.dtype(shape), 2, total, *inner, shape.head_dim)
              for _ in range(layers)]
        q = self.random(self.dtype(shape), shape.batch, shape.query_heads, shape.rows,
                        shape.head_dim)
        blocks = torch.randperm(total, device=self.device).to(torch.int32)
        tables = torch.split(blocks, counts)

        def kv_of(layer, sequence):
            tokens = kv[layer][:, tables[sequence].long()]
            if self.blocks_have_heads_first:
                tokens = tokens.transpose(2, 3)
            return tokens.flatten(1, 2)[:, :shape.lengths[sequence]].transpose(1, 2)

        rows = q.transpose(1, 2).contiguous()
        return Inputs(layers, q, kv_of, self.forms(shape, rows, kv, tables))

    def forms(self, shape, rows, kv, tables):
        """rows: [batch, rows, query heads, head dim], as is the output in heads()."""
        raise NotImplementedError

    def int32(self, numbers):
        return self.torch.tensor(numbers, dtype=self.torch.int32, device=self.device)

    @staticmethod
    def starts(counts):
        return [0, *itertools.accumulate(counts)]


class FlashInfer(Paged):
    blocks_have_heads_first = True

    def __init__(self, request):
        self.flashinfer = self.load("flashinfer")
        super().__init__(request)
        self.version = f"flashinfer {self.flashinfer.__version__}, {self.version}"
        # Of XQA apart: it holds semaphores, which must be zero and are left so.
        self.workspace, self.xqa_workspace = (
            self.torch.zeros(size << 20, dtype=self.torch.uint8, device=self.device)
            for size in (512, 128))
        self.compile(request["shapes"])

    def compile(self, rows):
        """Asks for each kernel once: it is compiled then, if it was not before, for longer than a
        shape may take."""
        kinds = {(row["format"], row["head_dim"], row["query_heads"] // row["kv_heads"],
                  row["rows"] > 1): row for row in rows if row["window"] is None}
        for row in kinds.values():
            length = min(row["rows"], 2)
            small = dict(row, sequences=[[1, length]], rows=length, layers=1)
            try:
                forms = self.prepare(Shape(small)).forms
            except Unable:  # of its shapes all
                continue
            for form in forms:
                try:
                    form.launch(0)
                except Exception as error:  # the answer of the shapes, where it comes up again
                    print(f"{form.name}: {error}", file=sys.stderr)

    def forms(self, shape, rows, kv, tables):
        starts = self.int32(self.starts(len(table) for table in tables))
        last = self.int32([(length - 1) % PAGE + 1 for length in shape.lengths])
        pages = starts, self.torch.cat(tables), last
        if shape.rows > 1:
            return [self.planned(f"paged, causal, {backend}", self.prefill(shape, pages, backend),
                                 rows, kv) for backend in ("fa2", "fa3")]
        forms = [self.planned(name, self.decode(shape, pages, **more), rows, kv)
                 for name, more in (("paged", {}),
                                    ("paged, tensor cores, fa2",
                                     {"backend": "fa2", "use_tensor_cores": True}),
                                    ("paged, tensor cores, fa3",
                                     {"backend": "fa3", "use_tensor_cores": True}))]
        return [*forms, self.xqa(shape, rows, kv, tables)]

    @staticmethod
    def planned(name, plan, rows, kv):
        """plan: makes a wrapper that has planned; once for all layers, as kvgrid's."""
        flat = rows.flatten(0, 1)
        wrapper = functools.cache(plan)
        return Form(name, lambda layer: wrapper().run(flat, (kv[layer][0], kv[layer][1])),
                    lambda out: out.view(rows.shape).transpose(1, 2))

    def decode(self, shape, pages, **more):
        def plan():
            wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(self.workspace, "HND",
                                                                         **more)
            wrapper.plan(*pages, shape.query_heads, shape.kv_heads, shape.head_dim, PAGE,
                         q_data_type=self.dtype(shape), kv_data_type=self.dtype(shape))
            return wrapper

        return plan

    def prefill(self, shape, pages, backend):
        def plan():
            wrapper = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "HND",
                                                                          backend=backend)
            wrapper.plan(self.int32(self.starts(shape.batch * [shape.rows])), *pages,
                         shape.query_heads, shape.kv_heads, shape.head_dim, PAGE, causal=True,
                         q_data_type=self.dtype(shape), kv_data_type=self.dtype(shape))
            return wrapper

        return plan

    def xqa(self, shape, rows, kv, tables):
        table = self.torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        lengths, flat = self.int32(shape.lengths), rows.flatten(0, 1)
        return Form("paged, XQA",
                    lambda layer: self.flashinfer.decode.xqa_batch_decode_with_kv_cache(
                        flat, (kv[layer][0], kv[layer][1]), self.xqa_workspace, table, lengths,
                        shape.longest, bmm1_scale=1 / math.sqrt(shape.head_dim),
                        kv_layout="HND"),
                    lambda out: out.view(rows.shape).transpose(1, 2))


class FlashAttention3(Paged):
    INTERFACES = ("flash_attn_interface", "fa3_fwd_interface")  # the second: forward alone

    def __init__(self, request):
        here = [name for name in self.INTERFACES if importlib.util.find_spec(name)]
        self.interface = self.load((here or self.INTERFACES)[0])
        super().__init__(request)
        self.version = f"FlashAttention-3 ({self.interface.__name__}), {self.version}"

    def forms(self, shape, rows, kv, tables):
        heads, dim, causal = shape.kv_heads, shape.head_dim, shape.rows > 1
        starts = self.starts(PAGE * len(table) for table in tables)
        table = self.torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        lengths = self.int32(shape.lengths)

        def form(name, attend, order=None):
            def launch(layer):
                out = attend(kv[layer][0], kv[layer][1])
                return out[0] if isinstance(out, tuple) else out

            return Form(name + (", causal" if causal else ""), launch,
                        lambda out: out.view(rows.shape).transpose(1, 2), order)

        def paged(**more):
            return lambda k, v: self.interface.flash_attn_with_kvcache(
                rows, k, v, cache_seqlens=lengths, page_table=table, causal=causal, **more)

        # Else a kernel in front of each launch finds out what goes where.
        plan = functools.cache(lambda: self.interface.get_scheduler_metadata(
            shape.batch, shape.rows, table.shape[1] * PAGE, shape.query_heads, heads, dim, lengths,
            qkv_dtype=rows.dtype, page_size=PAGE, causal=causal))
        forms = [form("paged", paged()),
                 form("paged, planned", lambda k, v: paged(scheduler_metadata=plan())(k, v))]

        # The same memory, read as one sequence behind the other.
        def in_order(layer, sequence):
            begin = starts[sequence]
            tokens = kv[layer].flatten(1, 2)[:, begin:begin + shape.lengths[sequence]]
            return tokens.transpose(1, 2)

        if shape.even and shape.longest % PAGE == 0:
            def contiguous(k, v):
                k, v = (x.view(shape.batch, -1, heads, dim) for x in (k, v))
                return self.interface.flash_attn_with_kvcache(rows, k, v, causal=causal)

            forms.append(form("contiguous", contiguous, in_order))
        else:
            row_starts = self.int32(self.starts(shape.batch * [shape.rows]))
            key_starts = self.int32(starts)

            def packed(k, v):
                return self.interface.flash_attn_varlen_func(
                    rows.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), row_starts, key_starts,
                    shape.rows, shape.longest, seqused_k=lengths, causal=causal, num_splits=0)

            forms.append(form("packed", packed, in_order))
        return forms


class LlamaCpp(Peer):
    """llama.cpp's ggml_flash_attn_ext on the CPU, over K and V in the memory of a ggml context:
    [batch, KV heads, tokens, head dim]."""

    TYPES = {"fp32": 0, "fp16": 1, "bf16": 30}  # enum ggml_type

    class InitParams(ctypes.Structure):
        _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p),
                    ("no_alloc", ctypes.c_bool)]

    class ThreadpoolParams(ctypes.Structure):
        _fields_ = [("cpumask", ctypes.c_bool * 512), ("n_threads", ctypes.c_int),
                    ("prio", ctypes.c_int), ("poll", ctypes.c_uint32),
                    ("strict_cpu", ctypes.c_bool), ("paused", ctypes.c_bool)]

    class Plan(ctypes.Structure):  # ggml_cplan, and room for what later versions add
        _fields_ = [("work_size", ctypes.c_size_t), ("work_data", ctypes.c_void_p),
                    ("n_threads", ctypes.c_int), ("threadpool", ctypes.c_void_p),
                    ("rest", ctypes.c_void_p * 8)]

    def __init__(self, request):
        package = self.load("llama_cpp")
        super().__init__(request)
        self.version = f"llama-cpp-python {package.__version__}"
        folder = os.path.join(os.path.dirname(package.__file__), "lib")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        long, number = ctypes.c_int64, ctypes.c_float
        declared = {
            "libggml-base.so": {
                "ggml_init": (pointer, [self.InitParams]),
                "ggml_free": (None, [pointer]),
                "ggml_new_tensor_4d": (pointer, [pointer, ctypes.c_int] + [long] * 4),
                "ggml_get_data": (pointer, [pointer]),
                "ggml_tensor_overhead": (size, []),
                "ggml_graph_overhead": (size, []),
                "ggml_flash_attn_ext": (pointer, [pointer] * 5 + [number] * 3),
                "ggml_new_graph": (pointer, [pointer]),
                "ggml_build_forward_expand": (None, [pointer] * 2),
                "ggml_threadpool_params_default": (self.ThreadpoolParams, [ctypes.c_int]),
            },
            "libggml-cpu.so": {
                "ggml_cpu_init": (None, []),
                "ggml_threadpool_new": (pointer, [ctypes.POINTER(self.ThreadpoolParams)]),
                "ggml_graph_plan": (self.Plan, [pointer, ctypes.c_int, pointer]),
                "ggml_graph_compute": (ctypes.c_int, [pointer, ctypes.POINTER(self.Plan)]),
            },
        }
        self.ggml = types.SimpleNamespace()
        for library, functions in declared.items():
            try:
                loaded = ctypes.CDLL(os.path.join(folder, library))
                for name, (result, arguments) in functions.items():
                    function = getattr(loaded, name)
                    function.restype, function.argtypes = result, arguments
                    setattr(self.ggml, name, function)
            except (OSError, AttributeError) as error:
                raise Missing(first_line(error)) from error
        self.ggml.ggml_cpu_init()
        self.threads = request["threads"]
        self.pool = self.ggml.ggml_threadpool_new(
            self.ggml.ggml_threadpool_params_default(self.threads))
        self.context = None

    def prepare(self, shape):
        if not shape.even:
            raise Unable("no ragged batches")
        batch, heads, kv_heads, group, dim = (shape.batch, shape.query_heads, shape.kv_heads,
                                              shape.group, shape.head_dim)
        dtype = self.dtype(shape)
        layers = self.layers(shape, batch * shape.longest)
        bytes_of_kv = 2 * batch * kv_heads * shape.longest * dim * dtype.itemsize
        bytes_of_q = batch * heads * dim * 4
        overhead = (4 * self.ggml.ggml_tensor_overhead() + self.ggml.ggml_graph_overhead() + 1024)
        self.context = self.ggml.ggml_init(self.InitParams(
            layers * (bytes_of_kv + 4 * (bytes_of_q + overhead)) + (1 << 20), None, False))
        kv, kv_tensors = [], []
        for _ in range(layers):
            made = [self.tensor(self.TYPES[self.format_of(shape)], dtype, batch, kv_heads,
                                shape.longest, dim) for _ in range(2)]
            for _, memory in made:
                memory.copy_(self.random(dtype, *memory.shape))
            kv_tensors.append([tensor for tensor, _ in made])
            kv.append([memory for _, memory in made])
        q = self.random(self.torch.float32, batch, heads, dim)

        def form(name, q_heads, rows, arrange):
            tensor, memory = self.tensor(0, self.torch.float32, batch, q_heads, rows, dim)
            memory.copy_(q.view(batch, q_heads, rows, dim))
            launches = [self.attention(shape, tensor, *kv_tensors[layer]) for layer in
                        range(layers)]
            return Form(name, lambda layer: launches[layer](), arrange)

        forms = [form("query heads", heads, 1, lambda out: out.view(batch, heads, dim))]
        if group > 1:
            forms.append(form("query heads as rows", kv_heads, group,
                              lambda out: out.view(batch, group, kv_heads, dim).transpose(1, 2)
                              .reshape(batch, heads, dim)))
        return Inputs(layers, q, lambda layer, sequence: [x[sequence] for x in kv[layer]], forms)

    def memory(self, tensor, dtype, *size):
        """A ggml tensor's numbers as a tensor of torch's."""
        count = math.prod(size)
        data = (ctypes.c_char * (count * dtype.itemsize)).from_address(
            self.ggml.ggml_get_data(tensor))
        return self.torch.frombuffer(data, dtype=dtype).view(size)

    def tensor(self, kind, dtype, *size):
        made = self.ggml.ggml_new_tensor_4d(self.context, kind, *reversed(size))
        return made, self.memory(made, dtype, *size)

    def attention(self, shape, q, k, v):
        """A function that computes one layer and returns [batch, rows, heads, dim]."""
        out = self.ggml.ggml_flash_attn_ext(self.context, q, k, v, None,
                                            1 / math.sqrt(shape.head_dim), 0, 0)
        graph = self.ggml.ggml_new_graph(self.context)
        self.ggml.ggml_build_forward_expand(graph, out)
        plan = self.ggml.ggml_graph_plan(graph, self.threads, self.pool)
        work = ctypes.create_string_buffer(max(1, plan.work_size))
        plan.work_data = ctypes.addressof(work)
        result = self.memory(out, self.torch.float32,
                             shape.batch * shape.query_heads * shape.head_dim)

        def compute(_=work):  # kept with the function
            if self.ggml.ggml_graph_compute(graph, ctypes.byref(plan)) != 0:
                raise RuntimeError("ggml_graph_compute failed")
            return result

        return compute

    def release(self):
        if self.context is not None:
            self.ggml.ggml_free(self.context)
            self.context = None
        super().release()


# By device, in the order in which they are asked.
PEERS = {
    "cuda": {
        "torch-flash": SdpaFlash,
        "torch-cudnn": SdpaCudnn,
        "torch-math": SdpaMath,
        "torch-flex": Flex,
        "flashinfer": FlashInfer,
        "flash-attention-3": FlashAttention3,
    },
    "cpu": {
        "torch": Sdpa,
        "torch-fp32": SdpaFp32,
        "llama.cpp": LlamaCpp,
    },
}


def main(name):
    # Libraries print: their stdout is not ours.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**fields):
        print(json.dumps(fields), file=answers, flush=True)

    request = json.load(sys.stdin)
    try:
        peer = PEERS[request["device"]][name](request)
    except Missing as missing:
        answer(missing=str(missing))
        return
    answer(version=peer.version)
    for row in request["shapes"]:
        try:
            answer(**peer.measure(Shape(row)))
        except Unable as unable:
            answer(failed=str(unable))
        except Exception as error:  # whatever it is, it is the answer
            answer(failed=first_line(error))
        try:
            peer.release()
        except Exception as error:  # of the shape that was answered: none of this process's works
            print(first_line(error), file=sys.stderr, flush=True)
            os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
