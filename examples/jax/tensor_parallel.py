# SPDX-License-Identifier: MIT
"""A feed-forward layer with tensor and sequence parallelism in JAX, forward and backward, inside one jit: its
collectives are inside products of libmkernel, which XLA calls as custom calls (mkernel_ffi.cc). One process a rank,
each with one device:

    c++ -std=c++17 -O2 -shared -fPIC -o libmkernel_ffi.so mkernel_ffi.cc \\
        -I$(python3 -c 'import jax; print(jax.ffi.include_dir())') $(pkg-config --cflags --libs mkernel)
    MK_RANK=R MK_NRANKS=N python3 tensor_parallel.py FILE_FOR_THE_ID [libmkernel_ffi.so]

Every result is compared with what JAX makes of all rows and all weights; the numbers are small integers, so it has
to be equal.
"""

import ctypes
import functools
import os
import pathlib
import sys

# Processes of one machine share its GPUs: none may take three quarters of each one's memory, as JAX else does.
os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / 'python'))
import job  # noqa: E402
import mkernel  # noqa: E402

ROWS, HIDDEN, UNITS = 48, 64, 40  # of a rank: rows, and of the hidden layer; HIDDEN is every rank's


def register(path):
    library = ctypes.CDLL(path)
    symbols = {'mk_allgather_gemm': 'MkAllgatherGemm', 'mk_gemm_reduce_scatter': 'MkGemmReduceScatter'}
    for name, symbol in symbols.items():
        for platform, suffix in {'cpu': 'Host', 'CUDA': 'Cuda'}.items():
            handler = jax.ffi.pycapsule(getattr(library, symbol + suffix))
            jax.ffi.register_ffi_target(name, handler, platform=platform)


def call(name, comm, turn, rows, columns, a, b, **attributes):
    """The result, and the next call's turn: XLA may do what does not depend on another in any order, or at once, and
    a communicator's calls come one after the other, on all ranks in the same order."""
    results = jax.ShapeDtypeStruct((rows, columns), a.dtype), jax.ShapeDtypeStruct((), jnp.int32)
    return jax.ffi.ffi_call(name, results, has_side_effect=True)(a, b, turn, comm=comm.handle, **attributes)


def first_turn():
    return jnp.zeros((), jnp.int32)


def gather_and_multiply(comm, turn, rows, b, layout):
    """allgather(rows) @ b, or @ b.T where the layout is NK."""
    columns = b.shape[0] if layout == mkernel.NK else b.shape[1]
    return call('mk_allgather_gemm', comm, turn, rows.shape[0] * comm.nranks, columns, rows, b,
                mode=mkernel.FORWARD, b_layout=layout)


def multiply_and_scatter(comm, turn, a, b, layout):
    """This rank's rows of the sum over all ranks of a @ b, or a @ b.T."""
    columns = b.shape[0] if layout == mkernel.NK else b.shape[1]
    return call('mk_gemm_reduce_scatter', comm, turn, a.shape[0] // comm.nranks, columns, a, b, b_layout=layout)


def gather_for_gradient(comm, turn, a, rows):
    """a.T @ allgather(rows): all rows of a meet those of all ranks."""
    return call('mk_allgather_gemm', comm, turn, a.shape[1], rows.shape[1], rows, a, mode=mkernel.WGRAD,
                b_layout=mkernel.KN)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def column_parallel(comm, rows, weight):
    """Some columns of allgather(rows) @ W.T, for a weight of which each rank has some rows."""
    return column_parallel_forward(comm, rows, weight)[0]


def column_parallel_forward(comm, rows, weight):
    result, turn = gather_and_multiply(comm, first_turn(), rows, weight, mkernel.NK)
    return result, (turn, rows, weight)


# What the layer before waits for comes last: so its calls come after both of this one's.
def column_parallel_backward(comm, saved, gradient):
    turn, rows, weight = saved
    d_weight, turn = gather_for_gradient(comm, turn, gradient, rows)
    d_rows, _ = multiply_and_scatter(comm, turn, gradient, weight, mkernel.KN)
    return d_rows, d_weight


column_parallel.defvjp(column_parallel_forward, column_parallel_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def row_parallel(comm, a, weight):
    """This rank's rows of a @ W.T, for a weight of which each rank has some columns, and of a the same."""
    return row_parallel_forward(comm, a, weight)[0]


def row_parallel_forward(comm, a, weight):
    result, turn = multiply_and_scatter(comm, first_turn(), a, weight, mkernel.NK)
    return result, (turn, a, weight)


def row_parallel_backward(comm, saved, gradient):
    turn, a, weight = saved
    d_weight, turn = gather_for_gradient(comm, turn, a, gradient)
    d_a, _ = gather_and_multiply(comm, turn, gradient, weight, mkernel.KN)
    return d_a, d_weight.T


row_parallel.defvjp(row_parallel_forward, row_parallel_backward)


def integers(seed, shape, kinds=3):
    """-1, 0 and 1, mostly 0, the same on every rank: sums stay within what a bf16 holds exactly."""
    one, other = jax.random.split(jax.random.key(seed))
    values = jax.random.randint(one, shape, -1, 2) * (jax.random.randint(other, shape, 0, kinds) == 0)
    return values.astype(jnp.bfloat16)


def with_gradients(layer, dy, *parts):
    """What the layer makes of its parts, and their gradients for the output's."""
    y, pull_back = jax.vjp(layer, *parts)
    return (y, *pull_back(dy))


def run(comm):
    rank, nranks = comm.rank, comm.nranks
    x, w1 = integers(1, (ROWS * nranks, HIDDEN)), integers(2, (UNITS * nranks, HIDDEN))
    w2, dy = integers(3, (HIDDEN, UNITS * nranks)), integers(4, (ROWS * nranks, HIDDEN), 9)
    rows, units = slice(ROWS * rank, ROWS * (rank + 1)), slice(UNITS * rank, UNITS * (rank + 1))

    def parallel(x, w1, w2):
        return row_parallel(comm, jax.nn.relu(column_parallel(comm, x, w1)), w2)

    def whole(x, w1, w2):
        return jax.nn.relu(x @ w1.T) @ w2.T

    seen = jax.jit(functools.partial(with_gradients, parallel))(dy[rows], x[rows], w1[units], w2[:, units])
    y, dx, dw1, dw2 = with_gradients(whole, *(t.astype(jnp.float32) for t in (dy, x, w1, w2)))
    assert max(jnp.abs(t).max() for t in (y, dx, dw1, dw2)) <= 256, 'a bf16 would round'
    expected = (y[rows], dx[rows], dw1[units], dw2[:, units])
    return {name: int((one.astype(jnp.float32) != right).sum())
            for name, one, right in zip(('y', 'dx', 'dw1', 'dw2'), seen, expected)}


def main(path, library='libmkernel_ffi.so'):
    rank, nranks = job.rank_and_nranks()
    register(os.path.abspath(library))
    config = {'device': mkernel.DEVICE_HOST}
    if jax.default_backend() == 'gpu':
        gpu = jax.local_devices()[rank % jax.local_device_count()]
        jax.config.update('jax_default_device', gpu)
        config = {'device': mkernel.DEVICE_CUDA, 'cuda_device': gpu.local_hardware_id}
    with mkernel.Communicator(job.shared_id(path, rank), nranks, rank, **config) as comm:
        wrong = run(comm)
    print(f'rank {rank} of {nranks}: {", ".join(wrong)}: {sum(wrong.values())} wrong')
    return 1 if any(wrong.values()) else 0


if __name__ == '__main__':
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    raise SystemExit(main(*sys.argv[1:]))
