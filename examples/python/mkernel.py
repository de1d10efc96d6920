# SPDX-License-Identifier: MIT
"""libmkernel from Python, without anything compiled: a communicator, and the GEMM operators on matrices that are
given by address, as frameworks give them (tensor.data_ptr() of PyTorch, unsafe_buffer_pointer() of JAX).

What the fields mean, which must be alike on all ranks and how errors are told is in mkernel.h, whose names these
are. The library is libmkernel.so.0, or what the variable MK_LIBRARY names.
"""

import ctypes
import functools
import os

int32, int64, enum, address = ctypes.c_int32, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p

# mk_dtype_t, mk_device_t, mk_layout_t, mk_allgather_mode_t
BF16, FP16, FP32 = 1, 2, 3
DEVICE_AUTO, DEVICE_HOST, DEVICE_CUDA = 0, 1, 2
KN, NK = 0, 1
FORWARD, WGRAD = 0, 1


class Sized(ctypes.Structure):
    """A structure whose first field is its size: so the library knows what this file knows of it."""

    def __init__(self, **fields):
        super().__init__(struct_size=ctypes.sizeof(self), **fields)


class UniqueId(ctypes.Structure):
    _fields_ = [('bytes', ctypes.c_ubyte * 128)]


class CommConfig(Sized):
    _fields_ = [('struct_size', ctypes.c_size_t), ('device', enum), ('cuda_device', int32),
                ('node_of_rank', ctypes.POINTER(int32)), ('transport', ctypes.c_char_p), ('host_threads', int32),
                ('max_ctas', int32), ('reserved_sms', int32), ('require_prepare', int32),
                ('max_workspace_bytes', ctypes.c_uint64), ('init_timeout_ms', int64), ('wait_timeout_ms', int64),
                ('peer_timeout_ms', int64)]


class CommInfo(Sized):
    _fields_ = [('struct_size', ctypes.c_size_t), ('rank', int32), ('nranks', int32), ('node', int32),
                ('num_nodes', int32), ('local_rank', int32), ('local_nranks', int32), ('device', enum),
                ('cuda_device', int32), ('host_threads', int32), ('prepared', int32), ('epoch', ctypes.c_uint64),
                ('workspace_bytes', ctypes.c_uint64), ('transport', ctypes.c_char * 16)]


class AllgatherGemmArgs(Sized):
    _fields_ = [('struct_size', ctypes.c_size_t), ('m', int64), ('n', int64), ('k', int64), ('mode', enum),
                ('dtype', enum), ('out_dtype', enum), ('b_layout', enum), ('accumulate', int32),
                ('bias_dtype', enum), ('a', address), ('lda', int64), ('b', address), ('ldb', int64),
                ('c', address), ('ldc', int64), ('bias', address), ('a_gathered', address),
                ('lda_gathered', int64), ('tuning', address)]


class GemmReduceScatterArgs(Sized):
    _fields_ = [('struct_size', ctypes.c_size_t), ('m', int64), ('n', int64), ('k', int64), ('dtype', enum),
                ('out_dtype', enum), ('comm_dtype', enum), ('b_layout', enum), ('accumulate', int32),
                ('bias_dtype', enum), ('a', address), ('lda', int64), ('b', address), ('ldb', int64),
                ('c', address), ('ldc', int64), ('bias', address), ('tuning', address)]


class GemmAllreduceArgs(Sized):
    _fields_ = GemmReduceScatterArgs._fields_


class Error(RuntimeError):
    """What a call answered, and the sentence of the library."""

    def __init__(self, status, sentence):
        super().__init__(sentence)
        self.status = status


@functools.cache
def _library():
    library = ctypes.CDLL(os.environ.get('MK_LIBRARY', 'libmkernel.so.0'))
    library.mk_get_last_error.restype = library.mk_status_string.restype = ctypes.c_char_p
    library.mk_get_last_error.argtypes = [address]
    for name, types in {
            'mk_get_unique_id': [ctypes.POINTER(UniqueId)],
            'mk_comm_init': [ctypes.POINTER(address), ctypes.POINTER(UniqueId), ctypes.c_int, ctypes.c_int,
                             ctypes.POINTER(CommConfig)],
            'mk_comm_finalize': [address],
            'mk_comm_destroy': [address],
            'mk_comm_get_info': [address, ctypes.POINTER(CommInfo)],
            'mk_comm_synchronize': [address, address],
            'mk_allgather_gemm': [address, ctypes.POINTER(AllgatherGemmArgs), address],
            'mk_gemm_reduce_scatter': [address, ctypes.POINTER(GemmReduceScatterArgs), address],
            'mk_gemm_allreduce': [address, ctypes.POINTER(GemmAllreduceArgs), address],
    }.items():
        getattr(library, name).argtypes = types
    return library


def _check(what, status, comm=None):
    if status == 0:
        return
    name, sentence = _library().mk_status_string(status), _library().mk_get_last_error(comm)
    raise Error(status, f'{what}: {name.decode()}: {sentence.decode()}')


def get_unique_id():
    """The id of a job, 128 bytes: made by one rank, who gives it to the others by any means."""
    unique_id = UniqueId()
    _check('mk_get_unique_id', _library().mk_get_unique_id(unique_id))
    return bytes(unique_id.bytes)


class Communicator:
    """A rank of a job; made by all ranks together, and left by all in a `with` that ends in good order.

    The operators take the fields of their arguments by name, matrices as addresses. On CUDA `stream` is the
    address of a stream, and a call only enqueues; on the host it returns when the result is there.
    """

    def __init__(self, unique_id, nranks, rank, **config):
        self._comm = address()
        settings = CommConfig(**{'cuda_device': -1, **config})
        _check('mk_comm_init', _library().mk_comm_init(self._comm, UniqueId.from_buffer_copy(unique_id), nranks, rank,
                                                       settings))
        info = CommInfo()
        self._check('mk_comm_get_info', _library().mk_comm_get_info(self._comm, info))
        self.rank, self.nranks, self.is_cuda = info.rank, info.nranks, info.device == DEVICE_CUDA

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                self._check('mk_comm_finalize', _library().mk_comm_finalize(self._comm))
        finally:
            _library().mk_comm_destroy(self._comm)

    def allgather_gemm(self, stream=None, **fields):
        self._call('mk_allgather_gemm', AllgatherGemmArgs(**fields), stream)

    def gemm_reduce_scatter(self, stream=None, **fields):
        self._call('mk_gemm_reduce_scatter', GemmReduceScatterArgs(**fields), stream)

    def gemm_allreduce(self, stream=None, **fields):
        self._call('mk_gemm_allreduce', GemmAllreduceArgs(**fields), stream)

    @property
    def handle(self):
        """The mk_comm_t, as a number, for code that calls the library itself."""
        return self._comm.value

    def synchronize(self, stream=None):
        self._check('mk_comm_synchronize', _library().mk_comm_synchronize(self._comm, stream))

    def _call(self, name, arguments, stream):
        self._check(name, getattr(_library(), name)(self._comm, arguments, stream))
        if not self.is_cuda:
            self.synchronize()

    def _check(self, what, status):
        _check(what, status, self._comm)
