// Matrix products on GPUs: C = A B, all three N x N by rows, N a multiple of the block's tile (fill up with zeros).
//
// One block computes a tile of C. It walks along K in steps; while it computes with one step's tiles of A and B from
// shared memory, the next step's travel from global memory to registers, and from there to the second pair of tiles.
// So one barrier for each step is enough, and every load and store of global and shared memory is 16 bytes wide, but
// for A's, which is turned over on its way so that a column of it can be read in vectors.
//
// tests/data/emulated_cuda runs the same text on a CPU.

#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <mma.h>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define HAS_BF16  // tensor cores that multiply it
#endif

constexpr int THREADS = 256, BLOCKS_PER_SM = 2;  // together: at most 128 registers for a thread, of 65,536

template <typename T>
struct alignas(16) Vector {
    static constexpr int LENGTH = 16 / sizeof(T);
    T at[LENGTH];
};

// ------------------------------------------------------------------------------------------- from global to shared

// A part of a matrix, ROWS x COLUMNS, of which each thread of the block carries as many vectors.
template <typename T, int ROWS, int COLUMNS>
struct Carried {
    static constexpr int LENGTH = Vector<T>::LENGTH, PER_ROW = COLUMNS / LENGTH, COUNT = ROWS * PER_ROW / THREADS;
    static_assert(ROWS * PER_ROW % THREADS == 0, "each thread carries as many vectors as the others");
    Vector<T> vectors[COUNT];

    __device__ __forceinline__ void load(const T *from, int n, int thread) {
        _Pragma("unroll") for (int i = 0; i < COUNT; ++i) {
            const int place = thread + i * THREADS, row = place / PER_ROW, column = place % PER_ROW * LENGTH;
            vectors[i] = *reinterpret_cast<const Vector<T> *>(from + static_cast<std::size_t>(row) * n + column);
        }
    }

    template <int WIDTH>
    __device__ __forceinline__ void store(T (*tile)[WIDTH], int thread) const {
        _Pragma("unroll") for (int i = 0; i < COUNT; ++i) {
            const int place = thread + i * THREADS, row = place / PER_ROW, column = place % PER_ROW * LENGTH;
            *reinterpret_cast<Vector<T> *>(&tile[row][column]) = vectors[i];
        }
    }

    template <int WIDTH>
    __device__ __forceinline__ void store_turned(T (*tile)[WIDTH], int thread) const {
        _Pragma("unroll") for (int i = 0; i < COUNT; ++i) {
            const int place = thread + i * THREADS, row = place / PER_ROW, column = place % PER_ROW * LENGTH;
            _Pragma("unroll") for (int j = 0; j < LENGTH; ++j) tile[column + j][row] = vectors[i].at[j];
        }
    }
};

// ------------------------------------------------------------------------------------- fp32 and fp64, in registers

// Each thread computes M x N entries in groups of vectors, its warp's lanes lying as 8 x 4: a warp then reads 128
// bytes of A's tile and 64 of B's at once, which no two lanes read from the same bank.
template <typename T>
struct Tiled;

template <>
struct Tiled<float> {
    static constexpr int M = 8, N = 8, ROWS = 128, COLUMNS = 128, STEP = 8;
};

template <>
struct Tiled<double> {  // 8 x 8 would need 128 registers for the sums alone
    static constexpr int M = 4, N = 4, ROWS = 64, COLUMNS = 64, STEP = 8;
};

template <typename T>
struct TiledShared {
    static constexpr int PAD = Vector<T>::LENGTH;  // turned over, 16 rows of two columns fall into all banks once
    T a[2][Tiled<T>::STEP][Tiled<T>::ROWS + PAD];
    T b[2][Tiled<T>::STEP][Tiled<T>::COLUMNS];
};

