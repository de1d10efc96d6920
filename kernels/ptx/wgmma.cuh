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
// Operands of so many accumulators: what stands for them in the instruction, and the registers.
#define MK_WGMMA_D16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MK_WGMMA_D32 \
  MK_WGMMA_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MK_WGMMA_D36 MK_WGMMA_D32 ", %32, %33, %34, %35"
#define MK_WGMMA_D40 MK_WGMMA_D36 ", %36, %37, %38, %39"
#define MK_WGMMA_D48 MK_WGMMA_D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MK_WGMMA_D52 MK_WGMMA_D48 ", %48, %49, %50, %51"
#define MK_WGMMA_D56 MK_WGMMA_D52 ", %52, %53, %54, %55"
#define MK_WGMMA_D60 MK_WGMMA_D56 ", %56, %57, %58, %59"
#define MK_WGMMA_D64 MK_WGMMA_D60 ", %60, %61, %62, %63"
#define MK_WGMMA_D68 MK_WGMMA_D64 ", %64, %65, %66, %67"
#define MK_WGMMA_D72 MK_WGMMA_D68 ", %68, %69, %70, %71"
#define MK_WGMMA_D76 MK_WGMMA_D72 ", %72, %73, %74, %75"
#define MK_WGMMA_D80 MK_WGMMA_D76 ", %76, %77, %78, %79"
#define MK_WGMMA_D84 MK_WGMMA_D80 ", %80, %81, %82, %83"
#define MK_WGMMA_D88 MK_WGMMA_D84 ", %84, %85, %86, %87"
#define MK_WGMMA_D96 MK_WGMMA_D88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define MK_WGMMA_D104 MK_WGMMA_D96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define MK_WGMMA_D108 MK_WGMMA_D104 ", %104, %105, %106, %107"
#define MK_WGMMA_D112 MK_WGMMA_D108 ", %108, %109, %110, %111"
#define MK_WGMMA_D120 MK_WGMMA_D112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define MK_WGMMA_D128 MK_WGMMA_D120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define MK_WGMMA_R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MK_WGMMA_R8(d, i) MK_WGMMA_R4(d, i), MK_WGMMA_R4(d, i + 4)
#define MK_WGMMA_R16(d, i) MK_WGMMA_R8(d, i), MK_WGMMA_R8(d, i + 8)
#define MK_WGMMA_OUT16(d) MK_WGMMA_R16(d, 0)
#define MK_WGMMA_OUT32(d) MK_WGMMA_OUT16(d), MK_WGMMA_R16(d, 16)
#define MK_WGMMA_OUT36(d) MK_WGMMA_OUT32(d), MK_WGMMA_R4(d, 32)
#define MK_WGMMA_OUT40(d) MK_WGMMA_OUT36(d), MK_WGMMA_R4(d, 36)
#define MK_WGMMA_OUT48(d) MK_WGMMA_OUT40(d), MK_WGMMA_R8(d, 40)
#define MK_WGMMA_OUT52(d) MK_WGMMA_OUT48(d), MK_WGMMA_R4(d, 48)
#define MK_WGMMA_OUT56(d) MK_WGMMA_OUT52(d), MK_WGMMA_R4(d, 52)
#define MK_WGMMA_OUT60(d) MK_WGMMA_OUT56(d), MK_WGMMA_R4(d, 56)
#define MK_WGMMA_OUT64(d) MK_WGMMA_OUT60(d), MK_WGMMA_R4(d, 60)
#define MK_WGMMA_OUT68(d) MK_WGMMA_OUT64(d), MK_WGMMA_R4(d, 64)
#define MK_WGMMA_OUT72(d) MK_WGMMA_OUT68(d), MK_WGMMA_R4(d, 68)
#define MK_WGMMA_OUT76(d) MK_WGMMA_OUT72(d), MK_WGMMA_R4(d, 72)
#define MK_WGMMA_OUT80(d) MK_WGMMA_OUT76(d), MK_WGMMA_R4(d, 76)
#define MK_WGMMA_OUT84(d) MK_WGMMA_OUT80(d), MK_WGMMA_R4(d, 80)
#define MK_WGMMA_OUT88(d) MK_WGMMA_OUT84(d), MK_WGMMA_R4(d, 84)
#define MK_WGMMA_OUT96(d) MK_WGMMA_OUT88(d), MK_WGMMA_R8(d, 88)
#define MK_WGMMA_OUT104(d) MK_WGMMA_OUT96(d), MK_WGMMA_R8(d, 96)
#define MK_WGMMA_OUT108(d) MK_WGMMA_OUT104(d), MK_WGMMA_R4(d, 104)
#define MK_WGMMA_OUT112(d) MK_WGMMA_OUT108(d), MK_WGMMA_R4(d, 108)
#define MK_WGMMA_OUT120(d) MK_WGMMA_OUT112(d), MK_WGMMA_R8(d, 112)
#define MK_WGMMA_OUT128(d) MK_WGMMA_OUT120(d), MK_WGMMA_R8(d, 120)

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

