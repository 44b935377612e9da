"""The forms of launch/attention_peers.py with the PyTorch of this machine on its CPU: its own, and
those of FlashInfer and FlashAttention-3 over stand-ins that do what is documented of those. Without
PyTorch it is skipped."""

import contextlib
import importlib.machinery
import io
import os
import sys
import types
import unittest
import unittest.mock

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "launch"))
import attention_peers  # noqa: E402

try:
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(0)

REQUEST = {"device": "cpu", "threads": 1, "repetitions": 1, "shapes": []}
SEQUENCES = [[1, 9], [2, 70]]


class Fp32:
    """What a peer adds to a true result is then rounding alone."""

    format = "fp32"

    def __init__(self):
        super().__init__(REQUEST)


class Torch(Fp32, attention_peers.Sdpa):
    pass


class Math(Fp32, attention_peers.SdpaMath):
    pass


class Flash(Fp32, attention_peers.SdpaFlash):
    pass


class UpperLeft(Fp32, attention_peers.Sdpa):
    """Wrong: the first of the new tokens sees one token, the second two."""

    def lower_right(self, rows, tokens):
        return "upper left", {"is_causal": True}


class Packed(Fp32, attention_peers.Sdpa):
    """The ragged operators are on CUDA only: this one takes a sequence at a time, as they do."""

    def ragged_operator(self, shape):
        def operator(q, k, v, row_starts, key_starts, most_rows, most_keys):
            assert (most_rows, most_keys) == (max(row_starts.diff()), shape.longest)
            sequences = zip(row_starts, row_starts[1:], key_starts, key_starts[1:])
            return self.torch.cat([self.one(q[rows:rows_end], k[keys:keys_end], v[keys:keys_end],
                                            shape.rows)
                                   for rows, rows_end, keys, keys_end in sequences])
        return operator

    def one(self, q, k, v, new_tokens):
        """[rows, heads, dim] of one sequence."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        mask = self.lower_right(new_tokens, k.shape[2])[1] if new_tokens > 1 else {}
        return self.attend(q, k, v, **mask)[0].transpose(0, 1)


class WrongAndFast(Torch):
    """Has a form of nothing in front."""

    def prepare(self, shape):
        inputs = super().prepare(shape)
        nothing = self.torch.zeros_like(inputs.q)
        wrong = attention_peers.Form("nothing", lambda layer: nothing, lambda out: out)
        return inputs._replace(forms=[wrong, *inputs.forms])


def row(sequences, rows, window=None):
    return {"sequences": sequences, "rows": rows, "window": window, "query_heads": 8,
            "kv_heads": 2, "head_dim": 64, "format": "bf16", "layers": 2, "launches": 2}


def shape(*arguments, **keywords):
    return attention_peers.Shape(row(*arguments, **keywords))


def attend(q, k, v, causal):
    """[rows, heads, dim] of the last tokens of a sequence; k and v: [tokens, KV heads, dim]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    rows, tokens = q.shape[2], k.shape[2]
    seen = torch.ones(rows, tokens, dtype=torch.bool).tril(tokens - rows) if causal else None
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return out[0].transpose(0, 1)


def cut(x, starts):
    starts = starts.tolist()
    return [x[begin:end] for begin, end in zip(starts, starts[1:])]


class Wrapper:
    """FlashInfer's, for K and V of [page, KV head, token, dim]."""

    planned = 0

    def __init__(self, workspace, kv_layout="NHD", use_tensor_cores=False, backend="auto"):
        assert kv_layout == "HND" and workspace.dtype == torch.uint8

    def take(self, indptr, indices, last_page_len, heads, kv_heads, head_dim, page_size):
        Wrapper.planned += 1
        self.inner = (kv_heads, page_size, head_dim)
        self.pages, self.last = cut(indices, indptr), last_page_len.tolist()

    def attend(self, rows, kv, causal):
        out = []
        for q, pages, last in zip(rows, self.pages, self.last):
            assert all(x.shape[1:] == self.inner for x in kv) and 1 <= last <= self.inner[1]
            length = (len(pages) - 1) * self.inner[1] + last
            k, v = (x[pages].transpose(1, 2).flatten(0, 1)[:length] for x in kv)
            out.append(attend(q, k, v, causal))
        return torch.cat(out)


class DecodeWrapper(Wrapper):
    def plan(self, *pages_and_sizes, q_data_type="float16", kv_data_type=None):
        self.take(*pages_and_sizes)
        self.dtypes = {q_data_type, kv_data_type}

    def run(self, q, kv):
        assert {q.dtype} == self.dtypes
        return self.attend(q.unsqueeze(1), kv, False)


