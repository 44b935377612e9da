"""launch/compare_attention with a benchmark and peers that are made up here, so that what it makes of
them is known; then with the real benchmark and an interpreter that has no torch.

    compare_attention_test.py ATTEND_BENCHMARK
"""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import types
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPT = os.path.join(ROOT, "launch", "compare_attention")
sys.path.insert(0, os.path.join(ROOT, "launch"))
import attention_peers  # noqa: E402


def shape(name, sequences, plain_us, graph_us):
    tokens = sum(count * length for count, length in sequences)
    return {"shape": name, "format": "bf16", "sequences": sequences, "rows": 1, "window": None,
            "query_heads": 8, "kv_heads": 2, "head_dim": 64, "kv_bytes": tokens * 2 * 2 * 64 * 2,
            "layers": 4, "launches": 8, "plain_us": plain_us, "graph_us": graph_us}


SHAPES = [shape("1x1Kx8/2x64", [[1, 1024]], 20.0, 10.0),
          shape("2x1Kx8/2x64", [[2, 1024]], 40.0, 20.0),
          shape("1x5+2x70x8/2x64", [[1, 5], [2, 70]], 8.0, 4.0)]

# Notes its arguments, and reports SHAPES.
BENCHMARK = """
    import json, os, sys
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "arguments"), "w") as file:
        json.dump(sys.argv[1:], file)
    with open(os.path.join(here, "report")) as report:
        code, text = json.load(report)
    if text is not None:
        with open(sys.argv[sys.argv.index("--json") + 1], "x") as file:
            json.dump(text, file)
    sys.exit(code)
"""

# An interpreter that answers for the peers instead of running them.
INTERPRETER = """
    import json, os, signal, subprocess, sys, time
    assert sys.argv[1] == "-u" and os.path.exists(sys.argv[2])
    peer, request = sys.argv[3], json.load(sys.stdin)
    assert request["repetitions"] >= 20
    def say(**fields):
        print(json.dumps(fields), flush=True)
    def ran(shape, factor):
        graph_us = factor * shape["graph_us"] if request["device"] == "cuda" else None
        say(form="rows", max_rel_error=1e-3, plain_us=3 * shape["plain_us"], graph_us=graph_us)
    if peer == "torch-flex":
        say(missing="cannot compile: no compiler")
        sys.exit(0)
    if peer == "flashinfer":
        print("first line", file=sys.stderr)
        print("libcudart.so: no such file", file=sys.stderr)
        sys.exit(3)
    if peer == "torch-fp32":
        time.sleep(3)
    say(version="1.0")
    for shape in request["shapes"]:
        second = shape["shape"].startswith("2x")
        if peer in ("torch-flash", "torch", "torch-fp32"):
            ran(shape, 2.0)
        elif peer == "llama.cpp":
            if second:
                say(failed="device lost")
                sys.exit(0)
            ran(shape, 2.0)
        elif peer == "torch-cudnn":
            if second:
                os.kill(os.getpid(), signal.SIGSEGV)
            ran(shape, 1.25)
        elif peer == "torch-math":
            if second:
                child = subprocess.Popen(["sleep", "60"])
                with open(os.path.join(os.path.dirname(sys.argv[0]), "child"), "w") as file:
                    file.write(str(child.pid))
                child.wait()
            say(failed="no ragged batches") if "+" in shape["shape"] else ran(shape, 0.5)
        elif peer == "flash-attention-3":
            if second:
                print('{"form": "pag', end="", flush=True)
                sys.exit(9)
            ran(shape, 1.0)
"""


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def program(path, text):
    write(path, f"#!{sys.executable}\n" + textwrap.dedent(text))
    os.chmod(path, 0o755)
    return path


def run(*arguments):
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=100, check=False)
    return done.returncode, done.stdout, done.stderr


