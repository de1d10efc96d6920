// SPDX-License-Identifier: MIT
// wgmma: one warpgroup multiplies 64 x 16 by 16 x N out of shared memory (PTX ISA 9.7.15).
// Accumulator layout (9.7.15.5.1.1, D fragment): of a warp's 16 rows, lane i holds rows i / 4 and
// i / 4 + 8; d[4 j], d[4 j + 1] are columns 8 j + 2 (i % 4) and the next of the first row,
// d[4 j + 2], d[4 j + 3] the same of the second.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace mk::ptx {

// PTX ISA 9.7.15.7.1: wgmma.fence. Before the first wgmma and after registers were touched.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// PTX ISA 9.7.15.7.2: wgmma.commit_group
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// PTX ISA 9.7.15.7.3: wgmma.wait_group
template <int NUM_PENDING>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NUM_PENDING) : "memory");
}

// Keeps what touches these registers on its side of a wgmma, or of the wait for one: the compiler does not know
// that the instruction goes on writing, or reading, them.
template <class T, int COUNT>
__device__ __forceinline__ void wgmma_fence_registers(T (&registers)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      asm volatile("" : "+f"(registers[i])::"memory");
    } else {
      asm volatile("" : "+r"(registers[i])::"memory");
    }
  }
}

// PTX ISA 9.7.15.5.1.2.2, matrix descriptor, 128-byte swizzle, base offset 0 (1,024-byte aligned
// atoms). K-major: `stride_bytes` from 8 rows to the next 8, `leading_bytes` unused. MN-major:
// `stride_bytes` from 8 k to the next 8, `leading_bytes` from 64 elements of M or N to the next 64.
__device__ __forceinline__ constexpr uint64_t wgmma_descriptor_swizzle_128b(uint32_t smem_address,
                                                                            uint32_t leading_bytes,
                                                                            uint32_t stride_bytes) {
  return (uint64_t{1} << 62) | (uint64_t{stride_bytes >> 4} << 32) | (uint64_t{leading_bytes >> 4} << 16) |
         ((smem_address & 0x3FFFF) >> 4);
}

// PTX ISA 9.7.15.5.2: wgmma.mma_async, d = a b (+ d if ACCUMULATE), fp32 accumulators.
// The only difference between the two input types is the type's name in the instruction.
#define MK_WGMMA_D16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MK_WGMMA_D32                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MK_WGMMA_D40                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define MK_WGMMA_D48                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MK_WGMMA_D64                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MK_WGMMA_D80                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define MK_WGMMA_D88                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87"
#define MK_WGMMA_D96                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MK_WGMMA_D112                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define MK_WGMMA_D128                                                                            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MK_WGMMA_D8(d, i)                                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define MK_WGMMA_OUT16(d) MK_WGMMA_D8(d, 0), MK_WGMMA_D8(d, 8)
#define MK_WGMMA_OUT32(d) MK_WGMMA_D8(d, 0), MK_WGMMA_D8(d, 8), MK_WGMMA_D8(d, 16), MK_WGMMA_D8(d, 24)
#define MK_WGMMA_OUT40(d) \
  MK_WGMMA_D8(d, 0), MK_WGMMA_D8(d, 8), MK_WGMMA_D8(d, 16), MK_WGMMA_D8(d, 24), MK_WGMMA_D8(d, 32)
#define MK_WGMMA_OUT48(d)                                                                           \
  MK_WGMMA_D8(d, 0), MK_WGMMA_D8(d, 8), MK_WGMMA_D8(d, 16), MK_WGMMA_D8(d, 24), MK_WGMMA_D8(d, 32), \
      MK_WGMMA_D8(d, 40)
#define MK_WGMMA_OUT64(d)                                                                           \
  MK_WGMMA_D8(d, 0), MK_WGMMA_D8(d, 8), MK_WGMMA_D8(d, 16), MK_WGMMA_D8(d, 24), MK_WGMMA_D8(d, 32), \
      MK_WGMMA_D8(d, 40), MK_WGMMA_D8(d, 48), MK_WGMMA_D8(d, 56)
