#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Times what a call site does without mk_ring_attention: cuDNN's attention by PyTorch, one process a GPU.

    compare_attention.py [-g RANKS] [--shape batch=4,seq=6144,heads=16,kv_heads=16,dim=128]... [--gradients]
                         [--json FILE]

ring: keys and values go round by NCCL's send and receive on a stream of their own while cuDNN attends to the block
that is here; blocks are merged by their log-sum-exp. alone: cuDNN on one sequence, on all GPUs at once, with as much
to compute a GPU. Shapes are those of mk-perf; without --shape those of its preset ring-attention. With --gradients
the time of dq, dk and dv, for which there is no ring here: only alone, beside mk-perf ring_attention_backward.
Every time is the slowest GPU's. Needs PyTorch 2.5 or newer with CUDA, cuDNN and NCCL.
"""

import argparse
import datetime
import json
import math
import os
import statistics
import sys
import tempfile

# NVLink multicast stays off, whatever the libraries would choose.
ENVIRONMENT = {'NCCL_NVLS_ENABLE': '0', 'TORCH_SYMM_MEM_DISABLE_MULTICAST': '1', 'NVSHMEM_DISABLE_NVLS': '1'}
KEYS = ('batch', 'seq', 'heads', 'kv_heads', 'dim', 'causal', 'zigzag')
DEFAULTS = {'causal': 0, 'zigzag': 0}
ALONE_MULTIPLE = 128
ERROR_LIMIT = 1e-2  # every block is rounded to 16 bits before it is merged, and the result once more
SPIN_CYCLES = 6_000_000  # about 3 ms a launch, in which the host enqueues it
LOOP_US, LEAST_LAUNCHES, MOST_LAUNCHES = 10_000, 3, 20  # as mk-perf on GPUs
TIMEOUT = datetime.timedelta(seconds=180)


class Refusal(Exception):
    """A sentence for the user."""


# ---- shapes and operations


def parse_shape(text, keys=KEYS, defaults=None):
    """A shape with these keys; those without a default must be there, and not 0."""
    defaults = DEFAULTS if defaults is None else defaults
    shape = dict(defaults)
    for item in text.split(','):
        key, equals, value = item.partition('=')
        if key not in keys or not equals or not value.isdecimal():
            raise Refusal(f'--shape "{text}": expected {",".join(k + "=N" for k in keys)}, saw "{item}"')
        shape[key] = int(value)
    missing = [key for key in keys if not shape.get(key) and key not in defaults]
    if missing:
        raise Refusal(f'--shape "{text}": {missing[0]} is missing or 0')
    return {key: shape[key] for key in keys}


def preset_shapes():
    return [{'batch': 4, 'seq': seq, 'heads': 16, 'kv_heads': 16, 'dim': 128, 'causal': causal, 'zigzag': causal}
            for causal in (0, 1) for seq in (6144, 12288, 24576, 49152, 98304)]


def shape_text(shape):
    return ','.join(f'{key}={value}' for key, value in shape.items())


def check_shape(shape, ranks):
    where = f'--shape "{shape_text(shape)}": '
    if shape['causal'] > 1 or shape['zigzag'] > 1 or shape['causal'] != shape['zigzag']:
        raise Refusal(where + 'expected causal=0,zigzag=0 or causal=1,zigzag=1')
    if shape['heads'] != shape['kv_heads']:
        raise Refusal(where + 'expected as many kv_heads as heads: cuDNN is called without groups of heads')
    parts = 2 * ranks if shape['zigzag'] else ranks
    if shape['seq'] % parts:
        raise Refusal(where + f'seq is not a multiple of {parts}, the slices of {ranks} ranks')


def pairs(seq, causal):
    """Pairs of a query and a key that it sees, of one head."""
    return seq * (seq + 1) // 2 if causal else seq * seq


def flops(shape, seq, gradients=False):
    """Of two products, or with gradients of five."""
    return (10 if gradients else 4) * pairs(seq, shape['causal']) * shape['batch'] * shape['heads'] * shape['dim']


def alone_seq(shape, ranks):
    """The sequence of one GPU that has as many pairs as a rank, to the nearest multiple of 128."""
    exact = shape['seq'] / math.sqrt(ranks)
    multiple = ALONE_MULTIPLE if exact >= ALONE_MULTIPLE else 1
    return max(1, math.floor(exact / multiple + 0.5) * multiple)


def positions_of(seq, zigzag, rank, ranks):
    """As [(begin, end)]: slice r of W, or with zigzag slices r and 2W-1-r of 2W."""
    parts = 2 * ranks if zigzag else ranks
    length = seq // parts
    slices = (rank, parts - 1 - rank) if zigzag else (rank,)
    return [(part * length, (part + 1) * length) for part in slices]


def block_work(zigzag, rank, source):
    """What a rank's queries see of another rank's keys: (queries, keys), each 'all', 'early' or 'late'."""
    if not zigzag:
        return 'all', 'all'
    return ('all', 'early') if source < rank else ('late', 'all')


def launches_a_loop(us):
    return int(min(max(LOOP_US / max(us, 1), LEAST_LAUNCHES), MOST_LAUNCHES))


def summary(samples):
    return {'median': statistics.median(samples), 'min': min(samples), 'max': max(samples)}


def result_of(shape, ranks, dtype, mode, ring, alone, gradients=False):
    """ring, alone: samples in microseconds; ring may be None. alone_us is scaled to a rank's operations."""
    seq = alone_seq(shape, ranks)
    of_rank, of_alone = flops(shape, shape['seq'], gradients) / ranks, flops(shape, seq, gradients)
    alone_median = statistics.median(alone)
    alone_us = alone_median * of_rank / of_alone
    ring_us = summary(ring) if ring else None
    return {'shape': shape, 'ranks': ranks, 'dtype': dtype, 'mode': mode, 'ring_us': ring_us,
            'ring_tflops': of_rank / ring_us['median'] * 1e-6 if ring else None, 'alone_seq': seq,
            'alone_us': alone_us, 'alone_tflops': of_alone / alone_median * 1e-6, 'gradients': gradients,
            'ring_over_alone': ring_us['median'] / alone_us if ring else None}


