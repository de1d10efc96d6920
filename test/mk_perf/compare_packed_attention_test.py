#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What tools/compare_packed_attention.py does without PyTorch: shapes, lengths, operations."""

import importlib.util
import pathlib
import subprocess
import sys
import unittest

PROGRAM = pathlib.Path(sys.argv.pop())
sys.dont_write_bytecode = True
sys.path.insert(0, str(PROGRAM.parent))
SPEC = importlib.util.spec_from_file_location('compare_packed_attention', PROGRAM)
compare = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(compare)

TEXT = 'batch=1,seq=24576,heads=16,kv_heads=16,dim=128'


class ComparePackedAttentionTest(unittest.TestCase):
    def refusal(self, text):
        with self.assertRaises(compare.Refusal) as caught:
            compare.parse_shape(text)
        return str(caught.exception)

    def test_shapes(self):
        shape = compare.parse_shape(TEXT + ',packed=8')
        self.assertEqual((shape['packed'], shape['causal']), (8, 0))
        self.assertEqual(compare.shape_text(shape), TEXT + ',causal=0,packed=8')
        self.assertIn('packed is missing', self.refusal(TEXT))
        self.assertIn('saw "zigzag=1"', self.refusal(TEXT + ',packed=8,zigzag=1'))
        self.assertIn('batch=1', self.refusal(TEXT.replace('batch=1', 'batch=2') + ',packed=8'))
        self.assertIn('as many kv_heads', self.refusal(TEXT.replace('kv_heads=16', 'kv_heads=8') + ',packed=8'))

    def test_lengths_and_operations(self):
        self.assertEqual(compare.bounds(60, 3), [0, 10, 30, 60])
        shape = compare.parse_shape('batch=1,seq=60,heads=2,kv_heads=2,dim=64,packed=3')
        self.assertEqual(compare.flops(shape, False), 4 * (100 + 400 + 900) * 2 * 64)
        shape['causal'] = 1
        self.assertEqual(compare.flops(shape, True), 10 * (55 + 210 + 465) * 2 * 64)

    def test_program(self):
        for arguments, says in (([], '--shape'), (['--shape', 'm=1'], 'saw "m=1"'),
                                (['--shape', TEXT + ',packed=1', '--iters', '0'], '--iters')):
            result = subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True,
                                    check=False)
            self.assertEqual(result.returncode, 2, result)
            self.assertIn(says, result.stderr)


if __name__ == '__main__':
    unittest.main()
