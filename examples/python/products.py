#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The three GEMM operators from Python, with its standard library alone: one process a rank (job.py); the id
travels through the file named on the command line. The matrices are in host memory, so the ranks are on the host
executor. Small integers: every result is exact, and each rank checks its own.
"""

import array
import sys

import job
import mkernel

ROWS, INNER, COLUMNS = 50, 24, 16  # of the first operator's matrices, over all ranks


def value(matrix, row, column):
    return (row * 7 + column * 5 + row * column * (matrix + 1)) % 3 - 1


def bf16(matrix, rows, columns):
    """Those of a matrix, row by row, in bf16: the upper half of an fp32."""
    values = array.array('f', (value(matrix, row, column) for row in rows for column in columns))
    halves = array.array('H')
    halves.frombytes(values.tobytes())
    return halves[1::2]


def product(rows, columns, inner):
    return [sum(value(0, row, i) * value(1, i, column) for i in inner) for row in rows for column in columns]


def at(data):
    return data.buffer_info()[0]


def run(comm):
    rank, nranks = comm.rank, comm.nranks
    count = -(-ROWS // nranks)
    own = range(min(ROWS, rank * count), min(ROWS, (rank + 1) * count))
    # Of the first operator every rank has columns of its own, of the others a part of the inner dimension.
    columns = range(rank * COLUMNS, (rank + 1) * COLUMNS)
    inner = range(rank * INNER, (rank + 1) * INNER)
    every, narrow = range(ROWS), range(COLUMNS)
    common = {'m': ROWS, 'n': COLUMNS, 'k': INNER, 'out_dtype': mkernel.FP32, 'lda': INNER, 'ldb': COLUMNS,
              'ldc': COLUMNS}
    sums = {'comm_dtype': mkernel.FP32, **common}
    wrong = 0

    def compare(what, seen, expected):
        nonlocal wrong
        different = sum(one != other for one, other in zip(seen, expected))
        if different:
            print(f'rank {rank} of {nranks}: {what}: {different} of {len(expected)} are wrong', file=sys.stderr)
        wrong += different

    a, b = bf16(0, own, range(INNER)), bf16(1, range(INNER), columns)
    c = array.array('f', [float('nan')]) * (ROWS * COLUMNS)
    comm.allgather_gemm(a=at(a), b=at(b), c=at(c), **common)
    compare('allgather_gemm', c, product(every, columns, range(INNER)))

    a, b = bf16(0, every, inner), bf16(1, inner, narrow)
    whole = product(every, narrow, range(INNER * nranks))
    c = array.array('f', [float('nan')]) * (ROWS * COLUMNS)
    comm.gemm_allreduce(a=at(a), b=at(b), c=at(c), **sums)
    compare('gemm_allreduce', c, whole)

    c = array.array('f', [float('nan')]) * (len(own) * COLUMNS)
    comm.gemm_reduce_scatter(a=at(a), b=at(b), c=at(c), **sums)
    compare('gemm_reduce_scatter', c, whole[own.start * COLUMNS:own.stop * COLUMNS])
    return wrong


def main(path):
    rank, nranks = job.rank_and_nranks()
    with mkernel.Communicator(job.shared_id(path, rank), nranks, rank, device=mkernel.DEVICE_HOST) as comm:
        wrong = run(comm)
        # What a wrong argument is told.
        try:
            comm.allgather_gemm(m=-1)
            wrong += 1
        except mkernel.Error as error:
            wrong += ' m: expected' not in str(error)
    print(f'rank {rank} of {nranks}: three operators, {wrong} wrong')
    return 1 if wrong else 0


if __name__ == '__main__':
    if len(sys.argv) != 2:
        raise SystemExit('usage: MK_RANK=R MK_NRANKS=N products.py FILE_FOR_THE_ID')
    raise SystemExit(main(sys.argv[1]))