#define MK_WGMMA_OUT80(d)                                                                           \
  MK_WGMMA_D8(d, 0), MK_WGMMA_D8(d, 8), MK_WGMMA_D8(d, 16), MK_WGMMA_D8(d, 24), MK_WGMMA_D8(d, 32), \
      MK_WGMMA_D8(d, 40), MK_WGMMA_D8(d, 48), MK_WGMMA_D8(d, 56), MK_WGMMA_D8(d, 64), MK_WGMMA_D8(d, 72)
#define MK_WGMMA_OUT88(d)                                                                                 \
  MK_WGMMA_D8(d, 0), MK_WGMMA_D8(d, 8), MK_WGMMA_D8(d, 16), MK_WGMMA_D8(d, 24), MK_WGMMA_D8(d, 32),       \
      MK_WGMMA_D8(d, 40), MK_WGMMA_D8(d, 48), MK_WGMMA_D8(d, 56), MK_WGMMA_D8(d, 64), MK_WGMMA_D8(d, 72), \
      MK_WGMMA_D8(d, 80)
#define MK_WGMMA_OUT96(d)                                                                                 \
  MK_WGMMA_D8(d, 0), MK_WGMMA_D8(d, 8), MK_WGMMA_D8(d, 16), MK_WGMMA_D8(d, 24), MK_WGMMA_D8(d, 32),       \
      MK_WGMMA_D8(d, 40), MK_WGMMA_D8(d, 48), MK_WGMMA_D8(d, 56), MK_WGMMA_D8(d, 64), MK_WGMMA_D8(d, 72), \
      MK_WGMMA_D8(d, 80), MK_WGMMA_D8(d, 88)
#define MK_WGMMA_OUT112(d)                                                                                \
  MK_WGMMA_D8(d, 0), MK_WGMMA_D8(d, 8), MK_WGMMA_D8(d, 16), MK_WGMMA_D8(d, 24), MK_WGMMA_D8(d, 32),       \
      MK_WGMMA_D8(d, 40), MK_WGMMA_D8(d, 48), MK_WGMMA_D8(d, 56), MK_WGMMA_D8(d, 64), MK_WGMMA_D8(d, 72), \
      MK_WGMMA_D8(d, 80), MK_WGMMA_D8(d, 88), MK_WGMMA_D8(d, 96), MK_WGMMA_D8(d, 104)
#define MK_WGMMA_OUT128(d)                                                                                  \
  MK_WGMMA_D8(d, 0), MK_WGMMA_D8(d, 8), MK_WGMMA_D8(d, 16), MK_WGMMA_D8(d, 24), MK_WGMMA_D8(d, 32),         \
      MK_WGMMA_D8(d, 40), MK_WGMMA_D8(d, 48), MK_WGMMA_D8(d, 56), MK_WGMMA_D8(d, 64), MK_WGMMA_D8(d, 72),   \
      MK_WGMMA_D8(d, 80), MK_WGMMA_D8(d, 88), MK_WGMMA_D8(d, 96), MK_WGMMA_D8(d, 104), MK_WGMMA_D8(d, 112), \
      MK_WGMMA_D8(d, 120)

#define MK_WGMMA(N, TYPE, D_LIST, D_OUT, A, B, SCALE_D, T_A, T_B)                                 \
  asm volatile(                                                                                   \
      "{\n"                                                                                       \
      ".reg .pred p;\n"                                                                           \
      "setp.ne.b32 p, %" SCALE_D                                                                  \
      ", 0;\n"                                                                                    \
      "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" D_LIST "}, %" A ", %" B \
      ", p, 1, 1, %" T_A ", %" T_B                                                                \
      ";\n"                                                                                       \
      "}"                                                                                         \
      : D_OUT                                                                                     \
      : "l"(descriptor_a), "l"(descriptor_b), "r"(accumulate), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B))

