// Everything that needs PTX or a machine word's layout, and nothing else: number formats, asynchronous copies, matrix
// fragments, tensor-core products, warp shuffles. No header of CUDA is needed, so that NVRTC compiles without any path.
//
// With ATTNKIT_HOST defined the same functions come from a header of the host (ATTNKIT_HOST is its name).
#pragma once

namespace attnkit {

struct half {  // IEEE binary16
  unsigned short bits;
};
struct bfloat16 {  // the upper half of a binary32
  unsigned short bits;
};

template <class A, class B>
inline constexpr bool same = false;
template <class A>
inline constexpr bool same<A, A> = true;

constexpr int WARP = 32;

}  // namespace attnkit

#ifdef ATTNKIT_HOST
#include ATTNKIT_HOST
#else

namespace attnkit {

// ------------------------------------------------------------------------------------------------ numbers

__device__ inline float to_float(half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ inline float to_float(bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }

__device__ inline void from_float(half& x, float y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x.bits) : "f"(y)); }
__device__ inline void from_float(bfloat16& x, float y) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(x.bits) : "f"(y)); }

// Two numbers rounded to nearest into one register, `low` in its lower half.
template <class T>
__device__ inline unsigned pack(float low, float high) {
  unsigned two;
  if constexpr (same<T, half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  }
  return two;
}

__device__ inline unsigned bits_of(float x) { return __float_as_uint(x); }
__device__ inline float float_of(unsigned bits) { return __uint_as_float(bits); }

// The upper word of a product of two words.
__device__ inline unsigned multiply_high(unsigned a, unsigned b) { return __umulhi(a, b); }

// ------------------------------------------------------------------------------------------------ memory

// Dynamic shared memory of the block.
__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char memory[];
  return memory;
}

__device__ inline unsigned shared_address(const void* at) { return (unsigned)__cvta_generic_to_shared(at); }

// BYTES (4, 8 or 16, both sides aligned to them) from global to shared memory; zeros, and nothing is read, unless
// `present`. They are there after `wait_for_copies` and, for other threads, a barrier.
template <int BYTES>
__device__ inline void copy_async(void* to, const void* from, bool present) {
  const int read = present ? BYTES : 0;
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(read)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES),
                 "r"(read)
                 : "memory");
  }
}

// Closes a group of this thread's copies, an empty one as well.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last PENDING groups of this thread have arrived.
template <int PENDING>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ------------------------------------------------------------------------------------------------ warps

__device__ inline float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
__device__ inline double shuffle_xor(double x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }

// Four 8×8 matrices of 16-bit numbers; lane 8m + r gives the address of row r of matrix m. Lane l receives of each the
// elements (l / 4, 2(l % 4)) and the next.
__device__ inline void load_matrices(unsigned (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, each matrix transposed.
__device__ inline void load_matrices_transposed(unsigned (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row))
               : "memory");
}

// c (16, 8) += a (16, 16) b (16, 8) in float32. With g = lane / 4 and t = 2(lane % 4), a lane holds the rows g and
// g + 8 of a at columns t and t + 8 (in that order: rows first), the columns g of b at rows t and t + 8, and of c the
// elements (g, t), (g, t + 1), (g + 8, t), (g + 8, t + 1).
template <class T>
__device__ inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (same<T, half>) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace attnkit

#endif
