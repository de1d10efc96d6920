#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Draws results of mk-perf as an SVG: TFLOP/s of a rank against m, for the fused operator, the baseline and the
roofline.

    plot.py RESULTS.json... --out PLOT.svg [--title TEXT]

One panel an operator, mode and weight: shapes that differ in m alone share a panel, and so do shapes of which each
has another m. Of lines for the same shape in several files the last counts.
"""

import argparse
import json
import math
import sys
from xml.sax.saxutils import escape

# (name, colour, microseconds of a result or None)
CURVES = (
    ('fused', '#1a6fb5', lambda r: r['fused_us']['median']),
    ('NCCL + cuBLAS', '#c8553d', lambda r: r['baseline_us']),
    ('roofline', '#7a7a7a', lambda r: r['roofline_us']),
)
PANEL_WIDTH, PANEL_HEIGHT = 340, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 34, 40
HEADER = 58
MAX_COLUMNS = 3


def panels_of(results):
    """[(title, [result by rising m])] of the results that have an m."""
    by_run = {}
    for result in results:
        shape = result['shape']
        if 'm' not in shape:
            continue
        run = (result['operator'], result['ranks'], result['dtype'], result['mode'])
        key = (shape['m'], shape['n'], shape['k'])
        by_run.setdefault(run, {})[key] = result
    panels = []
    for (operator, ranks, dtype, mode), shapes in by_run.items():
        title = f'{operator}, {ranks} ranks, {dtype}, {mode}'
        weights = {}
        for (m, n, k), result in shapes.items():
            weights.setdefault((n, k), []).append((m, result))
        if len({m for m, _, _ in shapes}) == len(shapes):
            weights = {None: [(m, result) for (m, _, _), result in shapes.items()]}
        for weight, points in weights.items():
            suffix = '' if weight is None else f', n {weight[0]} k {weight[1]}'
            panels.append((title + suffix, [result for _, result in sorted(points, key=lambda point: point[0])]))
    return panels


def tflops(result, microseconds):
    """The rate at which the result's work would be done in this time; mk-perf gives that of the fused operator."""
    if not microseconds:
        return None
    return result['tflops'] * result['fused_us']['median'] / microseconds


def round_up(value):
    """The next 1, 2 or 5 times a power of ten, so that the axis ends on a round figure."""
    power = 10 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def text(x, y, content, size=11, anchor='middle', extra=''):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{extra}>'
            f'{escape(content)}</text>')


def draw_axes(ms, top):
    """The frame of a panel, and functions from m and TFLOP/s to coordinates."""
    width, height = PANEL_WIDTH - LEFT - RIGHT, PANEL_HEIGHT - TOP - BOTTOM
    low, high = math.log2(min(ms)), math.log2(max(ms))

    def x_of(m):
        return LEFT + (width / 2 if high == low else (math.log2(m) - low) / (high - low) * width)

    def y_of(rate):
        return TOP + height * (1 - rate / top)

    parts = []
    for i in range(6):
        rate = top * i / 5
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + width}" y1="{y_of(rate):.1f}" y2="{y_of(rate):.1f}" '
                     'stroke="#dddddd"/>')
        parts.append(text(LEFT - 6, y_of(rate) + 4, f'{rate:g}', 10, 'end'))
    for m in ms:
        parts.append(text(x_of(m), TOP + height + 15, str(m), 10))
    parts.append(text(LEFT + width / 2, TOP + height + 32, 'm'))
    parts.append(text(14, TOP + height / 2, 'TFLOP/s a rank', 10, 'middle',
                      f' transform="rotate(-90 14 {TOP + height / 2:.1f})"'))
    return parts, x_of, y_of


def draw_panel(title, results):
    curves = []
    for name, colour, time_of in CURVES:
        points = [(r['shape']['m'], tflops(r, time_of(r))) for r in results]
        curves.append((name, colour, [(m, rate) for m, rate in points if rate]))
    highest = max(rate for _, _, points in curves for _, rate in points)
    parts, x_of, y_of = draw_axes([r['shape']['m'] for r in results], round_up(highest))
    parts.append(text(PANEL_WIDTH / 2, 18, title, 10, 'middle', ' font-weight="bold"'))
    for name, colour, points in curves:
        dash = ' stroke-dasharray="5 4"' if name == 'roofline' else ''
        path = ' '.join(f'{x_of(m):.1f},{y_of(rate):.1f}' for m, rate in points)
        if points:
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        for m, rate in points:
            parts.append(f'<circle cx="{x_of(m):.1f}" cy="{y_of(rate):.1f}" r="2.5" fill="{colour}">'
                         f'<title>{escape(name)}, m {m}: {rate:.1f} TFLOP/s</title></circle>')
    return parts


def draw(panels, title):
    columns = min(MAX_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    width, height = columns * PANEL_WIDTH, HEADER + rows * PANEL_HEIGHT
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
             f'viewBox="0 0 {width} {height}" font-family="sans-serif">',
             f'<rect width="{width}" height="{height}" fill="white"/>',
             text(width / 2, 20, title, 12)]
    for i, (name, colour, _) in enumerate(CURVES):
        x = width / 2 - 150 + i * 110
        parts.append(f'<line x1="{x:.1f}" x2="{x + 20:.1f}" y1="40" y2="40" stroke="{colour}" stroke-width="3"/>')
        parts.append(text(x + 25, 44, name, 11, 'start'))
    for i, (panel_title, results) in enumerate(panels):
        x, y = i % columns * PANEL_WIDTH, HEADER + i // columns * PANEL_HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *draw_panel(panel_title, results), '</g>']
    return '\n'.join(parts + ['</svg>', ''])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('results', nargs='+', help='files that mk-perf --json wrote')
    parser.add_argument('--out', required=True, help='the SVG to write')
    parser.add_argument('--title', help='default: the GPU and the commit of the last file')
    arguments = parser.parse_args()
    results, machine = [], {}
    for path in arguments.results:
        try:
            with open(path, encoding='utf-8') as file:
                document = json.load(file)
            results += document['results']
            machine = document['machine']
        except (OSError, ValueError, KeyError, TypeError) as error:
            sys.exit(f'plot.py: {path}: not a result of mk-perf --json: {error!r}')
    panels = panels_of(results)
    if not panels:
        sys.exit('plot.py: no result has an m: there is nothing to draw')
    title = arguments.title or f'{machine.get("gpu") or machine.get("cpu") or ""}, {machine.get("build", "")}'
    with open(arguments.out, 'w', encoding='utf-8') as file:
        file.write(draw(panels, title))


if __name__ == '__main__':
    main()