template <class Element, int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_mma_async_k16(float (&d)[16], uint64_t descriptor_a,
                                                    uint64_t descriptor_b, int accumulate) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    MK_WGMMA("32", "bf16", MK_WGMMA_D16, MK_WGMMA_OUT16(d), "16", "17", "18", "19", "20");
  } else {
    MK_WGMMA("32", "f16", MK_WGMMA_D16, MK_WGMMA_OUT16(d), "16", "17", "18", "19", "20");
  }
}
template <class Element, int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_mma_async_k16(float (&d)[32], uint64_t descriptor_a,
                                                    uint64_t descriptor_b, int accumulate) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    MK_WGMMA("64", "bf16", MK_WGMMA_D32, MK_WGMMA_OUT32(d), "32", "33", "34", "35", "36");
  } else {
    MK_WGMMA("64", "f16", MK_WGMMA_D32, MK_WGMMA_OUT32(d), "32", "33", "34", "35", "36");
  }
}

template <class Element, int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_mma_async_k16(float (&d)[40], uint64_t descriptor_a,
                                                    uint64_t descriptor_b, int accumulate) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    MK_WGMMA("80", "bf16", MK_WGMMA_D40, MK_WGMMA_OUT40(d), "40", "41", "42", "43", "44");
  } else {
    MK_WGMMA("80", "f16", MK_WGMMA_D40, MK_WGMMA_OUT40(d), "40", "41", "42", "43", "44");
  }
}

template <class Element, int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_mma_async_k16(float (&d)[48], uint64_t descriptor_a,
                                                    uint64_t descriptor_b, int accumulate) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    MK_WGMMA("96", "bf16", MK_WGMMA_D48, MK_WGMMA_OUT48(d), "48", "49", "50", "51", "52");
  } else {
    MK_WGMMA("96", "f16", MK_WGMMA_D48, MK_WGMMA_OUT48(d), "48", "49", "50", "51", "52");
  }
}

template <class Element, int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_mma_async_k16(float (&d)[64], uint64_t descriptor_a,
                                                    uint64_t descriptor_b, int accumulate) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    MK_WGMMA("128", "bf16", MK_WGMMA_D64, MK_WGMMA_OUT64(d), "64", "65", "66", "67", "68");
  } else {
    MK_WGMMA("128", "f16", MK_WGMMA_D64, MK_WGMMA_OUT64(d), "64", "65", "66", "67", "68");
  }
}

template <class Element, int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_mma_async_k16(float (&d)[80], uint64_t descriptor_a,
                                                    uint64_t descriptor_b, int accumulate) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    MK_WGMMA("160", "bf16", MK_WGMMA_D80, MK_WGMMA_OUT80(d), "80", "81", "82", "83", "84");
  } else {
    MK_WGMMA("160", "f16", MK_WGMMA_D80, MK_WGMMA_OUT80(d), "80", "81", "82", "83", "84");
  }
}

template <class Element, int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_mma_async_k16(float (&d)[88], uint64_t descriptor_a,
                                                    uint64_t descriptor_b, int accumulate) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    MK_WGMMA("176", "bf16", MK_WGMMA_D88, MK_WGMMA_OUT88(d), "88", "89", "90", "91", "92");
  } else {
    MK_WGMMA("176", "f16", MK_WGMMA_D88, MK_WGMMA_OUT88(d), "88", "89", "90", "91", "92");
  }
}

template <class Element, int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_mma_async_k16(float (&d)[96], uint64_t descriptor_a,
                                                    uint64_t descriptor_b, int accumulate) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    MK_WGMMA("192", "bf16", MK_WGMMA_D96, MK_WGMMA_OUT96(d), "96", "97", "98", "99", "100");
  } else {
    MK_WGMMA("192", "f16", MK_WGMMA_D96, MK_WGMMA_OUT96(d), "96", "97", "98", "99", "100");
  }
}