template <typename T>
__device__ __forceinline__ void multiply_tiled(TiledShared<T> &shared, const T *a, const T *b, T *c, int n, int thread, int down,
                           int across) {
    using Shape = Tiled<T>;
    constexpr int LENGTH = Vector<T>::LENGTH, LANE_ROWS = 8, LANE_COLUMNS = 4, STEP = Shape::STEP;
    constexpr int WARP_ROWS = LANE_ROWS * Shape::M, WARP_COLUMNS = LANE_COLUMNS * Shape::N;
    constexpr int WARPS_ACROSS = Shape::COLUMNS / WARP_COLUMNS;
    static_assert(Shape::ROWS / WARP_ROWS * WARPS_ACROSS * 32 == THREADS, "the warps cover the tile once");
    const int warp = thread / 32, lane = thread % 32;
    const int row = warp / WARPS_ACROSS * WARP_ROWS + lane / LANE_COLUMNS * LENGTH;
    const int column = warp % WARPS_ACROSS * WARP_COLUMNS + lane % LANE_COLUMNS * LENGTH;
    a += static_cast<std::size_t>(down) * Shape::ROWS * n;
    b += static_cast<std::size_t>(across) * Shape::COLUMNS;

    T sums[Shape::M][Shape::N] = {};
    Carried<T, Shape::ROWS, STEP> next_a;
    Carried<T, STEP, Shape::COLUMNS> next_b;
    next_a.load(a, n, thread);
    next_b.load(b, n, thread);
    next_a.store_turned(shared.a[0], thread);
    next_b.store(shared.b[0], thread);
    __syncthreads();
    for (int step = 0, now = 0; step < n; step += STEP, now ^= 1) {
        const bool more = step + STEP < n;
        if (more) {
            next_a.load(a + step + STEP, n, thread);
            next_b.load(b + static_cast<std::size_t>(step + STEP) * n, n, thread);
        }
        _Pragma("unroll") for (int k = 0; k < STEP; ++k) {
            Vector<T> left[Shape::M / LENGTH], right[Shape::N / LENGTH];
            _Pragma("unroll") for (int i = 0; i < Shape::M / LENGTH; ++i)
                left[i] = *reinterpret_cast<const Vector<T> *>(&shared.a[now][k][row + i * LANE_ROWS * LENGTH]);
            _Pragma("unroll") for (int j = 0; j < Shape::N / LENGTH; ++j)
                right[j] = *reinterpret_cast<const Vector<T> *>(&shared.b[now][k][column + j * LANE_COLUMNS * LENGTH]);
            _Pragma("unroll") for (int i = 0; i < Shape::M; ++i)
                _Pragma("unroll") for (int j = 0; j < Shape::N; ++j)
                    sums[i][j] += left[i / LENGTH].at[i % LENGTH] * right[j / LENGTH].at[j % LENGTH];
        }
        if (more) {
            next_a.store_turned(shared.a[now ^ 1], thread);
            next_b.store(shared.b[now ^ 1], thread);
            __syncthreads();
        }
    }
    _Pragma("unroll") for (int i = 0; i < Shape::M; ++i) {
        const std::size_t to = static_cast<std::size_t>(down) * Shape::ROWS + row +
                               i / LENGTH * LANE_ROWS * LENGTH + i % LENGTH;
        _Pragma("unroll") for (int j = 0; j < Shape::N / LENGTH; ++j) {
            Vector<T> part;
            _Pragma("unroll") for (int l = 0; l < LENGTH; ++l) part.at[l] = sums[i][j * LENGTH + l];
            *reinterpret_cast<Vector<T> *>(c + to * n + across * Shape::COLUMNS + column +
                                           j * LANE_COLUMNS * LENGTH) = part;
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) tiled(const T *a, const T *b, T *c, int n) {
    __shared__ TiledShared<T> shared;
    multiply_tiled<T>(shared, a, b, c, n, threadIdx.x, blockIdx.y, blockIdx.x);
}

// --------------------------------------------------------------------------------- bf16 by tensor cores, sums in fp32

// Eight warps, each with 64 x 32 entries: 4 x 2 pieces of 16 x 16. Rows are 8 entries longer than the tile, so that
// the rows of a piece begin in different banks.
struct Tensor {
    static constexpr int ROWS = 128, COLUMNS = 128, STEP = 32, PAD = 8, PIECE = 16;
    static constexpr int WARP_ROWS = 64, WARP_COLUMNS = 32;
    static constexpr int DOWN = WARP_ROWS / PIECE, ACROSS = WARP_COLUMNS / PIECE;
};

struct alignas(32) TensorShared {  // as load_matrix_sync demands
    __nv_bfloat16 a[2][Tensor::ROWS][Tensor::STEP + Tensor::PAD];
    __nv_bfloat16 b[2][Tensor::STEP][Tensor::COLUMNS + Tensor::PAD];
};

#ifdef HAS_BF16
__device__ __forceinline__ void multiply_tensor(TensorShared &shared, const __nv_bfloat16 *a, const __nv_bfloat16 *b, float *c, int n,
                            int thread, int down, int across) {
    using namespace nvcuda::wmma;
    using Shape = Tensor;
    constexpr int STEP = Shape::STEP, PIECE = Shape::PIECE, WARPS_ACROSS = Shape::COLUMNS / Shape::WARP_COLUMNS;
    static_assert(Shape::ROWS / Shape::WARP_ROWS * WARPS_ACROSS * 32 == THREADS, "the warps cover the tile once");
    const int warp = thread / 32;
    const int row = warp / WARPS_ACROSS * Shape::WARP_ROWS, column = warp % WARPS_ACROSS * Shape::WARP_COLUMNS;
    a += static_cast<std::size_t>(down) * Shape::ROWS * n;
    b += static_cast<std::size_t>(across) * Shape::COLUMNS;

    fragment<accumulator, PIECE, PIECE, PIECE, float> sums[Shape::DOWN][Shape::ACROSS];
    _Pragma("unroll") for (int i = 0; i < Shape::DOWN; ++i)
        _Pragma("unroll") for (int j = 0; j < Shape::ACROSS; ++j) fill_fragment(sums[i][j], 0.0f);
    Carried<__nv_bfloat16, Shape::ROWS, STEP> next_a;
    Carried<__nv_bfloat16, STEP, Shape::COLUMNS> next_b;
    next_a.load(a, n, thread);
    next_b.load(b, n, thread);
    next_a.store(shared.a[0], thread);
    next_b.store(shared.b[0], thread);
    __syncthreads();
    for (int step = 0, now = 0; step < n; step += STEP, now ^= 1) {
        const bool more = step + STEP < n;
        if (more) {
            next_a.load(a + step + STEP, n, thread);
            next_b.load(b + static_cast<std::size_t>(step + STEP) * n, n, thread);
        }
        _Pragma("unroll 1") for (int k = 0; k < STEP; k += PIECE) {
            fragment<matrix_b, PIECE, PIECE, PIECE, __nv_bfloat16, row_major> right[Shape::ACROSS];
            _Pragma("unroll") for (int j = 0; j < Shape::ACROSS; ++j)
                load_matrix_sync(right[j], &shared.b[now][k][column + j * PIECE], Shape::COLUMNS + Shape::PAD);
            _Pragma("unroll") for (int i = 0; i < Shape::DOWN; ++i) {
                fragment<matrix_a, PIECE, PIECE, PIECE, __nv_bfloat16, row_major> left;
                load_matrix_sync(left, &shared.a[now][row + i * PIECE][k], STEP + Shape::PAD);
                _Pragma("unroll") for (int j = 0; j < Shape::ACROSS; ++j)
                    mma_sync(sums[i][j], left, right[j], sums[i][j]);
            }
        }
        if (more) {
            next_a.store(shared.a[now ^ 1], thread);
            next_b.store(shared.b[now ^ 1], thread);
            __syncthreads();
        }
    }
    _Pragma("unroll") for (int i = 0; i < Shape::DOWN; ++i) {
        const std::size_t to = static_cast<std::size_t>(down) * Shape::ROWS + row + i * PIECE;
        _Pragma("unroll") for (int j = 0; j < Shape::ACROSS; ++j)
            store_matrix_sync(c + to * n + across * Shape::COLUMNS + column + j * PIECE, sums[i][j], n, mem_row_major);
    }
}

#endif

__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) tensor(const __nv_bfloat16 *a, const __nv_bfloat16 *b, float *c, int n) {
#ifdef HAS_BF16
    __shared__ TensorShared shared;
    multiply_tensor(shared, a, b, c, n, threadIdx.x, blockIdx.y, blockIdx.x);
#endif
}
