"""The forms of launch/attention_peers.py for several new tokens a sequence, with the PyTorch of this
machine on its CPU. Without one it is skipped."""

import os
import sys
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "launch"))
import attention_peers  # noqa: E402

REQUEST = {"device": "cpu", "threads": 1, "repetitions": 1}
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


def shape(sequences, rows, window=None):
    return attention_peers.Shape({"sequences": sequences, "rows": rows, "window": window,
                                  "query_heads": 8, "kv_heads": 2, "head_dim": 64,
                                  "format": "bf16", "layers": 2, "launches": 2})


class Rows(unittest.TestCase):
    def errors(self, peer, sequences, rows):
        asked = shape(sequences, rows)
        inputs = peer.prepare(asked)
        return {form.name: peer.error(asked, inputs, form) for form in inputs.forms}

    def test_each_row_sees_what_is_before_it_and_itself(self):
        for peer in (Torch(), Math(), Flash()):
            for rows in (1, 2, 7, 69, 70):
                errors = self.errors(peer, [[2, 70]], rows)
                self.assertEqual(len(errors), 2 if rows == 1 else 1, errors)
                self.assertLess(max(errors.values()), 1e-6, (type(peer), rows, errors))

    def test_ragged_batches_are_packed_alike(self):
        for rows in (1, 2, 9):
            errors = self.errors(Packed(), SEQUENCES, rows)
            self.assertEqual(len(errors), 2 if rows == 1 else 1, errors)
            self.assertLess(max(errors.values()), 1e-6, (rows, errors))

    def test_a_mask_from_the_upper_left_is_wrong(self):
        for rows in (2, 69):
            error, = self.errors(UpperLeft(), [[2, 70]], rows).values()
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


if __name__ == "__main__":
    try:
        attention_peers.Peer.load("torch")
    except attention_peers.Missing as missing:
        print(f"skipped: {missing}")
        sys.exit(0)
    unittest.main()
