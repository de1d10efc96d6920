# SPDX-License-Identifier: MIT
"""A feed-forward layer with tensor and sequence parallelism in PyTorch, as Megatron has it, forward and backward,
where each collective is inside a product of libmkernel:

    torchrun --nproc-per-node 2 tensor_parallel.py

The ranks have GPUs, or where there are none, cores. Every result is compared with what PyTorch makes of all rows
and all weights; the numbers are small integers, so it has to be equal.
"""

import os

import torch
import torch.distributed as dist

import mkernel

DTYPES = {torch.bfloat16: mkernel.BF16, torch.float16: mkernel.FP16, torch.float32: mkernel.FP32}
ROWS, HIDDEN, UNITS = 48, 64, 40  # of a rank: rows, and of the hidden layer; HIDDEN is every rank's


def matrix(name, tensor):
    """A row-major matrix as two of an operator's fields. Rows of 16-bit inputs are multiples of 8 elements."""
    assert tensor.dim() == 2 and tensor.stride(1) == 1, f'{name}: expected rows, saw strides {tensor.stride()}'
    return {name: tensor.data_ptr(), 'ld' + name: tensor.stride(0)}


def call(operator, m, n, k, a, b, c, **more):
    stream = torch.cuda.current_stream().cuda_stream if c.is_cuda else None
    operator(stream, m=m, n=n, k=k, dtype=DTYPES[a.dtype], out_dtype=DTYPES[c.dtype], **matrix('a', a),
             **matrix('b', b), **matrix('c', c), **more)
    return c


def gather_and_multiply(comm, rows, b, layout):
    """allgather(rows) @ b, or @ b.T where the layout is NK."""
    m, k = rows.shape[0] * comm.nranks, rows.shape[1]
    n = b.shape[0] if layout == mkernel.NK else b.shape[1]
    return call(comm.allgather_gemm, m, n, k, rows, b, rows.new_empty(m, n), b_layout=layout)


def multiply_and_scatter(comm, a, b, layout):
    """This rank's rows of the sum over all ranks of a @ b, or a @ b.T."""
    m, k = a.shape
    n = b.shape[0] if layout == mkernel.NK else b.shape[1]
    return call(comm.gemm_reduce_scatter, m, n, k, a, b, a.new_empty(m // comm.nranks, n), b_layout=layout)


def gather_for_gradient(comm, a, rows):
    """a.T @ allgather(rows): all rows of a meet those of all ranks."""
    m, k, n = a.shape[0], a.shape[1], rows.shape[1]
    return call(comm.allgather_gemm, m, n, k, rows, a, a.new_empty(k, n), mode=mkernel.WGRAD)


class ColumnParallel(torch.autograd.Function):
    """Some columns of allgather(rows) @ W.T, for a weight of which each rank has some rows."""

    @staticmethod
    def forward(ctx, comm, rows, weight):
        ctx.comm = comm
        ctx.save_for_backward(rows, weight)
        return gather_and_multiply(comm, rows, weight, mkernel.NK)

    @staticmethod
    def backward(ctx, gradient):
        rows, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        return (None, multiply_and_scatter(ctx.comm, gradient, weight, mkernel.KN),
                gather_for_gradient(ctx.comm, gradient, rows))


class RowParallel(torch.autograd.Function):
    """This rank's rows of a @ W.T, for a weight of which each rank has some columns, and of a the same."""

    @staticmethod
    def forward(ctx, comm, a, weight):
        ctx.comm = comm
        ctx.save_for_backward(a, weight)
        return multiply_and_scatter(comm, a, weight, mkernel.NK)

    @staticmethod
    def backward(ctx, gradient):
        a, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        return (None, gather_and_multiply(ctx.comm, gradient, weight, mkernel.KN),
                gather_for_gradient(ctx.comm, a, gradient).t())


def integers(shape, seed, device, kinds=3):
    """-1, 0 and 1, mostly 0, the same on every rank: sums stay within what a bf16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-1, 2, shape, generator=generator)
    is_kept = torch.randint(0, kinds, shape, generator=generator) == 0
    return (values * is_kept).to(device, torch.bfloat16)


def run(comm, rank, nranks, device):
    x = integers((ROWS * nranks, HIDDEN), 1, device)
    w1 = integers((UNITS * nranks, HIDDEN), 2, device)
    w2 = integers((HIDDEN, UNITS * nranks), 3, device)
    dy = integers((ROWS * nranks, HIDDEN), 4, device, 9)
    own_rows = slice(ROWS * rank, ROWS * (rank + 1))
    own_units = slice(UNITS * rank, UNITS * (rank + 1))

    # Each rank's parts, and the layer.
    parts = [t.clone().requires_grad_() for t in (x[own_rows], w1[own_units], w2[:, own_units].contiguous())]
    rows, weight1, weight2 = parts
    y = RowParallel.apply(comm, torch.relu(ColumnParallel.apply(comm, rows, weight1)), weight2)
    y.backward(dy[own_rows])

    # The whole of it, in fp32.
    wholes = [t.float().requires_grad_() for t in (x, w1, w2)]
    whole = torch.relu(wholes[0] @ wholes[1].t()) @ wholes[2].t()
    whole.backward(dy.float())
    assert max(t.abs().max() for t in (whole, *(t.grad for t in wholes))) <= 256, 'a bf16 would round'
    expected = {'y': whole[own_rows], 'dx': wholes[0].grad[own_rows], 'dw1': wholes[1].grad[own_units],
                'dw2': wholes[2].grad[:, own_units]}
    seen = {'y': y, 'dx': rows.grad, 'dw1': weight1.grad, 'dw2': weight2.grad}
    return {name: int((seen[name].float() != right).sum()) for name, right in expected.items()}


def main():
    uses_cuda = torch.cuda.is_available()
    dist.init_process_group('gloo')  # for the id alone
    rank, nranks = dist.get_rank(), dist.get_world_size()
    device = torch.device('cpu')
    if uses_cuda:
        device = torch.device('cuda', int(os.environ.get('LOCAL_RANK', rank)))
        torch.cuda.set_device(device)
    unique_id = [mkernel.get_unique_id() if rank == 0 else None]
    dist.broadcast_object_list(unique_id)
    with mkernel.Communicator(unique_id[0], nranks, rank,
                              device=mkernel.DEVICE_CUDA if uses_cuda else mkernel.DEVICE_HOST) as comm:
        wrong = run(comm, rank, nranks, device)
        if uses_cuda:
            torch.cuda.synchronize()
    print(f'rank {rank} of {nranks}: {", ".join(wrong)}: {sum(wrong.values())} wrong', flush=True)
    return 1 if any(wrong.values()) else 0


if __name__ == '__main__':
    raise SystemExit(main())
