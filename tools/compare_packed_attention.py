#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Times what PyTorch has for packed sequences on one GPU, beside mk-perf ring_attention -g 1 of the same shapes.

    compare_packed_attention.py --shape batch=1,seq=24576,heads=16,kv_heads=16,dim=128,packed=8[,causal=1]...
                                [--gradients] [--json FILE]

flash: FlashAttention 2, which torch.nn.attention.varlen.varlen_attn calls. cudnn: cuDNN's kernels, each by itself as
PyTorch's profiler times them: PyTorch makes a plan in every call, tens of milliseconds on the host, so that a call's
own time says nothing; what passes between kernels does not count. Lengths are those of mk-perf: 1, 2, ... times as
long. Needs PyTorch 2.10 or newer with CUDA and cuDNN.
"""

import argparse
import json
import os
import statistics
import sys

import compare_attention
from compare_attention import Refusal, shape_text

KEYS = ('batch', 'seq', 'heads', 'kv_heads', 'dim', 'causal', 'packed')


def parse_shape(text):
    shape = compare_attention.parse_shape(text, KEYS, {'causal': 0})
    if shape['batch'] != 1 or shape['causal'] > 1 or shape['heads'] != shape['kv_heads']:
        raise Refusal(f'--shape "{text}": expected batch=1, causal=0 or 1, and as many kv_heads as heads')
    return shape


def bounds(seq, count):
    """Where sequences begin, and where the last one ends: as mk-perf's."""
    return [seq * (i * (i + 1)) // (count * (count + 1)) for i in range(count + 1)]


def flops(shape, gradients):
    """Of two products, or with gradients of five."""
    ends = bounds(shape['seq'], shape['packed'])
    lengths = [end - begin for begin, end in zip(ends, ends[1:])]
    pairs = sum(compare_attention.pairs(length, shape['causal']) for length in lengths)
    return (10 if gradients else 4) * pairs * shape['heads'] * shape['dim']


def kernels_us(torch, launch, iterations):
    """The sum of a launch's kernels: a list of one for each iteration."""
    from torch.profiler import ProfilerActivity, profile

    samples = []
    for _ in range(iterations):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            launch()
            torch.cuda.synchronize()
        samples.append(sum(event.device_time_total for event in profiler.events()
                           if event.device_type == torch.autograd.DeviceType.CUDA))
    return samples


def launches(torch, shape, dtype, gradients):
    """(flash, cudnn), each a launch."""
    aten, causal = torch.ops.aten, bool(shape['causal'])
    ends = bounds(shape['seq'], shape['packed'])
    longest = max(end - begin for begin, end in zip(ends, ends[1:]))
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device='cuda')
    where = (cu_seqlens, cu_seqlens, longest, longest)
    generator = torch.Generator(device='cuda').manual_seed(1)
    size = (shape['seq'], shape['heads'], shape['dim'])
    q, k, v, d_out = ((2 * torch.rand(size, generator=generator, device='cuda') - 1).to(dtype) for _ in range(4))

    def flash():
        return aten._flash_attention_forward(q, k, v, *where, 0.0, causal, False)

    def cudnn():
        return aten._cudnn_attention_forward(q, k, v, None, *where, True, 0.0, causal, False)

    out, lse, state, unused = flash()[:4]
    cudnn_out, cudnn_lse, *_, seed, offset, _ = cudnn()
    error = ((out - cudnn_out).float().norm() / out.float().norm()).item()
    if not error <= compare_attention.ERROR_LIMIT:
        raise Refusal(f'{shape_text(shape)}: cuDNN differs from FlashAttention by {error:.1e}, expected at most '
                      f'{compare_attention.ERROR_LIMIT:.0e}: its times mean nothing')
    if not gradients:
        return flash, cudnn
    return (lambda: aten._flash_attention_backward(d_out, q, k, v, out, lse, *where, 0.0, causal, state, unused),
            lambda: aten._cudnn_attention_backward(d_out, q, k, v, cudnn_out, cudnn_lse, seed, offset, None, *where,
                                                   0.0, causal))


def run(torch, shapes, options):
    dtype = {'bf16': torch.bfloat16, 'fp16': torch.float16}[options.dtype]
    clock = compare_attention.Clock(torch, 1)
    results = []
    for shape in shapes:
        flash, cudnn = launches(torch, shape, dtype, options.gradients)
        for launch in (flash, cudnn):
            launch()
        flash_us = [clock.us(flash, 1) for _ in range(options.iters)]
        cudnn_us = kernels_us(torch, cudnn, options.iters)
        work = flops(shape, options.gradients)
        result = {'shape': shape, 'dtype': options.dtype, 'gradients': options.gradients}
        for name, samples in (('flash', flash_us), ('cudnn_kernels', cudnn_us)):
            result[name + '_us'] = compare_attention.summary(samples)
            result[name + '_tflops'] = work / statistics.median(samples) * 1e-6
        results.append(result)
        print(f'{shape_text(shape)}  {options.dtype}  flash {result["flash_us"]["median"]:.1f} us '
              f'{result["flash_tflops"]:.0f} TFLOP/s, cudnn kernels {result["cudnn_kernels_us"]["median"]:.1f} us '
              f'{result["cudnn_kernels_tflops"]:.0f} TFLOP/s', flush=True)
    return results


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
    parser.add_argument('--shape', action='append', required=True, help='as for mk-perf; may be repeated')
    parser.add_argument('--gradients', action='store_true', help='of q, k and v')
    parser.add_argument('--dtype', choices=('bf16', 'fp16'), default='bf16')
    parser.add_argument('--iters', type=int, default=8)
    parser.add_argument('--json', help='write the results to this file, too')
    options = parser.parse_args(arguments)
    if options.iters < 1:
        parser.error('--iters: expected 1 or more')
    try:
        shapes = [parse_shape(text) for text in options.shape]
        os.environ.update(compare_attention.ENVIRONMENT)
        compare_attention.check_writable(options.json)
        torch = compare_attention.load_torch()
        results = run(torch, shapes, options)
    except Refusal as refusal:
        print(f'compare_packed_attention.py: {refusal}', file=sys.stderr)
        return 2
    if options.json:
        machine = {'gpu': torch.cuda.get_device_name(), 'torch': torch.__version__, 'cuda': torch.version.cuda,
                   'cudnn': torch.backends.cudnn.version()}
        with open(options.json, 'w', encoding='utf-8') as file:
            json.dump({'machine': machine, 'results': results}, file, indent=1)
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