template <class Element, int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_mma_async_k16(float (&d)[112], uint64_t descriptor_a,
                                                    uint64_t descriptor_b, int accumulate) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    MK_WGMMA("224", "bf16", MK_WGMMA_D112, MK_WGMMA_OUT112(d), "112", "113", "114", "115", "116");
  } else {
    MK_WGMMA("224", "f16", MK_WGMMA_D112, MK_WGMMA_OUT112(d), "112", "113", "114", "115", "116");
  }
}

template <class Element, int TRANSPOSE_A, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_mma_async_k16(float (&d)[128], uint64_t descriptor_a,
                                                    uint64_t descriptor_b, int accumulate) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    MK_WGMMA("256", "bf16", MK_WGMMA_D128, MK_WGMMA_OUT128(d), "128", "129", "130", "131", "132");
  } else {
    MK_WGMMA("256", "f16", MK_WGMMA_D128, MK_WGMMA_OUT128(d), "128", "129", "130", "131", "132");
  }
}

// The same with A in registers (9.7.15.5.1.1, A fragment): a[0], a[1] are columns 2 (i % 4) and the next of
// rows i / 4 and i / 4 + 8, a[2], a[3] those 8 columns further on. They must not change until the product is
// complete.
#define MK_WGMMA_A_REGISTERS(N, TYPE, D_LIST, D_OUT, A0, A1, A2, A3, B, T_B)                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" D_LIST "}, {%" A0 ", %" A1 \
               ", %" A2 ", %" A3 "}, %" B ", 1, 1, 1, %" T_B ";"                                              \
               : D_OUT                                                                                        \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(descriptor_b), "n"(TRANSPOSE_B))

template <class Element, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_mma_async_k16_a_registers(float (&d)[32], uint32_t a0, uint32_t a1,
                                                                uint32_t a2, uint32_t a3,
                                                                uint64_t descriptor_b) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    MK_WGMMA_A_REGISTERS("64", "bf16", MK_WGMMA_D32, MK_WGMMA_OUT32(d), "32", "33", "34", "35", "36", "37");
  } else {
    MK_WGMMA_A_REGISTERS("64", "f16", MK_WGMMA_D32, MK_WGMMA_OUT32(d), "32", "33", "34", "35", "36", "37");
  }
}

template <class Element, int TRANSPOSE_B>
__device__ __forceinline__ void wgmma_mma_async_k16_a_registers(float (&d)[64], uint32_t a0, uint32_t a1,
                                                                uint32_t a2, uint32_t a3,
                                                                uint64_t descriptor_b) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    MK_WGMMA_A_REGISTERS("128", "bf16", MK_WGMMA_D64, MK_WGMMA_OUT64(d), "64", "65", "66", "67", "68", "69");
  } else {
    MK_WGMMA_A_REGISTERS("128", "f16", MK_WGMMA_D64, MK_WGMMA_OUT64(d), "64", "65", "66", "67", "68", "69");
  }
}

#undef MK_WGMMA_A_REGISTERS
#undef MK_WGMMA
#undef MK_WGMMA_D32
#undef MK_WGMMA_OUT32
#undef MK_WGMMA_D40
#undef MK_WGMMA_OUT40
#undef MK_WGMMA_D48
#undef MK_WGMMA_OUT48
#undef MK_WGMMA_D64
#undef MK_WGMMA_OUT64
#undef MK_WGMMA_D80
#undef MK_WGMMA_OUT80
#undef MK_WGMMA_D88
#undef MK_WGMMA_OUT88
#undef MK_WGMMA_D96
#undef MK_WGMMA_OUT96
#undef MK_WGMMA_D112
#undef MK_WGMMA_OUT112
#undef MK_WGMMA_D128
#undef MK_WGMMA_OUT128
#undef MK_WGMMA_D8

}  // namespace mk::ptx
