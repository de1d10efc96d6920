#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""tools/plot.py draws every figure of a result file where it belongs, and refuses what is none."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
from xml.etree import ElementTree

PLOT = pathlib.Path(sys.argv.pop())
SVG = '{http://www.w3.org/2000/svg}'


def result(m, n=8192, k=2048, mode='isolated', **figures):
    line = {'operator': 'gemm_reduce_scatter', 'ranks': 4, 'shape': {'m': m, 'n': n, 'k': k}, 'dtype': 'bf16',
            'mode': mode, 'fused_us': {'median': 100.0}, 'tflops': 400.0, 'baseline_us': 200.0, 'roofline_us': 80.0}
    return {**line, **figures}


class PlotTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_plot(self, *documents):
        paths = []
        for i, document in enumerate(documents):
            paths.append(self.folder / f'{i}.json')
            paths[-1].write_text(document, encoding='utf-8')
        return subprocess.run([sys.executable, PLOT, *paths, '--out', self.folder / 'plot.svg'],
                              capture_output=True, text=True, timeout=60)

    def panels(self, *results_of_files):
        documents = [json.dumps({'machine': {'gpu': 'H200 <&>', 'build': '1-abc'}, 'results': results})
                     for results in results_of_files]
        outcome = self.run_plot(*documents)
        self.assertEqual((outcome.returncode, outcome.stderr), (0, ''))
        root = ElementTree.parse(self.folder / 'plot.svg').getroot()
        self.assertIn('H200 <&>, 1-abc', [text.text for text in root.iter(SVG + 'text')])
        return {group.findall(f'{SVG}text[@font-weight]')[0].text:
                [title.text for title in group.iter(SVG + 'title')] for group in root.iter(SVG + 'g')}

    def test_rates_of_all_three(self):
        self.assertEqual(self.panels([result(1024)]), {
            'gemm_reduce_scatter, 4 ranks, bf16, isolated':
                ['fused, m 1024: 400.0 TFLOP/s', 'NCCL + cuBLAS, m 1024: 200.0 TFLOP/s',
                 'roofline, m 1024: 500.0 TFLOP/s']})

    def test_what_was_not_measured_is_left_out(self):
        marks = self.panels([result(1024, baseline_us=None, roofline_us=None), result(2048)])
        self.assertEqual([len(marks) for marks in marks.values()], [4])

    def test_a_panel_a_weight_and_mode(self):
        panels = self.panels([result(m, k=k, mode=mode) for m in (2048, 1024) for k in (2048, 7168)
                              for mode in ('isolated', 'back-to-back')])
        prefix = 'gemm_reduce_scatter, 4 ranks, bf16, '
        self.assertEqual(sorted(panels), [prefix + mode + f', n 8192 k {k}'
                                          for mode in ('back-to-back', 'isolated') for k in (2048, 7168)])
        self.assertEqual(panels[prefix + 'isolated, n 8192 k 2048'][:2],
                         ['fused, m 1024: 400.0 TFLOP/s', 'fused, m 2048: 400.0 TFLOP/s'])

    def test_sizes_that_grow_together_share_a_panel(self):
        self.assertEqual(len(self.panels([result(m, n=m, k=m // 4) for m in (2048, 4096, 8192)])), 1)

    def test_the_last_file_counts(self):
        marks = self.panels([result(1024)], [result(1024, tflops=410.0)])
        self.assertEqual(list(marks.values())[0][0], 'fused, m 1024: 410.0 TFLOP/s')

    def test_bad_files_are_refused_by_name(self):
        for document in ('', '[]', '{"results": []}'):
            outcome = self.run_plot(document)
            self.assertEqual(outcome.returncode, 1)
            self.assertIn('0.json: not a result', outcome.stderr)
        attention = result(1)
        attention['shape'] = {'seq': 4}
        outcome = self.run_plot(json.dumps({'machine': {}, 'results': [attention]}))
        self.assertIn('nothing to draw', outcome.stderr)


if __name__ == '__main__':
    unittest.main()