def table_text(results):
    def number(value, digits):
        return '\u2014' if value is None else f'{value:.{digits}f}'

    rows = [('shape', 'dtype', 'ranks', 'mode', 'ring us', 'min us', 'max us', 'ring TFLOP/s a rank', 'alone seq',
             'alone us', 'alone TFLOP/s a rank', 'x alone')]
    for r in results:
        ring = r['ring_us'] or {'median': None, 'min': None, 'max': None}
        rows.append((shape_text(r['shape']), r['dtype'], str(r['ranks']), r['mode'], number(ring['median'], 1),
                     number(ring['min'], 1), number(ring['max'], 1), number(r['ring_tflops'], 1),
                     str(r['alone_seq']), number(r['alone_us'], 1), number(r['alone_tflops'], 1),
                     number(r['ring_over_alone'], 2)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text_columns = (0, 1, 3)
    return '\n'.join('  '.join(cell.ljust(width) if i in text_columns else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows)


# ---- on a GPU


class Ring:
    """Attention of one rank's queries over all ranks' keys and values. Tensors are [batch, head, row, dim], keys and
    values [2, batch, head, row, dim]: cuDNN's own order, and one message a step."""

    def __init__(self, torch, shape, rank, ranks, dtype, copies_slices):
        self.torch, self.shape, self.rank, self.ranks = torch, shape, rank, ranks
        self.half = shape['seq'] // ranks // 2
        self.copies_slices = copies_slices
        self.side = torch.cuda.Stream()
        size = (2, shape['batch'], shape['heads'], shape['seq'] // ranks, shape['dim'])
        self.landings = [torch.empty(size, dtype=dtype, device='cuda') for _ in range(2)]

    def attend(self, q, k, v, causal):
        attention = self.torch.ops.aten._scaled_dot_product_cudnn_attention
        # No bias, with log-sum-exp, no dropout. The log-sum-exp is [batch, head, row, 1] or lacks the last one.
        out, lse = attention(q, k, v, None, True, 0.0, causal, False)[:2]
        return out, lse.reshape(q.shape[:3]).float()

    def part(self, tensor, which):
        if which == 'all':
            return tensor
        rows = slice(0, self.half) if which == 'early' else slice(self.half, None)
        view = tensor[..., rows, :]
        return view.contiguous() if self.copies_slices else view

    def merge(self, out, lse, block_out, block_lse):
        """out and lse, in fp32, become those of both parts' keys: weights exp(lse) of each, without overflow."""
        out.lerp_(block_out.float(), self.torch.sigmoid(block_lse - lse).unsqueeze(-1))
        self.torch.logaddexp(lse, block_lse, out=lse)

    def exchange(self, current, landing):
        dist = self.torch.distributed
        to, source = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        with self.torch.cuda.stream(self.side):
            # What was computed from the landing before has been, and `current` is here.
            self.side.wait_stream(self.main)
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, current, to),
                                                dist.P2POp(dist.irecv, landing, source)]):
                work.wait()

    def run(self, q, kv):
        torch, zigzag = self.torch, bool(self.shape['zigzag'])
        self.main = torch.cuda.current_stream()
        late_q = self.part(q, 'late') if zigzag else None
        current, out, lse = kv, None, None
        for step in range(self.ranks):
            landing = self.landings[step % 2]
            if step + 1 < self.ranks:
                self.exchange(current, landing)
            if step == 0:
                # Both slices are in order, so that causal in local rows is causal in positions.
                block_out, block_lse = self.attend(q, kv[0], kv[1], zigzag)
                out, lse = block_out.float(), block_lse.contiguous()
            else:
                queries, keys = block_work(zigzag, self.rank, (self.rank - step) % self.ranks)
                k, v = self.part(current[0], keys), self.part(current[1], keys)
                block_out, block_lse = self.attend(late_q if queries == 'late' else q, k, v, False)
                first = self.half if queries == 'late' else 0
                self.merge(out[:, :, first:], lse[:, :, first:], block_out, block_lse)
            self.main.wait_stream(self.side)
            current = landing
        return out.to(q.dtype)


class Clock:
    """Times of launches that begin on all GPUs together."""

    def __init__(self, torch, ranks):
        self.torch, self.ranks = torch, ranks
        self.token = torch.zeros(1, device='cuda')
        self.start, self.stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def us(self, launch, count):
        torch = self.torch
        torch.cuda.synchronize()
        if self.ranks > 1:
            torch.distributed.all_reduce(self.token)
        if hasattr(torch.cuda, '_sleep'):
            torch.cuda._sleep(SPIN_CYCLES * count)
        self.start.record()
        for _ in range(count):
            launch()
        self.stop.record()
        torch.cuda.synchronize()
        return self.start.elapsed_time(self.stop) * 1000 / count

    def slowest(self, samples):
        if self.ranks == 1:
            return samples
        tensor = self.torch.tensor(samples, dtype=self.torch.float64, device='cuda')
        self.torch.distributed.all_reduce(tensor, op=self.torch.distributed.ReduceOp.MAX)
        return tensor.tolist()

    def in_turn(self, launches, mode, iterations, warmup):
        """A list of samples for each of `launches`."""
        counts = []
        for launch in launches:
            for _ in range(max(1, warmup)):  # the first one chooses kernels and makes connections
                launch()
            once = self.slowest([self.us(launch, 1)])[0]
            counts.append(launches_a_loop(once) if mode == 'back-to-back' else 1)
        samples = [[] for _ in launches]
        for _ in range(iterations):
            for own, launch, count in zip(samples, launches, counts):
                own.append(self.us(launch, count))
        return [self.slowest(own) for own in samples]


def random_inputs(torch, shape, rows, dtype, seed):
    """As mk-perf's: q and k uniform in [-1, 1), v in [-0.5, 0.5)."""
    generator = torch.Generator(device='cuda').manual_seed(seed)
    size = (shape['batch'], shape['heads'], rows, shape['dim'])
    q, k, v = (torch.rand(size, generator=generator, device='cuda') for _ in range(3))
    return (2 * q - 1).to(dtype), torch.stack((2 * k - 1, v - 0.5)).to(dtype)


def check_error(torch, shape, rank, ranks, dtype, copies_slices):
    """The largest relative error of any rank's ring, against one GPU's softmax in fp32."""
    q, kv = random_inputs(torch, shape, shape['seq'], dtype, seed=1)  # the same on every rank
    own = torch.cat([torch.arange(*run, device='cuda')
                     for run in positions_of(shape['seq'], shape['zigzag'], rank, ranks)])
    ring = Ring(torch, shape, rank, ranks, dtype, copies_slices)
    seen = ring.run(q[:, :, own].contiguous(), kv[:, :, :, own].contiguous()).double()
    logits = q[:, :, own].double() @ kv[0].double().transpose(-1, -2) / math.sqrt(shape['dim'])
    if shape['causal']:
        keys = torch.arange(shape['seq'], device='cuda')
        logits.masked_fill_(keys[None, :] > own[:, None], -math.inf)
    expected = torch.softmax(logits, -1) @ kv[1].double()
    error = torch.nan_to_num((seen - expected).norm() / expected.norm(), nan=math.inf, posinf=math.inf)
    if ranks > 1:
        torch.distributed.all_reduce(error, op=torch.distributed.ReduceOp.MAX)
    return error.item()


def check_ring(torch, shape, rank, ranks, dtype):
    """(error, whether slices of tensors have to be copied for cuDNN), the same on every rank."""
    small = dict(shape, batch=2, heads=4, kv_heads=4, seq=512 * ranks)
    error = check_error(torch, small, rank, ranks, dtype, False)
    if error <= ERROR_LIMIT or not shape['zigzag']:
        return error, False
    return check_error(torch, small, rank, ranks, dtype, True), True


def alone_launch(torch, shape, ranks, dtype, rank):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inputs = [random_inputs(torch, shape, alone_seq(shape, ranks), dtype, seed=1000 + 2 * rank + i) for i in range(2)]
    turn = [0]

    def launch():
        turn[0] += 1
        q, kv = inputs[turn[0] % 2]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, kv[0], kv[1], is_causal=bool(shape['causal']))

    return launch


