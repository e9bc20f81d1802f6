// A warp's fragments on a CPU.

#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_runtime.h"

namespace nvcuda::wmma {
struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
enum layout_t { mem_row_major };

// Each lane has the complete piece: what the 32 lanes of a warp hold together.
template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
    float at[16][16];
};

static void require_aligned(const void *address, unsigned stride_bytes) {
    if (reinterpret_cast<std::uintptr_t>(address) % 32 != 0 || stride_bytes % 16 != 0) {
        emulation::fail("a fragment begins at an address, or has rows, that tensor cores refuse");
    }
}

template <typename F>
void fill_fragment(F &to, float value) {
    for (auto &row : to.at)
        for (float &entry : row) entry = value;
}

template <typename F, typename T>
void load_matrix_sync(F &to, const T *from, unsigned stride) {
    require_aligned(from, stride * sizeof(T));
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 16; ++j) to.at[i][j] = from[i * stride + j];
}

template <typename D, typename A, typename B>
void mma_sync(D &d, const A &a, const B &b, const D &c) {
    D sum = c;
    for (int i = 0; i < 16; ++i)
        for (int k = 0; k < 16; ++k)
            for (int j = 0; j < 16; ++j) sum.at[i][j] += a.at[i][k] * b.at[k][j];
    d = sum;
}

template <typename F>
void store_matrix_sync(float *to, const F &from, unsigned stride, layout_t) {
    require_aligned(to, stride * sizeof(float));
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 16; ++j) to[i * static_cast<std::size_t>(stride) + j] = from.at[i][j];
}
}  // namespace nvcuda::wmma
