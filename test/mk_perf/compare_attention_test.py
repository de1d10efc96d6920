#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What tools/compare_attention.py does without PyTorch: shapes, operations, which blocks a ring computes."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM = pathlib.Path(sys.argv.pop())
sys.dont_write_bytecode = True
SPEC = importlib.util.spec_from_file_location('compare_attention', PROGRAM)
compare = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(compare)


def shape(seq, causal=0, **sizes):
    return {'batch': 4, 'seq': seq, 'heads': 16, 'kv_heads': 16, 'dim': 128, 'causal': causal, 'zigzag': causal,
            **sizes}


class CompareAttentionTest(unittest.TestCase):
    def refusal(self, action, *arguments):
        with self.assertRaises(compare.Refusal) as caught:
            action(*arguments)
        return str(caught.exception)

    def test_shapes(self):
        text = 'batch=4,seq=6144,heads=16,kv_heads=16,dim=128'
        self.assertEqual(compare.parse_shape(text), shape(6144))
        self.assertEqual(compare.shape_text(compare.parse_shape(text + ',causal=1,zigzag=1')),
                         text + ',causal=1,zigzag=1')
        self.assertIn('expected batch=N', self.refusal(compare.parse_shape, text + ',m=3'))
        self.assertIn('saw "seq=x"', self.refusal(compare.parse_shape, 'batch=4,seq=x'))
        self.assertIn('dim is missing', self.refusal(compare.parse_shape, 'batch=4,seq=8,heads=1,kv_heads=1'))

    def test_shapes_that_are_refused(self):
        compare.check_shape(shape(6144), 8)
        compare.check_shape(shape(6144, causal=1), 8)
        self.assertIn('not a multiple of 5', self.refusal(compare.check_shape, shape(6144), 5))
        self.assertIn('not a multiple of 8', self.refusal(compare.check_shape, shape(20, causal=1), 4))
        self.assertIn('kv_heads', self.refusal(compare.check_shape, shape(6144, kv_heads=8), 4))
        self.assertIn('zigzag=1', self.refusal(compare.check_shape, shape(6144, zigzag=1), 4))
        for ranks in (1, 2, 4, 8):
            for candidate in compare.preset_shapes():
                compare.check_shape(candidate, ranks)
        self.assertEqual(len(compare.preset_shapes()), 10)

    def test_as_much_to_compute_alone(self):
        self.assertEqual(compare.alone_seq(shape(6144), 4), 3072)
        self.assertEqual(compare.alone_seq(shape(6144), 2), 4352)
        self.assertEqual(compare.alone_seq(shape(98304), 8), 34816)
        self.assertEqual(compare.alone_seq(shape(64), 4), 32)
        self.assertEqual(compare.pairs(5, 1), 15)
        self.assertEqual(compare.flops(shape(6144), 6144), 4 * 6144 ** 2 * 4 * 16 * 128)

    def test_the_blocks_of_a_ring_are_those_that_the_mask_leaves(self):
        for ranks in (2, 3, 4):
            for zigzag in (0, 1):
                seq = 4 * ranks
                for rank in range(ranks):
                    held = [list(range(*compare.positions_of(seq, zigzag, r, ranks)[0]))
                            + [p for run in compare.positions_of(seq, zigzag, r, ranks)[1:] for p in range(*run)]
                            for r in range(ranks)]
                    self.assertEqual(sorted(sum(held, [])), list(range(seq)))
                    part = {'all': lambda rows: rows, 'early': lambda rows: rows[:2], 'late': lambda rows: rows[2:]}
                    for source in range(ranks):
                        if source == rank:
                            continue
                        queries, keys = compare.block_work(zigzag, rank, source)
                        computed = {(q, k) for q in part[queries](held[rank]) for k in part[keys](held[source])}
                        seen = {(q, k) for q in held[rank] for k in held[source] if not zigzag or k <= q}
                        self.assertEqual(computed, seen)

    def test_results_and_table(self):
        result = compare.result_of(shape(6144), 2, 'bf16', 'isolated', [200.0, 100.0, 300.0], [150.0])
        self.assertEqual(result['ring_us'], {'median': 200.0, 'min': 100.0, 'max': 300.0})
        factor = 6144 ** 2 / 2 / 4352 ** 2
        self.assertAlmostEqual(result['alone_us'], 150 * factor)
        self.assertAlmostEqual(result['ring_over_alone'], 200 / (150 * factor))
        self.assertAlmostEqual(result['ring_tflops'], 2 * 6144 ** 2 * 4 * 16 * 128 / 200e-6 * 1e-12)
        one = compare.result_of(shape(6144), 1, 'bf16', 'isolated', None, [150.0])
        self.assertIsNone(one['ring_us'])
        gradients = compare.result_of(shape(6144), 1, 'bf16', 'isolated', None, [150.0], gradients=True)
        self.assertAlmostEqual(gradients['alone_tflops'], 2.5 * one['alone_tflops'])
        lines = compare.table_text([result, one]).split('\n')
        self.assertEqual(len(lines), 3)
        self.assertIn('ring TFLOP/s a rank', lines[0])
        self.assertIn('4352', lines[1])
        self.assertIn('\u2014', lines[2])

    def test_a_loop_has_about_10_ms(self):
        self.assertEqual([compare.launches_a_loop(us) for us in (0, 1000, 26000)], [20, 10, 3])

    def test_without_pytorch_it_says_so(self):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / 'torch.py').write_text('raise ImportError("none here")\n', encoding='utf-8')
            outcome = subprocess.run([sys.executable, PROGRAM, '-g', '2'], capture_output=True, text=True, timeout=50,
                                     env={**os.environ, 'PYTHONPATH': folder})
        self.assertEqual(outcome.returncode, 2)
        self.assertIn('cannot load PyTorch (none here)', outcome.stderr)
        self.assertEqual(outcome.stderr.count('\n'), 1)


if __name__ == '__main__':
    unittest.main()