class WithFakes(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.bin = os.path.join(self.folder.name, "tests", "bin")
        for name in ("attend_benchmark", "attend_benchmark_gpu"):
            program(os.path.join(self.bin, name), BENCHMARK)
        self.python = program(os.path.join(self.folder.name, "python"), INTERPRETER)
        self.json = os.path.join(self.folder.name, "result.json")
        self.reports(0)

    def reports(self, code, rows=tuple(SHAPES)):
        self.reported = list(rows)
        report = {"threads": 0, "rows": list(rows)} if rows else None
        write(os.path.join(self.bin, "report"), json.dumps([code, report]))

    def compare(self, *arguments):
        return run("--build", self.folder.name, "--python", self.python, *arguments)

    def rows(self, peers, *arguments):
        code, output, errors = self.compare("--peers", peers, "--json", self.json, *arguments)
        self.assertEqual(code, 0, output + errors)
        with open(self.json, encoding="utf-8") as file:
            result = json.load(file)
        self.assertEqual(result["kvgrid"]["rows"], self.reported)
        return result["peers"], output

    def test_ratio_is_the_peers_time_over_kvgrids(self):
        rows, output = self.rows("torch-flash")
        self.assertEqual([row["shape"] for row in rows], [row["shape"] for row in SHAPES])
        for row, ours in zip(rows, SHAPES):
            self.assertEqual(row["launch"], "graph")
            self.assertEqual((row["us"], row["kvgrid_us"]),
                             (2 * ours["graph_us"], ours["graph_us"]))
            self.assertAlmostEqual(row["ratio"], 2.0)
            self.assertAlmostEqual(row["gb_per_s"], ours["kv_bytes"] / row["us"] / 1e3)
            self.assertIsNone(row["failed"])
        self.assertRegex(output, r"torch-flash +1x1Kx8/2x64 +bf16 +20\.0 +\d+ +10\.0 +2\.00x "
                                 r"+1\.0e-03  rows")
        self.assertIn("kvgrid is ahead in 3 of 3 comparisons\nOK\n", output)

    def test_on_the_cpu_it_is_of_single_launches(self):
        self.reports(0, [dict(SHAPES[0], graph_us=None)])
        code, _, errors = self.compare("--device", "cpu", "--peers", "torch", "--json", self.json)
        self.assertEqual(code, 0, errors)
        with open(self.json, encoding="utf-8") as file:
            row, = json.load(file)["peers"]
        self.assertEqual((row["launch"], row["us"], row["kvgrid_us"]), ("plain", 60.0, 20.0))
        self.assertAlmostEqual(row["ratio"], 3.0)

    def test_a_peer_that_dies_at_a_shape_goes_on_behind_it(self):
        rows, output = self.rows("torch-cudnn")
        self.assertEqual([row["failed"] for row in rows], [None, "ended by SIGSEGV", None])
        self.assertIsNone(rows[1]["ratio"])
        self.assertIn("2 of 2 comparisons; failed rows: torch-cudnn 1\n", output)

    def test_a_cut_answer_is_none(self):
        rows, _ = self.rows("flash-attention-3")
        self.assertEqual([row["failed"] for row in rows], [None, "ended with exit code 9", None])

    def test_a_shape_past_its_limit_fails_and_no_process_is_left(self):
        rows, output = self.rows("torch-math", "--limit", "2")
        self.assertEqual([row["failed"] for row in rows],
                         [None, "not over after 2 s", "no ragged batches"])
        self.assertIn("behind torch-math at 1x1Kx8/2x64 bf16 (0.50x)", output)
        with open(os.path.join(self.folder.name, "child"), encoding="utf-8") as file:
            child = f"/proc/{file.read()}/cmdline"
        if os.path.exists(child):  # killed, and not waited for by anyone yet
            with open(child, encoding="utf-8") as file:
                self.assertEqual(file.read(), "")

    def test_past_the_limit_of_the_peer_what_was_answered_counts(self):
        rows, _ = self.rows("torch-math", "--peer-limit", "2")
        late = "the peer is not over after 2 s"
        self.assertEqual([row["failed"] for row in rows], [None, late, late])

    def test_only_the_limit_of_the_peer_counts_its_start(self):
        self.reports(0, [dict(shape, graph_us=None) for shape in SHAPES])
        for arguments, failed in ((["--limit", "2"], None),
                                  (["--peer-limit", "2"], "the peer is not over after 2 s")):
            rows, _ = self.rows("torch-fp32", "--device", "cpu", *arguments)
            self.assertEqual([row["failed"] for row in rows], 3 * [failed])
            os.remove(self.json)

    def test_a_peer_that_answers_and_ends_goes_on_behind_it(self):
        self.reports(0, [dict(shape, graph_us=None) for shape in SHAPES])
        rows, _ = self.rows("llama.cpp", "--device", "cpu")
        self.assertEqual([row["failed"] for row in rows], [None, "device lost", None])

    def test_a_missing_peer_is_a_failed_row(self):
        rows, output = self.rows("torch-flex,flashinfer")
        self.assertEqual({row["failed"] for row in rows[:3]}, {"cannot compile: no compiler"})
        self.assertEqual({row["failed"] for row in rows[3:]},
                         {"ended with exit code 3: libcudart.so: no such file"})
        self.assertRegex(output, r"torch-flex +all +failed: cannot compile: no compiler\n")
        self.assertIn("0 of 0 comparisons; failed rows: torch-flex all, flashinfer all\n", output)

    def test_require_ahead_decides_the_exit_code(self):
        for peers, code, verdict in (
                ("torch-flash", 0, "OK"), ("flash-attention-3", 0, "OK"),
                ("torch-math", 1, "FAILED: kvgrid is behind"),
                ("torch-flash,torch-flex", 1, "FAILED: did not run: torch-flex")):
            found, output, _ = self.compare("--require-ahead", "--limit", "2", "--peers", peers)
            self.assertEqual((found, output.splitlines()[-1]), (code, verdict))
        # Nobody asked for those that are missing.
        self.reports(0, SHAPES[2:])
        found, output, _ = self.compare("--require-ahead")
        self.assertEqual((found, output.splitlines()[-1]), (0, "OK"))
        self.assertIn("flashinfer all", output)

    def test_the_benchmark_gets_what_was_asked_for(self):
        self.rows("torch-flash", "--shape", "a", "--shape", "b", "--formats", "fp16", "--only", "c",
                  "--threads", "3")
        with open(os.path.join(self.bin, "arguments"), encoding="utf-8") as file:
            arguments = json.load(file)
        del arguments[arguments.index("--json"):arguments.index("--json") + 2]
        self.assertEqual(arguments, ["--formats", "fp16", "--shape", "a", "--shape", "b", "--only",
                                     "c", "--threads", "3"])

    def test_exit_codes_of_the_benchmark_are_passed_on(self):
        self.reports(3, ())
        self.assertEqual(self.compare()[0], 3)
        self.reports(1)
        code, output, _ = self.compare("--peers", "torch-flash")
        self.assertEqual((code, output.splitlines()[-1]),
                         (1, "FAILED: an output of kvgrid is wrong"))

    def test_misuse_is_refused_by_name(self):
        write(self.json, "mine")
        for arguments, code, words in (
                (["--peers", "torch"], 2, "--peers: torch: not among torch-flash"),
                (["--device", "cpu", "--peers", "flashinfer"], 2, "not among torch"),
                (["--json", self.json], 2, "exists and is not overwritten"),
                (["--json", "/nowhere/x"], 2, "cannot write /nowhere/x"),
                (["--build", "/nowhere"], 4, "attend_benchmark_gpu is not there")):
            found, _, errors = self.compare(*arguments)
            self.assertEqual(found, code, arguments)
            self.assertIn(words, errors)
        with open(self.json, encoding="utf-8") as file:
            self.assertEqual(file.read(), "mine")


class WithTheRealBenchmark(unittest.TestCase):
    benchmark = None

    def test_missing_torch_is_said_and_kvgrid_is_measured(self):
        build = os.path.dirname(os.path.dirname(os.path.dirname(self.benchmark)))
        with tempfile.TemporaryDirectory() as folder:
            # -S: none of the packages that may be installed here.
            python = os.path.join(folder, "python")
            write(python, f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
            os.chmod(python, 0o755)
            result = os.path.join(folder, "result.json")
            code, output, errors = run(
                "--device", "cpu", "--build", build, "--python", python, "--threads", "1",
                "--shape", "2x1Kx8/2x64", "--shape", "1x300+2x70x4/1", "--json", result)
            self.assertEqual(code, 0, output + errors)
            with open(result, encoding="utf-8") as file:
                found = json.load(file)
        ours = found["kvgrid"]["rows"]
        self.assertEqual([(row["shape"], row["format"]) for row in ours],
                         [(shape, format) for format in ("bf16", "fp16")
                          for shape in ("2x1Kx8/2x64", "1x300+2x70x4/1")])
        for row in ours:
            self.assertEqual(row["wrong"], 0)
            self.assertGreaterEqual(row["checked"], 3)
            self.assertLess(row["max_rel_error"], 1e-5)
            self.assertGreater(row["plain_us"], 0)
            self.assertIsNone(row["graph_us"])
        peers = found["peers"]
        self.assertEqual({row["peer"] for row in peers}, set(attention_peers.PEERS["cpu"]))
        self.assertEqual({row["failed"] for row in peers},
                         {"torch is not installed", "llama_cpp is not installed"})
        self.assertEqual(len(peers), len(ours) * len(attention_peers.PEERS["cpu"]))


# A process of a peer that loses its device at the second shape.
LOSES_DEVICE = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import attention_peers
    class Peer:
        version, shapes = "1.0", 0
        def __init__(self, request):
            pass
        def measure(self, shape):
            self.shapes += 1
            if self.shapes == 2:
                raise RuntimeError("illegal access")
            return {"form": "rows"}
        def release(self):
            if self.shapes == 2:
                raise RuntimeError("device lost")
    attention_peers.PEERS["cpu"]["torch"] = Peer
    attention_peers.main("torch")
"""


class Process(unittest.TestCase):
    def test_a_lost_device_is_the_answer_of_its_shape_alone(self):
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(LOSES_DEVICE),
                               os.path.join(ROOT, "launch")], capture_output=True, text=True,
                              input=json.dumps({"device": "cpu", "shapes": SHAPES}), check=False)
        self.assertEqual([json.loads(line) for line in done.stdout.splitlines()],
                         [{"version": "1.0"}, {"form": "rows"},
                          {"failed": "RuntimeError: illegal access"}])
        self.assertEqual((done.returncode, done.stderr), (0, "RuntimeError: device lost\n"))


class Shapes(unittest.TestCase):
    def test_a_row_says_the_lengths(self):
        ragged = attention_peers.Shape(SHAPES[2])
        self.assertEqual((ragged.lengths, ragged.even, ragged.longest, ragged.group),
                         ([5, 70, 70], False, 70, 4))
        self.assertTrue(attention_peers.Shape(SHAPES[1]).even)


class Mask:
    """torch.ones(rows, tokens).tril(diagonal), as the tokens that each row sees."""

    def __init__(self, rows, tokens):
        self.rows, self.tokens = rows, tokens

    def tril(self, diagonal):
        return [[token for token in range(self.tokens) if token <= row + diagonal]
                for row in range(self.rows)]


class Tensor:
    def __init__(self, *size):
        self.shape = size

    def __getitem__(self, _):
        return Tensor(*self.shape[1:])

    def view(self, *size):
        return Tensor(*size)


class SeveralRows(unittest.TestCase):
    """What PyTorch is asked for; attention_peers_test.py asks it, where it is."""

    def calls(self, peer, rows):
        """The (q, k, v, keywords) of each form."""
        found = []

        def attend(*tensors, **keywords):
            found.append((*(tensor.shape for tensor in tensors), keywords))

        functional = types.SimpleNamespace(scaled_dot_product_attention=attend)
        peer = object.__new__(peer)
        peer.torch = types.SimpleNamespace(
            bool=None, ones=lambda rows, tokens, dtype, device: Mask(rows, tokens),
            nn=types.SimpleNamespace(functional=functional))
        peer.device, peer.layers, peer.dtype = "cpu", lambda *_: 1, lambda _: None
        peer.random = lambda _, *size: Tensor(*size)
        for form in peer.prepare(attention_peers.Shape(dict(SHAPES[1], rows=rows))).forms:
            form.launch(0)
        return found

    def test_one_token_sees_all(self):
        keys = (2, 2, 1024, 64)
        self.assertEqual(self.calls(attention_peers.Sdpa, 1),
                         [((2, 8, 1, 64), keys, keys, {"enable_gqa": True}),
                          ((2, 2, 4, 64), keys, keys, {})])

    def test_the_last_tokens_see_what_is_before_them(self):
        (q, k, _, keywords), = self.calls(attention_peers.Sdpa, 3)
        self.assertEqual((q, k, keywords["enable_gqa"]), ((2, 8, 3, 64), (2, 2, 1024, 64), True))
        self.assertEqual(keywords["attn_mask"],
                         [list(range(1022)), list(range(1023)), list(range(1024))])
        self.assertNotIn("is_causal", keywords)

    def test_all_tokens_are_causal(self):
        (q, _, _, keywords), = self.calls(attention_peers.Sdpa, 1024)
        self.assertEqual((q, keywords), ((2, 8, 1024, 64), {"is_causal": True, "enable_gqa": True}))

    def test_the_ragged_operator_of_flash_is_causal(self):
        for rows in (1, 3):
            arguments = []
            flash = object.__new__(attention_peers.SdpaFlash)
            aten = types.SimpleNamespace(
                _flash_attention_forward=lambda *given: arguments.append(given) or ["out"])
            flash.torch = types.SimpleNamespace(ops=types.SimpleNamespace(aten=aten))
            shape = attention_peers.Shape(dict(SHAPES[2], rows=rows))
            self.assertEqual(flash.ragged_operator(shape)(*"qkvrkmm"), "out")
            self.assertEqual(arguments, [(*"qkvrkmm", 0.0, rows > 1, False)])

    def test_who_cannot_says_so(self):
        for peer, reason in ((attention_peers.Flex, "not compared"),
                             (attention_peers.LlamaCpp, "not compared"),
                             (attention_peers.SdpaCudnn, "upper left"),
                             (attention_peers.SdpaMath, "no ragged batches")):
            with self.assertRaisesRegex(attention_peers.Unable, reason):
                object.__new__(peer).measure(attention_peers.Shape(dict(SHAPES[2], rows=3)))


if __name__ == "__main__":
    WithTheRealBenchmark.benchmark = os.path.abspath(sys.argv.pop())
    unittest.main()