class PrefillWrapper(Wrapper):
    def plan(self, qo_indptr, *pages_and_sizes, causal=False, q_data_type="float16",
             kv_data_type=None):
        self.take(*pages_and_sizes)
        self.rows, self.causal, self.dtypes = qo_indptr, causal, {q_data_type, kv_data_type}

    def run(self, q, kv):
        assert {q.dtype} == self.dtypes
        return self.attend(cut(q, self.rows), kv, self.causal)


def xqa_batch_decode_with_kv_cache(q, kv, workspace, block_tables, seq_lens, max_seq_len,
                                   bmm1_scale=1.0, kv_layout="NHD"):
    assert not workspace.any() and kv_layout == "HND" and max_seq_len == max(seq_lens)
    scale = bmm1_scale * q.shape[-1] ** 0.5
    out = []
    for one, table, length in zip(q, block_tables, seq_lens):
        k, v = (x[table].transpose(1, 2).flatten(0, 1)[:length] for x in kv)
        out.append(attend(scale * one.unsqueeze(0), k, v, False))
    return torch.cat(out)


def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=None, page_table=None, causal=False,
                            scheduler_metadata=None):
    assert scheduler_metadata in (None, (len(q), q.shape[1], *q.shape[2:], causal))
    out = []
    for sequence, rows in enumerate(q):
        k, v = ((x[sequence] if page_table is None else x[page_table[sequence]].flatten(0, 1))
                for x in (k_cache, v_cache))
        length = len(k) if cache_seqlens is None else cache_seqlens[sequence]
        out.append(attend(rows, k[:length], v[:length], causal))
    return torch.stack(out)


def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv,
                           headdim, cache_seqlens, qkv_dtype=None, page_size=None, causal=False):
    assert num_heads_q % num_heads_kv == 0 and max_seqlen_k % page_size == 0
    assert len(cache_seqlens) == batch_size and max(cache_seqlens) <= max_seqlen_k
    return batch_size, max_seqlen_q, num_heads_q, headdim, causal


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                           seqused_k=None, causal=False, num_splits=1):
    assert max_seqlen_q == max(cu_seqlens_q.diff()) and max_seqlen_k == max(seqused_k)
    return torch.cat([attend(rows, keys[:used], values[:used], causal) for rows, keys, values, used
                      in zip(cut(q, cu_seqlens_q), cut(k, cu_seqlens_k), cut(v, cu_seqlens_k),
                             seqused_k)])


def module(name, **members):
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(made).update(members)
    return {name: made}


FLASHINFER = module("flashinfer", __version__="0.7.4",
                    BatchDecodeWithPagedKVCacheWrapper=DecodeWrapper,
                    BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper,
                    decode=types.SimpleNamespace(
                        xqa_batch_decode_with_kv_cache=xqa_batch_decode_with_kv_cache))
FLASH_ATTENTION = {"flash_attn_with_kvcache": flash_attn_with_kvcache,
                   "flash_attn_varlen_func": flash_attn_varlen_func,
                   "get_scheduler_metadata": get_scheduler_metadata}


class FlashInfer(Fp32, attention_peers.FlashInfer):
    pass


class FlashAttention3(Fp32, attention_peers.FlashAttention3):
    pass


def errors(peer, sequences, rows):
    asked = shape(sequences, rows)
    inputs = peer.prepare(asked)
    return {form.name: peer.error(asked, inputs, form) for form in inputs.forms}


class Rows(unittest.TestCase):
    def test_each_row_sees_what_is_before_it_and_itself(self):
        for peer in (Torch(), Math(), Flash()):
            for rows in (1, 2, 7, 69, 70):
                found = errors(peer, [[2, 70]], rows)
                self.assertEqual(len(found), 2 if rows == 1 else 1, found)
                self.assertLess(max(found.values()), 1e-6, (type(peer), rows, found))

    def test_ragged_batches_are_packed_alike(self):
        for rows in (1, 2, 9):
            found = errors(Packed(), SEQUENCES, rows)
            self.assertEqual(len(found), 2 if rows == 1 else 1, found)
            self.assertLess(max(found.values()), 1e-6, (rows, found))

    def test_a_mask_from_the_upper_left_is_wrong(self):
        for rows in (2, 69):
            error, = errors(UpperLeft(), [[2, 70]], rows).values()
            self.assertGreater(error, attention_peers.ERROR_BOUND)

    def test_windows_are_not_compared(self):
        with self.assertRaisesRegex(attention_peers.Unable, "windows"):
            Torch().measure(shape([[2, 70]], 1, window=16))

    def test_measured(self):
        answer = Torch().measure(shape([[2, 70]], 7))
        self.assertEqual(answer["form"], "query heads, lower-right mask")
        self.assertGreater(answer["plain_us"], 0)
        self.assertLess(answer["max_rel_error"], 1e-6)

    def test_a_wrong_form_does_not_win(self):
        answer = WrongAndFast().measure(shape([[2, 70]], 7))
        self.assertEqual(answer["form"], "query heads, lower-right mask")

    def test_a_shape_whose_forms_are_wrong_has_failed(self):
        with self.assertRaisesRegex(attention_peers.Unable,
                                    "query heads, upper left: wrong output: error "):
            UpperLeft().measure(shape([[2, 70]], 7))