// Of N columns, of which a thread has COUNT accumulators; A to T_B are the operands after these.
#define MK_WGMMA_OF_COLUMNS(N, COUNT, A, B, SCALE_D, T_A, T_B)                                 \
  template <class Element, int TRANSPOSE_A, int TRANSPOSE_B>                                   \
  __device__ __forceinline__ void wgmma_mma_async_k16(float(&d)[COUNT], uint64_t descriptor_a, \
                                                      uint64_t descriptor_b, int accumulate) { \
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {                                    \
      MK_WGMMA(N, "bf16", MK_WGMMA_D##COUNT, MK_WGMMA_OUT##COUNT(d), A, B, SCALE_D, T_A, T_B); \
    } else {                                                                                   \
      MK_WGMMA(N, "f16", MK_WGMMA_D##COUNT, MK_WGMMA_OUT##COUNT(d), A, B, SCALE_D, T_A, T_B);  \
    }                                                                                          \
  }
MK_WGMMA_OF_COLUMNS("32", 16, "16", "17", "18", "19", "20")
MK_WGMMA_OF_COLUMNS("64", 32, "32", "33", "34", "35", "36")
MK_WGMMA_OF_COLUMNS("72", 36, "36", "37", "38", "39", "40")
MK_WGMMA_OF_COLUMNS("80", 40, "40", "41", "42", "43", "44")
MK_WGMMA_OF_COLUMNS("96", 48, "48", "49", "50", "51", "52")
MK_WGMMA_OF_COLUMNS("104", 52, "52", "53", "54", "55", "56")
MK_WGMMA_OF_COLUMNS("112", 56, "56", "57", "58", "59", "60")
MK_WGMMA_OF_COLUMNS("120", 60, "60", "61", "62", "63", "64")
MK_WGMMA_OF_COLUMNS("128", 64, "64", "65", "66", "67", "68")
MK_WGMMA_OF_COLUMNS("136", 68, "68", "69", "70", "71", "72")
MK_WGMMA_OF_COLUMNS("144", 72, "72", "73", "74", "75", "76")
MK_WGMMA_OF_COLUMNS("152", 76, "76", "77", "78", "79", "80")
MK_WGMMA_OF_COLUMNS("160", 80, "80", "81", "82", "83", "84")
MK_WGMMA_OF_COLUMNS("168", 84, "84", "85", "86", "87", "88")
MK_WGMMA_OF_COLUMNS("176", 88, "88", "89", "90", "91", "92")
MK_WGMMA_OF_COLUMNS("192", 96, "96", "97", "98", "99", "100")
MK_WGMMA_OF_COLUMNS("208", 104, "104", "105", "106", "107", "108")
MK_WGMMA_OF_COLUMNS("216", 108, "108", "109", "110", "111", "112")
MK_WGMMA_OF_COLUMNS("224", 112, "112", "113", "114", "115", "116")
MK_WGMMA_OF_COLUMNS("240", 120, "120", "121", "122", "123", "124")
MK_WGMMA_OF_COLUMNS("256", 128, "128", "129", "130", "131", "132")

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
#undef MK_WGMMA_OF_COLUMNS
#undef MK_WGMMA
#undef MK_WGMMA_D16
#undef MK_WGMMA_OUT16
#undef MK_WGMMA_D32
#undef MK_WGMMA_OUT32
#undef MK_WGMMA_D36
#undef MK_WGMMA_OUT36
#undef MK_WGMMA_D40
#undef MK_WGMMA_OUT40
#undef MK_WGMMA_D48
#undef MK_WGMMA_OUT48
#undef MK_WGMMA_D52
#undef MK_WGMMA_OUT52
#undef MK_WGMMA_D56
#undef MK_WGMMA_OUT56
#undef MK_WGMMA_D60
#undef MK_WGMMA_OUT60
#undef MK_WGMMA_D64
#undef MK_WGMMA_OUT64
#undef MK_WGMMA_D68
#undef MK_WGMMA_OUT68
#undef MK_WGMMA_D72
#undef MK_WGMMA_OUT72
#undef MK_WGMMA_D76
#undef MK_WGMMA_OUT76
#undef MK_WGMMA_D80
#undef MK_WGMMA_OUT80
#undef MK_WGMMA_D84
#undef MK_WGMMA_OUT84
#undef MK_WGMMA_D88
#undef MK_WGMMA_OUT88
#undef MK_WGMMA_D96
#undef MK_WGMMA_OUT96
#undef MK_WGMMA_D108
#undef MK_WGMMA_OUT108
#undef MK_WGMMA_D112
#undef MK_WGMMA_OUT112
#undef MK_WGMMA_D120
#undef MK_WGMMA_OUT120
#undef MK_WGMMA_D128
#undef MK_WGMMA_OUT128
#undef MK_WGMMA_R4
#undef MK_WGMMA_R8
#undef MK_WGMMA_R16

}  // namespace mk::ptx