def gradients_launch(torch, shape, ranks, dtype, rank):
    """cuDNN's gradients of one sequence. What its forward pass kept is there."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    passes = []
    for i in range(2):
        q, kv = random_inputs(torch, shape, alone_seq(shape, ranks), dtype, seed=1000 + 2 * rank + i)
        d_out = random_inputs(torch, shape, alone_seq(shape, ranks), dtype, seed=2000 + 2 * rank + i)[0]
        leaves = [tensor.clone().requires_grad_() for tensor in (q, kv[0], kv[1])]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            passes.append((torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=bool(shape['causal'])),
                           leaves, d_out))
    turn = [0]

    def launch():
        turn[0] += 1
        out, leaves, d_out = passes[turn[0] % 2]
        torch.autograd.grad(out, leaves, d_out, retain_graph=True)

    return launch


def ring_launch(torch, shape, rank, ranks, dtype, copies_slices):
    ring = Ring(torch, shape, rank, ranks, dtype, copies_slices)
    inputs = [random_inputs(torch, shape, shape['seq'] // ranks, dtype, seed=2 * rank + i) for i in range(2)]
    turn = [0]

    def launch():
        turn[0] += 1
        ring.run(*inputs[turn[0] % 2])

    return launch


def run_shapes(torch, rank, job):
    """On rank 0 what the parent gets."""
    ranks, dtype = job['ranks'], getattr(torch, {'bf16': 'bfloat16', 'fp16': 'float16'}[job['dtype']])
    clock = Clock(torch, ranks)
    errors, copies, results = {}, {}, []
    for shape in job['shapes']:
        causal, has_ring = shape['causal'], ranks > 1 and not job['gradients']
        if causal not in errors and has_ring:
            errors[causal], copies[causal] = check_ring(torch, shape, rank, ranks, dtype)
            if errors[causal] > ERROR_LIMIT:
                raise Refusal(f'causal={causal}: the ring differs from one GPU by {errors[causal]:.1e}, expected at '
                              f'most {ERROR_LIMIT:.0e}: its times mean nothing')
        launches = [(gradients_launch if job['gradients'] else alone_launch)(torch, shape, ranks, dtype, rank)]
        if has_ring:
            launches.append(ring_launch(torch, shape, rank, ranks, dtype, copies[causal]))
        for mode in job['modes']:
            alone, *ring = clock.in_turn(launches, mode, job['iterations'], job['warmup'])
            results.append(result_of(shape, ranks, job['dtype'], mode, ring[0] if ring else None, alone,
                                     job['gradients']))
        if rank == 0:
            print(table_text(results[-len(job['modes']):]).split('\n', 1)[1], file=sys.stderr, flush=True)
        del launches
        torch.cuda.empty_cache()
    nccl = torch.cuda.nccl.version() if ranks > 1 else None
    machine = {'gpu': torch.cuda.get_device_name(), 'torch': torch.__version__, 'cuda': torch.version.cuda,
               'cudnn': torch.backends.cudnn.version(),
               'nccl': '.'.join(map(str, nccl)) if isinstance(nccl, tuple) else nccl}
    check = [{'causal': causal, 'relative_error': errors[causal], 'copies_slices': copies[causal]}
             for causal in errors]
    return {'machine': machine, 'check': check, 'results': results}


def run_rank(rank, job):
    import torch

    torch.cuda.set_device(rank)
    if job['ranks'] > 1:
        torch.distributed.init_process_group('nccl', init_method='file://' + os.path.join(job['folder'], 'store'),
                                             rank=rank, world_size=job['ranks'], timeout=TIMEOUT)
    with torch.inference_mode(not job['gradients']):
        output = run_shapes(torch, rank, job)
    if rank == 0:
        with open(os.path.join(job['folder'], 'output.json'), 'w', encoding='utf-8') as file:
            json.dump(output, file)
    if job['ranks'] > 1:
        torch.distributed.destroy_process_group()


# ---- the command line


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
    parser.add_argument('-g', dest='ranks', type=int, help='GPUs, one process each (default: all)')
    parser.add_argument('--shape', action='append', help='as for mk-perf ring_attention; may be repeated')
    parser.add_argument('--only', choices=('causal', 'non-causal'), help='of the preset, one half')
    parser.add_argument('--gradients', action='store_true', help='of cuDNN alone, without a ring')
    parser.add_argument('--dtype', choices=('bf16', 'fp16'), default='bf16')
    parser.add_argument('--mode', choices=('isolated', 'back-to-back', 'both'), default='isolated')
    parser.add_argument('--iters', type=int, default=20)
    parser.add_argument('--warmup', type=int, default=3)
    parser.add_argument('--json', help='write the results to this file, too')
    options = parser.parse_args(arguments)
    if options.ranks is not None and options.ranks < 1:
        parser.error('-g: expected 1 or more')
    if options.iters < 1 or options.warmup < 0:
        parser.error('--iters: expected 1 or more, --warmup: 0 or more')
    if options.shape and options.only:
        parser.error('--only takes a part of the preset: leave --shape out')
    return options


def check_writable(path):
    """Before minutes of measuring. None: nothing is to be written."""
    try:
        if path:
            with open(path, 'w', encoding='utf-8'):
                pass
    except OSError as error:
        raise Refusal(f'--json {path}: cannot write: {error.strerror}') from error


def load_torch():
    try:
        import torch
        import torch.distributed
        import torch.multiprocessing
    except ImportError as error:
        raise Refusal(f'{sys.executable} cannot load PyTorch ({error}); install PyTorch 2.5 or newer with CUDA, or '
                      'start this program with a Python that has it') from error
    if not hasattr(torch.ops.aten, '_scaled_dot_product_cudnn_attention'):
        raise Refusal(f'PyTorch {torch.__version__} has no cuDNN attention that returns its log-sum-exp; '
                      'expected 2.5 or newer')
    if not torch.cuda.is_available():
        raise Refusal(f'PyTorch {torch.__version__} sees no GPU')
    return torch


def run(options):
    shapes = [parse_shape(text) for text in options.shape] if options.shape else preset_shapes()
    if options.only:
        shapes = [shape for shape in shapes if bool(shape['causal']) == (options.only == 'causal')]
    os.environ.update(ENVIRONMENT)
    torch = load_torch()
    ranks = torch.cuda.device_count() if options.ranks is None else options.ranks
    if ranks > torch.cuda.device_count():
        raise Refusal(f'-g {ranks}: PyTorch sees {torch.cuda.device_count()} GPUs')
    for shape in shapes:
        check_shape(shape, ranks)
    check_writable(options.json)
    modes = ['isolated', 'back-to-back'] if options.mode == 'both' else [options.mode]
    with tempfile.TemporaryDirectory() as folder:
        job = {'ranks': ranks, 'shapes': shapes, 'gradients': options.gradients, 'dtype': options.dtype, 'modes': modes,
               'iterations': options.iters, 'warmup': options.warmup, 'folder': folder}
        try:
            torch.multiprocessing.spawn(run_rank, args=(job,), nprocs=ranks)
        except Exception as error:  # its text has the rank's traceback
            print(f'compare_attention.py: a rank failed: {error}', file=sys.stderr)
            return 1
        with open(os.path.join(folder, 'output.json'), encoding='utf-8') as file:
            output = json.load(file)
    print(table_text(output['results']))
    print('alone us: cuDNN on alone seq, scaled to the operations of a rank. Times: median of '
          f'{options.iters}, each the slowest GPU\'s.')
    for check in output['check']:
        copied = '; slices are copied for cuDNN' if check['copies_slices'] else ''
        print(f'ring against one GPU, causal={check["causal"]}: '
              f'relative error {check["relative_error"]:.1e}{copied}.')
    print(', '.join(f'{name} {version}' for name, version in output['machine'].items() if version is not None) + '.')
    if options.json:
        with open(options.json, 'w', encoding='utf-8') as file:
            file.write(json.dumps(output, indent=1) + '\n')
    return 0


def main(arguments):
    try:
        return run(parse_arguments(arguments))
    except Refusal as refusal:
        print(f'compare_attention.py: {refusal}', file=sys.stderr)
        return 2


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