class OthersPaged(unittest.TestCase):
    def check(self, peer, forms, sequences, rows):
        found = errors(peer, sequences, rows)
        self.assertEqual(list(found), forms)
        self.assertLess(max(found.values()), 1e-6, (sequences, rows, found))

    @unittest.mock.patch.dict(sys.modules, FLASHINFER)
    def test_flashinfer(self):
        peer = FlashInfer()
        self.assertIn("flashinfer 0.7.4, torch", peer.version)
        for sequences in ([[2, 128]], [[2, 70]], SEQUENCES):
            self.check(peer, ["paged", "paged, tensor cores, fa2", "paged, tensor cores, fa3",
                              "paged, XQA"], sequences, 1)
            for rows in (2, 9):
                self.check(peer, ["paged, causal, fa2", "paged, causal, fa3"], sequences, rows)

    @unittest.mock.patch.dict(sys.modules, FLASHINFER)
    def test_flashinfer_plans_once_for_all_layers(self):
        peer = FlashInfer()
        for rows in (1, 9):
            for form in peer.prepare(shape(SEQUENCES, rows)).forms:
                Wrapper.planned = 0
                for layer in (0, 1, 0):
                    form.launch(layer)
                self.assertEqual(Wrapper.planned, 0 if form.name == "paged, XQA" else 1)

    @unittest.mock.patch.dict(sys.modules, FLASHINFER)
    def test_flashinfer_is_asked_for_each_kernel_before_the_first_shape(self):
        Wrapper.planned = 0
        same = [row([[1, 9]], 1), row([[2, 70]], 1), row([[1, 9]], 5), row([[1, 9]], 1, window=4)]
        with unittest.mock.patch.dict(REQUEST, shapes=same):
            FlashInfer()
        self.assertEqual(Wrapper.planned, 3 + 2)  # of one token, of several
        broken = unittest.mock.patch.object(DecodeWrapper, "plan", side_effect=RuntimeError("nvcc"))
        said = io.StringIO()
        with unittest.mock.patch.dict(REQUEST, shapes=same), broken, \
                contextlib.redirect_stderr(said):
            peer = FlashInfer()
            answer = peer.measure(shape(SEQUENCES, 1))
        self.assertEqual(said.getvalue().count("nvcc"), 3)
        self.assertEqual(answer["form"], "paged, XQA")

    def test_flash_attention_3(self):
        paged = ["paged", "paged, planned"]
        for name in ("flash_attn_interface", "fa3_fwd_interface"):
            with unittest.mock.patch.dict(sys.modules, module(name, **FLASH_ATTENTION)):
                peer = FlashAttention3()
                self.assertIn(name, peer.version)
                for sequences, last in (([[2, 128]], "contiguous"), ([[2, 70]], "packed"),
                                        (SEQUENCES, "packed")):
                    self.check(peer, [*paged, last], sequences, 1)
                    for rows in (2, 9):
                        self.check(peer, [form + ", causal" for form in (*paged, last)],
                                   sequences, rows)

    def test_flash_attention_3_without_paged_kv(self):
        def unpaged(*arguments, page_table=None, **keywords):
            if page_table is not None:
                raise RuntimeError("This flash attention build does not support paged KV.")
            return flash_attn_with_kvcache(*arguments, **keywords)

        members = dict(FLASH_ATTENTION, flash_attn_with_kvcache=unpaged)
        with unittest.mock.patch.dict(sys.modules, module("fa3_fwd_interface", **members)):
            answer = FlashAttention3().measure(shape([[2, 128]], 1))
        self.assertEqual(answer["form"], "contiguous")


if __name__ == "__main__":
    unittest.main()
